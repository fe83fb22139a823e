//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// drainScenario is the state that the steps of TestProviderIsDrained share.
type drainScenario struct {
	ns       string
	reserved *broker.Reservation
	// lines are what kubectl get providerinstructions --watch prints.
	lines lockedBuffer
}

// lockedBuffer is a buffer that one goroutine writes and another reads.
type lockedBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

// drained are the nodes of paris that guests run on.
var drained = []string{"paris-worker", "paris-worker2"}

// TestProviderIsDrained drains all nodes of a provider that have guests and reserved
// capacity. The provider says what it no longer holds, and the pods run elsewhere.
func TestProviderIsDrained(t *testing.T) {
	s := &drainScenario{}
	feature := features.New("a provider is drained").Setup(s.setup)
	feature.Assess("its nodes are drained as an administrator does it", s.drain)
	feature.Assess("kubectl get providerinstructions says what is lost", s.saysSo)
	feature.Assess("all pods run again, elsewhere", s.runElsewhere)
	testenv.Test(t, feature.Feature())
}

func (s *drainScenario) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectIdle(ctx, t)
	s.ns = namespace(ctx, t, "scenario-drained", true)
	fill(ctx, t, rome, rome.ControlPlane(), "1m")
	emptyBerlin := fill(ctx, t, berlin, berlin.ControlPlane(), "1m")
	// One that is not used.
	total := broker.FromList(requests("cpu", "200m", "memory", "32Mi"))
	s.reserved = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "spare"}, Spec: broker.ReservationSpec{TargetClusterID: "paris", RequestedResources: &total, PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "none"}}},
	}
	if err := rome.Create(ctx, s.reserved); err != nil {
		t.Fatal(err)
	}
	if err := rome.Create(ctx, deployment(s.ns, "web", 2, requests("cpu", "300m", "memory", "32Mi"))); err != nil {
		t.Fatal(err)
	}
	if _, away := allReady(ctx, t, s.ns, "web", 2, 2*time.Minute); len(away) != 2 {
		t.Fatalf("%d pods overflowed, want 2", len(away))
	}
	emptyBerlin()
	// The broker takes the lost part from the instruction within seconds.
	watch := s.command(ctx, t, "get", "providerinstructions", "-A", "--watch")
	watch.Stdout, watch.Stderr = &s.lines, &s.lines
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = watch.Process.Kill()
		_ = watch.Wait()
	})
	for _, node := range drained {
		t.Cleanup(func() {
			if out, err := s.kubectl(context.WithoutCancel(ctx), t, "uncordon", node); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
	return ctx
}

// command is kubectl on paris.
func (s *drainScenario) command(ctx context.Context, t *testing.T, arguments ...string) *exec.Cmd {
	t.Helper()
	program, err := binaries.Program(ctx, "kubectl", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	return exec.CommandContext(ctx, program, append([]string{"--kubeconfig", kubeconfig, "--context", paris.Context()}, arguments...)...)
}

func (s *drainScenario) kubectl(ctx context.Context, t *testing.T, arguments ...string) (string, error) {
	t.Helper()
	out, err := s.command(ctx, t, arguments...).CombinedOutput()
	return string(out), err
}

func (s *drainScenario) drain(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	// Other pods stay, such as those of Spillway and of Liqo.
	guests := client.HasLabels{s.guestLabel(ctx, t)}
	for _, node := range drained {
		if out, err := s.kubectl(ctx, t, "cordon", node); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	for _, node := range drained {
		out, err := s.kubectl(ctx, t, "drain", node, "--timeout=60s", "--ignore-daemonsets", "--pod-selector="+guests[0])
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		t.Logf("kubectl drain %s:\n%s", node, out)
	}
	return ctx
}

// guestLabel is a label that guests have, and other pods of paris have not.
func (s *drainScenario) guestLabel(ctx context.Context, t *testing.T) string {
	t.Helper()
	var pods corev1.PodList
	if err := paris.List(ctx, &pods); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods.Items {
		for _, label := range []string{"offloading.liqo.io/origin", "broker.fluidos.eu/origin-uid"} {
			if p.Labels[label] != "" {
				return label
			}
		}
	}
	t.Fatal("there is no guest in paris")
	return ""
}

func (s *drainScenario) saysSo(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	eventually(ctx, t, "a line says CapacityLost", time.Minute, func(ctx context.Context) (bool, string) {
		return strings.Contains(s.lines.String(), "CapacityLost"), s.lines.String()
	})
	t.Logf("kubectl get providerinstructions --watch:\n%s", s.lines.String())
	return ctx
}

func (s *drainScenario) runElsewhere(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	start := time.Now()
	// A pod that was bound in the meantime is evicted when it has not started in time. Those
	// whose guests were evicted have failed.
	eventually(ctx, t, "both pods are ready in berlin", 90*time.Second, func(ctx context.Context) (bool, string) {
		pods, err := podsOf(ctx, s.ns, "web")
		if err != nil {
			return false, err.Error()
		}
		var elsewhere int
		var states []string
		for _, p := range pods {
			states = append(states, fmt.Sprintf("%s %s on %q", p.Name, p.Status.Phase, p.Spec.NodeName))
			if ready(p) && p.Spec.NodeName == broker.VirtualNodeName("berlin") {
				elsewhere++
			}
		}
		return elsewhere == 2, strings.Join(states, "; ")
	})
	timing(t, "the provider is drained, all pods are ready elsewhere", time.Since(start))
	return ctx
}
