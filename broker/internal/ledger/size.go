package ledger

import (
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Bounds of one provider's ledger. It is one object together with the advertisement: the
// API server and etcd take none above 1.5 MiB, and every change writes all of it. With
// them, a write takes at most as many bytes as both maxima, and 64 KiB for the rest of the
// object.
const (
	// MaxHolds is the maximum number of holds.
	MaxHolds = 1100
	// MaxBytes is the maximum size of all holds, encoded.
	MaxBytes = 1088 << 10
	// maxLargeBytes is the part of it for holds of more than largeHold bytes, which have
	// long selectors or many pod sets: they leave room for ordinary ones.
	maxLargeBytes = 384 << 10
	largeHold     = 4 << 10
	// MaxAdvertisementBytes is the size of an advertisement that there is always room for.
	// What a larger one takes beyond that is not there for holds.
	MaxAdvertisementBytes = 384 << 10
)

// Size is the size of a ledger, each hold as large as it may become: its capacity may
// stand in it as promised, granted and unconfirmed.
type Size struct {
	holds, Bytes, largeBytes int
	// beyond are the bytes of the advertisement above MaxAdvertisementBytes.
	beyond int
}

// SizeOf is the size of the ledger of a cluster with that advertisement and these holds.
func SizeOf(spec *broker.ClusterAdvertisementSpec, holds []broker.Hold) Size {
	var size Size
	for i := range holds {
		size.add(holdBytes(&holds[i]))
	}
	// As long as the holds are few, there is room beside any advertisement that could be
	// stored.
	if size.Bytes > MaxBytes/4 {
		size.beyond = max(0, AdvertisementBytes(spec)-MaxAdvertisementBytes)
	}
	return size
}

func (s *Size) add(bytes int) {
	s.holds++
	s.Bytes += bytes
	if bytes > largeHold {
		s.largeBytes += bytes
	}
}

// AdvertisementBytes is the size of an advertisement, encoded.
func AdvertisementBytes(spec *broker.ClusterAdvertisementSpec) int {
	// What cannot be encoded is not in any object.
	encoded, _ := json.Marshal(spec)
	return len(encoded)
}

// Crowded reports whether a hold of the maximum size of a Reservation may find no room.
func (s Size) Crowded() bool {
	const largest = 64 << 10
	return s.holds >= MaxHolds || s.Bytes+s.beyond > MaxBytes-largest || s.largeBytes > maxLargeBytes-largest
}

// Room returns a *FullError if there is no room for one more hold of that capacity.
func (s Size) Room(capacity broker.HeldCapacity) error {
	// The names are as long as they may be.
	bytes := holdBytes(&broker.Hold{Promised: capacity, Cost: &broker.Cost{}}) + 64 + 40
	s.add(bytes)
	switch {
	case s.holds > MaxHolds:
		return &FullError{Message: fmt.Sprintf("The cluster's ledger has the maximum of %d holds.", MaxHolds)}
	case s.Bytes+s.beyond > MaxBytes, bytes > largeHold && s.largeBytes > maxLargeBytes:
		return &FullError{Message: fmt.Sprintf("The cluster's ledger has no room for a hold of %d bytes. Shorten the node selectors, affinity or tolerations.", bytes)}
	}
	return nil
}

// ReasonFull is the reason of the rejection of a cluster whose ledger has no room.
const ReasonFull = "LedgerFull"

// FullError reports that a ledger has no room for a hold, whatever its capacity.
type FullError struct {
	Message string
}

func (e *FullError) Error() string { return e.Message }

const (
	// holdOverhead are the bytes of a hold besides its names, prices and capacity: its UID,
	// three attempts, how long pods may use what was withdrawn, and the field names.
	// priceBytes are those of its prices.
	holdOverhead = 240
	priceBytes   = 160
	// setOverhead and amountOverhead are the bytes of the field names, the count and the
	// punctuation of a capacity or pod set, and of an amount, which may get longer when
	// others are taken from it.
	setOverhead    = 44
	amountOverhead = 5 + 6
)

// holdBytes is the number of bytes that a hold takes at most.
func holdBytes(hold *broker.Hold) int {
	most := capacityBytes(&hold.Promised)
	for _, other := range []*broker.HeldCapacity{hold.Granted, hold.Unconfirmed} {
		if other != nil {
			most = max(most, capacityBytes(other))
		}
	}
	bytes := holdOverhead + len(hold.ReservationName) + len(hold.Requester) + 3*most
	if hold.Cost != nil {
		bytes += priceBytes
	}
	return bytes
}

func capacityBytes(c *broker.HeldCapacity) int {
	bytes := setOverhead + amountsBytes(&c.Totals)
	for i := range c.PodSets {
		set := &c.PodSets[i]
		bytes += setOverhead + len(set.Name) + amountsBytes(&set.Requests)
		if set.NodeSelector != nil || set.NodeAffinity != nil || set.Tolerations != nil {
			// A pod set that cannot be encoded is not in any object.
			encoded, _ := json.Marshal(set)
			bytes += len(encoded)
		} else if set.PodSecurity != "" {
			bytes += len(`,"podSecurity":""`) + len(set.PodSecurity)
		}
	}
	return bytes
}

func amountsBytes(q *broker.ResourceQuantities) int {
	bytes := 0
	add := func(name string, amount *resource.Quantity) {
		if amount != nil {
			// String keeps its result in the quantity, and others read this one.
			unshared := *amount
			bytes += len(name) + len(unshared.String()) + amountOverhead
		}
	}
	add("cpu", q.CPU)
	add("memory", q.Memory)
	add("gpu", q.GPU)
	add("storage", q.Storage)
	for name, amount := range q.Extended {
		add(string(name), &amount)
	}
	return bytes
}
