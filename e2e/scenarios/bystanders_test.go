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

// bystanders is the state that the steps of TestBystanders share.
type bystanders struct {
	// ns may overflow, home may not.
	ns, home string
	// first is the pod that overflowed first.
	first corev1.Pod
	// greedy tolerates and selects virtual nodes, and has no grant.
	greedy corev1.Pod
}

// TestBystanders lets pods overflow beside others that must not notice: pods that never opted
// in, an administrator who cordons, and namespaces that can be mapped beside some that cannot.
func TestBystanders(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	s := &bystanders{}
	feature := features.New("bystanders").Setup(s.setup)
	feature.Assess("pods that never opted in spread over the hosts of home", s.spreadAtHome)
	feature.Assess("a cordon stays, and means nothing new there", s.cordonStays)
	feature.Assess("a namespace that cannot be mapped concerns its own pods", s.unmappedNamespaces)
	feature.Assess("a pod without a grant has stayed out meanwhile", s.hasStayedOut)
	testenv.Test(t, feature.Feature())
}

func (s *bystanders) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectUnused(ctx, t)
	s.ns, s.home = namespace(ctx, t, "scenario-bystanders", true), namespace(ctx, t, "scenario-bystanders-home", false)
	fill(ctx, t, rome, rome.ControlPlane(), "50m")
	s.greedy = corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.home, Name: "greedy"}, Spec: podSpec(requests("cpu", "20m", "memory", "4Mi"), "serve")}
	s.greedy.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	s.greedy.Spec.NodeSelector = map[string]string{broker.LabelNodeType: broker.NodeTypeVirtual}
	if err := rome.Create(ctx, &s.greedy); err != nil {
		t.Fatal(err)
	}
	s.first = s.overflow(ctx, t, s.ns, "first")
	return ctx
}

// hasStayedOut expects that no place of a virtual node was free for a pod without a grant while
// others overflowed. TestPodsWithoutGrantStayOut on the playground has more of such pods.
func (s *bystanders) hasStayedOut(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	if err := rome.Get(ctx, client.ObjectKeyFromObject(&s.greedy), &s.greedy); err != nil {
		t.Fatal(err)
	}
	if s.greedy.Spec.NodeName != "" {
		t.Errorf("a pod without a grant is bound to %s", s.greedy.Spec.NodeName)
	}
	if s.greedy.Spec.Affinity == nil || s.greedy.Spec.Affinity.NodeAffinity == nil {
		t.Error("it is not kept off virtual nodes: its scheduler would try to bind it there")
	}
	return ctx
}

// create creates a Deployment of one pod that does not fit at home.
func (s *bystanders) create(ctx context.Context, t *testing.T, ns, name string) {
	t.Helper()
	if err := rome.Create(ctx, deployment(ns, name, 1, requests("cpu", "300m", "memory", "16Mi"))); err != nil {
		t.Fatal(err)
	}
}

// overflow creates such a Deployment, and waits until its pod runs.
func (s *bystanders) overflow(ctx context.Context, t *testing.T, ns, name string) corev1.Pod {
	t.Helper()
	s.create(ctx, t, ns, name)
	_, away := allReady(ctx, t, ns, name, 1, 2*time.Minute)
	if len(away) != 1 {
		t.Fatalf("the pod of %s runs at home", name)
	}
	return away[0]
}

func (s *bystanders) spreadAtHome(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	plain := deployment(s.home, "plain", 3, requests("cpu", "10m", "memory", "16Mi"))
	plain.Spec.Template.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
		MaxSkew: 1, TopologyKey: corev1.LabelHostname, WhenUnsatisfiable: corev1.DoNotSchedule, LabelSelector: plain.Spec.Selector,
	}}
	if err := rome.Create(ctx, plain); err != nil {
		t.Fatal(err)
	}
	home, _ := allReady(ctx, t, s.home, "plain", 3, time.Minute)
	if len(home) != 3 {
		t.Errorf("%d of 3 pods that never opted in run at home", len(home))
	}
	var node corev1.Node
	if err := rome.Get(ctx, client.ObjectKey{Name: s.first.Spec.NodeName}, &node); err != nil {
		t.Fatalf("the virtual node went meanwhile: %v", err)
	}
	for _, key := range []string{corev1.LabelHostname, corev1.LabelTopologyZone, corev1.LabelTopologyRegion} {
		if value, domain := node.Labels[key]; domain {
			t.Errorf("the virtual node has label %s=%s", key, value)
		}
	}
	return ctx
}

func (s *bystanders) cordonStays(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: s.first.Spec.NodeName}}
	cordon := func(unschedulable bool) {
		patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, unschedulable))
		if err := rome.Patch(ctx, node, patch); err != nil {
			t.Fatal(err)
		}
	}
	cordon(true)
	second := s.overflow(ctx, t, s.ns, "second")
	if second.Spec.NodeName == node.Name {
		t.Errorf("a pod was bound to cordoned node %s", node.Name)
	}
	if err := rome.Get(ctx, client.ObjectKeyFromObject(node), node); err != nil || !node.Spec.Unschedulable {
		t.Errorf("the cordon was undone: unschedulable %t, %v", node.Spec.Unschedulable, err)
	}
	if home, away := allReady(ctx, t, s.ns, "first", 1, time.Minute); len(home) > 0 || away[0].UID != s.first.UID {
		t.Errorf("the pod on the cordoned node does not run on")
	}
	cordon(false)
	return ctx
}

func (s *bystanders) unmappedNamespaces(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	if driver(ctx, t) != "liqo" {
		t.Skip("with driver direct all guests share one namespace")
	}
	long := namespace(ctx, t, "scenario-bystanders-"+strings.Repeat("x", 40), true)
	s.create(ctx, t, long, "long")
	taken := namespace(ctx, t, "scenario-bystanders-taken", true)
	provider := strings.TrimPrefix(s.first.Spec.NodeName, broker.VirtualNodePrefix)
	in := map[string]*remote{"paris": paris, "berlin": berlin}[provider]
	other := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: taken + "-rome"}}
	if err := in.Create(ctx, other); err != nil {
		t.Fatal(err)
	}
	defer in.Delete(context.WithoutCancel(ctx), other)
	s.create(ctx, t, taken, "taken")
	// A positive control beside the negatives: another namespace overflows meanwhile.
	s.overflow(ctx, t, namespace(ctx, t, "scenario-bystanders-short", true), "short")
	_, away := allReady(ctx, t, taken, "taken", 1, 3*time.Minute)
	if len(away) != 1 || away[0].Spec.NodeName == s.first.Spec.NodeName {
		t.Errorf("the pod whose namespace is taken in %s is on %v", provider, away)
	}
	pods, err := podsOf(ctx, long, "long")
	if err != nil || len(pods) != 1 || pods[0].Spec.NodeName != "" {
		t.Fatalf("the pod of namespace %s: %v, %v", long, pods, err)
	}
	eventually(ctx, t, "an event says why the pod of the long namespace does not overflow", time.Minute, func(ctx context.Context) (bool, string) {
		messages := events(ctx, pods[0])
		return strings.Contains(messages, "longer than 63 characters"), messages
	})
	return ctx
}
