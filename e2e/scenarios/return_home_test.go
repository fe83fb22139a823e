//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// TestPodsReturnHome makes room in rome while a Deployment has overflowed: its pods move
// back, and what they used elsewhere is given back.
func TestPodsReturnHome(t *testing.T) {
	liqoOnly(t, "when pods return is decided by the scheduler")
	const app, pods = "returning", 2
	feature := features.New("pods that return home").Assess("overflowed pods move back once there is room", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		ns := namespace(ctx, t, "scenario-return", true)
		policy := &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "scenario-return"}, Spec: broker.OverflowPolicySpec{
			NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: ns}},
			ReturnHome:        &broker.ReturnHome{After: &metav1.Duration{Duration: 5 * time.Second}, MinimumStay: &metav1.Duration{Duration: 5 * time.Second}},
		}}
		if err := client.IgnoreNotFound(rome.Delete(ctx, policy.DeepCopy())); err != nil { // left by a run that was cut off
			t.Fatal(err)
		}
		if err := rome.Create(ctx, policy); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = rome.Delete(context.WithoutCancel(ctx), policy) })
		empty := fill(ctx, t, rome, rome.ControlPlane(), "1m")
		if err := rome.Create(ctx, deployment(ns, app, pods, requests("cpu", "150m", "memory", "16Mi"))); err != nil {
			t.Fatal(err)
		}
		_, away := allReady(ctx, t, ns, app, pods, 3*time.Minute)
		if len(away) != pods {
			t.Fatalf("%d pods overflowed, want %d", len(away), pods)
		}
		began := time.Now()
		empty()
		eventually(ctx, t, "all pods are back", 3*time.Minute, func(ctx context.Context) (bool, string) {
			now, err := podsOf(ctx, ns, app)
			if err != nil {
				return false, err.Error()
			}
			home := 0
			var states []string
			for _, p := range now {
				if states = append(states, fmt.Sprintf("%s on %q", p.Name, p.Spec.NodeName)); ready(p) && !overflowed(p) {
					home++
				}
			}
			return home == pods && len(now) == pods, strings.Join(states, "; ")
		})
		timing(t, "room at home: 2 overflowed pods are back, one after the other", time.Since(began))
		for _, p := range away {
			if said := events(ctx, p); !strings.Contains(said, "ReturningHome") {
				t.Errorf("pod %s has no event about its return:\n%s", p.Name, said)
			}
		}
		eventually(ctx, t, "the Reservation is given back", 3*time.Minute, func(ctx context.Context) (bool, string) {
			var left broker.ReservationList
			err := rome.List(ctx, &left, client.InNamespace(ns))
			return err == nil && len(left.Items) == 0, fmt.Sprint(len(left.Items), " Reservations ", err)
		})
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
