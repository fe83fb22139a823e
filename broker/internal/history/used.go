package history

import (
	"math/big"

	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// usedOf divides what a provider has measured of each consumer's guests among its holds there: those
// that were requested for pods come first, and those made by hand have the rest. Holds of one kind
// have equal parts of what they were granted, and none has more than that.
func usedOf(ad *broker.ClusterAdvertisement, find Find) map[types.UID]capacity.Vector {
	if len(ad.Spec.ObservedHolds) == 0 {
		return nil
	}
	measured := map[string]capacity.Vector{}
	for _, observed := range ad.Spec.ObservedHolds {
		if measured[observed.Requester] == nil {
			measured[observed.Requester] = capacity.Vector{}
		}
		measured[observed.Requester].Add(capacity.Floor(observed.Used.List()), 1)
	}
	type kind struct {
		requester string
		byHand    bool
	}
	granted := map[kind]map[types.UID]capacity.Vector{}
	for i := range ad.Status.Holds {
		hold := &ad.Status.Holds[i]
		if hold.Granted == nil || measured[hold.Requester] == nil {
			continue
		}
		of := kind{hold.Requester, byHand(find(hold.ReservationName, hold.ReservationUID))}
		if granted[of] == nil {
			granted[of] = map[types.UID]capacity.Vector{}
		}
		granted[of][hold.ReservationUID] = capacity.Floor(hold.Granted.Totals.List())
	}
	used := map[types.UID]capacity.Vector{}
	for requester, rest := range measured {
		for _, byHand := range []bool{false, true} {
			rest = divide(rest, granted[kind{requester, byHand}], used)
		}
	}
	return used
}

// byHand reports whether a Reservation was not requested for pods. One that is unknown counts as
// requested.
func byHand(r *broker.Reservation) bool {
	return r != nil && (r.Labels[broker.LabelByHand] == "true" || r.Annotations[broker.LabelSourceName] == "")
}

// divide divides an amount in proportion to what there is, and returns the rest.
func divide(amount capacity.Vector, among, into map[types.UID]capacity.Vector) (rest capacity.Vector) {
	total := capacity.Vector{}
	for _, has := range among {
		total.Add(has, 1)
	}
	for uid, has := range among {
		part := capacity.Vector{}
		for name, most := range has {
			if amount[name] >= total[name] {
				part[name] = most
			} else if amount[name] > 0 {
				product := new(big.Int).Mul(big.NewInt(most), big.NewInt(amount[name]))
				part[name] = product.Quo(product, big.NewInt(total[name])).Int64()
			}
		}
		into[uid] = part
	}
	return amount.Minus(total, 1)
}
