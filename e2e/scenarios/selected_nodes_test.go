//go:build e2e

package scenarios

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"
)

// zone is that of the nodes of paris in the scenario.
const zone = "eu-west-1a"

// TestSelectedNodes has pods that only some of the providers' nodes admit: a tainted node
// with GPUs and the nodes of a zone.
func TestSelectedNodes(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	var ns string
	feature := features.New("selected nodes").Setup(func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		expectUnused(ctx, t)
		for _, name := range paris.Nodes()[1:] {
			changeNode(ctx, t, paris, name, func(node *corev1.Node) {
				node.Labels[corev1.LabelTopologyZone] = zone
				if paris.GPUs[name] > 0 && !slices.ContainsFunc(node.Spec.Taints, isGPU) {
					node.Spec.Taints = append(node.Spec.Taints, corev1.Taint{Key: "nvidia.com/gpu", Value: "present", Effect: corev1.TaintEffectNoSchedule})
				}
			})
		}
		ns = namespace(ctx, t, "scenario-selected", true)
		fill(ctx, t, rome, rome.ControlPlane(), "10m")
		return ctx
	})
	feature.Assess("a pod runs where its selector and its tolerations allow it", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		tolerations := []corev1.Toleration{{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists}}
		inZone := map[string]string{corev1.LabelTopologyZone: zone}
		createPod(ctx, t, ns, "gpu", func(spec *corev1.PodSpec) {
			spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: requests("cpu", "100m", "memory", "16Mi", "nvidia.com/gpu", "1"), Limits: requests("cpu", "100m", "memory", "16Mi", "nvidia.com/gpu", "1")}
			spec.Tolerations = tolerations
		})
		createPod(ctx, t, ns, "zone", func(spec *corev1.PodSpec) { spec.NodeSelector = inZone })
		for app, node := range map[string]string{"gpu": "paris-worker2", "zone": "paris-worker"} {
			_, away := allReady(ctx, t, ns, app, 1, 2*time.Minute)
			if len(away) != 1 || away[0].Spec.NodeName != "spillway-paris" {
				t.Fatalf("pod %s does not run in paris: %v", app, away)
			}
			if got := nodesOfGuests(ctx, t, paris, app); !slices.Equal(got, []string{node}) {
				t.Errorf("pod %s runs on the nodes %q of paris, want %s", app, got, node)
			}
		}
		return ctx
	})
	feature.Assess("the events of a pod that no provider can run say why", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		for app, tc := range map[string]struct {
			change func(*corev1.PodSpec)
			words  []string
		}{
			"elsewhere": {func(spec *corev1.PodSpec) {
				spec.NodeSelector = map[string]string{corev1.LabelTopologyZone: "us-east-1b"}
			}, []string{"paris", "berlin", "us-east-1b"}},
			"arm": {func(spec *corev1.PodSpec) { spec.NodeSelector = map[string]string{corev1.LabelArchStable: "arm64"} }, []string{corev1.LabelArchStable}},
		} {
			pod := createPod(ctx, t, ns, app, tc.change)
			expectMessages(ctx, t, pod, tc.words...)
		}
		return ctx
	})
	feature.Assess("a pod without the toleration does not run on the tainted node", func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		fill(ctx, t, berlin, berlin.ControlPlane(), "10m")
		empty := fill(ctx, t, paris, "paris-worker", "10m")
		pod := createPod(ctx, t, ns, "ordinary", func(*corev1.PodSpec) {})
		// The other node of paris has room for it, and the taint.
		expectMessages(ctx, t, pod, "paris: 0 of 1 pods", "berlin: 0 of 1 pods")
		if pods, err := podsOf(ctx, ns, "ordinary"); err != nil || len(pods) != 1 || pods[0].Spec.NodeName != "" {
			t.Errorf("the pod has a node: %+v (%v)", pods, err)
		}
		empty()
		if _, away := allReady(ctx, t, ns, "ordinary", 1, 2*time.Minute); len(away) != 1 || away[0].Spec.NodeName != "spillway-paris" {
			t.Errorf("the pod does not run in paris: %v", away)
		}
		return ctx
	})
	testenv.Test(t, feature.Feature())
}

// isGPU reports whether a taint is the scenario's.
func isGPU(taint corev1.Taint) bool { return taint.Key == "nvidia.com/gpu" }

// changeNode changes a node's labels and taints until the test ends.
func changeNode(ctx context.Context, t *testing.T, r *remote, name string, change func(*corev1.Node)) {
	t.Helper()
	update := func(ctx context.Context, change func(*corev1.Node)) error {
		return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			node, err := r.set.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			change(node)
			_, err = r.set.CoreV1().Nodes().Update(ctx, node, metav1.UpdateOptions{})
			return err
		})
	}
	if err := update(ctx, change); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := update(context.WithoutCancel(ctx), func(node *corev1.Node) {
			delete(node.Labels, corev1.LabelTopologyZone)
			node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, isGPU)
		}); err != nil {
			t.Errorf("restoring node %s: %v", name, err)
		}
	})
}

func createPod(ctx context.Context, t *testing.T, ns, app string, change func(*corev1.PodSpec)) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: app, Labels: map[string]string{"app": app}},
		Spec:       podSpec(requests("cpu", "100m", "memory", "16Mi"), "serve"),
	}
	change(&pod.Spec)
	if err := rome.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	return pod
}

// nodesOfGuests returns the nodes of a provider that the guests of an app run on.
func nodesOfGuests(ctx context.Context, t *testing.T, r *remote, app string) (nodes []string) {
	t.Helper()
	var list corev1.PodList
	if err := r.List(ctx, &list, client.MatchingLabels{"app": app}); err != nil {
		t.Fatal(err)
	}
	for _, pod := range list.Items {
		nodes = append(nodes, pod.Spec.NodeName)
	}
	return nodes
}

// expectMessages expects a pod's events to have all words.
func expectMessages(ctx context.Context, t *testing.T, pod *corev1.Pod, words ...string) {
	t.Helper()
	eventually(ctx, t, "the events of pod "+pod.Name+" say why it does not overflow", time.Minute, func(ctx context.Context) (bool, string) {
		messages := events(ctx, *pod)
		return !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(messages, word) }), messages
	})
	t.Logf("the events of pod %s:\n%s", pod.Name, events(ctx, *pod))
}
