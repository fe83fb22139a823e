package overflow

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// heldWrites is an API server that answers each write with what it was sent: for namespace
// shop, not before answer is closed. It ignores the deadlines of its clients.
type heldWrites struct {
	arrived      chan string // the paths
	answer       chan struct{}
	atOnce, most atomic.Int64 // writes for namespace shop
}

// RoundTrip implements http.RoundTripper.
func (h *heldWrites) RoundTrip(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	held := strings.Contains(r.URL.Path, "/namespaces/shop/")
	if held {
		now := h.atOnce.Add(1)
		defer h.atOnce.Add(-1)
		for seen := h.most.Load(); now > seen && !h.most.CompareAndSwap(seen, now); seen = h.most.Load() {
		}
	}
	h.arrived <- r.URL.Path
	if held {
		<-h.answer
	}
	return &http.Response{StatusCode: http.StatusOK, Request: r, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(string(body)))}, nil
}

// TestLimitedNamespaceHoldsNoWriters: while the API server does not answer to a write of a
// namespace whose Reservations are limited in sum, the others of that namespace wait for it, and
// hold up no other namespace. All of them are written then, one after the other.
func TestLimitedNamespaceHoldsNoWriters(t *testing.T) {
	const limited = 3 * writers
	api := &heldWrites{arrived: make(chan string, limited+1), answer: make(chan struct{})}
	client, err := restClient(&rest.Config{Host: "http://none", Transport: api})
	expect.NoError(t, err)
	p := poolPlugin()
	c, _, _ := testController(t, p, newIndexer())
	c.reservations, c.synced, c.requestedAt = newReservationStore(client, newIndexer(), c.clock), func() bool { return true }, map[demand.Key]time.Time{}
	for _, name := range []string{"shop", "bank"} {
		namespace, err := p.namespaces.Get(name)
		expect.NoError(t, err)
		namespace.Labels["limited"] = fmt.Sprint(name == "shop")
	}
	limit := broker.FromList(expect.Resources("cpu", "100"))
	c.policies = newPolicies(&broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "limit"}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"limited": "true"}}, MaxResources: &limit}})
	for range writers {
		go c.write(t.Context())
	}
	request := func(namespace, job string) {
		pod := jobPod(job, job, "1")
		pod.Namespace = namespace
		key, _ := p.keys.Get(pod)
		set := key.Set
		set.Count = 1
		c.mu.Lock()
		c.requests[key.Key] = demand.Request{Key: key.Key, Owner: key.Owner, PodSets: []broker.PodSet{set}}
		c.mu.Unlock()
		c.writeQueue.Add(c.slotOf(key.Key))
	}
	arrives := func(what string) (path string) {
		t.Helper()
		select {
		case path = <-api.arrived:
		case <-time.After(expect.Deadline):
			t.Fatalf("%s is not written", what)
		}
		return path
	}
	for i := range limited {
		request("shop", fmt.Sprint("job-", i))
	}
	written := map[string]bool{arrives("a Reservation of namespace shop"): true}
	request("bank", "other")
	if path := arrives("that of namespace bank"); !strings.Contains(path, "/namespaces/bank/") {
		t.Errorf("%s is written, want that of namespace bank", path)
	}
	close(api.answer)
	for len(written) < limited {
		written[arrives(fmt.Sprintf("one of %d Reservations of namespace shop, of which %d are", limited, len(written)))] = true
	}
	if n := api.most.Load(); n != 1 {
		t.Errorf("%d Reservations of namespace shop are written at the same time", n)
	}
}
