package probe_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	"github.com/spillway-dev/spillway/agent/internal/health"
	"github.com/spillway-dev/spillway/agent/internal/probe"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// TestServer: with the CRDs of this version no field is missing, and with others it is named.
func TestServer(t *testing.T) {
	config := controlplane.Start(t)
	var in health.Installation
	expect.NoError(t, probe.Server(config, &in))
	if in.Version == "" || len(in.Kinds) < 7 || len(in.LacksFields) > 0 {
		t.Errorf("it finds %+v", in)
	}
	if in.ClockAhead == nil || in.ClockAhead.Abs() > 3*time.Second {
		t.Errorf("the clock is ahead by %v", in.ClockAhead)
	}
	server, err := discovery.NewDiscoveryClientForConfig(config)
	expect.NoError(t, err)
	paths, err := server.OpenAPIV3().Paths()
	expect.NoError(t, err)
	document, err := paths["apis/broker.fluidos.eu/v1alpha1"].Schema("application/json")
	expect.NoError(t, err)
	older := strings.NewReplacer(`"minAvailable"`, `"was"`, `"acceptedAttempt"`, `"formerly"`).Replace(string(document))
	got, err := probe.Lacks([]byte(older))
	if want := []string{"ClusterAdvertisement.status.holds.acceptedAttempt", "Reservation.spec.minAvailable"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("of older CRDs it says %v, %v, want %v", got, err, want)
	}
	if _, err := probe.Lacks([]byte("<html>")); err == nil {
		t.Error("a page is a document")
	}
	if !json.Valid(document) {
		t.Error("the document is no JSON")
	}
}

// TestClock: that of the API server may be another one.
func TestClock(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Date", time.Now().Add(time.Hour).UTC().Format(http.TimeFormat))
		if r.URL.Path != "/version" {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write([]byte(`{"major": "1", "minor": "37", "gitVersion": "v1.37.0"}`))
	}))
	defer server.Close()
	var in health.Installation
	expect.NoError(t, probe.Server(&rest.Config{Host: server.URL}, &in))
	if in.ClockAhead == nil || (*in.ClockAhead-time.Hour).Abs() > 3*time.Second {
		t.Errorf("the clock is ahead by %v, want an hour", in.ClockAhead)
	}
}

// TestEndpoints: who answers by TLS, whatever the certificate.
func TestEndpoints(t *testing.T) {
	server := httptest.NewTLSServer(http.NotFoundHandler())
	defer server.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	got := probe.Endpoints(t.Context(), []health.Endpoint{{URL: server.URL}, {URL: strings.Replace(plain.URL, "http:", "https:", 1)}, {URL: "https://127.0.0.1:1"}, {URL: "::"}})
	if got[0].Problem != "" || !got[0].Ends.Equal(server.Certificate().NotAfter) {
		t.Errorf("a server is %+v", got[0])
	}
	for _, e := range got[1:] {
		if e.Problem == "" || !e.Ends.IsZero() {
			t.Errorf("it is %+v", e)
		}
	}
}

// FuzzLacks: an API server may answer with anything.
func FuzzLacks(f *testing.F) {
	f.Add([]byte(`{"components": {"schemas": {"r": {"x-kubernetes-group-version-kind": [{"kind": "Reservation"}], "properties": {"spec": {"properties": {"podSets": {"items": {}}}}}}}}}`))
	f.Add([]byte(`{"components": {"schemas": {"r": {"items": {"items": null}}}}}`))
	f.Fuzz(func(t *testing.T, document []byte) {
		if fields, err := probe.Lacks(document); err != nil && len(fields) > 0 {
			t.Errorf("of what cannot be read, %v are missing", fields)
		}
	})
}
