package program

import (
	"net/http"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/clock"
)

// errFenced is the result of a write by a former leader. It tells agents to try again
// soon, as while there is no leader.
var errFenced = apierrors.NewServiceUnavailable("this replica has not renewed its lease in time: another one may be the leader")

// fence refuses a leader's writes to the API server once its lease may have ended. A
// process that was stopped for a while goes on where it was before it notices that it
// does not lead any more, with a cache that is as old. A replica that has never led is
// not fenced.
type fence struct {
	lease time.Duration
	clock clock.PassiveClock

	mu sync.Mutex
	// renewed is when the last renewal that succeeded was sent; zero before the first.
	renewed time.Time
}

// wrap puts the fence before a transport. All transports share what is known of the
// lease: it is renewed through one of them.
func (f *fence) wrap(next http.RoundTripper) http.RoundTripper { return &fenced{fence: f, next: next} }

// fenced is a transport behind a fence.
type fenced struct {
	fence *fence
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (t *fenced) RoundTrip(r *http.Request) (*http.Response, error) {
	switch {
	case r.Method == http.MethodGet:
		return t.next.RoundTrip(r)
	case !strings.Contains(r.URL.Path, "/apis/coordination.k8s.io/"):
		if t.fence.ended() {
			return nil, errFenced
		}
		return t.next.RoundTrip(r)
	}
	sent := t.fence.clock.Now()
	response, err := t.next.RoundTrip(r)
	if err == nil && response.StatusCode/100 == 2 {
		t.fence.renew(sent)
	}
	return response, err
}

// WrappedRoundTripper lets client-go find the transport.
func (t *fenced) WrappedRoundTripper() http.RoundTripper { return t.next }

func (f *fence) renew(sent time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.renewed = sent
}

// ended reports whether the replica has led and its lease may have ended.
func (f *fence) ended() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return !f.renewed.IsZero() && f.clock.Since(f.renewed) >= f.lease
}
