package overflow

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/dynamic"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/gang"
	"github.com/spillway-dev/spillway/scheduler-plugin/moves"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
	"github.com/spillway-dev/spillway/scheduler-plugin/usage"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// Name of the plugin in KubeSchedulerConfiguration.
const Name = "Overflow"

// Messages of the statuses that Filter and PostFilter return. Those of Filter
// contain no figures: each new message is a write to the pod's status.
const (
	errNoReservation   = "virtual node(s) had no reservation for this pod (provider %s), %s"
	errReservationFull = "virtual node(s) had no reserved capacity left for this pod (provider %s), " + seeCondition
	errPreempting      = "waiting for preemption victims to terminate"
	errCannotOverflow  = "the pod cannot overflow: %s"
	errNotSynced       = "cannot overflow: Reservations are not synced"
	errRefused         = "insufficient capacity in other clusters"
	errNotRequested    = "capacity in other clusters cannot be requested"
	errUndecided       = "no decision about capacity in other clusters in time"
	errWaiting         = "waiting for capacity in another cluster"
	errOthersNode      = "node(s) had a taint {%s} that the pod tolerates only for virtual nodes of Spillway"
	errWithdrawn       = "the capacity for this pod at provider %s was withdrawn before the pod was bound"
	errVictim          = "pods in other clusters are not preempted (provider %s)"
	errNominees        = "node(s) had no room left beside nominated pods of other schedulers"
)

// What explains that nothing is reserved for a pod: the virtual node does not.
const (
	seeCondition = "whose condition " + string(broker.PodOverflow) + " says why it waits"
	notOptedIn   = "whose namespace has not opted in"
	optedOut     = "which does not overflow"
)

// scoreOfRank is the score of the best virtual node. What is left to that of this cluster's
// nodes must, times the plugin's weight, exceed what all other plugins give.
const scoreOfRank = 36

// stateKey is where PreFilter stores the cycleState of a pod.
const stateKey framework.StateKey = "PreFilter" + Name

// signKey is the fragment that keeps pods with different grants from being
// batched together.
const signKey = broker.Group + "/Overflow.grants()"

// Plugin is the instance of one profile.
type Plugin struct {
	handle     framework.Handle
	args       *OverflowArgs
	nodes      corelisters.NodeLister
	namespaces corelisters.NamespaceLister
	keys       *owners.KeyCache
	owners     *ownerCache
	gangs      *gang.Gangs
	grants     *usage.GrantCache
	pools      *usage.PoolCache
	placements *usage.Placements
	gate       *waiting.Gate
	queue      *waiting.WorkQueue
	clock      clock.PassiveClock
	// synced reports whether grants is complete, and counted, whether placements is.
	synced, counted func() bool
	// scheduling is set by the first scheduling cycle: only the leader has any.
	scheduling atomic.Bool
	// leads reports whether this replica is known to lead before its first cycle.
	leads func() bool
	// unlabelled is when a pod was last seen without the labels of its binding.
	unlabelled atomic.Int64
	// watched are the pods that the return of overflowed ones depends on.
	watched *moves.WatchedPods
	binder  *binder
	// pending has the events that pods have got, and reservations what they are about.
	pending      *waiting.PendingPods
	reservations *request.Reservations
}

var (
	_ framework.PreEnqueuePlugin  = &Plugin{}
	_ framework.PreFilterPlugin   = &Plugin{}
	_ framework.FilterPlugin      = &Plugin{}
	_ framework.PostFilterPlugin  = &Plugin{}
	_ framework.PreScorePlugin    = &Plugin{}
	_ framework.ScorePlugin       = &Plugin{}
	_ framework.ReservePlugin     = &Plugin{}
	_ framework.PermitPlugin      = &Plugin{}
	_ framework.BindPlugin        = &Plugin{}
	_ framework.SignPlugin        = &Plugin{}
	_ framework.EnqueueExtensions = &Plugin{}
	_ framework.StateData         = &cycleState{}
)

// cycleState is what a scheduling cycle of a pod knows.
type cycleState struct {
	// grants of the pod; nil if it has none. They are not changed.
	grants *usage.Grants
	// pools that the pod may use, and what it needs of them; none if it cannot overflow.
	pools []*usage.Pool
	need  *usage.PodNeed
	// pool that Reserve has chosen, or nil.
	pool *usage.Pool
	// since is when the cycle began.
	since time.Time
	// added are the pod's tolerations for virtual nodes.
	added []corev1.Toleration
	// removed has the guests that a dry run of preemption has removed.
	removed map[types.UID]bool
}

