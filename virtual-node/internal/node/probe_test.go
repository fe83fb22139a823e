package node_test

import (
	"fmt"
	"net/http"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/internal/node"
)

type roundTripper func(*http.Request) (*http.Response, error)

func (r roundTripper) RoundTrip(request *http.Request) (*http.Response, error) { return r(request) }

// A probe shows whether the token may list guests, and costs the same however many there are.
func TestProbeListsNoGuests(t *testing.T) {
	config := controlplane.StartBare(t)
	admin := kubernetes.NewForConfigOrDie(config)
	expect.NoError(t, err(admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "guests"}}, metav1.CreateOptions{})))
	expect.NoError(t, err(admin.CoreV1().ServiceAccounts("guests").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})))
	for i := range 3 {
		expect.NoError(t, err(admin.CoreV1().Pods("guests").Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("guest-", i)},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}, metav1.CreateOptions{})))
	}
	for name, c := range map[string]struct {
		config *rest.Config
		ready  bool
		reason string
	}{
		"authorized":     {config, true, "ProviderReachable"},
		"not authorized": {rest.AnonymousClientConfig(config), false, "ProviderAccessDenied"},
	} {
		t.Run(name, func(t *testing.T) {
			requests, probed := make(chan *http.Request, 100), rest.CopyConfig(c.config)
			probed.Wrap(func(next http.RoundTripper) http.RoundTripper {
				return roundTripper(func(r *http.Request) (*http.Response, error) {
					requests <- r
					return next.RoundTrip(r)
				})
			})
			health := make(chan node.Health, 1)
			prober := node.Prober{Provider: "paris", Namespace: "guests", Client: kubernetes.NewForConfigOrDie(probed), Clock: clock.RealClock{}, Report: func(h node.Health) { health <- h }}
			go prober.Run(t.Context())
			if got := <-health; got.Ready != c.ready || got.Reason != c.reason {
				t.Errorf("ready %t, reason %s: %s", got.Ready, got.Reason, got.Message)
			}
			request := <-requests
			if request.Method != http.MethodGet || request.URL.Path != "/api/v1/namespaces/guests/pods" {
				t.Errorf("a probe is %s %s", request.Method, request.URL)
			}
			// The API server answers the same request with what a probe gets.
			var listed corev1.PodList
			expect.NoError(t, admin.CoreV1().RESTClient().Get().RequestURI(request.URL.RequestURI()).Do(t.Context()).Into(&listed))
			if n := len(listed.Items); n > 0 {
				t.Errorf("a probe lists %d guests, want none", n)
			}
		})
	}
}

func err[T any](_ T, err error) error { return err }
