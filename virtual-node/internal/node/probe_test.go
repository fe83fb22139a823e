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
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// counted counts the bytes of the answers.
type counted struct {
	next  http.RoundTripper
	bytes *atomic.Int64
}

func (c counted) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := c.next.RoundTrip(request)
	if err == nil {
		response.Body = countedBody{response.Body, c.bytes}
	}
	return response, err
}

type countedBody struct {
	io.ReadCloser
	bytes *atomic.Int64
}

func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.bytes.Add(int64(n))
	return n, err
}

// TestProbeReadsNoGuests: a probe does not cost more the more guests there are.
func TestProbeReadsNoGuests(t *testing.T) {
	config := controlplane.Start(t)
	admin := kubernetes.NewForConfigOrDie(config)
	_, err := admin.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "guests"}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	_, err = admin.CoreV1().ServiceAccounts("guests").Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	for i := range 20 {
		_, err := admin.CoreV1().Pods("guests").Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("guest-", i)}, Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false), Containers: []corev1.Container{{Name: "main", Image: "image"}},
		}}, metav1.CreateOptions{})
		expect.NoError(t, err)
	}
	expect.Eventually(t, "the guests in the API server's cache", func() (bool, string) {
		list, err := admin.CoreV1().Pods("guests").List(t.Context(), metav1.ListOptions{ResourceVersion: "0"})
		return err == nil && len(list.Items) == 20, fmt.Sprint(err)
	})
	var bytes atomic.Int64
	client := rest.CopyConfig(config)
	client.Wrap(func(next http.RoundTripper) http.RoundTripper { return counted{next, &bytes} })
	prober := &Prober{Provider: "paris", Namespace: "guests", Client: kubernetes.NewForConfigOrDie(client), Clock: clock.RealClock{}}
	if health := prober.probe(t.Context()); !health.Ready {
		t.Fatalf("the provider is not ready: %s", health.Message)
	}
	if n := bytes.Load(); n > 1000 {
		t.Errorf("the probe has read %d bytes of guests", n)
	}
}
