package virtualnode_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
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

// TestNoOwnersWithoutOptIn: owners of waiting pods are not looked up where none may overflow.
func TestNoOwnersWithoutOptIn(t *testing.T) {
	for optedIn, want := range map[string]int{broker.OverflowEnabled: 1, "": 0} {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: optedIn}}}
		c, lookups := fake.NewClientBuilder().WithObjects(namespace).Build(), 0
		r := virtualnode.New(c, c, nil, nil, virtualnode.Options{SchedulerName: broker.SchedulerName, Owners: func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) {
			lookups++
			return nil, true
		}})
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "train", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "jobset.x-k8s.io/v1alpha2", Kind: "JobSet", Name: "train", UID: "set", Controller: ptr.To(true)},
		}}, Spec: corev1.PodSpec{SchedulerName: broker.SchedulerName}}
		r.Pods.Set(pod)
		shape, _ := demand.ShapeOf(pod)
		reservation := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "train"}}
		need, err := r.Need(t.Context(), reservation, demand.Key{Namespace: "shop", OwnerUID: "set", Shape: shape})
		expect.NoError(t, err)
		if lookups != want || int(need.Pods()) != want {
			t.Errorf("label %q: %d look-ups and %d pods, want %d", optedIn, lookups, need.Pods(), want)
		}
	}
}
