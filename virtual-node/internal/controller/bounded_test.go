package controller

import (
	"encoding/pem"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// endless sends zeros until the client closes the connection.
func endless(w http.ResponseWriter, _ *http.Request) {
	chunk := make([]byte, 1<<20)
	for {
		if _, err := w.Write(chunk); err != nil {
			return
		}
	}
}

// A hostile provider cannot make the program read a list without end.
func TestEndlessListIsBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(endless))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	response, err := client.Get(server.URL + "/api/v1/namespaces/spillway-guests-rome/pods")
	expect.NoError(t, err)
	defer response.Body.Close()
	n, err := io.Copy(io.Discard, response.Body)
	if err == nil || n != maxBody {
		t.Errorf("read %d bytes, %v; want an error after %d", n, err, maxBody)
	}
	// The attack itself: without the bound there is no end.
	unbounded, err := http.Get(server.URL + "/api/v1/namespaces/spillway-guests-rome/pods")
	expect.NoError(t, err)
	defer unbounded.Body.Close()
	if n, err := io.CopyN(io.Discard, unbounded.Body, 2*maxBody); err != nil {
		t.Errorf("without the bound, read %d bytes, %v", n, err)
	}
}

// A list that always has another page ends as well.
func TestEndlessPagesAreBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	defer server.Close()
	client := &http.Client{}
	pages := func() (n int) {
		for url := server.URL + "/api/v1/namespaces/x/pods?limit=500"; n < 2*maxPages; n++ {
			response, err := client.Get(url)
			if err != nil {
				break
			}
			response.Body.Close()
			url = server.URL + "/api/v1/namespaces/x/pods?limit=500&continue=more"
		}
		return n
	}
	if n := pages(); n != 2*maxPages {
		t.Errorf("without the bound, a list ends after %d pages", n)
	}
	client.Transport = newBounded(http.DefaultTransport)
	// The next list begins with its first page.
	if first, second := pages(), pages(); first != maxPages || second != maxPages {
		t.Errorf("lists of %d and %d pages, want %d", first, second, maxPages)
	}
}

func TestDeclaredSizeIsBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "99999999999")
		w.WriteHeader(http.StatusOK)
	}))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	if response, err := client.Get(server.URL + "/api/v1/namespaces/x/pods"); err == nil {
		response.Body.Close()
		t.Error("an answer of 100 GB is read")
	}
}

func TestLimits(t *testing.T) {
	for path, want := range map[string]int64{
		"/api/v1/namespaces/x/pods":                      maxBody,
		"/api/v1/namespaces/x/pods?watch=true":           maxWatch,
		"/api/v1/namespaces/x/pods?watch=1":              maxWatch,
		"/api/v1/namespaces/x/pods/web/log?follow=true":  0,
		"/api/v1/namespaces/x/pods/web/exec?command=sh":  0,
		"/api/v1/namespaces/x/pods/web/portforward":      0,
		"/api/v1/namespaces/x/pods/web/log/../../../etc": maxBody,
	} {
		if got := limitOf(httptest.NewRequest(http.MethodGet, path, nil)); got != want {
			t.Errorf("%s: want %d, got %d", path, want, got)
		}
	}
}

// get returns how much a client reads of an answer, and the error that ends it.
func get(t *testing.T, client *http.Client, url string) (read int64, err error) {
	t.Helper()
	response, err := client.Get(url)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	return io.Copy(io.Discard, response.Body)
}

// A large error is not read either, also where a stream was asked for.
func TestErrorsAreBounded(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
		for range 16 {
			if _, err := w.Write(make([]byte, 1<<20)); err != nil {
				return
			}
		}
	}))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	for _, path := range []string{"/api/v1/namespaces/x/pods", "/api/v1/namespaces/x/pods?watch=true", "/api/v1/namespaces/x/pods/web/log?follow=true"} {
		if n, err := get(t, client, server.URL+path); err == nil || n != maxError {
			t.Errorf("%s: read %d bytes, %v; want an error after %d", path, n, err, maxError)
		}
		if n, err := get(t, http.DefaultClient, server.URL+path); err != nil || n != 16<<20 {
			t.Errorf("%s: without the bound, read %d bytes, %v", path, n, err)
		}
	}
}

// A provider that ends each watch in time, and sends other objects with the next one, does not
// fill the cache without end: it is listed again.
func TestWatchesAreBoundedTogether(t *testing.T) {
	const size = 48 << 20
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Has("watch") {
			_, _ = w.Write(make([]byte, size))
		}
	}))
	defer server.Close()
	client := &http.Client{Transport: newBounded(http.DefaultTransport)}
	list := server.URL + "/api/v1/namespaces/x/pods"
	watched := func() (sum int64) {
		for range 2 * maxWatch / size {
			n, err := get(t, client, list+"?watch=true")
			if sum += n; err != nil {
				break
			}
		}
		return sum
	}
	for _, again := range []string{list, list + "?watch=true&sendInitialEvents=true"} {
		if sum := watched(); sum != maxWatch {
			t.Errorf("watches have sent %d bytes, want at most %d", sum, maxWatch)
		}
		if n, err := get(t, client, list+"?watch=true"); err == nil {
			t.Errorf("a further watch has sent %d bytes", n)
		}
		if _, err := get(t, client, again); err != nil {
			t.Errorf("%s: %v", again, err)
		}
	}
	// A list of other objects does not count, and a write does not.
	watched()
	response, err := client.Post(list, "application/json", nil)
	expect.NoError(t, err)
	response.Body.Close()
	_, err = get(t, client, server.URL+"/api/v1/namespaces/x/secrets")
	expect.NoError(t, err)
	if n, err := get(t, client, list+"?watch=true"); err == nil {
		t.Errorf("a further watch has sent %d bytes", n)
	}
}

// A provider cannot make this program send requests to addresses of this cluster.
func TestRedirectsAreNotFollowed(t *testing.T) {
	var reached atomic.Int64
	inside := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached.Add(1) }))
	defer inside.Close()
	for _, code := range []int{http.StatusMovedPermanently, http.StatusFound, http.StatusTemporaryRedirect, http.StatusPermanentRedirect} {
		provider := httptest.NewTLSServer(http.RedirectHandler(inside.URL+"/latest/meta-data", code))
		defer provider.Close()
		connected, err := newProvider(nodeconfig.Connection{
			Endpoint: provider.URL, Namespace: "x", Token: "t",
			CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: provider.Certificate().Raw}),
		})
		expect.NoError(t, err)
		_, err = connected.client.CoreV1().Pods("x").Get(t.Context(), "web", metav1.GetOptions{})
		if err == nil || !strings.Contains(err.Error(), "refers to another address") {
			t.Errorf("%d: a read ends with %v", code, err)
		}
		_, err = connected.client.CoreV1().Pods("x").Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}}, metav1.CreateOptions{})
		if err == nil {
			t.Errorf("%d: a pod was created", code)
		}
		_, err = connected.client.CoreV1().Pods("x").GetLogs("web", &corev1.PodLogOptions{}).DoRaw(t.Context())
		if err == nil {
			t.Errorf("%d: logs were read", code)
		}
	}
	if n := reached.Load(); n > 0 {
		t.Errorf("an address of this cluster got %d requests", n)
	}
}
