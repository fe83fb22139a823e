package kubelet

import (
	"crypto/tls"
	"io"
	"iter"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/e2e/expect"
)

const (
	nodeName       = "spillway-paris"
	podName        = "job"
	podNamespace   = "work"
	guestName      = "work-job-0123456789"
	guestNamespace = "spillway-rome"
)

// fakeGuests is a node with one pod, whose guest is at the provider of config.
type fakeGuests struct {
	mu     sync.Mutex
	config *rest.Config
	pods   []*corev1.Pod
}

func (g *fakeGuests) Locate(namespace, pod string) (string, string, bool) {
	return guestNamespace, guestName, namespace == podNamespace && pod == podName
}

func (g *fakeGuests) ProviderConfig() *rest.Config {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.config
}

func (g *fakeGuests) setConfig(config *rest.Config) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.config = config
}

func (g *fakeGuests) Pods() iter.Seq[*corev1.Pod] { return slices.Values(g.pods) }

// serve starts a node's kubelet API for the duration of a test. A nil auth allows
// all requests.
func serve(t *testing.T, guests Guests, auth nodeutil.Auth, now clock.PassiveClock) *httptest.Server {
	t.Helper()
	if auth == nil {
		auth = nodeutil.NoAuth()
	}
	handler, err := New(Options{NodeName: nodeName, Auth: auth, Guests: guests, Clock: now})
	expect.NoError(t, err)
	certificate, err := SelfSignedCertificate(nodeName, net.IPv4(127, 0, 0, 1))
	expect.NoError(t, err)
	server := httptest.NewUnstartedServer(handler)
	server.TLS = TLSConfig(certificate)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// fakeProvider starts a fake of the provider's API server.
func fakeProvider(t *testing.T, handler http.HandlerFunc) *rest.Config {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL, BearerToken: "secret-token", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

// insecureClient does not verify the server's certificate, as API servers by
// default.
func insecureClient(certificates ...tls.Certificate) *http.Client {
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates},
	}}
}

// get returns the status code and body of a response.
func get(t *testing.T, url string) (int, string) {
	t.Helper()
	client := insecureClient()
	client.Timeout = 30 * time.Second
	response, err := client.Get(url)
	expect.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	expect.NoError(t, err)
	return response.StatusCode, string(body)
}
