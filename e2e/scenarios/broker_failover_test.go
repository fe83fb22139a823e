//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
)

// brokerLease is the lease that the broker's replicas compete for.
const brokerLease = "spillway-broker"

// TestBrokerFailover kills the leading broker (SIGKILL) after a provider has accepted the hold
// and before a pod is bound: with the second Deployment, whose provider is peered already, only
// soon after the grant. Another process leads and completes the overflow, and at no time is more
// granted than the ledger holds.
func TestBrokerFailover(t *testing.T) {
	liqoOnly(t, "the broker is the same with each driver")
	feature := features.New("the leading broker is killed between grant and placement")
	feature.Assess("another broker completes the overflow, and no grant exceeds its hold", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectIdle(ctx, t) // the first provider is not peered
		ns := namespace(ctx, t, "scenario-failover", true)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		ledger := sampleLedger(ctx, t)
		for round, app := range []string{"first", "second"} {
			leader := brokerLeader(ctx, t)
			if err := rome.Create(ctx, deployment(ns, app, 2, requests("cpu", "250m", "memory", "16Mi"))); err != nil {
				t.Fatal(err)
			}
			waitForGrant(ctx, t, round+1)
			if identity, err := brokerIdentity(ctx); err != nil || identity != leader.identity {
				leader = brokerLeader(ctx, t) // another one leads since
			}
			pods, err := podsOf(ctx, ns, app)
			if err != nil {
				t.Fatal(err)
			}
			leader.kill(ctx, t)
			start := time.Now()
			bound := slices.DeleteFunc(pods, func(p corev1.Pod) bool { return !overflowed(p) })
			if peered := round > 0; len(bound) > 0 && !peered {
				t.Errorf("%d pods of %s were bound before the broker was killed", len(bound), app)
			}
			eventually(ctx, t, "another broker leads than "+leader.identity, time.Minute, func(ctx context.Context) (bool, string) {
				identity, err := brokerIdentity(ctx)
				return err == nil && identity != "" && identity != leader.identity, fmt.Sprintf("%q, %v", identity, err)
			})
			timing(t, fmt.Sprintf("leading broker killed (%d pods bound) to another one leads", len(bound)), time.Since(start))
			_, away := allReady(ctx, t, ns, app, 2, 3*time.Minute)
			if len(away) != 2 {
				t.Errorf("%d of 2 pods of %s overflowed", len(away), app)
			}
			timing(t, "leading broker "+leader.pod+" killed to all pods ready", time.Since(start))
		}
		samples, violations := ledger.stop()
		if samples == 0 || len(violations) > 0 {
			t.Errorf("%d samples of the ledger, violations: %s", samples, strings.Join(violations, "; "))
		}
		t.Logf("%d samples of the ledger, no grant exceeded its hold", samples)
		return ctx
	})
	testenv.Test(t, feature.Feature())
}

// waitForGrant waits until the hub has the given number of Reservations that a provider has
// accepted.
func waitForGrant(ctx context.Context, t *testing.T, count int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(ctx, deadlineFactor*time.Minute)
	defer cancel()
	// Checked more often than other conditions: a grant soon leads to a bound pod.
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for range ticker.C {
		var reservations broker.ReservationList
		if err := hub.List(ctx, &reservations); err != nil {
			dump(t)
			t.Fatalf("waiting for %d Reservations with a grant: %v", count, err)
		}
		granted := slices.DeleteFunc(reservations.Items, func(r broker.Reservation) bool {
			return !slices.ContainsFunc(r.Status.Allocations, func(a broker.Allocation) bool { return a.Accepted })
		})
		if len(granted) >= count {
			return
		}
	}
}

// leadingBroker is the process of the leading broker.
type leadingBroker struct {
	// identity is the process in the lease; pod and node are where it runs.
	identity, pod, node string
	container           string
}

// brokerIdentity is the holder of the brokers' lease.
func brokerIdentity(ctx context.Context) (string, error) {
	var lease coordinationv1.Lease
	if err := hub.Get(ctx, client.ObjectKey{Namespace: broker.SystemNamespace, Name: brokerLease}, &lease); err != nil {
		return "", err
	}
	return ptr.Deref(lease.Spec.HolderIdentity, ""), nil
}

