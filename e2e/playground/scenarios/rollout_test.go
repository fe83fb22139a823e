package scenarios_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestRolloutKeepsReservation restarts a Deployment whose pods have all overflowed, and scales it
// up and down: one Reservation is there throughout, and ends with the Deployment.
func TestRolloutKeepsReservation(t *testing.T) {
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "2", "memory", "1Gi")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "1Gi")},
	})
	ns := s.optedIn("rollout")
	stop := s.watchReservations(ns)
	d := deploymentOf(ns, "web", 3, "100m", nil)
	expect.NoError(t, s.rome.Create(t.Context(), d))
	replicas := func(count int) {
		t.Helper()
		if home, _ := s.allReady(ns, "web", count); len(home) > 0 {
			t.Errorf("%d of %d pods are at home, which is full", len(home), count)
		}
	}
	replicas(3)
	before, err := s.podsOf(ns, "web")
	expect.NoError(t, err)
	// As kubectl rollout restart does.
	restart := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, time.Now().Format(time.RFC3339)))
	expect.NoError(t, s.rome.Patch(t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "web"}}, restart))
	s.eventually("the pods from before the restart are gone", func() error {
		now, err := s.podsOf(ns, "web")
		if err != nil || len(now) == 0 {
			return fmt.Errorf("%d pods (%v)", len(now), err)
		}
		for _, pod := range now {
			if slices.ContainsFunc(before, func(old corev1.Pod) bool { return old.UID == pod.UID }) {
				return describe(now)
			}
		}
		return nil
	})
	replicas(3)
	s.scale(ns, "web", 5)
	replicas(5)
	s.scale(ns, "web", 2)
	replicas(2)
	s.eventually("the Reservation is for 2 pods", func() error {
		var list broker.ReservationList
		if err := s.rome.List(t.Context(), &list, client.InNamespace(ns)); err != nil || len(list.Items) != 1 {
			return fmt.Errorf("%d Reservations (%v)", len(list.Items), err)
		}
		if r := list.Items[0]; r.DeletionTimestamp != nil || len(r.Spec.PodSets) != 1 || r.Spec.PodSets[0].Count != 2 {
			return fmt.Errorf("%+v, deleted at %v", r.Spec.PodSets, r.DeletionTimestamp)
		}
		return nil
	})
	if uids := stop(); len(uids) != 1 {
		t.Errorf("%d Reservations have been there, want one throughout: %v", len(uids), uids)
	}
	expect.NoError(t, s.rome.Delete(t.Context(), d))
	s.eventually("the Reservation is gone", func() error { return s.reservations(ns, 0) })
}

// watchReservations notes which Reservations a namespace of rome has, by UID, until stop.
func (s *playgroundTest) watchReservations(ns string) (stop func() map[types.UID]string) {
	s.t.Helper()
	watch, err := s.rome.Watch(s.t.Context(), &broker.ReservationList{}, client.InNamespace(ns))
	expect.NoError(s.t, err)
	s.t.Cleanup(watch.Stop)
	seen, done := map[types.UID]string{}, make(chan struct{})
	go func() {
		defer close(done)
		for event := range watch.ResultChan() {
			if r, ok := event.Object.(*broker.Reservation); ok {
				seen[r.UID] = r.Name
			}
		}
	}()
	return func() map[types.UID]string {
		watch.Stop()
		<-done
		return seen
	}
}