// shape of a pod that may use a virtual node.
func (s *cycleState) shape() string {
	if s.grants != nil {
		return s.grants.Key.Shape
	}
	return s.need.Shape
}

// Clone implements framework.StateData.
func (s *cycleState) Clone() framework.StateData {
	clone := *s
	clone.removed = maps.Clone(s.removed)
	return &clone
}

// New returns the plugin and starts its informers and its controllers in the
// background, until ctx ends. It runs in standby replicas too. leads reports whether this
// replica is known to lead before it schedules its first pod: also while none is created, pods
// then return home, and those that were not steered have an event of that.
func New(ctx context.Context, obj runtime.Object, handle framework.Handle, minor compatibility.Minor, leads func() bool) (framework.Plugin, error) {
	args, err := parseArgs(obj)
	if err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	if utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		// PostFilter would not run for the pods of a group.
		return nil, fmt.Errorf("plugin %s: feature gate GenericWorkload is on; switch it off in this scheduler: the plugin itself holds the pods of a group together", Name)
	}
	log := klog.FromContext(ctx).WithName("overflow")
	ownerCache, err := newOwnerCache(log, handle.KubeConfig(), handle, args.OwnerKinds)
	if err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	core := handle.SharedInformerFactory().Core().V1()
	groups, err := dynamic.NewForConfig(handle.KubeConfig())
	if err != nil {
		return nil, fmt.Errorf("plugin %s: creating a client for PodGroups and Workloads: %w", Name, err)
	}
	gangs, err := gang.New(clock.RealClock{}, groups, minor, core.Pods().Informer(), func(resource, missing string) cache.WatchErrorHandlerWithContext {
		return logWatchErrors(log, resource, missing)
	})
	if err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	gangs.RefusePodResources = args.RefusePodResources
	p := &Plugin{
		handle:     handle,
		args:       args,
		nodes:      core.Nodes().Lister(),
		namespaces: core.Namespaces().Lister(),
		keys:       owners.NewKeyCache(clock.RealClock{}, ownerCache.find),
		owners:     ownerCache,
		gangs:      gangs,
		grants:     usage.NewGrantCache(clock.RealClock{}),
		pools:      usage.NewPoolCache(clock.RealClock{}),
		gate:       waiting.NewGate(clock.RealClock{}),
		clock:      clock.RealClock{},
		leads:      leads,
		binder:     newBinder(),
		pending:    waiting.NewPendingPods(),
	}
	pods := core.Pods().Lister()
	p.keys.Exists = func(pod *corev1.Pod) bool {
		current, err := pods.Pods(pod.Namespace).Get(pod.Name)
		return err == nil && current.UID == pod.UID
	}
	p.placements = usage.NewPlacements(p.clock, p.keys.KeyOf)
	p.placements.Pooled, p.placements.Grants = p.pools.Has, p.grants.Get
	p.queue, p.watched = waiting.NewWorkQueue(p.placements.IsVirtual), moves.NewWatchedPods(handle.ProfileName(), p.placements.IsVirtual)
	if err := p.start(ctx); err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	return p, nil
}

// Name implements framework.Plugin.
func (p *Plugin) Name() string { return Name }

// PreEnqueue holds pods for which an attempt would be futile.
func (p *Plugin) PreEnqueue(_ context.Context, pod *corev1.Pod) *framework.Status {
	if p.gate.Passes(pod) && !p.holds(pod) {
		return nil
	}
	return framework.NewStatus(framework.UnschedulableAndUnresolvable, errWaiting)
}

// holds closes the gate for a pod that was not tried yet if others of its owner and shape
// have just not fit, and capacity is requested for it with theirs: that saves the attempt,
// the write of its result and its event. A gang is tried as a whole, where an autoscaler is
// to act first it must see each pod, and preemption that waits for a decision is to wait no
// longer.
func (p *Plugin) holds(pod *corev1.Pod) bool {
	if !p.gate.Failing() || p.args.AskAfter.Duration > 0 || p.args.Overflow == BeforePreemption || !request.OptedIn(p.namespaces, pod.Namespace) {
		return false
	}
	if _, tried := podutil.GetPodCondition(&pod.Status, corev1.PodScheduled); tried != nil || pod.Status.NominatedNodeName != "" {
		return false
	}
	if _, gang := demand.GangOf(pod); gang {
		return false
	}
	if ok, _ := p.gangs.Admissible(pod); !ok {
		return false
	}
	key, ok := p.keys.Get(pod)
	if !ok || p.settled(key.Key) || !p.gate.Hold(pod, key.Key) {
		return false
	}
	p.queue.AddUnschedulable(pod)
	return true
}

