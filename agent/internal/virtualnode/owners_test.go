package virtualnode_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
)

// TestResolveOwners: owners that Kubernetes' own controllers do not create are looked up with
// Options.Owners, as the scheduler looks them up.
func TestResolveOwners(t *testing.T) {
	set := metav1.OwnerReference{APIVersion: "jobset.x-k8s.io/v1alpha2", Kind: "JobSet", Name: "train", UID: "set"}
	above := &metav1.OwnerReference{Kind: "Training", UID: "above"}
	for name, tc := range map[string]struct {
		lookup     func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool)
		controller *metav1.OwnerReference
		found      bool
	}{
		"no look-up":          {found: true},
		"it has a controller": {func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) { return above, true }, above, true},
		"not looked up yet":   {func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) { return nil, false }, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := virtualnode.New(nil, nil, nil, nil, virtualnode.Options{Owners: tc.lookup})
			controller, found := r.ResolveOwners(t.Context())("shop", set)
			if controller != tc.controller || found != tc.found {
				t.Errorf("got %v (found %t), want %v (found %t)", controller, found, tc.controller, tc.found)
			}
		})
	}
}
