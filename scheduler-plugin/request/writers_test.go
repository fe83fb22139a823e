package request

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
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
	client, err := NewClient(&rest.Config{Host: "http://none", Transport: api})
	expect.NoError(t, err)
	c, _ := testController(t, demandtest.NewIndexer())
	c.Reservations = NewReservations(client, demandtest.NewIndexer(), c.Clock)
	named := func(name, limited string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled, "limited": limited}}}
	}
	c.Namespaces = corelisters.NewNamespaceLister(demandtest.NewIndexer(named("shop", "true"), named("bank", "false")))
	limit := broker.FromList(expect.Resources("cpu", "100"))
	c.Policies = newPolicies(&broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "limit"}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"limited": "true"}}, MaxResources: &limit}})
	for range writers {
		go c.write(t.Context())
	}
	request := func(namespace, job string) {
		pod := demandtest.JobPod(job, job, "1")
		pod.Namespace = namespace
		key, _ := c.Keys.Get(pod)
		set := key.Set
		set.Count = 1
		c.writes.add(c.slotOf(key.Key), demand.Request{Key: key.Key, Owner: key.Owner, PodSets: []broker.PodSet{set}})
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

// TestWritesWaitForNoOther: while the API server does not answer to the write of one
// Reservation, another is written, and work is still taken from the queue.
func TestWritesWaitForNoOther(t *testing.T) {
	arrived, answer := make(chan string, 2), make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body) // what is missing does not decode below
		arrived <- path.Base(r.URL.Path)
		if strings.HasPrefix(path.Base(r.URL.Path), "slow-") {
			<-answer
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(body) // the client may have gone
	}))
	defer server.Close()
	defer close(answer)
	client, err := NewClient(&rest.Config{Host: server.URL})
	expect.NoError(t, err)
	c, _ := testController(t, demandtest.NewIndexer())
	c.Reservations, c.Active = NewReservations(client, demandtest.NewIndexer(), c.Clock), func() bool { return false }
	for range writers {
		go c.write(t.Context())
	}
	for _, job := range []string{"slow", "other"} {
		key, _ := c.Keys.Get(demandtest.JobPod(job, job, "1"))
		set := key.Set
		set.Count = 1
		c.writes.add(c.slotOf(key.Key), demand.Request{Key: key.Key, Owner: key.Owner, PodSets: []broker.PodSet{set}})
		select {
		case name := <-arrived:
			if !strings.HasPrefix(name, job+"-") {
				t.Errorf("%s was written, want that of %s", name, job)
			}
		case <-time.After(time.Minute):
			t.Fatalf("the Reservation of %s was not written", job)
		}
	}
}
