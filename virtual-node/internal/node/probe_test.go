package node

import (
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// received counts the bytes of the bodies that a client receives.
type received struct {
	next  http.RoundTripper
	bytes *atomic.Int64
}

func (r received) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.next.RoundTrip(request)
	if err == nil {
		response.Body = &countedBody{response.Body, r.bytes}
	}
	return response, err
}

type countedBody struct {
	io.ReadCloser
	bytes *atomic.Int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.bytes.Add(int64(n))
	return n, err
}

// TestProbeDoesNotGrow: a probe costs a provider with many guests as little as one without,
// and shows whether the identity is still authorized.
func TestProbeDoesNotGrow(t *testing.T) {
	config := controlplane.StartBare(t)
	admin, err := kubernetes.NewForConfig(config)
	expect.NoError(t, err)
	var bytes atomic.Int64
	counted := rest.CopyConfig(config)
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper { return received{next, &bytes} })
	client, err := kubernetes.NewForConfig(counted)
	expect.NoError(t, err)
	prober := &Prober{Provider: "paris", Namespace: "default", Client: client, Clock: clock.RealClock{}}
	probe := func() int64 {
		bytes.Store(0)
		if health := prober.probe(t.Context()); !health.Ready {
			t.Fatalf("the provider is not ready: %s", health.Message)
		}
		return bytes.Load()
	}
	without := probe()
	for i := range 50 {
		_, err := admin.CoreV1().Pods("default").Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("guest-%d", i)},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "registry.example.org/app:1"}}, AutomountServiceAccountToken: new(bool)},
		}, metav1.CreateOptions{})
		expect.NoError(t, err)
	}
	if with := probe(); with > without+100 {
		t.Errorf("a probe received %d bytes with 50 guests, and %d without any", with, without)
	}
	stranger := rest.CopyConfig(config)
	stranger.Impersonate = rest.ImpersonationConfig{UserName: "stranger"}
	prober.Client, err = kubernetes.NewForConfig(stranger)
	expect.NoError(t, err)
	if health := prober.probe(t.Context()); health.Ready || health.Reason != reasonAccessDenied {
		t.Errorf("an identity without access got %+v", health)
	}
}
