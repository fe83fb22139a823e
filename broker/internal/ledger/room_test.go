package ledger_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// advertisement is one of plenty of capacity, whose node classes have that many bytes of
// labels.
func advertisement(bytes int) *broker.ClusterAdvertisementSpec {
	return &broker.ClusterAdvertisementSpec{
		Resources:   broker.AdvertisedResources{Allocatable: plenty},
		NodeClasses: []broker.NodeClass{{Name: "std", Labels: map[string]string{"large": strings.Repeat("x", bytes)}}},
	}
}

// fill places holds of a consumer until there is no room, or that many, and returns how
// many there are.
func fill(t *testing.T, spec *broker.ClusterAdvertisementSpec, status *broker.ClusterAdvertisementStatus, requester string, most int, set broker.PodSet) (placed int) {
	t.Helper()
	for ; placed < most; placed++ {
		name := fmt.Sprintf("%s-%d-%d", requester, len(status.Holds), placed)
		_, err := ledger.Place(spec, status, ledger.Growth{
			ReservationUID: types.UID(name), ReservationName: name, Requester: requester, Attempt: 1, Capacity: capacity.OfPodSets([]broker.PodSet{set}),
		})
		var full *ledger.FullError
		if errors.As(err, &full) {
			break
		}
		expect.NoError(t, err)
	}
	return placed
}

// One consumer may have as many holds at one provider as the quota allows by default.
func TestOneConsumerHasAThousandHolds(t *testing.T) {
	if got := fill(t, advertisement(0), &broker.ClusterAdvertisementStatus{}, "rome", 1000, ordinary); got != 1000 {
		t.Errorf("it has %d", got)
	}
}

// The advertisement and the holds are one object, which must stay below 1.5 MiB with the
// rest of it, whatever the advertisement's size.
func TestAdvertisementAndHoldsFitInOneObject(t *testing.T) {
	const most = 3<<19 - 64<<10
	long := *ordinary.DeepCopy()
	long.NodeSelector = map[string]string{"example.com/zone": strings.Repeat("v", 1000)}
	for _, bytes := range []int{0, 100 << 10, 383 << 10, 700 << 10, 1000 << 10} {
		spec, status := advertisement(bytes), &broker.ClusterAdvertisementStatus{}
		for _, requester := range []string{"m", "n", "o"} {
			fill(t, spec, status, requester, 5000, long)
		}
		holds := len(status.Holds)
		for i := range status.Holds {
			// As large as they become: granted, then released.
			ledger.Confirm(status, status.Holds[i].ReservationUID, 1, true, nil)
			half := *status.Holds[i].Promised.DeepCopy()
			half.PodSets[0].Count = 50
			ledger.Shrink(status, status.Holds[i].ReservationUID, 2, capacity.OfPodSets(half.PodSets))
		}
		object, err := json.Marshal(broker.ClusterAdvertisement{Spec: *spec, Status: *status})
		expect.NoError(t, err)
		t.Logf("beside %d bytes, there are %d holds: %d bytes together", bytes, holds, len(object))
		if len(object) > most || holds == 0 {
			t.Errorf("an advertisement of %d bytes and %d holds have %d bytes together", bytes, holds, len(object))
		}
	}
}

// A thousand nodes of 40 classes, each with another free capacity, are far below the maximum.
func TestAdvertisementOfAThousandNodes(t *testing.T) {
	spec := advertisement(0)
	spec.NodeClasses = nil
	for i := range 40 {
		class := broker.NodeClass{Name: fmt.Sprintf("class-%d", i), Arch: "amd64", Labels: map[string]string{}, LargestNode: &ordinary.Requests}
		for j := range 15 {
			class.Labels[fmt.Sprintf("topology.example.com/label-%d", j)] = fmt.Sprintf("value-%d-of-class-%d", j, i)
		}
		class.Taints = []corev1.Taint{{Key: "example.com/pool", Value: class.Name, Effect: corev1.TaintEffectNoSchedule}}
		for j := range 25 {
			free := broker.FromList(expect.Resources("cpu", fmt.Sprintf("%dm", 15_000+j), "memory", fmt.Sprintf("%dMi", 62_000+j), "ephemeral-storage", fmt.Sprintf("%dGi", 90+j)))
			class.FreeShapes = append(class.FreeShapes, broker.FreeShape{Nodes: 1, Free: free, Pods: 110})
		}
		spec.NodeClasses = append(spec.NodeClasses, class)
	}
	bytes := ledger.AdvertisementBytes(spec)
	t.Logf("it has %d bytes", bytes)
	if bytes > ledger.MaxAdvertisementBytes/2 {
		t.Errorf("it has %d bytes", bytes)
	}
}
