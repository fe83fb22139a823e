//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
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
	// emptyBerlin makes room in berlin.
	emptyBerlin func()
}

// drained are the nodes of paris that guests run on.
var drained = []string{"paris-worker", "paris-worker2"}

// TestProviderIsDrained drains all nodes of a provider that have guests and reserved
// capacity. The provider says what it no longer holds, and the pods run elsewhere.
func TestProviderIsDrained(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	s := &drainScenario{}
	feature := features.New("a provider is drained").Setup(s.setup)
	feature.Assess("its nodes are cordoned", s.cordon)
	feature.Assess("kubectl get providerinstructions says what is lost", s.saysSo)
	feature.Assess("nothing is kept for the unused hold", s.keepsNothing)
	feature.Assess("the pods at home say that they must leave", s.mustLeave)
	feature.Assess("its nodes are drained as an administrator does it", s.drain)
	feature.Assess("all pods run again, elsewhere", s.runElsewhere)
	testenv.Test(t, feature.Feature())
}

func (s *drainScenario) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectUnused(ctx, t)
	s.ns = namespace(ctx, t, "scenario-drained", true)
	fill(ctx, t, rome, rome.ControlPlane(), "1m")
	s.emptyBerlin = fill(ctx, t, berlin, berlin.ControlPlane(), "1m")
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
	eventually(ctx, t, "paris keeps places for the unused hold", time.Minute, func(ctx context.Context) (bool, string) {
		kept, err := placeholdersOn(ctx, drained)
		return err == nil && kept > 0, fmt.Sprint(kept, err)
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

// kubectl calls kubectl on paris.
func (s *drainScenario) kubectl(ctx context.Context, t *testing.T, arguments ...string) (string, error) {
	t.Helper()
	program, err := binaries.Program(ctx, "kubectl", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(ctx, program, append([]string{"--kubeconfig", kubeconfig, "--context", paris.Context()}, arguments...)...).CombinedOutput()
	return string(out), err
}

// cordon cordons the nodes while there is no room elsewhere: the guests stay for now.
func (s *drainScenario) cordon(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	for _, node := range drained {
		if out, err := s.kubectl(ctx, t, "cordon", node); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	return ctx
}

// saysSo expects one line for the lost hold with guests: reason, and by when they must leave. It
// stays once the broker has lowered its promise.
func (s *drainScenario) saysSo(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	var said string
	eventually(ctx, t, "the broker has lowered its promise, and a line says CapacityLost", time.Minute, func(ctx context.Context) (bool, string) {
		var list broker.ProviderInstructionList
		if err := paris.List(ctx, &list, client.InNamespace("spillway-system")); err != nil {
			return false, err.Error()
		}
		var lines []string
		for _, in := range list.Items {
			out, err := s.kubectl(ctx, t, "get", "providerinstructions", "-n", in.Namespace, in.Name, "--no-headers")
			if lines = append(lines, strings.TrimSpace(out)); err != nil {
				continue
			}
			if by := in.Status.LeaveBy; by != nil && in.Spec.Releasing && strings.Contains(out, " CapacityLost ") && strings.Contains(out, by.UTC().Format(time.RFC3339)) {
				said = strings.TrimSpace(out)
			}
		}
		return said != "", strings.Join(lines, "; ")
	})
	t.Logf("kubectl get providerinstructions: %s", said)
	return ctx
}

// placeholdersOn counts the placeholders that keep places on some nodes of paris.
func placeholdersOn(ctx context.Context, nodes []string) (int, error) {
	var list corev1.PodList
	err := paris.List(ctx, &list, client.InNamespace("spillway-holds"))
	list.Items = slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || !slices.Contains(nodes, p.Spec.NodeName)
	})
	return len(list.Items), err
}

// keepsNothing expects that paris keeps no place on the cordoned nodes: the unused hold has lost
// them, too.
func (s *drainScenario) keepsNothing(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	eventually(ctx, t, "no place is kept on the cordoned nodes", 2*time.Minute, func(ctx context.Context) (bool, string) {
		kept, err := placeholdersOn(ctx, drained)
		return err == nil && kept == 0, fmt.Sprint(kept, err)
	})
	return ctx
}

// mustLeave expects the mark of the guests on their pods in rome.
func (s *drainScenario) mustLeave(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	eventually(ctx, t, "both pods in rome have condition "+string(broker.PodMustLeave), time.Minute, func(ctx context.Context) (bool, string) {
		pods, err := podsOf(ctx, s.ns, "web")
		if err != nil {
			return false, err.Error()
		}
		var marked int
		var states []string
		for _, p := range pods {
			if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == broker.PodMustLeave && c.Status == corev1.ConditionTrue
			}) {
				marked++
			}
			states = append(states, fmt.Sprintf("%s on %q has %+v", p.Name, p.Spec.NodeName, p.Status.Conditions))
		}
		return marked == 2, strings.Join(states, "; ")
	})
	return ctx
}

func (s *drainScenario) drain(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	// Other pods stay, such as those of Spillway and of Liqo.
	guests := s.guestLabel(ctx, t)
	s.emptyBerlin()
	for _, node := range drained {
		out, err := s.kubectl(ctx, t, "drain", node, "--timeout=60s", "--ignore-daemonsets", "--pod-selector="+guests)
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		t.Logf("kubectl drain %s:\n%s", node, out)
	}
	return ctx
}

// guestLabel is a label that guests have, and other pods of paris have not. They also have the
// label by which paris attributes them to a hold.
func (s *drainScenario) guestLabel(ctx context.Context, t *testing.T) string {
	t.Helper()
	var pods corev1.PodList
	if err := paris.List(ctx, &pods); err != nil {
		t.Fatal(err)
	}
	for _, p := range pods.Items {
		for _, label := range []string{"offloading.liqo.io/origin", "broker.fluidos.eu/origin-uid"} {
			if p.Labels[label] == "" {
				continue
			}
			if p.Labels[broker.LabelHold] == "" {
				t.Errorf("guest %s/%s has no label %s", p.Namespace, p.Name, broker.LabelHold)
			}
			return label
		}
	}
	t.Fatal("there is no guest in paris")
	return ""
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
