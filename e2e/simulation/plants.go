package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agent "github.com/spillway-dev/spillway/agent/simulated"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// plant is a fault that is put at a seam on purpose, to see that the invariants find it.
type plant struct {
	name string
	// by is the invariant that must find it: others are not checked. It is empty if any may.
	by string
	// setUp changes the world before its programs start.
	setUp func(*world)
	// brokerWrites and agentWrites wrap the client of a program's writes and live reads.
	brokerWrites, agentWrites func(*world, client.Client) client.Client
	// brokerLive and agentLive replace the reader of a program's live reads.
	brokerLive, agentLive func(live, cached client.Reader) client.Reader
	// request changes a request on its way to the broker; nil drops it.
	request func(*world, message) message
	// loses reports whether an event of a stream is lost, and tells changes what it says.
	loses func(protocol.Event) bool
	tells func(*world, *protocol.Event)
	// stalls is the beginning of the name of steps that never happen.
	stalls string
	// anyLeader makes a new leader act with whatever its caches have.
	anyLeader bool
	// ignoreGuests makes the agents recognize no guest.
	ignoreGuests bool
}

// plants are the planted faults. Each must be found.
var plants = []plant{
	{name: "the ledger is written without compare-and-swap", brokerWrites: onStatus(func(_ *world, object client.Object) bool {
		if _, ok := object.(*broker.ClusterAdvertisement); ok {
			object.SetResourceVersion("")
		}
		return true
	})},
	{name: "nothing in the hub is written with compare-and-swap", brokerWrites: onStatus(func(_ *world, object client.Object) bool {
		object.SetResourceVersion("")
		return true
	})},
	{name: "the attempt is not recorded before the hold", brokerWrites: onStatus(func(w *world, object client.Object) bool {
		return !w.recordsAttempt(object)
	})},
	{name: "a hold is dropped before the provider confirms", by: invariantCapacity, brokerWrites: onHolds(func(holds []broker.Hold) []broker.Hold {
		return slices.DeleteFunc(holds, func(h broker.Hold) bool { return h.Promised.Empty() })
	})},
	{name: "only what is promised is charged", by: invariantCapacity, brokerWrites: onHolds(func(holds []broker.Hold) []broker.Hold {
		for i := range holds {
			holds[i].Unconfirmed = nil
		}
		return holds
	})},
	{name: "the hold of a Reservation that is being deleted is dropped at once", by: invariantCapacity, brokerWrites: onStatus(func(w *world, object client.Object) bool {
		if ad, ok := object.(*broker.ClusterAdvertisement); ok {
			ad.Status.Holds = slices.DeleteFunc(ad.Status.Holds, func(h broker.Hold) bool {
				r := w.inHubOf(&h)
				return r != nil && r.DeletionTimestamp != nil
			})
		}
		return true
	})},
	{name: "a consumer does not hear that its Reservation is being deleted", by: invariantEnd, tells: func(w *world, e *protocol.Event) {
		for i := range e.Consumer {
			view := &e.Consumer[i]
			if r := w.inHubOf(&broker.Hold{ReservationName: view.ID, ReservationUID: view.UID}); r != nil && r.DeletionTimestamp != nil {
				view.Status = w.heard[view.UID]
			} else {
				w.heard[view.UID] = view.Status
			}
		}
	}},
	{name: "a status grants what the provider is asked to release", by: invariantGrant, brokerWrites: onStatus(func(w *world, object client.Object) bool {
		r, ok := object.(*broker.Reservation)
		if !ok {
			return true
		}
		stored := w.inHubOf(&broker.Hold{ReservationName: r.Name, ReservationUID: r.UID})
		return stored == nil || accepted(r) >= accepted(stored)
	})},
	{name: "what is promised counts as granted", by: invariantGrant, brokerWrites: onHolds(func(holds []broker.Hold) []broker.Hold {
		for i := range holds {
			if !holds[i].Promised.Empty() {
				holds[i].Granted = holds[i].Promised.DeepCopy()
			}
		}
		return holds
	})},
	{name: "holds are never released", by: invariantEnd, brokerWrites: onHolds(func(holds []broker.Hold) []broker.Hold {
		for i := range holds {
			if holds[i].Promised.Empty() && holds[i].Unconfirmed != nil {
				holds[i].Promised = *holds[i].Unconfirmed.DeepCopy()
			}
		}
		return holds
	})},
	{name: "refusals are forgotten", by: invariantWrites, setUp: configured(broker.BrokerConfigSpec{RetryAfter: &metav1.Duration{Duration: time.Millisecond}})},
	{name: "a silent provider is waited for", by: invariantAnswer, setUp: configured(broker.BrokerConfigSpec{ProofDeadline: &metav1.Duration{Duration: 1000 * time.Hour}})},
	{name: "leases end by the wall clock", by: invariantLease, setUp: func(w *world) {
		for _, b := range w.brokers {
			b.clock.OnlyWall = true
		}
	}},
	{name: "orphans are swept without a live read", brokerLive: fromCache(func(object any) bool { _, ok := object.(*broker.Reservation); return ok })},
	{name: "an answer counts for any Reservation of its name", request: onAck(func(hold *broker.Hold, ack *protocol.ProviderAck) {
		ack.ReservationUID = hold.ReservationUID
	})},
	{name: "an answer counts for any attempt", request: onAck(func(hold *broker.Hold, ack *protocol.ProviderAck) {
		if ack.ReservationUID == hold.ReservationUID {
			ack.Attempt = hold.Attempt
		}
	})},
	{name: "an answer counts for whatever is held now", request: onAck(func(hold *broker.Hold, ack *protocol.ProviderAck) {
		ack.ReservationUID, ack.Attempt = hold.ReservationUID, hold.Attempt
	})},
	{name: "a refusal counts as a yes", request: onAck(func(_ *broker.Hold, ack *protocol.ProviderAck) { ack.Accepted = true })},
	{name: "a refusal does not say what is still held", request: onAck(func(_ *broker.Hold, ack *protocol.ProviderAck) { ack.Held = nil })},
	{name: "a release is confirmed while guests run", ignoreGuests: true},
	{name: "a provider accepts without holding", by: invariantGrant, agentWrites: onStatus(func(_ *world, object client.Object) bool {
		if i, ok := object.(*broker.ProviderInstruction); ok {
			i.Status.Held = nil
		}
		return true
	})},
	{name: "a provider keeps for consumers what its own pods have taken", by: invariantFit, agentWrites: onStatus(func(_ *world, object client.Object) bool {
		i, ok := object.(*broker.ProviderInstruction)
		return !ok || !agent.GaveUp(i)
	})},
	{name: "a provider advertises twice what it has", request: onAdvertisement(func(_ *world, spec *broker.ClusterAdvertisementSpec) {
		double(&spec.Resources.Allocatable)
		for i := range spec.NodeClasses {
			for j := range spec.NodeClasses[i].FreeShapes {
				spec.NodeClasses[i].FreeShapes[j].Nodes *= 2
			}
		}
	})},
	{name: "an older advertisement replaces a newer one", by: invariantNews, request: onAdvertisement(func(w *world, spec *broker.ClusterAdvertisementSpec) {
		var stored broker.ClusterAdvertisement
		if w.client.Get(context.Background(), types.NamespacedName{Namespace: namespace, Name: spec.ClusterID}, &stored) == nil {
			spec.Sequence = max(spec.Sequence, stored.Spec.Sequence+1)
		}
	})},
	{name: "a provider does not advertise what the hub has lost", by: invariantCapacity, request: onAdvertisement(func(_ *world, spec *broker.ClusterAdvertisementSpec) {
		spec.UnlistedHolds, spec.ObservedHolds = nil, nil
	})},
	{name: "a provider does not advertise what its own pods free", by: invariantProgress, request: onAdvertisement(func(w *world, spec *broker.ClusterAdvertisementSpec) {
		var stored broker.ClusterAdvertisement
		allocated := func(spec *broker.ClusterAdvertisementSpec) int64 {
			return cpus(&broker.HeldCapacity{Totals: spec.Resources.Allocated})
		}
		if w.client.Get(context.Background(), types.NamespacedName{Namespace: namespace, Name: spec.ClusterID}, &stored) == nil && allocated(spec) < allocated(&stored.Spec) {
			spec.Resources, spec.NodeClasses = stored.Spec.Resources, stored.Spec.NodeClasses
		}
	})},
	{name: "the lease of a consumer that is gone does not end", by: invariantEnd, setUp: configured(broker.BrokerConfigSpec{DefaultLease: &metav1.Duration{Duration: 1000 * time.Hour}})},
	{name: "an agent finds another status than it wrote", by: invariantSettle, agentWrites: onStatus(func(w *world, object client.Object) bool {
		if r, ok := object.(*broker.Reservation); ok {
			w.names++
			r.Status.Summary = fmt.Sprint(w.names)
		}
		return true
	})},
	{name: "a withdrawal does not say how long pods may stay", by: invariantLeaving, request: onAck(func(_ *broker.Hold, ack *protocol.ProviderAck) { ack.LeaveWithin = nil })},
	{name: "a withdrawal gives pods less time than the provider does", by: invariantLeaving, request: onAck(func(_ *broker.Hold, ack *protocol.ProviderAck) {
		if ack.LeaveWithin != nil {
			ack.LeaveWithin.Duration /= 2
		}
	})},
	{name: "a deletion is lost", by: invariantEnd, request: func(_ *world, m message) message {
		if m.method == http.MethodDelete {
			m.method, m.target = http.MethodGet, protocol.PathAdvertisements
		}
		return m
	}},
	{name: "streams lose deletions", loses: func(e protocol.Event) bool { return e.Type == protocol.EventDelete }},
	{name: "clusters are given up between two beats", by: invariantStays, setUp: configured(broker.BrokerConfigSpec{StaleAfter: &metav1.Duration{Duration: time.Second}})},
	{name: "a new leader acts before its caches have caught up", anyLeader: true},
	{name: "what a cluster creates after it is forgotten stays", by: invariantForgotten, brokerWrites: func(w *world, c client.Client) client.Client {
		return &plantedClient{Client: c, loses: func(object client.Object, o *client.DeleteOptions) bool {
			// What was there before is deleted whatever its UID.
			return o.Preconditions != nil && w.isOfForgotten(object)
		}}
	}},
	{name: "the queue keeps nothing free", by: invariantTurn, setUp: configured(broker.BrokerConfigSpec{Queueing: broker.QueueingNone})},
	{name: "what a Reservation grows by is as old as its creation", by: invariantTurn, brokerWrites: onStatus(func(_ *world, object client.Object) bool {
		if r, ok := object.(*broker.Reservation); ok {
			r.Status.QueueTime = nil
		}
		return true
	})},
	{name: "pods may use a part of a gang", by: invariantGang, brokerWrites: onStatus(func(w *world, object client.Object) bool {
		if r, ok := object.(*broker.Reservation); ok {
			h := w.holdings()
			for i := range r.Status.Allocations {
				a := &r.Status.Allocations[i]
				a.Accepted = a.Accepted || h.granted[holdKey{r.UID, a.Cluster}] > 0
			}
		}
		return true
	})},
	{name: "what is released is given back twice", by: invariantCapacity, brokerWrites: onStatus(func(w *world, object client.Object) bool {
		ad, ok := object.(*broker.ClusterAdvertisement)
		if !ok {
			return true
		}
		for _, hold := range w.ledgerOf(ad) {
			released := !slices.ContainsFunc(ad.Status.Holds, func(h broker.Hold) bool { return h.ReservationUID == hold.ReservationUID })
			if released && len(ad.Status.Holds) > 0 {
				ad.Status.Holds = ad.Status.Holds[1:]
			}
		}
		return true
	})},
	{name: "no fence: a hold that stays may still be changed by an earlier attempt", brokerWrites: onStatus(func(w *world, object client.Object) bool {
		ad, ok := object.(*broker.ClusterAdvertisement)
		return !ok || !onlyFences(w.ledgerOf(ad), ad.Status.Holds)
	})},
	{name: "the watch of the ledgers stalls", stalls: "broker-a watch ClusterAdvertisement"},
}

