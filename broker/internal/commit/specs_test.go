package commit

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestSpecs: one copy is shared of each version of what a cluster advertises, and nothing of
// another version or object.
func TestSpecs(t *testing.T) {
	ad := func(uid types.UID, generation, sequence int64) *broker.ClusterAdvertisement {
		return &broker.ClusterAdvertisement{
			ObjectMeta: metav1.ObjectMeta{Name: "paris", UID: uid, Generation: generation},
			Spec:       broker.ClusterAdvertisementSpec{Sequence: sequence, NodeClasses: []broker.NodeClass{{Name: string(uid)}}},
		}
	}
	specs := &Specs{}
	transform := specs.Transform(func(object any) (any, error) { return object, nil })
	shared := func(ad *broker.ClusterAdvertisement, with *broker.ClusterAdvertisement) bool {
		t.Helper()
		before := ad.DeepCopy()
		if _, err := transform(ad); err != nil {
			t.Fatal(err)
		}
		if ad.Spec.Sequence != before.Spec.Sequence || ad.Spec.NodeClasses[0].Name != before.Spec.NodeClasses[0].Name {
			t.Errorf("%+v has become %+v", before.Spec, ad.Spec)
		}
		return &ad.Spec.NodeClasses[0] == &with.Spec.NodeClasses[0]
	}
	first := ad("a", 2, 7)
	specs.share(first)
	for name, tc := range map[string]struct {
		ad   *broker.ClusterAdvertisement
		want bool
	}{
		"the same version":                 {ad("a", 2, 7), true},
		"an older version":                 {ad("a", 1, 6), false},
		"the same after an older one":      {ad("a", 2, 7), true},
		"not stored yet":                   {ad("", 0, 7), false},
		"stored, without a generation yet": {ad("a", 0, 7), false},
	} {
		if got := shared(tc.ad, first); got != tc.want {
			t.Errorf("%s: shared is %t", name, got)
		}
	}
	restored := ad("a", 2, 3)
	if shared(restored, first) {
		t.Error("another content of the same generation is shared")
	}
	newer := ad("a", 3, 8)
	if shared(newer, first) || !shared(ad("a", 3, 8), newer) {
		t.Error("the next version is not what is shared")
	}
	other := ad("b", 3, 8)
	if shared(other, newer) || !shared(ad("b", 3, 8), other) {
		t.Error("the next object of the name is not what is shared")
	}
	specs.Forget(newer)
	if len(specs.of) != 1 {
		t.Error("a deleted object has ended the sharing with the next of its name")
	}
	specs.Forget(other)
	if len(specs.of) != 0 {
		t.Error("something is shared of a deleted object")
	}
	(*Specs)(nil).share(first)
	(*Specs)(nil).Forget(first)
	if object, err := transform(&broker.Reservation{}); object == nil || err != nil {
		t.Errorf("another kind becomes %v, %v", object, err)
	}
}
