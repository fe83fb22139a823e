package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agent "github.com/spillway-dev/spillway/agent/simulated"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Names of the invariants.
const (
	invariantCapacity = "capacity is promised once"
	invariantFit      = "at rest, what is promised fits beside a provider's own pods"
	invariantGrant    = "what is granted is held at the provider"
	invariantAnswer   = "a request is granted, or waits with a reason"
	invariantEnd      = "a hold ends with its Reservation"
	invariantNews     = "older news does not replace newer"
	invariantLease    = "a lease lasts for its duration"
	invariantWrites   = "the number of writes is bounded"
	invariantSettle   = "the programs come to rest"
	invariantStays    = "a Reservation is not moved back and forth"
	invariantProgress = "a request does not wait beside free capacity"
	invariantLeaving  = "pods have the time to leave that the provider gives"
	// A forgotten cluster has no registration any more.
	invariantForgotten = "nothing of a forgotten cluster stays"
	invariantTurn      = "a request is not overtaken without end"
	invariantGang      = "a gang is granted as a whole"
)

// invariantNames are all of them.
var invariantNames = []string{
	invariantCapacity, invariantFit, invariantGrant, invariantAnswer, invariantEnd, invariantNews, invariantLease, invariantWrites, invariantSettle, invariantStays, invariantProgress, invariantLeaving,
	invariantForgotten, invariantTurn, invariantGang,
}

// violation of an invariant.
type violation struct {
	invariant, message string
}

// invariants are checked after every step.
type invariants struct {
	versions [4]int64
	found    *violation
	// only is the invariant that is checked, "" for all.
	only string
	// made is when each cluster's stored advertisement was made, reserved when each
	// Reservation with a duration was first seen with a hold.
	made     map[string]time.Time
	reserved map[types.UID]time.Time
	// homes are, for each Reservation, the clusters that have granted it capacity, and
	// whether they still hold some. returns is how often it returned to one since the last
	// event.
	homes   map[types.UID]map[string]bool
	returns map[types.UID]int
	// gaveUp is by when pods must leave what a provider gave up, grants what consumers knew
	// last of each grant, by the UID of its instruction.
	gaveUp map[givenUp]time.Time
	grants map[types.UID]grantSeen
	// ledgers is what the ledgers last granted.
	ledgers map[holdKey]ledgerSeen
	// holdings are those of the last check. passed are the Reservations that waited when the
	// last growth of a hold was promised, overtaken is how often that was granted.
	holdings  *holdings
	passed    map[holdKey][]types.UID
	overtaken map[types.UID]int
	// grew is when each Reservation last queued again, and requested are the pods that it last
	// requested.
	grew      map[types.UID]time.Time
	requested map[types.UID]int64
	// complete are the gangs that were granted as a whole and have been in use since.
	complete map[types.UID]bool
}

// givenUp is an attempt of a Reservation of which a provider has given up a part.
type givenUp struct {
	reservation types.UID
	cluster     string
	attempt     int64
}

// grantSeen is a number of pods, and the last withdrawal.
type grantSeen struct {
	pods       int32
	withdrawal broker.GrantWithdrawal
}

// ledgerSeen is what a ledger grants to a Reservation, of which attempt it has learned a
// withdrawal last, and, if that lowered the grant, the version that the Reservation had then.
type ledgerSeen struct {
	granted, withdrawn int64
	version            string
}

// fail records the first violation.
func (i *invariants) fail(invariant, format string, args ...any) {
	if i.found == nil && (i.only == "" || i.only == invariant) {
		i.found = &violation{invariant, fmt.Sprintf(format, args...)}
	}
}

// check checks what must hold at any time, if anything has changed.
func (i *invariants) check(w *world) {
	versions := [4]int64{w.hub.Version()}
	for n, c := range w.clusters {
		versions[n+1] = c.server.Version()
	}
	if versions == i.versions || i.found != nil {
		return
	}
	before := i.versions
	i.versions = versions
	for _, c := range w.clusters {
		i.checkProvider(w, c)
	}
	i.checkLeaving(w)
	if versions[0] != before[0] {
		i.checkWrites(w)
		i.checkNews(w)
		i.checkHomes(w)
		i.checkLeases(w)
		i.checkTurns(w)
		i.checkGangs()
	}
}

