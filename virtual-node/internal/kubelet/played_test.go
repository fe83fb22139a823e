package kubelet

import (
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
)

const (
	nodeName   = "spillway-paris"
	homePod    = "job"
	homeSpace  = "work"
	guestPod   = "work-job-0123456789"
	guestSpace = "spillway-rome"
)

// oneGuest is a node with one pod, whose guest is where config leads.
type oneGuest struct {
	mutex  sync.Mutex
	config *rest.Config
	err    error
	pods   []*corev1.Pod
}

func (g *oneGuest) Locate(namespace, pod string) (string, string, bool) {
	return guestSpace, guestPod, namespace == homeSpace && pod == homePod
}

func (g *oneGuest) Provider() (*rest.Config, error) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	return g.config, g.err
}

func (g *oneGuest) lead(config *rest.Config, err error) {
	g.mutex.Lock()
	defer g.mutex.Unlock()
	g.config, g.err = config, err
}

func (g *oneGuest) Pods() []*corev1.Pod { return g.pods }

// serve starts a node's kubelet API for the life of a test. A nil auth lets
// everybody do everything.
func serve(t *testing.T, guests Guests, auth nodeutil.Auth, now clock.PassiveClock) *httptest.Server {
	t.Helper()
	if auth == nil {
		auth = nodeutil.NoAuth()
	}
	handler, err := New(Options{NodeName: nodeName, Auth: auth, Guests: guests, Clock: now})
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := Certificate(nodeName, "127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(handler)
	server.TLS = ServerTLS(certificate)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// played starts a TLS server that plays the provider's API server.
func played(t *testing.T, handler http.HandlerFunc) *rest.Config {
	t.Helper()
	server := httptest.NewTLSServer(handler)
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL, BearerToken: "secret-token", TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
}

// anyClient connects without looking at the server's certificate, as an API server
// does that was given no CA for kubelets.
func anyClient(certificates ...tls.Certificate) *http.Client {
	return &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates},
	}}
}
