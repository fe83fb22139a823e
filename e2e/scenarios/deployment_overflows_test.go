//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/install"
)

// webApp is the Deployment of the scenario.
const webApp = "web"

// deploymentScenario is the state that the steps of TestDeploymentOverflowsAndReturns share.
type deploymentScenario struct {
	small, large int // pods: what fits at home, and three more
	ns           string
	before       map[string]bool
	first        []types.UID
	home, away   []corev1.Pod
}

// TestDeploymentOverflowsAndReturns scales a Deployment beyond the capacity of
// rome. The pods that do not fit overflow without any operator action, work as one
// Service, and leave nothing behind when the Deployment fits at home again.
func TestDeploymentOverflowsAndReturns(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	s := &deploymentScenario{}
	feature := features.New("a Deployment that grows and shrinks").Setup(s.createDeployment)
	feature.Assess("what fits at home stays there, and a census is taken", s.staysHome)
	feature.Assess("what does not fit runs elsewhere, on nodes of exactly the size granted", s.overflows)
	feature.Assess("logs and exec work through rome", s.logsAndExec)
	feature.Assess("one Service reaches all of them", s.serviceReachesAll)
	feature.Assess("one more overflows over the warm peering", s.overflowsWarm)
	feature.Assess("back at its size, the pods at home are the same, and all but the warm peering is gone", s.returns)
	feature.Assess("a planted stray is counted", s.countsStrayObject)
	testenv.Test(t, feature.Feature())
}

func (s *deploymentScenario) createDeployment(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectIdle(ctx, t)
	s.ns = namespace(ctx, t, "scenario-deployment", true)
	free, err := freeCPU(ctx, rome, rome.ControlPlane())
	if err != nil {
		t.Fatal(err)
	}
	s.small = int(free.MilliValue() / 300)
	s.large = s.small + 3
	if s.small < 1 || s.small > 6 {
		t.Fatalf("rome has %s CPU left, expected enough for 1 to 6 pods of 300m", free.String())
	}
	d := deployment(s.ns, webApp, int32(s.small), requests("cpu", "300m", "memory", "32Mi"))
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: webApp},
		Spec:       corev1.ServiceSpec{Selector: d.Spec.Selector.MatchLabels, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}},
	}
	for _, o := range []client.Object{d, service} {
		if err := rome.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	return ctx
}

func (s *deploymentScenario) staysHome(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	s.home, s.away = allReady(ctx, t, s.ns, webApp, s.small, time.Minute)
	if len(s.away) > 0 {
		t.Fatalf("%d pods overflowed though rome has free capacity", len(s.away))
	}
	for _, p := range s.home {
		s.first = append(s.first, p.UID)
	}
	s.before = census(ctx, t)
	t.Logf("census: %d objects in four clusters", len(s.before))
	return ctx
}

func (s *deploymentScenario) overflows(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	start := time.Now()
	scale(ctx, t, s.ns, webApp, int32(s.large))
	s.home, s.away = allReady(ctx, t, s.ns, webApp, s.large, 3*time.Minute)
	timing(t, fmt.Sprintf("cold: %d more pods, %d of them overflowed, all ready", s.large-s.small, len(s.away)), time.Since(start))
	if len(s.away) == 0 {
		t.Fatal("nothing overflowed: rome has too much free capacity for this scenario")
	}
	free, err := freeCPU(ctx, rome, rome.ControlPlane())
	if err != nil {
		t.Fatal(err)
	}
	if free.Cmp(resource.MustParse("300m")) >= 0 {
		t.Errorf("pods overflowed while rome has %s CPU left", free.String())
	}
	eventually(ctx, t, "each virtual node is as large as what is granted there", 30*time.Second, func(ctx context.Context) (bool, string) {
		nodes, err := virtualNodes(ctx)
		if err != nil || len(nodes) == 0 {
			return false, fmt.Sprint("no virtual node ", err)
		}
		for _, n := range nodes {
			total, pods, err := granted(ctx, n.Labels[broker.LabelProvider])
			if err != nil {
				return false, err.Error()
			}
			if pods == 0 {
				continue // parked, from an earlier scenario
			}
			for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
				have, want := n.Status.Allocatable[name], total[name]
				if have.Cmp(want) != 0 {
					return false, fmt.Sprintf("%s has %s %s, granted is %s", n.Name, have.String(), name, want.String())
				}
			}
			waiting, err := waitingDaemons(ctx, n.Name)
			if err != nil {
				return false, err.Error()
			}
			if have := n.Status.Allocatable.Pods().Value(); have != pods+waiting {
				return false, fmt.Sprintf("%s takes %d pods, granted are %d, and %d of DaemonSets wait", n.Name, have, pods, waiting)
			}
			t.Logf("node %s: allocatable cpu %s, memory %s, pods %d: as granted", n.Name, n.Status.Allocatable.Cpu(), n.Status.Allocatable.Memory(), pods)
		}
		return true, ""
	})
	return ctx
}

