//go:build e2e

package scenarios

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// hostileProviderScenario is a pod of rome that runs in paris, and what paris may report of it.
type hostileProviderScenario struct {
	ns          string
	reservation *broker.Reservation
	pod         *corev1.Pod
	// guests is the namespace of its guest in paris.
	guests string
	// virtualKubelet is the account in rome that reports what paris says.
	virtualKubelet types.NamespacedName
	direct         bool
	// own are addresses of rome: a node, a Service and a pod.
	own []string
}

// TestHostileProvider: as the administrator of paris and as the program in rome that reports what
// paris says, gives a guest addresses of rome itself, to which rome's Services would send traffic.
// None arrives, while those of paris do: the lab's networks have routes to each other. That each
// could be written without the policy is shown by TestAttacksByAProvider in charts.
func TestHostileProvider(t *testing.T) {
	s := &hostileProviderScenario{}
	feature := features.New("a hostile provider").Setup(s.setup)
	feature.Assess("addresses of the provider's network arrive", s.honest)
	feature.Assess("addresses of the consumer do not", s.dropped)
	feature.Assess("its virtual kubelet cannot write them", s.refused)
	feature.Teardown(func(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
		for _, object := range []client.Object{s.pod, s.reservation} {
			if err := client.IgnoreNotFound(rome.Delete(ctx, object)); err != nil {
				t.Error(err)
			}
		}
		expectUnused(ctx, t)
		return ctx
	})
	testenv.Test(t, feature.Feature())
}

func (s *hostileProviderScenario) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectUnused(ctx, t)
	s.ns = namespace(ctx, t, "scenario-hostile", true)
	total := broker.FromList(requests("cpu", "300m", "memory", "64Mi"))
	s.reservation = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "grant"},
		Spec:       broker.ReservationSpec{TargetClusterID: "paris", RequestedResources: &total},
	}
	s.pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "web"}, Spec: podSpec(requests("cpu", "200m", "memory", "32Mi"), "serve")}
	fill(ctx, t, rome, rome.ControlPlane(), "1m")
	if err := rome.Create(ctx, s.reservation); err != nil {
		t.Fatal(err)
	}
	// Before, the scheduler would request capacity for the pod, also in berlin.
	eventually(ctx, t, "the grant is usable", 2*time.Minute, func(ctx context.Context) (bool, string) {
		var n corev1.Node
		err := rome.Get(ctx, client.ObjectKey{Name: broker.VirtualNodeName("paris")}, &n)
		return err == nil && n.Status.Allocatable.Cpu().MilliValue() == 300 && !n.Spec.Unschedulable, fmt.Sprint(n.Status.Allocatable, err)
	})
	if err := rome.Create(ctx, s.pod); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "the pod runs in paris", 2*time.Minute, func(ctx context.Context) (bool, string) {
		err := rome.Get(ctx, client.ObjectKeyFromObject(s.pod), s.pod)
		return err == nil && ready(*s.pod) && s.pod.Spec.NodeName == broker.VirtualNodeName("paris"), fmt.Sprint(s.pod.Spec.NodeName, s.pod.Status.Phase, err)
	})
	err := rome.Get(ctx, client.ObjectKey{Namespace: "spillway-virtual-nodes", Name: "spillway-direct-paris"}, &corev1.Secret{})
	switch {
	case err == nil:
		s.direct, s.guests = true, "spillway-guests-rome"
		s.virtualKubelet = types.NamespacedName{Namespace: broker.SystemNamespace, Name: "spillway-virtual-node"}
	case apierrors.IsNotFound(err):
		s.guests = s.ns + "-rome"
		s.virtualKubelet = types.NamespacedName{Namespace: "liqo-tenant-paris", Name: broker.VirtualNodeName("paris")}
	default:
		t.Fatal(err)
	}

	var node corev1.Node
	var service corev1.Service
	var pods corev1.PodList
	for _, err := range []error{
		rome.Get(ctx, client.ObjectKey{Name: rome.ControlPlane()}, &node), rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: "kubernetes"}, &service),
		rome.List(ctx, &pods, client.InNamespace(broker.SystemNamespace)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, address := range node.Status.Addresses {
		if address.Type == corev1.NodeInternalIP {
			s.own = append(s.own, address.Address)
		}
	}
	s.own = append(s.own, service.Spec.ClusterIP)
	for _, pod := range pods.Items {
		if !pod.Spec.HostNetwork && pod.Status.PodIP != "" {
			s.own = append(s.own, pod.Status.PodIP)
			break
		}
	}
	if len(s.own) < 3 {
		t.Fatalf("addresses of rome: %v", s.own)
	}
	return ctx
}

