package reservation_test

import (
	"testing"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestBeat: a beat counts only for the content that is stored, as an API server stores it.
func TestBeat(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	e := newEnv(t, controlplane.Start(t))
	p := e.start(nil)
	spec := fullSpec(e.spec("paris", "1"))
	beat := func(of broker.ClusterAdvertisementSpec) (known bool) {
		t.Helper()
		return p.Beat("paris", protocol.Beat{Sequence: of.Sequence, Digest: protocol.Digest(of)})
	}
	expectKnown := func(what string, of broker.ClusterAdvertisementSpec, want bool) {
		t.Helper()
		spec.Sequence++
		of.Sequence = spec.Sequence
		if known := beat(of); known != want {
			t.Errorf("%s: known is %t", what, known)
		}
	}
	expectKnown("before the first", spec, false)
	p.advertise(spec)
	stored := e.ad("paris")
	if protocol.Digest(stored.Spec) != protocol.Digest(spec) {
		t.Errorf("%+v is stored as %+v", spec, stored.Spec)
	}
	expectKnown("the stored one", spec, true)
	other := *spec.DeepCopy()
	other.EndpointURL = "https://elsewhere.test"
	expectKnown("another content", other, false)
	late := spec
	late.Sequence = spec.Sequence - 5
	if beat(late) {
		t.Error("an older one counts")
	}
	// One that is older than a beat is as outdated.
	late.Sequence = spec.Sequence - 2
	if beat(late) {
		t.Error("one that is older than a beat counts")
	}
	if now := e.ad("paris"); now.ResourceVersion != stored.ResourceVersion {
		t.Error("a beat was stored")
	}
	changed := e.ad("paris")
	changed.Spec.EndpointURL = other.EndpointURL
	expect.NoError(t, e.client.Update(e.Context(), changed))
	expect.Eventually(t, "the change by another to be seen", func() (bool, string) {
		spec.Sequence++
		return !beat(spec), "it is not"
	})
	spec.Sequence++
	p.advertise(spec)
	expectKnown("stored again", spec, true)
}

// fullSpec sets every field of an advertisement, with quantities that are not canonical.
func fullSpec(spec broker.ClusterAdvertisementSpec) broker.ClusterAdvertisementSpec {
	amounts := func() broker.ResourceQuantities {
		return broker.ResourceQuantities{
			CPU: ptr.To(resource.MustParse("1000m")), Memory: ptr.To(resource.MustParse("1024Mi")), Storage: ptr.To(resource.MustParse("1.5Gi")), GPU: ptr.To(resource.MustParse("0")),
			Extended: map[corev1.ResourceName]resource.Quantity{"example.com/b": resource.MustParse("1e3"), "example.com/a": *resource.NewQuantity(2000, resource.DecimalSI)},
		}
	}
	spec.ClusterName, spec.PeerKey, spec.Region, spec.Zone = "Paris <&>", "key", "eu", "eu-1"
	spec.Lending = broker.Lending{Enabled: true, Consumers: []string{"rome"}, PodSecurity: "baseline"}
	spec.Resources = broker.AdvertisedResources{Capacity: amounts(), Allocatable: amounts(), Allocated: broker.ResourceQuantities{CPU: resource.NewMilliQuantity(250, resource.DecimalSI)}}
	spec.NodeClasses = []broker.NodeClass{
		{
			Name: "std", Arch: "amd64", Labels: map[string]string{"b": "2", "a": ""}, Taints: []corev1.Taint{{Key: "k", Value: "v", Effect: corev1.TaintEffectNoSchedule}},
			FreeShapes: []broker.FreeShape{{Nodes: 1, Free: amounts(), Pods: 100}}, LargestNode: ptr.To(amounts()),
		},
		{Name: "empty", Labels: map[string]string{}, Taints: []corev1.Taint{}, FreeShapes: []broker.FreeShape{}},
	}
	spec.ObservedHolds = []broker.ObservedHold{{Requester: "rome", Used: amounts(), Pods: 1}}
	spec.UnlistedHolds = []broker.UnlistedHold{{ReservationUID: "u", ReservationName: "r", Requester: "rome", Held: amounts()}}
	spec.Unreachable = []string{"berlin"}
	spec.Cost = &broker.Cost{CPUCost: "0.10", MemoryCost: "1", GPUCost: "2", StorageCost: "3", Currency: "EUR"}
	return spec
}