// PreFilter looks up the pod's grants.
func (p *Plugin) PreFilter(_ context.Context, state framework.CycleState, pod *corev1.Pod, _ []framework.NodeInfo) (*framework.PreFilterResult, *framework.Status) {
	if !p.scheduling.Load() {
		p.scheduling.Store(true)
		p.queue.Signal()
	}
	if waitsFor := p.gangs.Hold(pod); waitsFor != "" {
		return nil, framework.NewStatus(framework.UnschedulableAndUnresolvable, waitsFor)
	}
	s := &cycleState{grants: p.grantsOf(pod), pools: p.poolsOf(pod), since: p.clock.Now(), added: demand.AddedTolerations(pod.Spec.Tolerations)}
	if len(s.pools) > 0 {
		s.need = usage.NeedOf(pod)
	}
	state.Write(stateKey, s)
	return nil, nil
}

// grantsOf returns what a pod without a place may use in other clusters; nil if nothing. A
// grant of its owner and shape may be older than what keeps this pod in its cluster.
func (p *Plugin) grantsOf(pod *corev1.Pod) *usage.Grants {
	if !p.counted() || !p.grants.HasNamespace(pod.Namespace) || !p.mayOverflow(pod) {
		return nil
	}
	return p.ownGrants(pod)
}

// ownGrants returns the grants of a pod's owner and shape; nil if there are none.
func (p *Plugin) ownGrants(pod *corev1.Pod) *usage.Grants {
	key, ok := p.keys.Get(pod)
	if !ok {
		return nil
	}
	return p.grants.Get(key.Key)
}

// mayOverflow reports whether a pod without a place may get one in another cluster.
func (p *Plugin) mayOverflow(pod *corev1.Pod) bool {
	if !request.OptedIn(p.namespaces, pod.Namespace) {
		return false
	}
	ok, _ := p.gangs.Admissible(pod)
	return ok
}

// poolsOf returns the pools that a pod without a place may use, in the order in which it
// uses them.
func (p *Plugin) poolsOf(pod *corev1.Pod) []*usage.Pool {
	if !p.counted() || len(p.pools.All()) == 0 || !p.mayOverflow(pod) {
		return nil
	}
	return p.pools.Of(pod)
}

// poolWithRoom returns the first pool that has room for the pod on a provider's virtual
// node, or nil; any reports whether the pod may use one there at all.
func (p *Plugin) poolWithRoom(s *cycleState, provider, node string) (first *usage.Pool, any bool) {
	for _, pool := range s.pools {
		if pool.Provider != provider {
			continue
		}
		if any = true; p.placements.InPool(pool, node, s.need) {
			return pool, true
		}
	}
	return nil, any
}

// ownSlot reports whether a grant of the pod's owner has a free slot on a virtual node.
func (p *Plugin) ownSlot(s *cycleState, provider, node string) bool {
	return s.grants.SlotsAt(provider) > 0 && p.placements.FreeOf(s.grants, provider, node) > 0
}

// stateIn returns what PreFilter stored; an empty one if it did not run.
func stateIn(state framework.CycleState) *cycleState {
	if data, err := state.Read(stateKey); err == nil {
		return data.(*cycleState)
	}
	return &cycleState{}
}

// PreFilterExtensions implements framework.PreFilterPlugin.
func (p *Plugin) PreFilterExtensions() framework.PreFilterExtensions { return p }

// RemovePod marks the dry runs of preemption that take a guest away.
func (p *Plugin) RemovePod(_ context.Context, state framework.CycleState, _ *corev1.Pod, victim framework.PodInfo, nodeInfo framework.NodeInfo) *framework.Status {
	if usage.ProviderOf(nodeInfo.Node()) == "" {
		return nil
	}
	s := stateIn(state)
	if s.removed == nil {
		s.removed = map[types.UID]bool{}
	}
	s.removed[victim.GetPod().UID] = true
	return nil
}

