//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	"github.com/spillway-dev/spillway/e2e/lab/install"
)

// connection is what one pod asks another for.
type connection struct {
	name    string
	from    caller
	request []string
}

// caller runs the workload with arguments in a pod.
type caller func(ctx context.Context, args ...string) (string, error)

// guestsNetwork is a guest in paris, a pod of each of the two clusters, and what they may
// reach.
type guestsNetwork struct {
	allowed, denied []connection
	// confined are the namespaces whose policies deny.
	confined []confinedNamespace
}

type confinedNamespace struct {
	*remote
	name string
}

// TestGuestsNetwork connects from and to a guest: the NetworkPolicies admit what the
// provider allows, and nothing else.
func TestGuestsNetwork(t *testing.T) {
	s := &guestsNetwork{}
	feature := features.New("the network of guests").Setup(s.setup)
	feature.Assess("what the provider allows passes", s.passes)
	feature.Assess("all else is denied", s.isDenied)
	feature.Assess("what is denied passes without the policies", s.passesWithoutPolicies)
	feature.Assess("all else is denied again", s.isDenied)
	testenv.Test(t, feature.Feature())
}

func (s *guestsNetwork) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectUnused(ctx, t)
	const app = "confined"
	ns := namespace(ctx, t, "scenario-guests-network", true)
	here := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "home", Labels: map[string]string{"app": "home"}},
		Spec:       podSpec(requests("cpu", "10m", "memory", "16Mi"), "serve"),
	}
	if err := rome.Create(ctx, here); err != nil {
		t.Fatal(err)
	}
	home, _ := allReady(ctx, t, ns, "home", 1, time.Minute)
	if len(home) != 1 {
		t.Fatalf("the pod of rome runs at a provider")
	}
	fill(ctx, t, rome, rome.ControlPlane(), "10m")
	fill(ctx, t, berlin, berlin.ControlPlane(), "10m")
	d := deployment(ns, app, 1, requests("cpu", "100m", "memory", "16Mi"))
	serving := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: app},
		Spec:       corev1.ServiceSpec{Selector: d.Spec.Selector.MatchLabels, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}}},
	}
	for _, o := range []client.Object{d, serving} {
		if err := rome.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	_, away := allReady(ctx, t, ns, app, 1, 2*time.Minute)
	if len(away) != 1 {
		t.Fatalf("the pod for paris runs at home")
	}
	var found corev1.PodList
	if err := paris.List(ctx, &found, client.MatchingLabels{"app": app}); err != nil || len(found.Items) != 1 {
		t.Fatalf("guests in paris: %d (%v), want 1", len(found.Items), err)
	}
	guest, provider := found.Items[0], ownPod(ctx, t)
	s.confined = []confinedNamespace{{paris, guest.Namespace}}

	fromHome := func(ctx context.Context, args ...string) (string, error) { return runIn(ctx, rome, home[0], args) }
	fromGuest := func(ctx context.Context, args ...string) (string, error) { return runIn(ctx, rome, away[0], args) }
	fromProvider := func(ctx context.Context, args ...string) (string, error) { return runIn(ctx, paris, *provider, args) }
	var service corev1.Service
	if err := paris.Get(ctx, client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: "kubernetes"}, &service); err != nil {
		t.Fatal(err)
	}
	apiServer := []string{"status", "https://" + net.JoinHostPort(service.Spec.ClusterIP, "443") + "/version"}
	s.allowed = []connection{
		{"home to the guest", fromHome, []string{"get", web(guest)}},
		{"home to the guest's Service", fromHome, []string{"get", fmt.Sprintf("http://%s.%s.svc.cluster.local", app, ns)}},
		{"the provider's pod to itself", fromProvider, []string{"get", web(*provider)}},
		{"the provider's pod to its API server", fromProvider, apiServer},
	}
	s.denied = []connection{
		{"the provider's pod to the guest", fromProvider, []string{"get", web(guest)}},
		{"the guest to the provider's pod", fromGuest, []string{"get", web(*provider)}},
		{"the guest to the provider's API server", fromGuest, apiServer},
		{"the guest to home", fromGuest, []string{"get", web(home[0])}},
	}
	if driver(ctx, t) == "liqo" {
		// The API server reaches this port: fromGuest needs it.
		kubelet := virtualKubelet(ctx, t)
		s.confined = append(s.confined, confinedNamespace{rome, kubelet.Namespace})
		s.denied = append(s.denied, connection{"home to Liqo's virtual kubelet", fromHome, []string{"status", "https://" + net.JoinHostPort(kubelet.Status.PodIP, "10250") + "/pods"}})
	}
	return ctx
}

