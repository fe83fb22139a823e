package overflow

import (
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// allowance is what the policy of a namespace allows the Reservation of one request.
type allowance struct {
	// units of the request that it may request at the moment; waits is true if that will be
	// more once others are lowered. short is the resource that allows no more.
	units int32
	waits bool
	short corev1.ResourceName
	// lower is true if it requests more pods than its share, to which it is to be lowered.
	lower bool
	share int32
	// above are the keys of others to be lowered, and below of those that may request more
	// than they do.
	above, below []demand.Key
}

// sharesLimit reports whether the policy of a namespace, or nil, limits the sum of its
// Reservations. If not, their use is not limited either.
func (c *demandController) sharesLimit(namespace string, policy *broker.OverflowPolicy) bool {
	if policy != nil && policy.Spec.MaxResources != nil {
		return true
	}
	c.wakeLoosened(c.placements.setLimits(namespace, nil))
	return false
}

// allowanceOf returns what the policy of its namespace, or nil, allows the Reservation of a
// request, by name. It limits the use of all, so that an owner with more than its fair share
// does not use again what ends.
func (c *demandController) allowanceOf(policy *broker.OverflowPolicy, request demand.Request, name string) (allowance, error) {
	_, wanted := request.Unit()
	if policy == nil || policy.Spec.MaxResources == nil {
		return allowance{units: wanted}, nil
	}
	existing, err := c.reservations.list(request.Key.Namespace)
	if err != nil {
		return allowance{}, err
	}
	claims := c.claims(request, existing)
	others := requestedResources(existing, claims)
	limit, all := *policy.Spec.MaxResources, slices.Collect(maps.Values(claims))
	shares := fairShares(limit, others, all)
	limits := c.limitsOf(all, shares, levelShares(limit, others, all))
	c.wakeLoosened(c.placements.setLimits(request.Key.Namespace, limits))
	own := claims[name]
	allowed := allowance{share: shares[name], lower: own.has > shares[name]}
	for _, other := range all {
		share := shares[other.name]
		switch {
		case other.name == name:
			continue
		case other.has > share:
			allowed.above = append(allowed.above, other.key)
		case other.has < share:
			allowed.below = append(allowed.below, other.key)
		}
		broker.AddTo(others, broker.Times(other.each, max(other.has, share)))
	}
	now, short := maxPods(own.each, limit, others)
	fair := min(allowed.share, wanted)
	allowed.units, allowed.short = min(fair, max(now, own.has, own.floor)), short
	allowed.waits = allowed.units < fair && len(allowed.above) > 0
	return allowed, nil
}

// limitTo returns the part of a request that is allowed, whether that is not all for as long as
// other Reservations do not shrink, and when to requeue the request, or zero.
func (c *demandController) limitTo(allowed allowance, request demand.Request, policy *broker.OverflowPolicy, current *broker.Reservation) (part demand.Request, limited bool, requeueAfter time.Duration) {
	c.requeueNow(allowed.above)
	part = request.Limited(allowed.units)
	if part.Pods() < request.MinAvailable {
		part = request.Limited(0)
	}
	limited = part.Pods() < request.Pods()
	switch {
	case allowed.waits:
		return part, limited, retryAfter // its pods need not know: those that are lowered requeue it
	case limited:
		c.setLimited(request.Key, true, part.Pods())
		requestsTotal.WithLabelValues(resultCapped).Inc()
		c.recordAll(request, capped(policy.Name, request, part.Pods(), allowed.short, current))
		return part, true, blockedRetryAfter
	}
	return part, false, 0
}

// claims returns what the Reservations of a request's namespace claim, by their names: those
// of keys that have pending pods, whether they exist or not, and those that the plugin has
// made for others, which keep what they have. The latter leaves out gangs of several shapes.
func (c *demandController) claims(request demand.Request, existing []*broker.Reservation) map[string]claim {
	c.mu.Lock()
	maps.DeleteFunc(c.wanted, func(key demand.Key, _ demand.Request) bool {
		return key != request.Key && !c.batcher.Has(key)
	})
	wanted := map[string]demand.Request{request.Key.Name(request.Owner.Name): request}
	for key, other := range c.wanted {
		if key.Namespace == request.Key.Namespace && key != request.Key {
			wanted[key.Name(other.Owner.Name)] = other
		}
	}
	c.mu.Unlock()
	claims := make(map[string]claim, len(wanted))
	for _, r := range existing {
		w, pending := wanted[r.Name]
		key, keyed := demand.KeyOfReservation(r)
		switch {
		case pending:
			claims[r.Name] = c.claimOf(w, r)
		case keyed && len(r.Spec.PodSets) == 1 && r.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway:
			served := c.claimOf(demand.Request{Key: key, PodSets: r.Spec.PodSets, MinAvailable: r.Spec.MinAvailable}, r)
			served.floor = served.has
			claims[r.Name] = served
		}
	}
	for name, w := range wanted {
		if _, exists := claims[name]; !exists {
			each, n := w.Unit()
			claims[name] = claim{name: name, key: w.Key, each: each, want: n, whole: wholeOf(w)}
		}
	}
	return claims
}

// wholeOf returns how many units of a request are of use together: one of a gang of several
// shapes, which is requested as a whole.
func wholeOf(request demand.Request) int32 {
	if len(request.PodSets) > 1 {
		return 1
	}
	return request.MinAvailable
}

// claimOf returns the claim of a request that has a Reservation. A gang of several shapes
// grows as a whole: it claims what is missing, and what it has counts as that of others.
func (c *demandController) claimOf(request demand.Request, r *broker.Reservation) claim {
	has := r.Spec.PodSets
	if request.Key.IsGang() {
		request.PodSets = raised(has, request.PodSets)
	}
	each, n := request.Unit()
	of := claim{name: r.Name, key: request.Key, each: each, whole: wholeOf(request)}
	if len(request.PodSets) > 1 {
		of.each, of.want = corev1.ResourceList{}, 1
		for _, set := range request.PodSets {
			broker.AddTo(of.each, broker.Times(set.Requests.List(), set.Count-podsOf(has, set.Name)))
		}
		return of
	}
	of.has = podsOf(has, "")
	of.want = max(n, of.has)
	of.least = min(1, of.has) // the agent deletes none that requests nothing
	switch {
	case r.DeletionTimestamp != nil:
		of.want, of.least = of.has, of.has
	case of.has >= of.whole:
		of.least = max(of.least, of.whole)
	}
	of.floor = of.least
	if r.Status.ID == "" {
		return of
	}
	if r.DeletionTimestamp == nil && !request.Key.IsGang() {
		of.hold = demand.HoldLabel(r.Status.ID)
	}
	var granted, used int32
	for i := range r.Status.Allocations {
		a := &r.Status.Allocations[i]
		if a.Accepted {
			granted += podsOf(a.PodSets, "")
		}
		used += c.usersOf(r, a.Cluster)
	}
	if of.hold != "" {
		granted = min(granted, c.placements.limitOf(of.key, of.hold))
	}
	// What providers accept before they have learnt of a lower count is not used.
	of.floor = max(of.floor, min(granted, of.has), used)
	return of
}

// usersOf returns how many pods use a Reservation at a provider.
func (c *demandController) usersOf(r *broker.Reservation, cluster string) int32 {
	return c.placements.usersOf(r.Namespace, broker.VirtualNodeName(cluster), demand.HoldLabel(r.Status.ID))
}

// lowered returns a Reservation, or nil, with the count that it is to be lowered to, if it is.
// It retains at each provider what pods use there, then what the provider has accepted; what
// else it requests may be anywhere.
func (c *demandController) lowered(r *broker.Reservation, allowed allowance) *broker.Reservation {
	if !allowed.lower {
		return r
	}
	r = r.DeepCopy()
	left := allowed.share
	r.Spec.PodSets[0].Count = left
	r.Spec.Retained = make([]broker.RetainedPods, len(r.Status.Allocations))
	retain := func(i int, pods int32) {
		n := min(pods, left)
		r.Spec.Retained[i].Count += n
		left -= n
	}
	for i, a := range r.Status.Allocations {
		r.Spec.Retained[i].Cluster = a.Cluster
		retain(i, c.usersOf(r, a.Cluster))
	}
	for i, a := range r.Status.Allocations {
		if a.Accepted {
			retain(i, max(0, podsOf(a.PodSets, "")-r.Spec.Retained[i].Count))
		}
	}
	if len(r.Spec.Retained) > 0 {
		retain(0, left)
	}
	return r
}

// limitsOf returns the limits of the pods that use the Reservations of claims. While another
// claim has less than its level share, a claim that has more does not use again what ends. One
// that is lowered is limited until its lower count is effective.
func (c *demandController) limitsOf(claims []claim, shares, level map[string]int32) map[demand.Key]useLimit {
	short := slices.ContainsFunc(claims, func(of claim) bool { return shares[of.name] < level[of.name] })
	limits := map[demand.Key]useLimit{}
	for _, of := range claims {
		share := shares[of.name]
		switch {
		case of.hold == "":
		case short && share > level[of.name]:
			limits[of.key] = useLimit{hold: of.hold, most: share, least: level[of.name]}
		case c.grants.usableOf(of.key, of.name) > share:
			limits[of.key] = useLimit{hold: of.hold, most: share, least: share}
		}
	}
	return limits
}

// wakeLoosened wakes pods of keys whose limits are higher than before, or gone.
func (c *demandController) wakeLoosened(keys []demand.Key) {
	for _, key := range keys {
		c.queue.addKey(key)
	}
}

// requeueLimited requeues the keys whose use is limited: a place of theirs may have ended that
// is another owner's now.
func (c *demandController) requeueLimited(keys map[demand.Key]bool) {
	for key := range keys {
		if c.placements.limited(key) {
			c.batcher.RequeueAfter(key, conflictRetryAfter)
		}
	}
}

// requeueNow makes keys due that have pending pods.
func (c *demandController) requeueNow(keys []demand.Key) {
	for _, key := range keys {
		c.batcher.RequeueAfter(key, 0)
	}
	if len(keys) > 0 {
		c.queue.signal()
	}
}
