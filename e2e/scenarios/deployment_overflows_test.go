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

// TestDeploymentOverflowsAndReturns is the first story: a Deployment of more
// pods than rome has room for overflows with nobody acting on it, works as one
// Service, and leaves nothing behind when it fits at home again.
func TestDeploymentOverflowsAndReturns(t *testing.T) {
	const app = "web"
	var (
		small, large int // pods: what fits at home, and three more
		ns           string
		before       map[string]bool
		first        []types.UID
		home, away   []corev1.Pod
	)
	feature := features.New("a Deployment that grows and shrinks").Setup(func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		quiet(ctx, t)
		ns = namespace(ctx, t, "story-deployment", true)
		free, err := freeCPU(ctx, rome, rome.ControlPlane())
		if err != nil {
			t.Fatal(err)
		}
		small = int(free.MilliValue() / 300)
		large = small + 3
		if small < 1 || small > 6 {
			t.Fatalf("rome has %s CPU left, meant is room for a few pods of 300m", free.String())
		}
		d := deployment(ns, app, int32(small), requests("cpu", "300m", "memory", "32Mi"))
		service := &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: app},
			Spec:       corev1.ServiceSpec{Selector: d.Spec.Selector.MatchLabels, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}},
		}
		for _, o := range []client.Object{d, service} {
			if err := rome.Create(ctx, o); err != nil {
				t.Fatal(err)
			}
		}
		return ctx
	})
	feature.Assess("what fits at home stays there, and a census is taken", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		home, away = allReady(ctx, t, ns, app, small, time.Minute)
		if len(away) > 0 {
			t.Fatalf("%d pods overflowed though rome has room", len(away))
		}
		for _, p := range home {
			first = append(first, p.UID)
		}
		before = census(ctx, t)
		t.Logf("census: %d objects in four clusters", len(before))
		return ctx
	})
	feature.Assess("what does not fit runs elsewhere, on nodes of exactly the size granted", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		start := time.Now()
		scale(ctx, t, ns, app, int32(large))
		home, away = allReady(ctx, t, ns, app, large, 3*time.Minute)
		timing(t, fmt.Sprintf("cold: %d more pods, %d of them overflowed, all ready", large-small, len(away)), time.Since(start))
		if len(away) == 0 {
			t.Fatal("nothing overflowed: rome is too large for this story")
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
					continue // parked, from an earlier story
				}
				for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
					have, want := n.Status.Allocatable[name], total[name]
					if have.Cmp(want) != 0 {
						return false, fmt.Sprintf("%s has %s %s, granted is %s", n.Name, have.String(), name, want.String())
					}
				}
				if have := n.Status.Allocatable.Pods().Value(); have != pods {
					return false, fmt.Sprintf("%s takes %d pods, granted are %d", n.Name, have, pods)
				}
				t.Logf("node %s: allocatable cpu %s, memory %s, pods %d: as granted", n.Name, n.Status.Allocatable.Cpu(), n.Status.Allocatable.Memory(), pods)
			}
			return true, ""
		})
		return ctx
	})
	feature.Assess("logs and exec work through rome", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		for _, p := range away {
			if name, err := execIn(ctx, p, "/"+install.Workload, "hostname"); err != nil || name != p.Name {
				t.Errorf("exec in %s answers %q (%v)", p.Name, name, err)
			}
			if text, err := logs(ctx, p); err != nil || !strings.Contains(text, "serving as "+p.Name) {
				t.Errorf("the logs of %s are %q (%v)", p.Name, text, err)
			}
		}
		return ctx
	})
	feature.Assess("one Service reaches all of them", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		var want []string
		for _, p := range slices.Concat(home, away) {
			want = append(want, p.Name)
		}
		eventually(ctx, t, "all pods answer through the Service", time.Minute, func(ctx context.Context) (bool, string) {
			out, err := execIn(ctx, home[0], "/"+install.Workload, "get", fmt.Sprintf("http://%s.%s.svc.cluster.local", app, ns), "60")
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
	})
	feature.Assess("back at its size, the pods at home are the same, and all but the warm peering is gone", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		start := time.Now()
		scale(ctx, t, ns, app, int32(small))
		home, away = allReady(ctx, t, ns, app, small, time.Minute)
		for _, p := range slices.Concat(home, away) {
			if !slices.Contains(first, p.UID) {
				t.Errorf("%s on %s is not one of the first pods: the overflowed ones should have gone first", p.Name, p.Spec.NodeName)
			}
		}
		eventually(ctx, t, "the census equals the first, but for the warm peering", 3*time.Minute, func(ctx context.Context) (bool, string) {
			added, missing := compare(before, census(ctx, t))
			added = slices.DeleteFunc(added, keptWarm)
			return len(added)+len(missing) == 0, fmt.Sprintf("more: %v; less: %v", added, missing)
		})
		timing(t, "released: all but the warm peering is gone", time.Since(start))
		eventually(ctx, t, "after its idle time the peering is gone too", 4*time.Minute, func(ctx context.Context) (bool, string) {
			added, missing := compare(before, census(ctx, t))
			return len(added)+len(missing) == 0, fmt.Sprintf("more: %v; less: %v", added, missing)
		})
		timing(t, "torn down: nothing is left in any cluster", time.Since(start))
		return ctx
	})
	feature.Assess("a planted stray is counted", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		stray := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "authentication.liqo.io/v1beta1", "kind": "ResourceSlice",
			"metadata": map[string]any{"name": "stray", "namespace": "default"},
			"spec":     map[string]any{"class": "stray", "consumerClusterID": "nobody", "providerClusterID": "paris"},
		}}
		if err := paris.Create(ctx, stray); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { paris.Delete(context.WithoutCancel(ctx), stray) })
		added, _ := compare(before, census(ctx, t))
		if len(added) != 1 || !strings.Contains(added[0], "resourceslices.authentication.liqo.io default/stray") {
			t.Errorf("the census does not see a stray slice, or sees more: %v", added)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}
