// Package contract has the tests that every transport to the broker must pass, with a real
// broker: Test follows a reservation from the consumer's request to its release at the provider.
package contract

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Connect returns a connection of a cluster that may use the broker, until the end of the test.
type Connect func(t *testing.T, cluster string) transport.BrokerCommunicator

// Test runs the contract with a broker that knows no advertisement and no Reservation.
func Test(t *testing.T, connect Connect) {
	s := &suite{T: t, connect: connect}
	s.rome, s.paris, s.oslo = s.join("rome"), s.join("paris"), s.join("oslo")
	s.advertises()
	reservation := s.isHeld()
	s.isRefusedToOthers(reservation)
	s.isUsed(reservation)
	s.isSeenByTheNextAgent(reservation)
	s.relays()
	s.isReleased(reservation)
	s.ends()
}

// suite is three clusters: rome consumes, paris provides, oslo has nothing to do with it.
type suite struct {
	*testing.T
	connect           Connect
	rome, paris, oslo *Cluster
}

// Cluster is an agent of a cluster, as far as it talks to the broker.
type Cluster struct {
	transport.BrokerCommunicator
	id       string
	Consumer *transport.Mirror[protocol.ConsumerView]
	Provider *transport.Mirror[protocol.ProviderView]
	stop     func()

	mu       sync.Mutex
	messages []protocol.RelayMessage
}

// Follow watches all that the broker has for a cluster, until Stop or the end of the test.
func Follow(t *testing.T, id string, communicator transport.BrokerCommunicator) *Cluster {
	t.Helper()
	c := &Cluster{BrokerCommunicator: communicator, id: id, Consumer: transport.NewConsumerMirror(communicator), Provider: transport.NewProviderMirror(communicator)}
	ctx, cancel := context.WithCancel(context.Background())
	var ended sync.WaitGroup
	ended.Go(func() { _ = c.Consumer.Start(ctx) })
	ended.Go(func() { _ = c.Provider.Start(ctx) })
	ended.Go(func() {
		communicator.Watch(ctx, "", func(event protocol.Event) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.messages = append(c.messages, event.Relay...)
		})
	})
	c.stop = sync.OnceFunc(func() { cancel(); ended.Wait() })
	t.Cleanup(c.stop)
	expect.Eventually(t, "all of "+id+" to be listed", func() (bool, string) {
		return c.Consumer.Synced() && c.Provider.Synced(), fmt.Sprint(c.Consumer.Synced(), c.Provider.Synced())
	})
	return c
}

// Stop ends the watches.
func (c *Cluster) Stop() { c.stop() }

func (s *suite) join(id string) *Cluster {
	s.Helper()
	return Follow(s.T, id, s.connect(s.T, id))
}

// refused fails unless an error is a response of the broker with a code.
func (s *suite) refused(what string, err error, code string) {
	s.Helper()
	if !protocol.HasCode(err, code) {
		s.Errorf("%s: want %s, got %v", what, code, err)
	}
}

// Advertisement is that of a cluster with 8 free CPUs, or that does not lend.
func Advertisement(id string, sequence int64, lends bool) broker.ClusterAdvertisementSpec {
	cpu, memory := resource.MustParse("8"), resource.MustParse("16Gi")
	all := broker.ResourceQuantities{CPU: &cpu, Memory: &memory}
	return broker.ClusterAdvertisementSpec{
		ClusterID: id, EndpointURL: "https://" + id + ".test:6443", PeerKey: "key-of-" + id, Lending: broker.Lending{Enabled: lends},
		Resources:   broker.AdvertisedResources{Capacity: all, Allocatable: all},
		NodeClasses: []broker.NodeClass{{Name: "plain", Arch: "amd64", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: all, Pods: 100}}}},
		Timestamp:   metav1.Now().Rfc3339Copy(), Sequence: sequence,
	}
}

// Request is a request for two pods.
func Request() protocol.ReservationRequest {
	cpu, memory := resource.MustParse("300m"), resource.MustParse("64Mi")
	return protocol.ReservationRequest{
		SourceUID: types.UID(uuid.NewUUID()), SourceNamespace: "shop", SourceName: "web", SourceGeneration: 1,
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.ResourceQuantities{CPU: &cpu, Memory: &memory}}}},
	}
}