// brokerLeader waits for a broker that leads and whose container runs.
func brokerLeader(ctx context.Context, t *testing.T) (leader leadingBroker) {
	t.Helper()
	eventually(ctx, t, "a broker leads", time.Minute, func(ctx context.Context) (bool, string) {
		identity, err := brokerIdentity(ctx)
		if err != nil {
			return false, err.Error()
		}
		name, _, _ := strings.Cut(identity, "_")
		var pod corev1.Pod
		if err := hub.Get(ctx, client.ObjectKey{Namespace: broker.SystemNamespace, Name: name}, &pod); err != nil {
			return false, fmt.Sprintf("the lease is held by %q: %v", identity, err)
		}
		if !ready(pod) || len(pod.Status.ContainerStatuses) == 0 {
			return false, fmt.Sprintf("pod %s is not ready: %+v", name, pod.Status.ContainerStatuses)
		}
		_, id, _ := strings.Cut(pod.Status.ContainerStatuses[0].ContainerID, "://")
		leader = leadingBroker{identity, name, pod.Spec.NodeName, id}
		return id != "", "its container has no ID"
	})
	return leader
}

// kill ends the process without any chance to clean up.
func (b leadingBroker) kill(ctx context.Context, t *testing.T) {
	t.Helper()
	if _, err := engine.Docker(ctx, "exec", b.node, "ctr", "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", b.container); err != nil {
		t.Fatal(err)
	}
}

// ledgerSampler compares, again and again, what is granted with what the ledger holds.
type ledgerSampler struct {
	cancel     context.CancelFunc
	done       sync.WaitGroup
	samples    int
	violations []string
}

func sampleLedger(ctx context.Context, t *testing.T) *ledgerSampler {
	ctx, cancel := context.WithCancel(ctx)
	s := &ledgerSampler{cancel: cancel}
	t.Cleanup(cancel)
	s.done.Go(func() {
		for ctx.Err() == nil {
			// The grant is read between two reads of the ledger, so that a hold that is
			// made or released meanwhile is in one of them.
			before, overcommitted, err1 := chargedCPU(ctx)
			granted, err2 := grantedCPU(ctx)
			after, _, err3 := chargedCPU(ctx)
			if err1 == nil && err2 == nil && err3 == nil {
				s.samples++
				s.violations = append(s.violations, overcommitted...)
				for provider, amount := range granted {
					if held := max(before[provider], after[provider]); amount > held {
						s.violations = append(s.violations, fmt.Sprintf("%s has granted %dm CPU, its ledger holds %dm", provider, amount, held))
					}
				}
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return s
}

func (s *ledgerSampler) stop() (samples int, violations []string) {
	s.cancel()
	s.done.Wait()
	return s.samples, s.violations
}

// chargedCPU is what the ledger of each provider is charged for, in millicores, and
// the providers whose ledger holds more than they have.
func chargedCPU(ctx context.Context) (charged map[string]int64, overcommitted []string, err error) {
	var list broker.ClusterAdvertisementList
	if err := hub.List(ctx, &list, client.InNamespace(broker.SystemNamespace)); err != nil {
		return nil, nil, err
	}
	charged = map[string]int64{}
	for _, ad := range list.Items {
		reserved := ad.Status.Reserved.List()[corev1.ResourceCPU]
		charged[ad.Spec.ClusterID] = reserved.MilliValue()
		unallocated := ad.Spec.Resources.Allocatable.List()[corev1.ResourceCPU]
		unallocated.Sub(ad.Spec.Resources.Allocated.List()[corev1.ResourceCPU])
		if len(ad.Status.Holds) > 0 && reserved.Cmp(unallocated) > 0 {
			overcommitted = append(overcommitted, fmt.Sprintf("the ledger of %s holds %s CPU of %s", ad.Spec.ClusterID, reserved.String(), unallocated.String()))
		}
	}
	return charged, overcommitted, nil
}

// grantedCPU is what each provider lets rome use, in millicores: the larger of what its
// instructions hold and of what the virtual node provides.
func grantedCPU(ctx context.Context) (map[string]int64, error) {
	granted := map[string]int64{}
	for _, provider := range []*remote{paris, berlin} {
		var instructions broker.ProviderInstructionList
		if err := provider.List(ctx, &instructions); err != nil {
			return nil, err
		}
		for _, instruction := range instructions.Items {
			if held := instruction.Status.Held; held != nil && instruction.DeletionTimestamp == nil {
				cpu := held.Totals.List()[corev1.ResourceCPU]
				granted[provider.Name] += cpu.MilliValue()
			}
		}
	}
	nodes, err := virtualNodes(ctx)
	if err != nil {
		return nil, err
	}
	for _, n := range nodes {
		if provider := n.Labels[broker.LabelProvider]; !n.Status.Allocatable.Pods().IsZero() {
			granted[provider] = max(granted[provider], n.Status.Allocatable.Cpu().MilliValue())
		}
	}
	return granted, nil
}