// AddPod reverts RemovePod.
func (p *Plugin) AddPod(_ context.Context, state framework.CycleState, _ *corev1.Pod, pod framework.PodInfo, _ framework.NodeInfo) *framework.Status {
	delete(stateIn(state).removed, pod.GetPod().UID)
	return nil
}

// Filter admits a pod to a virtual node only within a grant of its owner and shape, or
// within a pool. It returns UnschedulableAndUnresolvable, because otherwise the guests
// there would be candidates for preemption; and it must run before the plugins that
// return Unschedulable for a full node. A dry run of preemption that has removed a
// guest finds no node. A node of this cluster has room for a pod only beside the nominees.
func (p *Plugin) Filter(_ context.Context, state framework.CycleState, pod *corev1.Pod, nodeInfo framework.NodeInfo) *framework.Status {
	node := nodeInfo.Node()
	provider := usage.ProviderOf(node)
	if provider == "" {
		if len(node.Spec.Taints) > 0 { // few pods and nodes: this runs for each of them
			if status := othersNode(stateIn(state), pod, node); status != nil {
				return status
			}
		}
		return p.besideNominees(pod, nodeInfo)
	}
	s := stateIn(state)
	own := s.grants.SlotsAt(provider) > 0
	if own && len(s.removed) == 0 && p.ownSlot(s, provider, node.Name) {
		return nil
	}
	pool, pooled := p.poolWithRoom(s, provider, node.Name)
	switch {
	case !own && !pooled:
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errNoReservation, provider, p.whyUnreserved(pod)))
	case len(s.removed) > 0:
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errVictim, provider))
	case pool == nil:
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errReservationFull, provider))
	}
	return nil
}

// whyUnreserved explains that nothing is reserved for a pod.
func (p *Plugin) whyUnreserved(pod *corev1.Pod) string {
	if !request.OptedIn(p.namespaces, pod.Namespace) {
		return notOptedIn
	}
	if ok, reason := p.gangs.Admissible(pod); !ok && reason == "" {
		return optedOut
	}
	return seeCondition
}

// othersNode keeps a pod off a node of this cluster whose taint it tolerates only because
// it may use Spillway's virtual nodes: those that the user has made with the same driver.
func othersNode(s *cycleState, pod *corev1.Pod, node *corev1.Node) *framework.Status {
	if len(s.added) == 0 {
		return nil
	}
	if taint := usage.OnlyFor(s.added, pod, node); taint != nil {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errOthersNode, taint.ToString()))
	}
	return nil
}

// PreScore skips scoring unless there is a virtual node beside another node: only for a pod
// that may use one.
func (p *Plugin) PreScore(_ context.Context, state framework.CycleState, _ *corev1.Pod, nodes []framework.NodeInfo) *framework.Status {
	if s := stateIn(state); s.grants == nil && len(s.pools) == 0 {
		return framework.NewStatus(framework.Skip)
	}
	if len(nodes) > 1 && slices.ContainsFunc(nodes, func(n framework.NodeInfo) bool { return usage.ProviderOf(n.Node()) != "" }) {
		return nil
	}
	return framework.NewStatus(framework.Skip)
}

// Score prefers the nodes of this cluster, then the virtual nodes by what the pod would
// use there: a grant of its owner, then pools in their order.
func (p *Plugin) Score(_ context.Context, state framework.CycleState, _ *corev1.Pod, nodeInfo framework.NodeInfo) (int64, *framework.Status) {
	node := nodeInfo.Node()
	provider := usage.ProviderOf(node)
	if provider == "" {
		return framework.MaxScore, nil
	}
	s := stateIn(state)
	if p.ownSlot(s, provider, node.Name) {
		return scoreOfRank, nil
	}
	if pool, _ := p.poolWithRoom(s, provider, node.Name); pool != nil {
		return scoreOfRank - (1+pool.Rank())*scoreOfRank/(1+usage.PoolRanks), nil
	}
	return framework.MinScore, nil
}

// ScoreExtensions implements framework.ScorePlugin: scores are normalized.
func (p *Plugin) ScoreExtensions() framework.ScoreExtensions { return nil }

