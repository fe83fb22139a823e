package virtualnode

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// peeringState is what is remembered of the peering with one provider. Only the
// worker that reconciles the provider uses it.
type peeringState struct {
	peer peering.Peer
	// lastGrant is when a grant was observed last.
	lastGrant time.Time
	// terminating is set from the first call of Teardown until it is done.
	terminating bool
	// late is what is not ready: the peering or the virtual node, or else grants of which
	// no pod can use the node, by the UID of their instruction.
	late    map[types.UID]*lateness
	backoff wait.Backoff
	// inEffect is what the driver has done, nil if it is to be called.
	inEffect *inEffect
}

// theNode is the key of the peering and the virtual node among what is late.
const theNode types.UID = ""

// lateness is since when something is not ready; reported is set once an event says that it
// is late.
type lateness struct {
	since    time.Time
	reported bool
}

// inEffect is a plan that the driver has carried out, and what was observed then.
type inEffect struct {
	peer     peering.Peer
	plan     peering.Capacity
	node     *corev1.Node
	progress progress
}

// is reports whether a plan is in effect, and its virtual node as it was then.
func (e *inEffect) is(peer peering.Peer, plan peering.Capacity, node *corev1.Node) bool {
	return e != nil && e.peer == peer && equality.Semantic.DeepEqual(e.plan, plan) && sameNode(e.node, node)
}

// sameNode reports whether a node is as it was, but for heartbeats.
func sameNode(before, after *corev1.Node) bool {
	if before == nil || after == nil {
		return before == after
	}
	return before.UID == after.UID && nodeReady(before) == nodeReady(after) && maps.Equal(before.Labels, after.Labels) &&
		equality.Semantic.DeepEqual(before.Spec, after.Spec) && equality.Semantic.DeepEqual(before.Status.Allocatable, after.Status.Allocatable)
}

// observe records since when the virtual node, or else a grant that no pod can use there, is
// not ready, and returns the progress with the time waited.
func (s *peeringState) observe(p progress, snapshot *Snapshot, now time.Time, timeout time.Duration) progress {
	before := s.late
	s.late = map[types.UID]*lateness{}
	late := func(key types.UID, p progress) progress {
		s.late[key] = before[key]
		if s.late[key] == nil {
			s.late[key] = &lateness{since: now}
		}
		p.lateness, p.waited = s.late[key], now.Sub(s.late[key].since)
		p.overdue = p.waited >= timeout
		return p
	}
	if !p.ready() {
		maps.Copy(s.late, before) // what is known of grants counts again with the node
		return late(theNode, p)
	}
	if !p.pending() {
		s.backoff = stepBackoff
	}
	p.unmapped = map[types.UID]progress{}
	for _, g := range snapshot.Grants {
		why := cmp.Or(snapshot.cordoned(g), g.unmapped(snapshot.OptedIn, p.node.Namespaces))
		if why == nil {
			continue
		}
		own := p
		own.node.Done, own.node.Reason, own.node.Message = false, why.Reason, why.Message
		own.noPod, own.unmapped = true, nil
		own = late(g.Instruction.UID, own)
		own.final = why.Final || own.overdue
		p.unmapped[g.Instruction.UID] = own
	}
	return p
}

// carriedPods is the number of pods that a virtual node has capacity for on
// behalf of one instruction, and since when.
type carriedPods struct {
	pods  int32
	since time.Time
}

// release is a release of capacity in progress, of the Reservation with the UID.
type release struct {
	uid      types.UID
	retained []broker.RetainedPods
}

// state returns what is remembered of a provider. The idle time of a peering that
// is found without a grant starts then.
func (r *Reconciler) state(provider string) *peeringState {
	r.mu.Lock()
	defer r.mu.Unlock()
	state := r.peerings[provider]
	if state == nil {
		state = &peeringState{peer: peering.Peer{ClusterID: provider}, lastGrant: r.Clock.Now(), backoff: stepBackoff}
		r.peerings[provider] = state
	}
	return state
}

func (r *Reconciler) deleteState(provider string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.peerings, provider)
	delete(r.carried, provider)
	delete(r.changed, provider)
}

// takeChanged reports whether a provider has been enqueued since the last call.
func (r *Reconciler) takeChanged(provider string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed := r.changed[provider]
	delete(r.changed, provider)
	return changed
}

