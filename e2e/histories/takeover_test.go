package histories

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestNewLeaderCatchesUp stops the leader while the watches of the other broker lag
// behind: it becomes the leader, but is not ready before they have caught up. If they do
// not, it exits, and the next one to start leads.
func TestNewLeaderCatchesUp(t *testing.T) {
	// A leader must not lose its lease in the time in which it may catch up.
	h := newHub(t, false, "--leader-elect-lease-duration=15s", "--leader-elect-renew-deadline=12s")
	former := h.awaitLeader(t, nil)
	next := h.other(former)

	h.lagBehind(t, next, "first")
	holder := h.holder(t)
	former.signal(t, syscall.SIGSTOP)
	expect.EventuallyWithin(t, patience, "the other broker to get the lease", func() (bool, string) {
		now := h.holder(t)
		return now != "" && now != holder, now
	})
	if _, starts := next.current(); next.ready() && starts == 1 {
		t.Error("the new leader is ready, and its caches are outdated")
	}
	next.gateway.watches.release()
	h.awaitLeader(t, former)
	former.signal(t, syscall.SIGCONT)
	expect.EventuallyWithin(t, patience, "the former leader to start again", func() (bool, string) {
		_, starts := former.current()
		return starts > 1, former.tail()
	})

	leader := h.awaitLeader(t, nil)
	standby := h.other(leader)
	h.lagBehind(t, standby, "second")
	_, starts := standby.current()
	leader.signal(t, syscall.SIGSTOP)
	expect.EventuallyWithin(t, patience, "a leader that does not catch up to exit", func() (bool, string) {
		_, now := standby.current()
		return now > starts, standby.tail()
	})
	if log := standby.log(t); !strings.Contains(log, "the caches of this new leader are outdated") {
		t.Errorf("the broker does not say why it exited:\n%s", standby.tail())
	}
	standby.gateway.watches.release()
	h.awaitLeader(t, leader)
	leader.signal(t, syscall.SIGCONT)
}

// lagBehind holds back the watches of a standby that is in sync, and creates a Reservation
// of which they do not tell.
func (h *hub) lagBehind(t *testing.T, standby *replica, name string) {
	t.Helper()
	standby.gateway.watches.awaitElection(t)
	standby.gateway.watches.hold()
	cpu := resource.MustParse("100m")
	expect.NoError(t, h.api.Create(t.Context(), &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: name},
		Spec:       broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: 1, Requests: broker.ResourceQuantities{CPU: &cpu}}}},
	}))
}

// holder is who has the lease.
func (h *hub) holder(t *testing.T) string {
	t.Helper()
	var lease coordinationv1.Lease
	expect.NoError(t, h.api.Get(t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: "spillway-broker"}, &lease))
	if lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

func (h *hub) other(than *replica) *replica {
	if h.brokers[0] == than {
		return h.brokers[1]
	}
	return h.brokers[0]
}

// watches of one broker. What they send can be held back.
type watches struct {
	mu sync.Mutex
	// held is closed when what is held back goes on; nil if nothing is.
	held chan struct{}
	// elections counts the requests for the lease: a broker asks for it once its caches are
	// in sync.
	elections int
}

func (w *watches) hold() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held == nil {
		w.held = make(chan struct{})
	}
}

func (w *watches) release() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.held != nil {
		close(w.held)
		w.held = nil
	}
}

// awaitElection waits until a request for the lease comes.
func (w *watches) awaitElection(t *testing.T) {
	t.Helper()
	count := func() int {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.elections
	}
	before := count()
	expect.EventuallyWithin(t, patience, "the broker to ask for the lease", func() (bool, string) {
		return count() > before, ""
	})
}

// modify holds back the events of a watch. It is a function of a ReverseProxy.
func (w *watches) modify(response *http.Response) error {
	path := response.Request.URL.Path
	if strings.Contains(path, "/leases/") {
		w.mu.Lock()
		w.elections++
		w.mu.Unlock()
	}
	if strings.Contains(path, broker.Group) && response.Request.URL.Query().Has("watch") {
		response.Body = &heldBody{ReadCloser: response.Body, watches: w, closed: response.Request.Context().Done()}
	}
	return nil
}

// heldBody passes on what it has read once nothing is held back.
type heldBody struct {
	io.ReadCloser
	watches *watches
	closed  <-chan struct{}
}

// Read implements io.Reader.
func (b *heldBody) Read(data []byte) (int, error) {
	n, err := b.ReadCloser.Read(data)
	b.watches.mu.Lock()
	held := b.watches.held
	b.watches.mu.Unlock()
	if held != nil {
		select {
		case <-held:
		case <-b.closed:
		}
	}
	return n, err
}
