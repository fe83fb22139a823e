package server

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"testing"
	"time"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestRevokedWhileSending: a cluster that is forgotten while it sends the body of a call
// leaves nothing in the hub.
func TestRevokedWhileSending(t *testing.T) {
	hub := startHub(t)
	rome := hub.join(t, "rome")
	calls := []*slowCall{
		hub.beginSlowly(t, rome, protocol.PathAdvertisements, encode(t, newAdvertisement("rome"))),
		hub.beginSlowly(t, rome, protocol.PathReservations, encode(t, newRequest("late"))),
	}
	registration := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "rome"}}
	expect.NoError(t, hub.api.Delete(t.Context(), registration))
	eventually(t, "rome to be forgotten", func() error {
		if err := hub.api.Get(t.Context(), client.ObjectKeyFromObject(registration), registration); !apierrors.IsNotFound(err) {
			return fmt.Errorf("its registration exists: %v", err)
		}
		if _, err := rome.client.Advertisements(t.Context()); !protocol.HasCode(err, protocol.CodeUnauthorized) {
			return fmt.Errorf("its call got %v", err)
		}
		return nil
	})
	for _, call := range calls {
		call.end(t).expect(t, http.StatusUnauthorized, "join again")
	}
	for _, list := range []client.ObjectList{&broker.ClusterAdvertisementList{}, &broker.ReservationList{}} {
		expect.NoError(t, hub.api.List(t.Context(), list))
		if n := meta.LenList(list); n > 0 {
			t.Errorf("%d objects are left: %s", n, encode(t, list))
		}
	}
}

// TestAuthenticatedAgain: the caller is authenticated a second time at the end of a body that
// took time, and not for one that came at once.
func TestAuthenticatedAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		took   time.Duration
		status int
		reads  int
	}{
		"at once": {0, http.StatusOK, 1},
		"later":   {sameMoment, http.StatusUnauthorized, 2},
	} {
		t.Run(name, func(t *testing.T) {
			clock := testclock.NewFakeClock(time.Now())
			m := newMemoryAt(logr.Discard(), clock)
			request := m.request(http.MethodPost, protocol.PathAdvertisements, encode(t, newAdvertisement("rome")), "rome")
			request.Body = &revokingBody{ReadCloser: request.Body, revoke: func() {
				clock.Step(tc.took)
				m.callers.revoked = true
			}}
			got := m.serveRequest(request)
			if got.status != tc.status || m.callers.reads != tc.reads {
				t.Errorf("status %d after %d reads, want %d after %d", got.status, m.callers.reads, tc.status, tc.reads)
			}
			if stored := len(m.agents.stored) > 0; stored != (tc.status == http.StatusOK) {
				t.Errorf("the advertisement is stored: %t", stored)
			}
		})
	}
}

// revokingBody is a body whose sender is revoked while it is read.
type revokingBody struct {
	io.ReadCloser
	revoke func()
}

func (b *revokingBody) Read(into []byte) (int, error) {
	b.revoke()
	return b.ReadCloser.Read(into)
}

// slowCall is a call of which the broker reads the body, and has not read the end.
type slowCall struct {
	body   string
	to     *io.PipeWriter
	answer chan answer
}

// beginSlowly begins a POST, and returns once the broker waits for the body.
func (h *testHub) beginSlowly(t *testing.T, caller *cluster, path, body string) *slowCall {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: caller.tls, ExpectContinueTimeout: expect.Deadline}
	t.Cleanup(transport.CloseIdleConnections)
	from, to := io.Pipe()
	waits := make(chan struct{})
	// The broker says so when it begins to read.
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got100Continue: func() { close(waits) }})
	ctx, cancel := context.WithTimeout(ctx, expect.Deadline)
	t.Cleanup(cancel)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, h.url+path, from)
	expect.NoError(t, err)
	request.ContentLength = int64(len(body))
	request.Header.Set("Expect", "100-continue")
	call := &slowCall{body: body, to: to, answer: make(chan answer, 1)}
	go func() { call.answer <- h.send(t, transport, request) }()
	select {
	case <-waits:
	case got := <-call.answer:
		t.Fatalf("the call ended before its body: %d %s %v", got.status, got.body, got.err)
	case <-time.After(expect.Deadline):
		t.Fatal("the broker does not read the body")
	}
	return call
}

// end sends the body and returns the response.
func (c *slowCall) end(t *testing.T) answer {
	t.Helper()
	_, err := io.WriteString(c.to, c.body)
	expect.NoError(t, err)
	expect.NoError(t, c.to.Close())
	return <-c.answer
}