func (s *suite) advertises() {
	ctx := s.Context()
	first := Advertisement("paris", 1000, true)
	if known, err := s.paris.Beat(ctx, protocol.Beat{Sequence: 999, Digest: protocol.Digest(first)}); err != nil || known {
		s.Errorf("a beat before the first advertisement: %t, %v", known, err)
	}
	expect.NoError(s, s.paris.PublishAdvertisement(ctx, first))
	expect.NoError(s, s.paris.PublishAdvertisement(ctx, first))
	expect.NoError(s, s.rome.PublishAdvertisement(ctx, Advertisement("rome", 1, false)))
	expect.Eventually(s, "the advertisement to be known", func() (bool, string) {
		known, err := s.paris.Beat(ctx, protocol.Beat{Sequence: 1001, Digest: protocol.Digest(first)})
		return known, fmt.Sprint(err)
	})
	other := first
	other.Region = "elsewhere"
	if known, err := s.paris.Beat(ctx, protocol.Beat{Sequence: 1002, Digest: protocol.Digest(other)}); err != nil || known {
		s.Errorf("a beat with another content: %t, %v", known, err)
	}
	other.Sequence = 1
	var outdated *protocol.OutdatedError
	if err := s.paris.PublishAdvertisement(ctx, other); !errors.As(err, &outdated) || outdated.Latest < 1000 {
		s.Errorf("an advertisement from before: %v", err)
	}
	s.refused("an advertisement for another cluster", s.oslo.PublishAdvertisement(ctx, Advertisement("paris", 2000, true)), protocol.CodeForbidden)
}

// isHeld has rome ask for capacity, which paris accepts, and returns the reservation's ID.
func (s *suite) isHeld() (id string) {
	ctx := s.Context()
	request := Request()
	view, err := s.rome.PutReservation(ctx, request)
	expect.NoError(s, err)
	if id = protocol.ReservationID("rome", request.SourceUID); view.ID != id || view.UID == "" || view.SourceName != "web" || view.Spec.RequesterID != "rome" {
		s.Fatalf("got %+v", view)
	}
	if again, err := s.rome.PutReservation(ctx, request); err != nil || again.UID != view.UID {
		s.Errorf("the same request again: %+v, %v", again, err)
	}
	request.SourceGeneration = 2
	request.Spec.PodSets[0].Count = 3
	grown, err := s.rome.PutReservation(ctx, request)
	if expect.NoError(s, err); grown.UID != view.UID || grown.SourceGeneration != 2 || grown.Spec.PodSets[0].Count != 3 {
		s.Errorf("a larger request: %+v", grown)
	}
	request.SourceGeneration = 3
	request.Spec.TargetClusterID = "oslo"
	_, err = s.rome.PutReservation(ctx, request)
	s.refused("another target", err, protocol.CodeConflict)
	s.accept(id, 3)
	return id
}

// accept has paris accept what it is to hold for a reservation, until it is a number of pods, as the
// consumer sees it.
func (s *suite) accept(id string, pods int32) {
	s.Helper()
	expect.Eventually(s, "paris to accept the hold, and rome to see it", func() (bool, string) {
		view, held := s.paris.Provider.Get(id)
		if held && view.Hold.AcceptedAttempt != view.Hold.Attempt {
			if view.Requester != "rome" || view.RequesterPeerKey != "key-of-rome" {
				s.Fatalf("paris is to hold capacity for %+v", view)
			}
			if err := s.paris.AckProvider(s.Context(), id, protocol.ProviderAck{ReservationUID: view.Hold.ReservationUID, Attempt: view.Hold.Attempt, Accepted: true}); err != nil {
				return false, err.Error()
			}
		}
		seen, _ := s.rome.Consumer.Get(id)
		a := seen.Status.Allocations
		ok := len(a) == 1 && a[0].Cluster == "paris" && a[0].Accepted && broker.HeldCapacity{PodSets: a[0].PodSets}.Pods() == pods
		if ok && (a[0].Endpoint != "https://paris.test:6443" || seen.PeerKeys["paris"] != "key-of-paris") {
			s.Fatalf("rome sees %+v", seen)
		}
		return ok, fmt.Sprintf("paris: %+v, rome: %+v", view, seen.Status)
	})
}