func (s *deploymentScenario) logsAndExec(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	for _, p := range s.away {
		if name, err := execIn(ctx, p, "/"+install.Workload, "hostname"); err != nil || name != p.Name {
			t.Errorf("exec in %s answers %q (%v)", p.Name, name, err)
		}
		if text, err := logs(ctx, p); err != nil || !strings.Contains(text, "serving as "+p.Name) {
			t.Errorf("the logs of %s are %q (%v)", p.Name, text, err)
		}
	}
	return ctx
}

func (s *deploymentScenario) serviceReachesAll(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	var want []string
	for _, p := range slices.Concat(s.home, s.away) {
		want = append(want, p.Name)
	}
	eventually(ctx, t, "all pods answer through the Service", time.Minute, func(ctx context.Context) (bool, string) {
		out, err := execIn(ctx, s.home[0], "/"+install.Workload, "get", fmt.Sprintf("http://%s.%s.svc.cluster.local", webApp, s.ns), "60")
		if err != nil {
			return false, err.Error()
		}
		for _, name := range want {
			if !strings.Contains(out, name) {
				return false, fmt.Sprintf("%s did not answer among %v", name, slices.Compact(strings.Fields(out)))
			}
		}
		return true, ""
	})
	return ctx
}

func (s *deploymentScenario) overflowsWarm(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	start := time.Now()
	scale(ctx, t, s.ns, webApp, int32(s.large+1))
	home, away := allReady(ctx, t, s.ns, webApp, s.large+1, 2*time.Minute)
	timing(t, "warm: one more pod, ready", time.Since(start))
	if len(home) != len(s.home) || len(away) != len(s.away)+1 {
		t.Errorf("%d pods run at home and %d elsewhere, want %d and %d", len(home), len(away), len(s.home), len(s.away)+1)
	}
	return ctx
}

func (s *deploymentScenario) returns(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	start := time.Now()
	scale(ctx, t, s.ns, webApp, int32(s.small))
	s.home, s.away = allReady(ctx, t, s.ns, webApp, s.small, time.Minute)
	for _, p := range slices.Concat(s.home, s.away) {
		if !slices.Contains(s.first, p.UID) {
			t.Errorf("%s on %s is not one of the first pods: the overflowed ones should have gone first", p.Name, p.Spec.NodeName)
		}
	}
	eventually(ctx, t, "the census equals the first, but for the warm peering", 3*time.Minute, func(ctx context.Context) (bool, string) {
		added, missing := compare(s.before, census(ctx, t))
		added = slices.DeleteFunc(added, keptWarm)
		return len(added)+len(missing) == 0, fmt.Sprintf("more: %v; less: %v", added, missing)
	})
	timing(t, "released: all but the warm peering is gone", time.Since(start))
	eventually(ctx, t, "after its idle time the peering is gone too", 4*time.Minute, func(ctx context.Context) (bool, string) {
		added, missing := compare(s.before, census(ctx, t))
		return len(added)+len(missing) == 0, fmt.Sprintf("more: %v; less: %v", added, missing)
	})
	timing(t, "torn down: nothing is left in any cluster", time.Since(start))
	return ctx
}

func (s *deploymentScenario) countsStrayObject(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	stray := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "authentication.liqo.io/v1beta1", "kind": "ResourceSlice",
		"metadata": map[string]any{"name": "stray", "namespace": "default"},
		"spec":     map[string]any{"class": "stray", "consumerClusterID": "none", "providerClusterID": "paris"},
	}}
	if err := paris.Create(ctx, stray); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { paris.Delete(context.WithoutCancel(ctx), stray) })
	added, _ := compare(s.before, census(ctx, t))
	if len(added) != 1 || !strings.Contains(added[0], "resourceslices.authentication.liqo.io default/stray") {
		t.Errorf("the census does not see a stray slice, or sees more: %v", added)
	}
	return ctx
}