// SignPod permits batching of pods with the same grants and pools; most have none.
func (p *Plugin) SignPod(_ context.Context, pod *corev1.Pod) ([]framework.SignFragment, *framework.Status) {
	var value string
	if g := p.grantsOf(pod); g != nil {
		value = g.Key.String()
	}
	for _, pool := range p.poolsOf(pod) {
		value += "+" + pool.Hold + "/" + pool.Provider
	}
	return []framework.SignFragment{{Key: signKey, Value: value}}, nil
}

// EventsToRegister returns the events that may make a pod schedulable that Filter
// rejected. Grants are not among them: package request activates their
// pods, so that scheduling does not depend on the CRD.
func (p *Plugin) EventsToRegister(context.Context) ([]framework.ClusterEventWithHint, error) {
	return []framework.ClusterEventWithHint{
		{Event: framework.ClusterEvent{Resource: framework.Pod, ActionType: framework.Delete}, QueueingHintFn: p.isSchedulableAfterPodDeleted},
		{Event: framework.ClusterEvent{Resource: framework.Node, ActionType: framework.Add}, QueueingHintFn: p.isSchedulableAfterNodeAdded},
		{Event: framework.ClusterEvent{Resource: framework.Pod, ActionType: framework.UpdatePodToleration}, QueueingHintFn: isSchedulableAfterPodUpdated},
	}, nil
}

// isSchedulableAfterPodDeleted queues the pod if a pod left a virtual node on which it has
// a pool or, if that was a pod of its namespace, a grant; or one of this cluster, if a nominee
// has kept the pod out.
func (p *Plugin) isSchedulableAfterPodDeleted(_ klog.Logger, pod *corev1.Pod, deleted, _ any) (framework.QueueingHint, error) {
	other, ok := deleted.(*corev1.Pod)
	if !ok {
		return framework.Queue, nil
	}
	node, err := p.nodes.Get(other.Spec.NodeName)
	if err == nil && p.hasPoolAt(pod, usage.ProviderOf(node)) {
		return framework.Queue, nil
	}
	if err == nil && usage.ProviderOf(node) == "" && p.placements.Nominees.KeepsOut(pod.UID) {
		return framework.Queue, nil
	}
	if other.Namespace != pod.Namespace || err == nil && p.grantsOf(pod).SlotsAt(usage.ProviderOf(node)) == 0 {
		return framework.QueueSkip, nil
	}
	return framework.Queue, nil
}

// hasPoolAt reports whether a pod may use a pool at a provider.
func (p *Plugin) hasPoolAt(pod *corev1.Pod, provider string) bool {
	return provider != "" && slices.ContainsFunc(p.poolsOf(pod), func(pool *usage.Pool) bool { return pool.Provider == provider })
}

// isSchedulableAfterPodUpdated queues the pod if it was itself updated.
func isSchedulableAfterPodUpdated(_ klog.Logger, pod *corev1.Pod, _, updated any) (framework.QueueingHint, error) {
	if other, ok := updated.(*corev1.Pod); ok && other.UID != pod.UID {
		return framework.QueueSkip, nil
	}
	return framework.Queue, nil
}

// isSchedulableAfterNodeAdded queues the pod for a local node, and for a virtual
// node on which it has a grant or a pool already: the grant may arrive before the node.
func (p *Plugin) isSchedulableAfterNodeAdded(_ klog.Logger, pod *corev1.Pod, _, added any) (framework.QueueingHint, error) {
	node, ok := added.(*corev1.Node)
	if !ok || usage.ProviderOf(node) == "" || p.grantsOf(pod).SlotsAt(usage.ProviderOf(node)) > 0 || p.hasPoolAt(pod, usage.ProviderOf(node)) {
		return framework.Queue, nil
	}
	return framework.QueueSkip, nil
}

// PostFilter adds the pod to the controller's queue, in memory.
func (p *Plugin) PostFilter(_ context.Context, state framework.CycleState, pod *corev1.Pod, _ framework.NodeToStatusReader) (*framework.PostFilterResult, *framework.Status) {
	if p.gangs.Hold(pod) != "" {
		return nil, framework.NewStatus(framework.Unschedulable)
	}
	if !request.OptedIn(p.namespaces, pod.Namespace) {
		p.passGate(pod.UID)
		p.queue.AddUnschedulable(pod) // its namespace may opt in, or have done so just now
		return nil, framework.NewStatus(framework.Unschedulable)
	}
	if p.victimsTerminating(pod) {
		p.queue.Remove(pod.UID)
		return nil, framework.NewStatus(framework.Unschedulable, errPreempting)
	}
	code, message := p.wait(state, pod)
	p.queue.AddUnschedulable(pod)
	p.refuseGang(pod)
	return nil, framework.NewStatus(code, message)
}

