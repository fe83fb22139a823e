//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestRolloutKeepsReservation restarts a Deployment whose pods have all overflowed, and scales it
// up and down: one Reservation is there throughout, and ends with the Deployment.
func TestRolloutKeepsReservation(t *testing.T) {
	liqoOnly(t, "the scheduler keeps the Reservation")
	feature := features.New("a rollout and changes of scale of an overflowed Deployment")
	feature.Assess("one Reservation throughout", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectUnused(ctx, t)
		ns := namespace(ctx, t, "scenario-rollout", true)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		d := deployment(ns, webApp, 3, requests("cpu", "100m", "memory", "16Mi"))
		if err := rome.Create(ctx, d); err != nil {
			t.Fatal(err)
		}
		seen := sampleReservations(ctx, t, ns)
		replicas := func(n int) {
			t.Helper()
			if home, _ := allReady(ctx, t, ns, webApp, n, 3*time.Minute); len(home) > 0 {
				t.Errorf("%d of %d pods are at home, which is full", len(home), n)
			}
		}
		replicas(3)
		before, err := podsOf(ctx, ns, webApp)
		if err != nil {
			t.Fatal(err)
		}
		// As kubectl rollout restart does.
		restart := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":%q}}}}}`, time.Now().Format(time.RFC3339)))
		if err := rome.Patch(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: webApp}}, restart); err != nil {
			t.Fatal(err)
		}
		var old []types.UID
		for _, p := range before {
			old = append(old, p.UID)
		}
		eventually(ctx, t, "the pods from before the restart are gone", 3*time.Minute, func(ctx context.Context) (bool, string) {
			pods, err := podsOf(ctx, ns, webApp)
			n := 0
			for _, p := range pods {
				if slices.Contains(old, p.UID) {
					n++
				}
			}
			return err == nil && len(pods) > 0 && n == 0, fmt.Sprintf("%d of %d pods are left, %v", n, len(pods), err)
		})
		replicas(3)
		scale(ctx, t, ns, webApp, 5)
		replicas(5)
		scale(ctx, t, ns, webApp, 2)
		replicas(2)
		eventually(ctx, t, "the Reservation is for 2 pods", 2*time.Minute, func(ctx context.Context) (bool, string) {
			var list broker.ReservationList
			if err := rome.List(ctx, &list, client.InNamespace(ns)); err != nil || len(list.Items) != 1 {
				return false, fmt.Sprintf("%d Reservations, %v", len(list.Items), err)
			}
			r := list.Items[0]
			return r.DeletionTimestamp == nil && len(r.Spec.PodSets) == 1 && r.Spec.PodSets[0].Count == 2, fmt.Sprintf("%+v, deleted at %v", r.Spec.PodSets, r.DeletionTimestamp)
		})
		if uids := seen.stop(); len(uids) != 1 {
			t.Errorf("%d Reservations have been there, want one throughout: %v", len(uids), uids)
		}
		if err := rome.Delete(ctx, d); err != nil {
			t.Fatal(err)
		}
		eventually(ctx, t, "the Reservation is gone", 2*time.Minute, func(ctx context.Context) (bool, string) {
			names, err := reservationsOf(ctx, ns)
			return err == nil && len(names) == 0, fmt.Sprint(names, err)
		})
		return ctx
	})
	testenv.Test(t, feature.Feature())
}

// reservationsOf returns the names of a namespace's Reservations in rome by UID.
func reservationsOf(ctx context.Context, ns string) (map[types.UID]string, error) {
	var list broker.ReservationList
	if err := rome.List(ctx, &list, client.InNamespace(ns)); err != nil {
		return nil, err
	}
	names := map[types.UID]string{}
	for _, r := range list.Items {
		names[r.UID] = r.Name
	}
	return names, nil
}

// reservationSampler notes which Reservations a namespace has, again and again.
type reservationSampler struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
	seen   map[types.UID]string
}

func sampleReservations(ctx context.Context, t *testing.T, ns string) *reservationSampler {
	ctx, cancel := context.WithCancel(ctx)
	s := &reservationSampler{cancel: cancel, seen: map[types.UID]string{}}
	t.Cleanup(cancel)
	s.done.Go(func() {
		ticker := time.NewTicker(100 * time.Millisecond)
		defer ticker.Stop()
		for {
			if names, err := reservationsOf(ctx, ns); err == nil {
				maps.Copy(s.seen, names)
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	})
	return s
}

func (s *reservationSampler) stop() map[types.UID]string {
	s.cancel()
	s.done.Wait()
	return s.seen
}
