//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// attack is what a hostile consumer attempts at its provider, with an identity that the
// peering gave it. It changes nothing: writes are dry runs.
type attack struct {
	name string
	do   func(ctx context.Context) error
	// want is part of the refusal.
	want string
}

// attackScenario is a provider with a grant for rome, and what rome may do there. What a
// hostile provider does to a consumer: TestHostileProvider, and for lists without end, which no
// real API server serves, the unit tests TestEndlessListIsBounded and TestEndlessPagesAreBounded
// in virtual-node/internal/controller.
type attackScenario struct {
	ns          string
	reservation *broker.Reservation
	attacks     []attack
}

// TestAttacks attempts, as a hostile consumer, what its grant does not say, with the identities
// that a real peering gives it. Each attempt is refused. That each succeeds without its guard is
// shown by TestAttacksWithLiqo and TestAttacksWithDirect in charts; not of those that Liqo's own
// webhook refuses, which request more than the grant.
func TestAttacks(t *testing.T) {
	s := &attackScenario{}
	feature := features.New("a hostile consumer").Setup(s.setup)
	feature.Assess("every attack is refused", s.refused)
	feature.Teardown(func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		if err := client.IgnoreNotFound(rome.Delete(ctx, s.reservation)); err != nil {
			t.Error(err)
		}
		expectIdle(ctx, t) // with each driver, nothing is left of the peering either
		return ctx
	})
	testenv.Test(t, feature.Feature())
}

func (s *attackScenario) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectIdle(ctx, t)
	s.ns = namespace(ctx, t, "scenario-attacks", true)
	s.reservation = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "grant"},
		Spec: broker.ReservationSpec{TargetClusterID: "paris", PodSets: []broker.PodSet{{
			Name: "pods", Count: 2,
			Requests: broker.ResourceQuantities{CPU: ptr.To(resource.MustParse("200m")), Memory: ptr.To(resource.MustParse("64Mi"))},
		}}},
	}
	if err := rome.Create(ctx, s.reservation); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the grant is usable", 2*time.Minute, func(ctx context.Context) (bool, string) {
		var n corev1.Node
		err := rome.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &n)
		return err == nil && n.Status.Allocatable.Pods().Value() == 2 && !n.Spec.Unschedulable, fmt.Sprint(n.Status.Allocatable, err)
	})
	var identity corev1.Secret
	err := rome.Get(ctx, client.ObjectKey{Namespace: "spillway-virtual-nodes", Name: "spillway-direct-paris"}, &identity)
	switch {
	case err == nil:
		s.attacks = directAttacks(ctx, t, &identity)
	case apierrors.IsNotFound(err):
		s.attacks = liqoAttacks(ctx, t, s.ns+"-rome")
	default:
		t.Fatal(err)
	}
	return ctx
}

func (s *attackScenario) refused(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	for _, a := range s.attacks {
		eventually(ctx, t, "attack is refused: "+a.name, 20*time.Second, func(ctx context.Context) (bool, string) {
			err := a.do(ctx)
			return apierrors.IsForbidden(err) && strings.Contains(err.Error(), a.want), fmt.Sprintf("want a refusal with %q, got %v", a.want, err)
		})
	}
	return ctx
}

// guestSpec is the spec of an ordinary guest that fits the grant.
func guestSpec() corev1.PodSpec {
	spec := podSpec(requests("cpu", "100m", "memory", "16Mi"), "serve")
	spec.AutomountServiceAccountToken = ptr.To(false)
	spec.Containers[0].Resources.Limits = requests("memory", "16Mi")
	spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: guest.NodeAffinity(nil)}}
	return spec
}

// specAttack is a change to an ordinary guest.
type specAttack struct {
	name   string
	change func(*corev1.PodSpec)
	// want is part of the refusal. Pod Security refuses the pod.
	want        string
	podSecurity bool
}