// inHubOf is the Reservation of a hold as it is in the hub, nil if it does not exist.
func (w *world) inHubOf(hold *broker.Hold) *broker.Reservation {
	var r broker.Reservation
	err := w.client.Get(context.Background(), types.NamespacedName{Namespace: namespace, Name: hold.ReservationName}, &r)
	if err != nil || r.UID != hold.ReservationUID {
		return nil
	}
	return &r
}

// accepted are the CPUs that a Reservation's status says are granted.
func accepted(r *broker.Reservation) (sum int64) {
	for _, allocation := range r.Status.Allocations {
		if allocation.Accepted {
			sum += cpus(&broker.HeldCapacity{Totals: allocation.Resources})
		}
	}
	return sum
}

// ledgerOf are the holds of an advertisement as they are in the hub.
func (w *world) ledgerOf(ad *broker.ClusterAdvertisement) []broker.Hold {
	var stored broker.ClusterAdvertisement
	must(client.IgnoreNotFound(w.client.Get(context.Background(), client.ObjectKeyFromObject(ad), &stored)))
	return stored.Status.Holds
}

// isOfForgotten reports whether a forgotten cluster has created an object in the hub.
func (w *world) isOfForgotten(object client.Object) bool {
	of := object.GetName()
	if r, ok := object.(*broker.Reservation); ok {
		of = r.Spec.RequesterID
	}
	return slices.ContainsFunc(w.clusters, func(c *cluster) bool { return c.forgotten && c.id == of })
}