// recordUse records which Reservations pods on the virtual node use.
func (r *Reconciler) recordUse(s *Snapshot) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.inUse, s.Provider)
	if len(s.Grants) == 0 {
		return
	}
	use := map[types.UID]bool{}
	for _, g := range s.Grants {
		uid := sourceOf(&g.Instruction.Spec)
		use[uid] = use[uid] || g.Bound.Count > 0
	}
	r.inUse[s.Provider] = use
}

// sourceOf is the UID of the Reservation that an instruction is for: that in this cluster
// or, if it was created there, that in the hub.
func sourceOf(spec *broker.ReservationInstructionSpec) types.UID {
	if spec.FromHub() {
		return spec.ReservationUID
	}
	return spec.SourceUID
}

// InUse reports whether pods use the capacity of the Reservation with a UID, in the hub
// for one that was created there; known is false until a virtual node for it has been observed.
func (r *Reconciler) InUse(reservation types.UID) (inUse, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, use := range r.inUse {
		used, granted := use[reservation]
		inUse, known = inUse || used, known || granted
	}
	return inUse, known
}

// recordCarried records the number of pods that the virtual node has capacity
// for by instruction, and enqueues the Reservations if one is new or has changed.
// While the node is being resized, the number only grows.
func (r *Reconciler) recordCarried(s *Snapshot, p progress) {
	r.mu.Lock()
	before, after, changed := r.carried[s.Provider], map[types.UID]carriedPods{}, false
	for _, g := range s.Grants {
		was, known := before[g.Instruction.UID]
		is := carriedPods{since: r.Clock.Now()}
		switch {
		case p.ready():
			is.pods = g.Pods()
		case s.Node == nil:
		case !known:
			continue
		default:
			is.pods = max(was.pods, g.Pods())
		}
		if known && was.pods == is.pods {
			is = was
		} else {
			changed = true
		}
		after[g.Instruction.UID] = is
	}
	r.carried[s.Provider] = after
	r.mu.Unlock()
	for _, g := range s.Grants {
		if changed && !g.Releasing() && g.Reservation != nil {
			enqueue(r.reservations, g.Reservation)
		}
	}
}

// carriesAtMost reports whether the virtual node has had capacity for at most
// the given pods of an instruction throughout Options.ShrinkDelay.
func (r *Reconciler) carriesAtMost(in *broker.ReservationInstruction, pods int32) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	c, ok := r.carried[in.Spec.TargetClusterID][in.UID]
	return ok && c.pods <= pods && !r.Clock.Now().Before(c.since.Add(r.ShrinkDelay))
}

// Shrunk reports whether the virtual nodes have shrunk to the retained pods, given
// in the order of the instructions, and no more pods are bound to them.
func (r *Reconciler) Shrunk(ctx context.Context, instructions []broker.ReservationInstruction, retained []broker.RetainedPods) (bool, error) {
	var shrunk []int
	for i := range instructions {
		if in := &instructions[i]; retained[i].Count < PodsOf(in.Spec.PodSets) {
			if !r.carriesAtMost(in, retained[i].Count) {
				return false, nil
			}
			shrunk = append(shrunk, i)
		}
	}
	// No pod can be bound to the released capacity any more, but the cache may not
	// show the latest binding yet.
	for _, i := range shrunk {
		live, err := r.gather(ctx, r.live, instructions[i].Spec.TargetClusterID)
		if err != nil || live.boundPods(instructions[i].UID) > retained[i].Count {
			return false, err
		}
	}
	return true, nil
}

// SetRelease limits the Reservation with this name and UID to the retained pods
// while a release is in progress, and enqueues the providers; nil ends the release.
func (r *Reconciler) SetRelease(name types.NamespacedName, uid types.UID, retained []broker.RetainedPods) {
	r.mu.Lock()
	before := r.releases[name].retained
	if retained == nil {
		delete(r.releases, name)
	} else {
		r.releases[name] = release{uid, retained}
	}
	r.mu.Unlock()
	if equality.Semantic.DeepEqual(before, retained) {
		return
	}
	for _, at := range slices.Concat(before, retained) {
		r.Enqueue(at.Cluster)
	}
}

// releaseOf returns what the release in progress of a Reservation retains, nil if
// there is none.
func (r *Reconciler) releaseOf(reservation *broker.Reservation) []broker.RetainedPods {
	r.mu.Lock()
	defer r.mu.Unlock()
	if release := r.releases[client.ObjectKeyFromObject(reservation)]; release.uid == reservation.UID {
		return release.retained
	}
	return nil
}