// checkNews checks that the stored advertisements follow the order in which they were
// made. Once a clock was set, their times do not show it.
func (i *invariants) checkNews(w *world) {
	if w.clocksSet || w.restored {
		return
	}
	var ads broker.ClusterAdvertisementList
	must(w.client.List(context.Background(), &ads, client.UnsafeDisableDeepCopy))
	for n := range ads.Items {
		spec := &ads.Items[n].Spec
		if last, ok := i.made[spec.ClusterID]; ok && spec.Timestamp.Time.Before(last) {
			i.fail(invariantNews, "the advertisement of %s of %s replaced that of %s", spec.ClusterID, spec.Timestamp.UTC(), last.UTC())
		}
		i.made[spec.ClusterID] = spec.Timestamp.Time
	}
}

// checkLeaving checks that the time that a provider gives for leaving what it has withdrawn
// reaches the consumer with the smaller grant, and neither shortens nor starts again.
func (i *invariants) checkLeaving(w *world) {
	if w.clocksSet {
		return
	}
	for _, c := range w.clusters {
		var list broker.ProviderInstructionList
		must(c.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
		for n := range list.Items {
			in := &list.Items[n]
			key := givenUp{in.Spec.ReservationUID, c.id, in.Status.ObservedAttempt}
			if _, known := i.gaveUp[key]; !known && agent.GaveUp(in) && in.Status.LeaveBy != nil {
				i.gaveUp[key] = in.Status.LeaveBy.Time
			}
		}
	}
	for _, c := range w.members() {
		var list broker.ReservationInstructionList
		must(c.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
		for n := range list.Items {
			i.checkWithdrawal(w, c, &list.Items[n])
		}
	}
	if !w.cordoned {
		return
	}
	// Nothing keeps the consumer from knowing it: then pods may not use it any more.
	for key, by := range i.gaveUp {
		if provider := w.cluster(key.cluster); time.Since(by) > time.Minute {
			if a := w.account(provider); a.usable[key.reservation] > a.held[key.reservation] {
				i.fail(invariantLeaving, "%s has withdrawn a part of what it held for %s and holds %d CPUs, and pods may use %d after %s", key.cluster, key.reservation, a.held[key.reservation], a.usable[key.reservation], by.UTC())
			}
		}
	}
}

func (i *invariants) checkWithdrawal(w *world, c *cluster, in *broker.ReservationInstruction) {
	before, known := i.grants[in.UID]
	now := grantSeen{pods: broker.HeldCapacity{PodSets: in.Spec.PodSets}.Pods()}
	if in.Spec.Withdrawal != nil {
		now.withdrawal = *in.Spec.Withdrawal
	}
	if before == now {
		return
	}
	i.grants[in.UID] = now
	spec, by := &in.Spec, now.withdrawal.LeaveBy.Time
	again := known && now.withdrawal.Attempt == before.withdrawal.Attempt
	if again && !by.Equal(before.withdrawal.LeaveBy.Time) {
		i.fail(invariantLeaving, "%s: pods of %s had to leave %s by %s, and now by %s", c.id, spec.ReservationUID, spec.TargetClusterID, before.withdrawal.LeaveBy.UTC(), by.UTC())
	}
	if given, ok := i.gaveUp[givenUp{spec.ReservationUID, spec.TargetClusterID, now.withdrawal.Attempt}]; ok && by.Before(given.Add(-2*time.Second)) {
		i.fail(invariantLeaving, "%s: pods of %s must leave %s by %s, which gives them until %s", c.id, spec.ReservationUID, spec.TargetClusterID, by.UTC(), given.UTC())
	}
	// Where nothing else lowers grants:
	if !w.cordoned || !again || now.pods >= before.pods || c.ended(in) {
		return
	}
	for key := range i.gaveUp {
		if key.reservation == spec.ReservationUID && key.cluster == spec.TargetClusterID && key.attempt > now.withdrawal.Attempt {
			i.fail(invariantLeaving, "%s: the grant of %s for %s was lowered from %d to %d pods, and nothing says by when pods must leave", c.id, spec.TargetClusterID, spec.ReservationUID, before.pods, now.pods)
		}
	}
}

// maxReturns is how often clusters that have granted a Reservation capacity, and hold
// nothing for it any more, may be asked for it again because of one event.
const maxReturns = 3

// checkHomes checks that Reservations do not keep moving between clusters.
func (i *invariants) checkHomes(w *world) {
	var ads broker.ClusterAdvertisementList
	must(w.client.List(context.Background(), &ads, client.UnsafeDisableDeepCopy))
	held := map[types.UID]map[string]bool{}
	for n := range ads.Items {
		for _, hold := range ads.Items[n].Status.Holds {
			uid, cluster := hold.ReservationUID, ads.Items[n].Name
			if hold.Promised.Empty() {
				continue
			}
			if held[uid] == nil {
				held[uid] = map[string]bool{}
			}
			held[uid][cluster] = true
			still, home := i.homes[uid][cluster]
			switch {
			case home && !still:
				i.returns[uid]++
			case !home && cpus(hold.Granted) == 0:
				continue
			case !home && i.homes[uid] == nil:
				i.homes[uid] = map[string]bool{}
			}
			i.homes[uid][cluster] = true
		}
	}
	for uid, homes := range i.homes {
		for cluster := range homes {
			homes[cluster] = held[uid][cluster]
		}
		if i.returns[uid] > maxReturns {
			i.fail(invariantStays, "Reservation %s returned to clusters that it had left, %d times after one event: %v", uid, i.returns[uid], slices.Sorted(maps.Keys(homes)))
		}
	}
}

// checkLeases checks that no Reservation expires before its duration has passed.
func (i *invariants) checkLeases(w *world) {
	var list broker.ReservationList
	must(w.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
	for n := range list.Items {
		r := &list.Items[n]
		if r.Spec.Duration == nil {
			continue
		}
		since, known := i.reserved[r.UID]
		if !known && len(r.Status.Allocations) > 0 {
			i.reserved[r.UID] = time.Now()
		}
		ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady)
		if lasted := time.Since(since); known && ready != nil && ready.Reason == "Expired" && lasted < r.Spec.Duration.Duration-time.Minute {
			i.fail(invariantLease, "the lease of %s ended after %s instead of %s", r.Name, lasted.Round(time.Second), r.Spec.Duration.Duration)
		}
	}
}

// pledges are CPUs by Reservation.
type pledges map[types.UID]int64

func (p pledges) total() (sum int64) {
	for _, n := range p {
		sum += n
	}
	return sum
}

// account is what a provider's capacity is taken for, by consumer and Reservation.
type account struct {
	charged, granted, held pledges
	// reported is what the Reservations in the hub say is granted, usable what consumers let
	// their pods use.
	reported, usable pledges
	consumer         map[types.UID]string
	used             map[string]int64
	// gaveUp are holds of which the provider has lost a part, which the broker learns
	// from its next answer. withdrawn is the attempt of which the ledger has learned it last.
	gaveUp    map[types.UID]bool
	withdrawn map[types.UID]int64
	// versions are those of the Reservations in the hub.
	versions map[types.UID]string
}

// cpus is an amount in CPUs.
func cpus(c *broker.HeldCapacity) int64 {
	if c == nil || c.Totals.CPU == nil {
		return 0
	}
	return c.Totals.CPU.Value()
}

func (w *world) account(c *cluster) *account {
	a := &account{charged: pledges{}, granted: pledges{}, held: pledges{}, reported: pledges{}, usable: pledges{}, consumer: map[types.UID]string{}, used: map[string]int64{}, gaveUp: map[types.UID]bool{}, withdrawn: map[types.UID]int64{}, versions: map[types.UID]string{}}
	var ad broker.ClusterAdvertisement
	must(client.IgnoreNotFound(w.client.Get(context.Background(), types.NamespacedName{Namespace: namespace, Name: c.id}, &ad)))
	for n := range ad.Status.Holds {
		hold := &ad.Status.Holds[n]
		a.consumer[hold.ReservationUID] = hold.Requester
		a.charged[hold.ReservationUID] = max(cpus(&hold.Promised), cpus(hold.Unconfirmed))
		a.granted[hold.ReservationUID] = cpus(hold.Granted)
		a.withdrawn[hold.ReservationUID] = hold.WithdrawnAttempt
	}
	var list broker.ProviderInstructionList
	must(c.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
	for n := range list.Items {
		spec := &list.Items[n].Spec
		a.consumer[spec.ReservationUID] = spec.RequesterClusterID
		a.held[spec.ReservationUID] += cpus(agent.Held(&list.Items[n]))
		a.gaveUp[spec.ReservationUID] = agent.GaveUp(&list.Items[n])
	}
	var reservations broker.ReservationList
	must(w.client.List(context.Background(), &reservations, client.UnsafeDisableDeepCopy))
	for n := range reservations.Items {
		a.versions[reservations.Items[n].UID] = reservations.Items[n].ResourceVersion
		for _, allocation := range reservations.Items[n].EffectiveStatus().Allocations {
			if allocation.Accepted && allocation.Cluster == c.id {
				uid := reservations.Items[n].UID
				a.consumer[uid] = reservations.Items[n].Spec.RequesterID
				a.reported[uid] = cpus(&broker.HeldCapacity{Totals: allocation.Resources})
			}
		}
	}
	for _, consumer := range w.members() {
		var list broker.ReservationInstructionList
		must(consumer.client.List(context.Background(), &list, client.UnsafeDisableDeepCopy))
		for n := range list.Items {
			spec, status := &list.Items[n].Spec, &list.Items[n].Status
			// What no pod can use is released while the consumer still has the instruction.
			useless := status.ObservedAttempt == spec.Attempt && meta.IsStatusConditionTrue(status.Conditions, broker.ConditionUnusable)
			if spec.TargetClusterID == c.id && !spec.Releasing && !spec.Suspended && !useless && !meta.IsStatusConditionTrue(status.Conditions, broker.ConditionRequesterReleased) {
				a.consumer[spec.ReservationUID] = consumer.id
				a.usable[spec.ReservationUID] += cpus(&broker.HeldCapacity{Totals: spec.RequestedResources})
			}
		}
	}
	for _, pod := range c.podList() {
		if consumer := pod.Labels[agent.LabelConsumer]; consumer != "" {
			a.used[consumer]++
		}
	}
	return a
}

// checkProvider checks that a provider's capacity is promised once, that it holds what is
// granted, and that it is not asked to release what still is. Pods of its own that have
// taken the place of placeholders excuse it until it has said so, and a Reservation's status
// until the first write after its ledger has followed. At rest, consumers use nothing else.
func (i *invariants) checkProvider(w *world, c *cluster) {
	a := w.account(c)
	taken, promised := map[string]int64{}, map[string]int64{}
	var parts []string
	lost := max(a.granted.total(), a.reported.total())+int64(len(c.localPods())) > c.offered()
	for _, uid := range slices.Sorted(maps.Keys(a.consumer)) {
		charged := a.charged[uid]
		if w.restored && !w.resting {
			// The hub may promise what it does not know to be held yet: the provider refuses
			// it. And what it has granted may have ended before it was restored.
			if charged = a.granted[uid]; charged <= c.restored[uid] {
				charged = 0
			}
		}
		taken[a.consumer[uid]] += max(charged, a.held[uid])
		promised[a.consumer[uid]] += max(a.granted[uid], a.held[uid])
		parts = append(parts, fmt.Sprintf("%s of %s: charged %d, held %d", uid, a.consumer[uid], a.charged[uid], a.held[uid]))
		reported := a.reported[uid]
		if i.follows(a, c, uid) && !w.resting {
			reported = min(reported, a.granted[uid])
		}
		if granted := max(a.granted[uid], reported); granted > a.held[uid] && !c.forgotten && (w.resting || !w.restored && !a.gaveUp[uid] && !lost) {
			i.fail(invariantGrant, "%s: %d CPUs are granted to %s of %s (%d by its status), but %d are held", c.id, granted, uid, a.consumer[uid], a.reported[uid], a.held[uid])
		}
		if reported > a.granted[uid] && !c.forgotten && (w.resting || !w.restored && !a.gaveUp[uid] && !lost) {
			i.fail(invariantGrant, "%s: %d CPUs are granted to %s of %s by its status, but %d in the ledger", c.id, a.reported[uid], uid, a.consumer[uid], a.granted[uid])
		}
		if w.resting && a.usable[uid] > a.held[uid] && !c.away() {
			i.fail(invariantGrant, "%s: %s lets pods use %d CPUs of %s, but %d are held", c.id, a.consumer[uid], a.usable[uid], uid, a.held[uid])
		}
	}
	var sum int64
	for _, consumer := range slices.Sorted(maps.Keys(a.used)) {
		taken[consumer] = max(taken[consumer], a.used[consumer])
		promised[consumer] = max(promised[consumer], a.used[consumer])
		parts = append(parts, fmt.Sprintf("guests of %s: %d", consumer, a.used[consumer]))
	}
	for _, n := range taken {
		sum += n
	}
	if sum > c.capacity {
		i.fail(invariantCapacity, "%s has %d CPUs, and %d are taken: %s", c.id, c.capacity, sum, strings.Join(parts, "; "))
	}
	// Until a provider has withdrawn what a pod of its own took, more is promised than there is.
	all := int64(len(c.localPods()))
	for _, n := range promised {
		all += n
	}
	if w.resting && !c.away() && all > c.offered() {
		i.fail(invariantFit, "%s offers %d CPUs, and its own pods and what is promised have %d: %s", c.id, c.offered(), all, strings.Join(parts, "; "))
	}
}

// follows reports whether a ledger has followed a withdrawal, and the Reservation has not
// been written since.
func (i *invariants) follows(a *account, c *cluster, uid types.UID) bool {
	key := holdKey{uid, c.id}
	before, known := i.ledgers[key]
	if !known || before.granted != a.granted[uid] {
		lowered := known && before.granted > a.granted[uid] && a.withdrawn[uid] > before.withdrawn
		before = ledgerSeen{granted: a.granted[uid], withdrawn: a.withdrawn[uid]}
		if lowered {
			before.version = a.versions[uid]
		}
		i.ledgers[key] = before
	}
	return before.version != "" && before.version == a.versions[uid]
}

// unanswered describes a request that has neither its grant nor a reason to wait; "" if
// there is none.
func (w *world) unanswered() string {
	for _, c := range w.members() {
		var list broker.ReservationList
		must(c.client.List(context.Background(), &list, client.InNamespace(workloads)))
		for i := range list.Items {
			r := &list.Items[i]
			if why := w.lacks(r); why != "" && r.DeletionTimestamp == nil {
				return fmt.Sprintf("Reservation %s of %s: %s; %q, conditions %s; in the hub: %s", r.Name, c.id, why, r.Status.Summary, conditions(r), w.copyOf(r))
			}
		}
	}
	return ""
}

// deleting describes a Reservation whose deletion in the hub does not end; "" if there is
// none. Its consumer has heard of it, and its providers have had time to answer.
func (w *world) deleting() string {
	var list broker.ReservationList
	must(w.client.List(context.Background(), &list))
	for i := range list.Items {
		r := &list.Items[i]
		if r.DeletionTimestamp == nil || w.cluster(r.Spec.RequesterID).gone {
			continue
		}
		waits := false
		for _, c := range w.clusters {
			waits = waits || (c.deaf || c.gone) && w.account(c).charged[r.UID] > 0
		}
		if !waits {
			return fmt.Sprintf("Reservation %s is not released %s after its deletion: %s", r.Name, time.Since(r.DeletionTimestamp.Time), conditions(r))
		}
	}
	return ""
}

// copyOf describes the hub's copy of a Reservation.
func (w *world) copyOf(r *broker.Reservation) string {
	var list broker.ReservationList
	must(w.client.List(context.Background(), &list))
	for i := range list.Items {
		if copied := &list.Items[i]; strings.HasSuffix(copied.Name, string(r.UID)) {
			return fmt.Sprintf("%s, %q, attempt %d %v, conditions %s", copied.Status.Phase, copied.Status.Summary, copied.Status.Attempt.Number, copied.Status.Attempt.Clusters, conditions(copied))
		}
	}
	return "none"
}

// idle describes capacity that is free while a request waits; "" if there is none.
func (w *world) idle() string {
	held := w.holdings()
	for _, c := range w.members() {
		var list broker.ReservationList
		must(c.client.List(context.Background(), &list, client.InNamespace(workloads)))
		for i := range list.Items {
			r := &list.Items[i]
			if !meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued) || r.DeletionTimestamp != nil || ended(r) {
				continue
			}
			var room int64
			most := w.mostByDomain(held, r, c.id)
			for _, provider := range w.providersFor(c.id) {
				room += min(w.room(provider), max(most-held.of(r, provider.id), 0))
			}
			// A gang needs as much as it lacks, and that may be kept free for it.
			_, least := pods(r)
			if room >= max(least-accepted(r), 1) && !held.ahead(r) {
				return fmt.Sprintf("Reservation %s of %s waits (%s), and there are %d free CPUs", r.Name, c.id, conditions(r), room)
			}
		}
	}
	return ""
}

// members are the clusters that are neither gone nor forgotten.
func (w *world) members() []*cluster {
	return slices.DeleteFunc(slices.Clone(w.clusters), (*cluster).away)
}

// away reports whether the cluster is gone or forgotten.
func (c *cluster) away() bool { return c.gone || c.forgotten }

func ended(r *broker.Reservation) bool {
	return r.Status.Phase == broker.ReservationReleased || r.Status.Phase == broker.ReservationFailed
}

// taken is the sum of what the consumers are charged for, hold or use.
func (a *account) taken() (sum int64) {
	by := map[string]int64{}
	for uid, consumer := range a.consumer {
		by[consumer] += max(a.charged[uid], a.held[uid])
	}
	for consumer, used := range a.used {
		by[consumer] = max(by[consumer], used)
	}
	for _, n := range by {
		sum += n
	}
	return sum
}

// lacks explains what a Reservation lacks; "" if nothing. What a cluster that is gone has
// granted does not count.
func (w *world) lacks(r *broker.Reservation) string {
	requested := broker.HeldCapacity{PodSets: r.Spec.PodSets}.Pods()
	var granted int32
	for _, allocation := range r.Status.Allocations {
		if allocation.Accepted && !w.cluster(allocation.Cluster).away() {
			granted += broker.HeldCapacity{PodSets: allocation.PodSets}.Pods()
		}
	}
	queued := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionQueued)
	switch {
	case ended(r):
		return ""
	case granted == requested:
		return ""
	case granted > requested:
		return fmt.Sprintf("%d pods are granted instead of %d", granted, requested)
	case queued == nil || queued.Status != metav1.ConditionTrue || queued.Message == "":
		return fmt.Sprintf("%d of %d pods are granted, and it is not queued", granted, requested)
	}
	return ""
}

func conditions(r *broker.Reservation) string {
	var out []string
	for _, c := range r.Status.Conditions {
		out = append(out, fmt.Sprintf("%s=%s (%s)", c.Type, c.Status, c.Message))
	}
	return strings.Join(out, "; ")
}

// left describes something that is left although all Reservations are deleted; "" if
// there is nothing.
func (w *world) left() string {
	silent := ""
	for _, c := range w.clusters {
		if c.deaf {
			silent = c.id
		}
	}
	ctx := context.Background()
	var ads broker.ClusterAdvertisementList
	must(w.client.List(ctx, &ads))
	waiting := map[string]bool{}
	for _, ad := range ads.Items {
		for _, hold := range ad.Status.Holds {
			if w.cluster(ad.Name).gone && hold.Promised.Empty() {
				// It is charged as long as nothing is known of its guests.
				continue
			}
			if ad.Name == silent {
				// Its release waits for the provider's answer.
				waiting[hold.ReservationName] = true
				continue
			}
			return fmt.Sprintf("%s still holds %d CPUs for %s (%s)", ad.Name, cpus(&hold.Promised), hold.ReservationName, hold.ReservationUID)
		}
	}
	var inHub broker.ReservationList
	must(w.client.List(ctx, &inHub))
	for _, r := range inHub.Items {
		if w.cluster(r.Spec.RequesterID).gone && ended(&r) && len(r.Finalizers) == 0 {
			// It says why it has ended, until its consumer or an administrator deletes it.
			continue
		}
		if !waiting[r.Name] {
			return fmt.Sprintf("Reservation %s is left in the hub: %s", r.Name, conditions(&r))
		}
	}
	for _, c := range w.members() {
		for _, list := range []client.ObjectList{&broker.ReservationList{}, &broker.ReservationInstructionList{}, &broker.ProviderInstructionList{}} {
			must(c.client.List(ctx, list))
			if n := meta.LenList(list); n > 0 && c.id != silent {
				return fmt.Sprintf("%s has %d objects left: %T", c.id, n, list)
			}
		}
	}
	return ""
}

// ofForgotten describes something in the hub that is left of a forgotten cluster; "" if
// there is nothing. A provider that does not answer may still hold what it asked for.
func (w *world) ofForgotten() string {
	forgotten := func(id string) bool { return w.cluster(id).forgotten }
	var ads broker.ClusterAdvertisementList
	must(w.client.List(context.Background(), &ads, client.UnsafeDisableDeepCopy))
	for _, ad := range ads.Items {
		if forgotten(ad.Name) {
			return fmt.Sprintf("the advertisement of %s is there", ad.Name)
		}
		for _, hold := range ad.Status.Holds {
			if provider := w.cluster(ad.Name); forgotten(hold.Requester) && !provider.deaf && !provider.gone {
				return fmt.Sprintf("%s holds capacity for %s of %s", ad.Name, hold.ReservationName, hold.Requester)
			}
		}
	}
	for _, r := range w.holdings().reservations {
		if forgotten(r.Spec.RequesterID) && r.DeletionTimestamp.IsZero() {
			return fmt.Sprintf("Reservation %s of %s is there", r.Name, r.Spec.RequesterID)
		}
		for _, allocation := range r.EffectiveStatus().Allocations {
			if forgotten(allocation.Cluster) {
				return fmt.Sprintf("Reservation %s has capacity of %s", r.Name, allocation.Cluster)
			}
		}
	}
	return ""
}