// wait closes the gate for a pod that waits for capacity in another cluster. It
// returns the result of its cycle.
func (p *Plugin) wait(state framework.CycleState, pod *corev1.Pod) (framework.Code, string) {
	if ok, reason := p.gangs.Admissible(pod); !ok {
		p.passGate(pod.UID)
		if reason == "" {
			return framework.Unschedulable, ""
		}
		return framework.Unschedulable, fmt.Sprintf(errCannotOverflow, reason)
	}
	synced := p.synced()
	if !synced && p.args.Overflow != BeforePreemption {
		return framework.Unschedulable, errNotSynced
	}
	key, ok := p.keys.Get(pod)
	if !ok {
		if p.args.Overflow != BeforePreemption {
			return framework.Unschedulable, errWaiting
		}
		// Its owner may be newer than what is known: that is no reason to preempt.
		key = &owners.PodKey{Key: waiting.UnresolvedKey(pod)}
	}
	deadline := p.gate.Since(pod.UID).Add(p.args.AskAfter.Duration + p.args.DecisionTimeout.Duration)
	code, message := framework.Unschedulable, errWaiting
	inVain := p.settled(key.Key) && !p.gate.IsAmong(waiting.Coming(p.grants, p.placements, key.Key), pod, key.Key, p.placements.Placed)
	switch {
	case inVain && p.grants.Refused(key.Key):
		message = errRefused
	case inVain:
		message = errNotRequested
	case p.args.Overflow == BeforePreemption && p.clock.Now().Before(deadline):
		// No PostFilter plugin after this one runs: no preemption while the request
		// is undecided, or not known.
		code = framework.UnschedulableAndUnresolvable
	case p.args.Overflow == BeforePreemption:
		message = errUndecided
	}
	if !synced {
		message = errNotSynced
	}
	if code == framework.Unschedulable {
		deadline = time.Time{}
	}
	p.queue.AddOpening(p.gate.Close(pod, key.Key, stateIn(state).since, deadline))
	if p.gate.Stale(pod.UID) {
		p.queue.AddChanged(pod)
	}
	return code, message
}

// passGate lets a pod pass the gate that does not wait for capacity in other clusters.
func (p *Plugin) passGate(pod types.UID) {
	if was := p.gate.Drop(pod); was != nil {
		p.queue.AddOpening(was.Opening)
	}
}

// settled reports whether preemption no longer waits for capacity for a key in other
// clusters, but for the pods that it is coming for.
func (p *Plugin) settled(key demand.Key) bool {
	return p.grants.Refused(key) || p.grants.IsUnasked(key)
}

// victimsTerminating reports whether preemption has nominated a node for the pod
// and its victims are still terminating: the pod needs no capacity elsewhere.
func (p *Plugin) victimsTerminating(pod *corev1.Pod) bool {
	if pod.Status.NominatedNodeName == "" {
		return false
	}
	node, err := p.handle.SnapshotSharedLister().NodeInfos().Get(pod.Status.NominatedNodeName)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(node.GetPods(), func(other framework.PodInfo) bool {
		return other.GetPod().DeletionTimestamp != nil && corev1helpers.PodPriority(other.GetPod()) < corev1helpers.PodPriority(pod)
	})
}

// Reserve counts the pod on its node, and chooses the hold that it is charged to: one of
// its owner if that has a free slot, or else that of a pool. It fails if a pool that
// Filter has seen has no room any more.
func (p *Plugin) Reserve(_ context.Context, state framework.CycleState, pod *corev1.Pod, nodeName string) *framework.Status {
	hold, room := "", usage.RoomID{Node: nodeName}
	node, err := p.nodes.Get(nodeName)
	if provider := usage.ProviderOf(node); err == nil && provider != "" {
		s := stateIn(state)
		pool, pooled := p.poolWithRoom(s, provider, nodeName)
		switch {
		case pooled && !p.ownSlot(s, provider, nodeName):
			if pool == nil {
				return framework.NewStatus(framework.Unschedulable, fmt.Sprintf(errReservationFull, provider))
			}
			hold, s.pool, room.Hold = pool.Hold, pool, pool.Hold
		case s.grants != nil:
			hold, room = p.placements.ChargedTo(pod.Namespace, nodeName, s.grants.Charges[provider]), usage.RoomID{}
		}
	}
	p.placements.Assume(pod, nodeName, hold)
	p.queue.AddOpening(p.gate.Assumed(pod.UID, room))
	return nil
}

