//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
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
	// One that nobody uses yet.
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
	return ctx
}

// kubectl runs kubectl on paris.
func (s *drainScenario) kubectl(ctx context.Context, t *testing.T, arguments ...string) (string, error) {
	t.Helper()
	program, err := binaries.Program(ctx, "kubectl", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(ctx, program, append([]string{"--kubeconfig", kubeconfig, "--context", paris.Context()}, arguments...)...).CombinedOutput()
	return string(out), err
}

func (s *drainScenario) drain(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	for _, node := range drained {
		t.Cleanup(func() {
			if out, err := s.kubectl(context.WithoutCancel(ctx), t, "uncordon", node); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
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
		out, err := s.kubectl(ctx, t, "get", "providerinstructions", "-A")
		if err == nil && strings.Contains(out, "CapacityLost") {
			t.Logf("kubectl get providerinstructions:\n%s", out)
			return true, ""
		}
		return false, fmt.Sprint(out, err)
	})
	return ctx
}

func (s *drainScenario) runElsewhere(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	start := time.Now()
	_, away := allReady(ctx, t, s.ns, "web", 2, 90*time.Second)
	timing(t, "the provider is drained, all pods are ready elsewhere", time.Since(start))
	for _, p := range away {
		if p.Spec.NodeName != broker.VirtualNodeName("berlin") {
			t.Errorf("%s is ready on %s, whose nodes are drained", p.Name, p.Spec.NodeName)
		}
	}
	return ctx
}
