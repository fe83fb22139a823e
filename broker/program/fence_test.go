package program

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	testingclock "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/e2e/expect"
)

type transport func(*http.Request) (*http.Response, error)

func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t(r) }

// TestFence checks when the writes of a broker reach the API server.
func TestFence(t *testing.T) {
	clock := testingclock.NewFakePassiveClock(time.Unix(1000, 0))
	status, took := http.StatusOK, time.Duration(0)
	server := transport(func(*http.Request) (*http.Response, error) {
		clock.SetTime(clock.Now().Add(took))
		return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(""))}, nil
	})
	f := &fence{lease: 4 * time.Second, clock: clock}
	// As in a broker, the lease has a client of its own.
	election, writer := f.wrap(server), f.wrap(server)
	send := func(through http.RoundTripper, method, path string) error {
		request, err := http.NewRequestWithContext(t.Context(), method, "https://hub"+path, nil)
		expect.NoError(t, err)
		response, err := (&http.Client{Transport: through}).Do(request)
		if err == nil {
			err = response.Body.Close()
		}
		return err
	}
	const lease, ledger = "/apis/coordination.k8s.io/v1/namespaces/spillway-system/leases/spillway-broker", "/apis/broker.fluidos.eu/v1alpha1/namespaces/spillway-system/clusteradvertisements/paris/status"
	writes := func(what string, want bool) {
		t.Helper()
		err := send(writer, http.MethodPut, ledger)
		if (err == nil) != want || err != nil && !(errors.Is(err, errFenced) && apierrors.IsServiceUnavailable(err)) {
			t.Errorf("%s: writing the ledger: %v", what, err)
		}
		expect.NoError(t, send(writer, http.MethodGet, ledger))
	}
	pass := func(d time.Duration) { clock.SetTime(clock.Now().Add(d)) }

	pass(time.Hour)
	writes("a replica that has never led", true)
	status = http.StatusConflict
	expect.NoError(t, send(election, http.MethodPut, lease))
	pass(time.Hour)
	writes("a replica that could not get the lease", true)
	status = http.StatusOK
	expect.NoError(t, send(election, http.MethodPut, lease))
	pass(3 * time.Second)
	writes("a leader within its lease", true)
	pass(time.Second)
	writes("a leader that was stopped for longer than its lease", false)
	if err := send(writer, http.MethodPut, "/apis/broker.fluidos.eu/v1alpha1/namespaces/spillway-system/reservations/leases"); !errors.Is(err, errFenced) {
		t.Errorf("writing an object with the name of the leases: %v", err)
	}
	took = 2 * time.Second
	expect.NoError(t, send(election, http.MethodPut, lease))
	took = 0
	writes("a leader that has renewed its lease again", true)
	pass(2 * time.Second)
	writes("a lease counts from when the renewal was sent", false)
	status = http.StatusConflict
	expect.NoError(t, send(election, http.MethodPut, lease))
	writes("a renewal that is refused is none", false)
}