// onlyFences reports whether two versions of a ledger differ in the attempts of holds only.
func onlyFences(before, after []broker.Hold) bool {
	fences := false
	for i := range before {
		if len(after) != len(before) {
			return false
		}
		fenced := after[i]
		fences = fences || fenced.Attempt > before[i].Attempt
		fenced.Attempt = before[i].Attempt
		if !equality.Semantic.DeepEqual(fenced, before[i]) {
			return false
		}
	}
	return fences
}

// configured creates the BrokerConfig.
func configured(spec broker.BrokerConfigSpec) func(*world) {
	return func(w *world) {
		must(w.client.Create(context.Background(), &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "default"}, Spec: spec}))
	}
}

// onStatus returns a wrapper whose status writes pass through a function. It returns
// false for a write that is dropped.
func onStatus(change func(*world, client.Object) bool) func(*world, client.Client) client.Client {
	return func(w *world, c client.Client) client.Client {
		return &plantedClient{Client: c, change: func(o client.Object) bool { return change(w, o) }}
	}
}

// onHolds returns a wrapper that changes the holds in each write of a ledger.
func onHolds(change func([]broker.Hold) []broker.Hold) func(*world, client.Client) client.Client {
	return onStatus(func(_ *world, object client.Object) bool {
		if ad, ok := object.(*broker.ClusterAdvertisement); ok {
			ad.Status.Holds = change(ad.Status.Holds)
		}
		return true
	})
}