func specAttacks() []specAttack {
	volume := func(source corev1.VolumeSource) func(*corev1.PodSpec) {
		return func(s *corev1.PodSpec) { s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
	}
	return []specAttack{
		{"privileged", func(s *corev1.PodSpec) {
			s.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: ptr.To(true)}
		}, "violates PodSecurity", true},
		{"hostPath", volume(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}), "violates PodSecurity", true},
		{"hostNetwork", func(s *corev1.PodSpec) { s.HostNetwork, s.Containers[0].Ports = true, nil }, "violates PodSecurity", true},
		{"anti-affinity to every pod", func(s *corev1.PodSpec) {
			s.Affinity.PodAntiAffinity = &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
				TopologyKey: corev1.LabelOSStable, NamespaceSelector: &metav1.LabelSelector{}, LabelSelector: &metav1.LabelSelector{},
			}}}
		}, "affinity", false},
		{"tolerating virtual nodes", func(s *corev1.PodSpec) {
			s.Tolerations = []corev1.Toleration{{Key: "virtual-node.liqo.io/not-allowed", Operator: corev1.TolerationOpExists}}
		}, "tolerate", false},
		{"a ServiceAccount", func(s *corev1.PodSpec) { s.ServiceAccountName = "admin" }, "ServiceAccount", false},
	}
}

// foreignAttacks are those of any identity, of which config is the configuration, at what is
// not the consumer's.
func foreignAttacks(ctx context.Context, t *testing.T, attacker client.Client, config *rest.Config) []attack {
	t.Helper()
	list := func(object client.ObjectList, options ...client.ListOption) func(context.Context) error {
		return func(ctx context.Context) error { return attacker.List(ctx, object, options...) }
	}
	return []attack{
		{"pods of another namespace", list(&corev1.PodList{}, client.InNamespace("default")), "cannot list resource"},
		{"all namespaces", list(&corev1.NamespaceList{}), "cannot list resource"},
		{"the provider's Secrets", list(&corev1.SecretList{}, client.InNamespace(broker.SystemNamespace)), "cannot list resource"},
		{"the provider's nodes", list(&corev1.NodeList{}), "cannot list resource"},
		{"exec into a pod of the provider", execInto(t, config, ownPod(ctx, t)), "cannot create resource"},
	}
}

// ownPod is a running pod of paris, which is no guest. It ends with the test.
func ownPod(ctx context.Context, t *testing.T) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "scenario-attacked"}, Spec: podSpec(requests("cpu", "10m", "memory", "16Mi"), "serve")}
	remove := func(ctx context.Context) {
		eventually(ctx, t, "the provider's pod is gone", time.Minute, func(ctx context.Context) (bool, string) {
			err := paris.Delete(ctx, pod.DeepCopy(), client.GracePeriodSeconds(0))
			return apierrors.IsNotFound(err), fmt.Sprint(err)
		})
	}
	remove(ctx) // left by a run that was cut off
	t.Cleanup(func() { remove(context.WithoutCancel(ctx)) })
	if err := paris.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the provider's pod runs", time.Minute, func(ctx context.Context) (bool, string) {
		err := paris.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		return err == nil && pod.Status.Phase == corev1.PodRunning, fmt.Sprint(pod.Status.Phase, err)
	})
	return pod
}

// execInto returns an attempt to run a command in a pod. It succeeds if the command has run.
func execInto(t *testing.T, config *rest.Config, pod *corev1.Pod) func(context.Context) error {
	t.Helper()
	set, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
		defer cancel()
		out, err := execAs(ctx, set, config, *pod, "/spillway-lab-workload", "hostname")
		if err == nil && out != pod.Name {
			err = fmt.Errorf("the command printed %q, want the pod's name", out)
		}
		// client-go reports a refused upgrade as a text.
		if err != nil && strings.Contains(err.Error(), " is forbidden: ") {
			err = apierrors.NewForbidden(corev1.Resource("pods"), pod.Name, err)
		}
		return err
	}
}

// creating returns an attempt to create an object.
func creating(attacker client.Client, object func() client.Object) func(context.Context) error {
	return func(ctx context.Context) error { return attacker.Create(ctx, object(), client.DryRunAll) }
}

// nodePort and tokenSecret are objects that open the provider's cluster.
func nodePort(namespace string) client.Object {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "attack"},
		Spec:       corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80}}},
	}
}

func tokenSecret(namespace string) client.Object {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "attack", Annotations: map[string]string{corev1.ServiceAccountNameKey: "default"}},
		Type:       corev1.SecretTypeServiceAccountToken,
	}
}

// asUnstructured is the content of a typed value for an object of a type that the
// clients do not know.
func asUnstructured(t *testing.T, value any) map[string]any {
	t.Helper()
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(value)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