// stillGranted reports whether a pod that has got a place has a grant for it, if it needs
// one: it may have waited for the other pods of its gang, or for its binding.
func (p *Plugin) stillGranted(pod *corev1.Pod) bool {
	nodeName, hold := p.placements.PlaceOf(pod.UID)
	node, err := p.nodes.Get(nodeName)
	provider := usage.ProviderOf(node)
	if err != nil || provider == "" || p.pools.Has(hold) {
		return true
	}
	g := p.ownGrants(pod)
	if g == nil || !slices.ContainsFunc(g.Charges[provider], func(c usage.Charge) bool { return c.Label == hold }) {
		return false
	}
	return p.placements.UsedOf(g.Key, nodeName, g.Charges[provider]) <= g.Slots[provider]
}

// Unreserve reverts Reserve.
func (p *Plugin) Unreserve(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) {
	now := p.clock.Now()
	node, key := p.placements.Forget(pod.UID)
	p.unreserveGang(pod, now)
	p.queue.AddFreed(node, key) // last: it may wake the pod itself
}

// Bind binds a pod to a virtual node, and with the same request labels it with its
// shape and the hold that it uses and, unless it has a deletion cost already, makes it
// the first to be deleted when its owner scales down. The pod is changed only if it is
// bound. A pod on another node is bound as DefaultBinder does, in its turn with all others;
// where kube-scheduler sends its requests itself (feature SchedulerAsyncAPICalls), it is
// left to DefaultBinder.
func (p *Plugin) Bind(ctx context.Context, state framework.CycleState, pod *corev1.Pod, nodeName string) *framework.Status {
	node, err := p.nodes.Get(nodeName)
	if err != nil {
		return framework.AsStatus(fmt.Errorf("getting node %s: %w", nodeName, err))
	}
	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: nodeName},
	}
	provider := usage.ProviderOf(node)
	if provider == "" {
		if p.handle.APICacher() != nil {
			return framework.NewStatus(framework.Skip)
		}
		return framework.AsStatus(p.binder.bind(ctx, p.handle.ClientSet(), binding))
	}
	s := stateIn(state)
	_, hold := p.placements.PlaceOf(pod.UID)
	if hold == "" {
		return framework.AsStatus(fmt.Errorf("pod has no hold at provider %s", provider))
	}
	if !p.stillGranted(pod) {
		return framework.AsStatus(fmt.Errorf(errWithdrawn, provider))
	}
	binding.Labels = map[string]string{broker.LabelHold: hold, broker.LabelShape: s.shape()}
	if _, own := pod.Annotations[corev1.PodDeletionCost]; !own {
		binding.Annotations = map[string]string{corev1.PodDeletionCost: broker.OverflowedDeletionCost}
	}
	e := p.grantedTo(pod, s, provider, hold)
	_, waited := p.gate.TriedAt(pod.UID)
	request.Writes.WithLabelValues(request.WriteBinding).Inc()
	if err := p.binder.bind(ctx, p.handle.ClientSet(), binding); err != nil {
		return framework.AsStatus(fmt.Errorf("binding the pod to %s: %w", nodeName, err))
	}
	if !waited {
		waiting.PodAttempts.Observe(1) // those of one that waited are counted when it ends to wait
	}
	if e != nil {
		e.Send(p.handle.EventRecorder(), pod)
	}
	return nil
}

// grantedTo returns the event of the capacity that a pod is about to use; nil if it has got
// that while it was pending.
func (p *Plugin) grantedTo(pod *corev1.Pod, s *cycleState, provider, hold string) *request.Event {
	if s.pool != nil {
		e := request.Pooled(s.pool)
		return &e
	}
	if s.grants == nil || p.pending.Announced(pod.UID, request.ReasonGranted, provider) {
		return nil
	}
	all, err := p.reservations.ByKey(s.grants.Key)
	if err != nil {
		return nil // the index exists
	}
	for _, r := range all {
		if slots := usage.StateOf(r, "").Slots; charge.Label(r.Status.ID) == hold && slots[provider] > 0 {
			e := request.Granted(r, slots)
			return &e
		}
	}
	return nil
}