// plantedClient changes writes of a status with change, unless it is nil. Deletions for
// which loses is true do not happen.
type plantedClient struct {
	client.Client
	change func(client.Object) bool
	loses  func(client.Object, *client.DeleteOptions) bool
}

func (c *plantedClient) Delete(ctx context.Context, object client.Object, options ...client.DeleteOption) error {
	var o client.DeleteOptions
	if o.ApplyOptions(options); c.loses != nil && c.loses(object, &o) {
		return nil
	}
	return c.Client.Delete(ctx, object, options...)
}

func (c *plantedClient) Status() client.SubResourceWriter {
	if c.change == nil {
		return c.Client.Status()
	}
	return &plantedStatus{SubResourceWriter: c.Client.Status(), change: c.change}
}

type plantedStatus struct {
	client.SubResourceWriter
	change func(client.Object) bool
}

func (s *plantedStatus) Update(ctx context.Context, object client.Object, options ...client.SubResourceUpdateOption) error {
	if !s.change(object) {
		return nil
	}
	return s.SubResourceWriter.Update(ctx, object, options...)
}

func (s *plantedStatus) Patch(ctx context.Context, object client.Object, patch client.Patch, options ...client.SubResourcePatchOption) error {
	if !s.change(object) {
		return nil
	}
	return s.SubResourceWriter.Patch(ctx, object, patch, options...)
}