// isRefusedToOthers: oslo sees nothing of a reservation, and cannot act on it.
func (s *suite) isRefusedToOthers(id string) {
	ctx := s.Context()
	all := func() int {
		return len(s.oslo.Consumer.Select(func(protocol.ConsumerView) bool { return true })) + len(s.oslo.Provider.Select(func(protocol.ProviderView) bool { return true }))
	}
	if n := all(); n > 0 {
		s.Errorf("oslo sees %d views", n)
	}
	view, _ := s.rome.Consumer.Get(id)
	s.refused("oslo's renewal", s.oslo.Renew(ctx, id, view.UID), protocol.CodeNotFound)
	s.refused("oslo's ack as the consumer", s.oslo.AckRequester(ctx, id, protocol.RequesterAck{ReservationUID: view.UID, Attempt: 1}), protocol.CodeNotFound)
	s.refused("oslo's ack as the provider", s.oslo.AckProvider(ctx, id, protocol.ProviderAck{ReservationUID: view.UID, Attempt: 1, Accepted: true}), protocol.CodeNotFound)
	expect.NoError(s, s.oslo.DeleteReservation(ctx, id))
	forged := Request()
	forged.Spec.RequesterID = "rome"
	_, err := s.oslo.PutReservation(ctx, forged)
	s.refused("a request in another cluster's name", err, protocol.CodeForbidden)
}

// isUsed has rome report its virtual node, and renew the lease.
func (s *suite) isUsed(id string) {
	ctx := s.Context()
	expect.Eventually(s, "the reservation to be active", func() (bool, string) {
		view, _ := s.rome.Consumer.Get(id)
		if view.Status.Phase == broker.ReservationActive {
			return true, ""
		}
		err := s.rome.AckRequester(ctx, id, protocol.RequesterAck{ReservationUID: view.UID, Attempt: view.Status.Attempt.Number, Ready: []string{"paris"}})
		return false, fmt.Sprintf("%v: %+v", err, view.Status)
	})
	view, _ := s.rome.Consumer.Get(id)
	expect.NoError(s, s.rome.Renew(ctx, id, view.UID))
	s.refused("the renewal of an unknown reservation", s.rome.Renew(ctx, protocol.ReservationID("rome", types.UID(uuid.NewUUID())), view.UID), protocol.CodeNotFound)
}

// isSeenByTheNextAgent: what there is, is listed to an agent that starts, and the one before may
// end at any time.
func (s *suite) isSeenByTheNextAgent(id string) {
	for _, of := range []**Cluster{&s.rome, &s.paris} {
		(*of).Stop()
		*of = s.join((*of).id)
	}
	if view, ok := s.rome.Consumer.Get(id); !ok || view.Status.Phase != broker.ReservationActive || view.SourceNamespace != "shop" {
		s.Errorf("rome's next agent sees %+v", view)
	}
	if view, ok := s.paris.Provider.Get(id); !ok || view.Hold.AcceptedAttempt != view.Hold.Attempt {
		s.Errorf("paris's next agent sees %+v", view)
	}
	s.accept(id, 3)
}

func (s *suite) relays() {
	ctx := s.Context()
	sent := protocol.RelayMessage{To: "paris", ID: "message", Sealed: []byte("sealed")}
	expect.Eventually(s, "a message to arrive", func() (bool, string) {
		// Delivery is not guaranteed.
		err := s.rome.Relay(ctx, sent)
		s.paris.mu.Lock()
		defer s.paris.mu.Unlock()
		if err != nil || len(s.paris.messages) == 0 {
			return false, fmt.Sprint(err)
		}
		if got := s.paris.messages[0]; got.From != "rome" || got.ID != sent.ID || string(got.Sealed) != "sealed" {
			s.Errorf("got %+v", got)
		}
		return true, ""
	})
	s.oslo.mu.Lock()
	if n := len(s.oslo.messages); n > 0 {
		s.Errorf("oslo got %d messages", n)
	}
	s.oslo.mu.Unlock()
	forged := sent
	forged.From = "rome"
	s.refused("a message in another cluster's name", s.oslo.Relay(ctx, forged), protocol.CodeForbidden)
}