// virtualKubelet is the pod of Liqo's virtual kubelet for paris in rome.
func virtualKubelet(ctx context.Context, t *testing.T) corev1.Pod {
	t.Helper()
	var found corev1.PodList
	if err := rome.List(ctx, &found, client.InNamespace("liqo-tenant-paris"), client.MatchingLabels{consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue}); err != nil || len(found.Items) != 1 {
		t.Fatalf("virtual kubelets for paris: %d (%v), want 1", len(found.Items), err)
	}
	return found.Items[0]
}

// web is the address that the workload serves at.
func web(pod corev1.Pod) string { return "http://" + net.JoinHostPort(pod.Status.PodIP, "8080") }

func runIn(ctx context.Context, r *remote, pod corev1.Pod, args []string) (string, error) {
	return execAs(ctx, r.set, r.config, pod, append([]string{"/" + install.Workload}, args...)...)
}

func (s *guestsNetwork) passes(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectConnections(ctx, t, s.allowed, nil)
	return ctx
}

// isDenied expects one to pass beside those that do not: that they fail says something only then.
func (s *guestsNetwork) isDenied(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectConnections(ctx, t, s.allowed[:1], s.denied)
	return ctx
}

// passesWithoutPolicies admits all with a further policy: the agent restores its own.
func (s *guestsNetwork) passesWithoutPolicies(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	var all []*networkingv1.NetworkPolicy
	for _, n := range s.confined {
		policy := &networkingv1.NetworkPolicy{
			ObjectMeta: metav1.ObjectMeta{Namespace: n.name, Name: "scenario-all"},
			Spec: networkingv1.NetworkPolicySpec{
				Ingress: []networkingv1.NetworkPolicyIngressRule{{}}, Egress: []networkingv1.NetworkPolicyEgressRule{{}},
				PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress},
			},
		}
		if err := n.Create(ctx, policy); err != nil && !apierrors.IsAlreadyExists(err) {
			t.Fatal(err)
		}
		all = append(all, policy)
	}
	expectConnections(ctx, t, s.denied, nil)
	for i, n := range s.confined {
		if err := n.Delete(ctx, all[i]); err != nil {
			t.Fatal(err)
		}
	}
	return ctx
}

// expectConnections expects that all of some connections pass and that none of others does, at the
// same time, once the network knows the policies. That the workload cannot be run in the pod says
// nothing of the network.
func expectConnections(ctx context.Context, t *testing.T, pass, denied []connection) {
	t.Helper()
	eventually(ctx, t, fmt.Sprintf("%d connections pass and %d are denied", len(pass), len(denied)), time.Minute, func(ctx context.Context) (bool, string) {
		var all sync.WaitGroup
		unexpected := make([]string, len(pass)+len(denied))
		for i, c := range slices.Concat(pass, denied) {
			all.Go(func() {
				answer, err := c.from(ctx, c.request...)
				if passes := i < len(pass); passes && err != nil || !passes && (err == nil || !strings.Contains(err.Error(), "workload: ")) {
					unexpected[i] = fmt.Sprintf("%s: %q, %v", c.name, answer, err)
				}
			})
		}
		all.Wait()
		unexpected = slices.DeleteFunc(unexpected, func(s string) bool { return s == "" })
		return len(unexpected) == 0, strings.Join(unexpected, "; ")
	})
}