// recordsAttempt reports whether a status write records a Reservation's attempt before a
// ledger has it.
func (w *world) recordsAttempt(object client.Object) bool {
	r, ok := object.(*broker.Reservation)
	if !ok {
		return false
	}
	var stored broker.Reservation
	if w.client.Get(context.Background(), client.ObjectKeyFromObject(r), &stored) != nil || r.Status.Attempt.Number <= stored.Status.Attempt.Number {
		return false
	}
	var ads broker.ClusterAdvertisementList
	must(w.client.List(context.Background(), &ads, client.UnsafeDisableDeepCopy))
	for i := range ads.Items {
		if slices.ContainsFunc(ads.Items[i].Status.Holds, func(h broker.Hold) bool {
			return h.ReservationUID == r.UID && h.Attempt >= r.Status.Attempt.Number
		}) {
			return false
		}
	}
	return len(r.Status.Attempt.Clusters) > 0
}

// fromCache returns a reader that reads some objects from the cache.
func fromCache(which func(object any) bool) func(live, cached client.Reader) client.Reader {
	return func(live, cached client.Reader) client.Reader { return &splitReader{live, cached, which} }
}

type splitReader struct {
	live, cached client.Reader
	fromCache    func(object any) bool
}

func (r *splitReader) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	if r.fromCache(object) {
		return r.cached.Get(ctx, key, object, options...)
	}
	return r.live.Get(ctx, key, object, options...)
}

func (r *splitReader) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	if r.fromCache(list) {
		return r.cached.List(ctx, list, options...)
	}
	return r.live.List(ctx, list, options...)
}

// onAck returns a hook that changes the providers' answers. hold is the one that the
// provider has for a Reservation of that name now.
func onAck(change func(hold *broker.Hold, ack *protocol.ProviderAck)) func(*world, message) message {
	return func(w *world, m message) message {
		name, isAck := strings.CutSuffix(strings.TrimPrefix(m.target, protocol.PathReservations+"/"), "/ack?role=provider")
		if !isAck {
			return m
		}
		var ad broker.ClusterAdvertisement
		if w.client.Get(context.Background(), types.NamespacedName{Namespace: namespace, Name: m.caller}, &ad) != nil {
			return m
		}
		at := slices.IndexFunc(ad.Status.Holds, func(h broker.Hold) bool { return h.ReservationName == name })
		if at < 0 {
			return m
		}
		return changed(m, func(ack *protocol.ProviderAck) { change(&ad.Status.Holds[at], ack) })
	}
}

// onAdvertisement returns a hook that changes the advertisements.
func onAdvertisement(change func(*world, *broker.ClusterAdvertisementSpec)) func(*world, message) message {
	return func(w *world, m message) message {
		if m.method != http.MethodPost || m.target != protocol.PathAdvertisements {
			return m
		}
		return changed(m, func(spec *broker.ClusterAdvertisementSpec) { change(w, spec) })
	}
}

// changed decodes a body, changes it, and encodes it again.
func changed[T any](m message, change func(*T)) message {
	var content T
	must(json.Unmarshal(m.body, &content))
	change(&content)
	encoded, err := json.Marshal(content)
	must(err)
	m.body = encoded
	return m
}

func double(q *broker.ResourceQuantities) {
	if q.CPU != nil {
		q.CPU.Add(q.CPU.DeepCopy())
	}
}