// honest expects the pod's own address, and that another one of paris arrives when it is reported
// and can be written: what is refused in the next steps is the address.
func (s *hostileProviderScenario) honest(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	network := netip.MustParsePrefix(paris.PodCIDR)
	if ip, err := netip.ParseAddr(s.pod.Status.PodIP); err != nil || !network.Contains(ip) {
		t.Errorf("the pod has address %q, want one of paris, %s (%v)", s.pod.Status.PodIP, paris.PodCIDR, err)
	}
	bytes := network.Addr().As4()
	bytes[2], bytes[3] = 250, 250
	address := netip.AddrFrom4(bytes).String()
	s.expectWrite(ctx, t, "the virtual kubelet writes", address, func(got string, err error) bool { return err == nil && got == address })
	eventually(ctx, t, "rome takes over "+address, time.Minute, func(ctx context.Context) (bool, string) {
		if err := s.report(ctx, address, "an address of paris"); err != nil {
			return false, err.Error()
		}
		err := rome.Get(ctx, client.ObjectKeyFromObject(s.pod), s.pod)
		return err == nil && s.pod.Status.PodIP == address, fmt.Sprintf("address %q, %v", s.pod.Status.PodIP, err)
	})
	return ctx
}

// report gives the guest an address and a message, as its kubelet does. That corrects it within
// some seconds.
func (s *hostileProviderScenario) report(ctx context.Context, address, message string) error {
	var found corev1.PodList
	if err := paris.List(ctx, &found, client.InNamespace(s.guests)); err != nil {
		return err
	}
	if len(found.Items) != 1 {
		return fmt.Errorf("%d guests in namespace %s", len(found.Items), s.guests)
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"podIP": address, "podIPs": []corev1.PodIP{{IP: address}}, "message": message}})
	if err != nil {
		return err
	}
	return paris.Status().Patch(ctx, &found.Items[0], client.RawPatch(types.MergePatchType, patch))
}

// dropped has paris report addresses until rome has the report that came with each.
func (s *hostileProviderScenario) dropped(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	for i, address := range append(s.own, "127.0.0.1") {
		message := fmt.Sprint("report ", time.Now().UnixNano(), " ", i)
		eventually(ctx, t, "rome has the report with address "+address, time.Minute, func(ctx context.Context) (bool, string) {
			if err := s.report(ctx, address, message); err != nil {
				return false, err.Error()
			}
			err := rome.Get(ctx, client.ObjectKeyFromObject(s.pod), s.pod)
			if s.pod.Status.PodIP == address {
				t.Errorf("the pod has address %s of rome", address)
			}
			return err == nil && s.pod.Status.Message == message, fmt.Sprintf("message %q, address %q, %v", s.pod.Status.Message, s.pod.Status.PodIP, err)
		})
	}
	return ctx
}

// write writes an address as the virtual kubelet, without storing it, and returns what would be
// stored.
func (s *hostileProviderScenario) write(ctx context.Context, address string) (string, error) {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: s.virtualKubelet.Namespace, Name: s.virtualKubelet.Name}}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](600)}}
	if err := rome.SubResource("token").Create(ctx, account, request); err != nil {
		return "", err
	}
	config := rest.AnonymousClientConfig(rome.config)
	config.BearerToken = request.Status.Token
	reporter, err := client.New(config, client.Options{Scheme: rome.Scheme()})
	if err != nil {
		return "", err
	}
	reported := &corev1.Pod{}
	if err := rome.Get(ctx, client.ObjectKeyFromObject(s.pod), reported); err != nil {
		return "", err
	}
	reported.Status.PodIP, reported.Status.PodIPs = address, []corev1.PodIP{{IP: address}}
	err = reporter.Status().Update(ctx, reported, client.DryRunAll)
	return reported.Status.PodIP, err
}

// refused: the webhook takes each address off, and with driver direct the policy refuses it.
func (s *hostileProviderScenario) refused(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	what, expected := "the webhook takes off", func(got string, err error) bool { return err == nil && got == "" }
	if s.direct {
		what, expected = "the policy refuses", func(_ string, err error) bool { return apierrors.IsForbidden(err) }
	}
	for _, address := range s.own {
		s.expectWrite(ctx, t, what, address, expected)
	}
	return ctx
}

// expectWrite writes an address until the outcome is as expected.
func (s *hostileProviderScenario) expectWrite(ctx context.Context, t *testing.T, what, address string, expected func(got string, err error) bool) {
	t.Helper()
	eventually(ctx, t, what+" "+address, 20*time.Second, func(ctx context.Context) (bool, string) {
		got, err := s.write(ctx, address)
		return expected(got, err), fmt.Sprintf("address %q, %v", got, err)
	})
}