// isReleased has rome give back what it has, and paris confirm it.
func (s *suite) isReleased(id string) {
	ctx := s.Context()
	expect.NoError(s, s.rome.DeleteReservation(ctx, protocol.ReservationID("rome", types.UID(uuid.NewUUID()))))
	expect.NoError(s, s.rome.DeleteReservation(ctx, id))
	expect.NoError(s, s.rome.DeleteReservation(ctx, id))
	expect.Eventually(s, "the reservation to end on both sides", func() (bool, string) {
		if view, held := s.paris.Provider.Get(id); held && view.Releasing() {
			if err := s.paris.AckProvider(ctx, id, protocol.ProviderAck{ReservationUID: view.Hold.ReservationUID, Attempt: view.Hold.Attempt, Accepted: true}); err != nil && !protocol.HasCode(err, protocol.CodeNotFound) {
				return false, err.Error()
			}
		}
		view, seen := s.rome.Consumer.Get(id)
		_, held := s.paris.Provider.Get(id)
		return !seen && !held, fmt.Sprintf("rome: %+v, paris: %t", view.Status, held)
	})
}

// TestMigration: a hold that was accepted with one transport stays as it is when its consumer and
// its provider use the other, and goes on there. What a spec has no more after a move is gone.
func TestMigration(t *testing.T, transports ...Connect) {
	s := &suite{T: t, connect: transports[0]}
	s.rome, s.paris, s.oslo = s.join("rome"), s.join("paris"), s.join("oslo")
	s.advertises()
	id := s.isHeld()
	s.isUsed(id)
	other := Request()
	for i, connect := range append(transports[1:], transports[0]) {
		other.SourceGeneration++
		other.Spec.Deadline, other.Spec.Priority = &metav1.Duration{Duration: time.Hour}, 5
		_, err := s.rome.PutReservation(s.Context(), other)
		expect.NoError(s, err)
		before, _ := s.rome.Consumer.Get(id)
		heldBefore, _ := s.paris.Provider.Get(id)
		s.connect = connect
		s.isSeenByTheNextAgent(id)
		seen, _ := s.rome.Consumer.Get(id)
		held, _ := s.paris.Provider.Get(id)
		if seen.UID != before.UID || seen.Status.Attempt.Number != before.Status.Attempt.Number || !equality.Semantic.DeepEqual(held.Hold, heldBefore.Hold) {
			s.Errorf("move %d has changed the reservation from %+v, held as %+v, to %+v, held as %+v", i+1, before, heldBefore, seen, held)
		}
		expect.NoError(s, s.rome.Renew(s.Context(), id, seen.UID))
		other.SourceGeneration++
		other.Spec.Deadline, other.Spec.Priority = nil, 0
		if view, err := s.rome.PutReservation(s.Context(), other); err != nil || view.Spec.Deadline != nil || view.Spec.Priority != 0 {
			s.Errorf("move %d: without deadline and priority: %+v, %v", i+1, view.Spec, err)
		}
	}
	s.isReleased(id)
}

// TestRestart: agents that stay connected go on with the next broker where the one before was.
func TestRestart(t *testing.T, connect Connect, restart func()) {
	s := &suite{T: t, connect: connect}
	s.rome, s.paris, s.oslo = s.join("rome"), s.join("paris"), s.join("oslo")
	s.advertises()
	id := s.isHeld()
	s.isUsed(id)
	for i := range 20 {
		s.receives(fmt.Sprint("before-", i))
	}
	restart()
	expect.Eventually(s, "the next broker to answer", func() (bool, string) {
		view, _ := s.rome.Consumer.Get(id)
		err := errors.Join(s.rome.Renew(s.Context(), id, view.UID), s.paris.PublishAdvertisement(s.Context(), Advertisement("paris", 3000, true)))
		return err == nil, fmt.Sprint(err)
	})
	s.receives("after")
	second := s.isHeld()
	s.isReleased(second)
	s.isReleased(id)
}

// receives has rome send one message, once the broker takes it, which paris receives.
func (s *suite) receives(id string) {
	s.Helper()
	expect.Eventually(s, "the broker to take a message", func() (bool, string) {
		err := s.rome.Relay(s.Context(), protocol.RelayMessage{To: "paris", ID: id, Sealed: []byte("sealed")})
		return err == nil, fmt.Sprint(err)
	})
	expect.Eventually(s, "message "+id+" to arrive", func() (bool, string) {
		s.paris.mu.Lock()
		defer s.paris.mu.Unlock()
		return slices.ContainsFunc(s.paris.messages, func(m protocol.RelayMessage) bool { return m.ID == id }), fmt.Sprint(len(s.paris.messages))
	})
}

// ends: a watch ends with its context.
func (s *suite) ends() {
	for _, c := range []*Cluster{s.rome, s.paris, s.oslo} {
		c.Stop()
	}
}
