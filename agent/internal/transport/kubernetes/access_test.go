package kubernetes

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTokenIsReadAgain: a kubeconfig that is replaced needs no restart, and one that cannot be read
// changes nothing.
func TestTokenIsReadAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "kubeconfig")
	write := func(token string) {
		access := clientcmdapi.NewConfig()
		access.Clusters["hub"] = &clientcmdapi.Cluster{Server: "https://hub.test"}
		access.AuthInfos["rome"] = &clientcmdapi.AuthInfo{Token: token}
		access.Contexts["hub"] = &clientcmdapi.Context{Cluster: "hub", AuthInfo: "rome", Namespace: "spillway-cluster-rome"}
		access.CurrentContext = "hub"
		expect.NoError(t, clientcmd.WriteToFile(*access, path))
	}
	if _, _, err := Access(path); err == nil {
		t.Error("no kubeconfig is access")
	}
	write("first")
	hub, namespace, err := Access(path)
	if expect.NoError(t, err); namespace != "spillway-cluster-rome" || hub.Host != "https://hub.test" {
		t.Errorf("access to namespace %s at %s", namespace, hub.Host)
	}
	if sent := sentWith(t, hub); sent != "Bearer first" {
		t.Errorf("sent %q", sent)
	}

	read := &token{path: path, last: "first", readAt: time.Now()}
	write("second")
	if got := read.current(); got != "first" {
		t.Errorf("within the minute: %s", got)
	}
	read.readAt = time.Now().Add(-readAgainAfter)
	if got := read.current(); got != "second" {
		t.Errorf("after a minute: %s", got)
	}
	expect.NoError(t, os.Remove(path))
	read.readAt = time.Now().Add(-readAgainAfter)
	if got := read.current(); got != "second" {
		t.Errorf("without the file: %s", got)
	}
}

// TestTokenFile: client-go reads it, and again when it changes.
func TestTokenFile(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "kubeconfig")
	expect.NoError(t, os.WriteFile(filepath.Join(directory, "token"), []byte("mounted\n"), 0o600))
	access := clientcmdapi.NewConfig()
	access.Clusters["hub"] = &clientcmdapi.Cluster{Server: "https://hub.test"}
	access.AuthInfos["rome"] = &clientcmdapi.AuthInfo{TokenFile: "token"}
	access.Contexts["hub"] = &clientcmdapi.Context{Cluster: "hub", AuthInfo: "rome"}
	access.CurrentContext = "hub"
	expect.NoError(t, clientcmd.WriteToFile(*access, path))
	hub, _, err := Access(path)
	expect.NoError(t, err)
	if sent := sentWith(t, rest.CopyConfig(hub)); sent != "Bearer mounted" {
		t.Errorf("sent %q", sent)
	}
}

// sentWith is the authorization that a server sees.
func sentWith(t *testing.T, hub *rest.Config) (sent string) {
	t.Helper()
	hub.TLSClientConfig = rest.TLSClientConfig{}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { sent = r.Header.Get("Authorization") }))
	defer server.Close()
	through, err := rest.TransportFor(hub)
	expect.NoError(t, err)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
	expect.NoError(t, err)
	response, err := through.RoundTrip(request)
	expect.NoError(t, err)
	_ = response.Body.Close()
	return sent
}
