package overflow

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/lru"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Name of the plugin in KubeSchedulerConfiguration.
const Name = "Overflow"

// stateKey is where PreFilter leaves a pod's grants for the rest of its cycle.
const stateKey framework.StateKey = "PreFilter" + Name

// signKey is the fragment that keeps pods with different grants from being
// batched together.
const signKey = broker.Group + "/Overflow.grants()"

// Plugin is one profile's instance.
type Plugin struct {
	handle     framework.Handle
	args       *OverflowArgs
	nodes      corelisters.NodeLister
	namespaces corelisters.NamespaceLister
	keys       *keyring
	book       *book
	inbox      *inbox
	// placed has the UIDs of the pods for which a node was found, until the cache
	// shows them there.
	placed *sync.Map
	// synced tells whether the book is complete.
	synced func() bool
	// scheduling is set by the first scheduling cycle: the sign that this
	// replica leads.
	scheduling atomic.Bool
}

var (
	_ framework.PreFilterPlugin   = &Plugin{}
	_ framework.FilterPlugin      = &Plugin{}
	_ framework.PostFilterPlugin  = &Plugin{}
	_ framework.PreScorePlugin    = &Plugin{}
	_ framework.ScorePlugin       = &Plugin{}
	_ framework.ReservePlugin     = &Plugin{}
	_ framework.PreBindPlugin     = &Plugin{}
	_ framework.SignPlugin        = &Plugin{}
	_ framework.EnqueueExtensions = &Plugin{}
	_ framework.StateData         = &grants{}
)

// New makes the plugin and starts its watching and asking in the background,
// until ctx ends. It runs in standby replicas too.
func New(ctx context.Context, obj runtime.Object, handle framework.Handle) (framework.Plugin, error) {
	args, err := parseArgs(obj)
	if err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	core := handle.SharedInformerFactory().Core().V1()
	p := &Plugin{
		handle:     handle,
		args:       args,
		nodes:      core.Nodes().Lister(),
		namespaces: core.Namespaces().Lister(),
		keys:       newKeyring(handle.SharedInformerFactory().Apps().V1().ReplicaSets().Lister()),
		book:       newBook(),
		inbox:      newInbox(),
		placed:     &sync.Map{},
	}
	if err := p.start(ctx); err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	return p, nil
}

// Name implements framework.Plugin.
func (p *Plugin) Name() string { return Name }

// PreFilter finds the pod's grants.
func (p *Plugin) PreFilter(_ context.Context, state framework.CycleState, pod *corev1.Pod, _ []framework.NodeInfo) (*framework.PreFilterResult, *framework.Status) {
	if !p.scheduling.Load() {
		p.scheduling.Store(true)
		p.inbox.ring()
	}
	if g := p.grantsOf(pod); g != nil {
		state.Write(stateKey, g)
	}
	return nil, nil
}

// grantsOf is what the pod may use in other clusters; nil if nothing.
func (p *Plugin) grantsOf(pod *corev1.Pod) *grants {
	if !p.book.any(pod.Namespace) || pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled {
		return nil
	}
	known, ok := p.keys.of(pod)
	if !ok {
		return nil
	}
	return p.book.grants(known.key)
}

// PreFilterExtensions implements framework.PreFilterPlugin: grants do not depend
// on who else is there.
func (p *Plugin) PreFilterExtensions() framework.PreFilterExtensions { return nil }

// Filter lets a pod onto a virtual node only within a grant of its owner and
// shape. It refuses with UnschedulableAndUnresolvable, because otherwise the
// guests there would be candidates for preemption.
func (p *Plugin) Filter(_ context.Context, state framework.CycleState, pod *corev1.Pod, nodeInfo framework.NodeInfo) *framework.Status {
	provider := providerOf(nodeInfo.Node())
	if provider == "" {
		return nil
	}
	g := grantsIn(state)
	if g == nil || g.places[provider] == 0 {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable,
			fmt.Sprintf("node(s) carried capacity of %s that is not reserved for this pod", provider))
	}
	if p.taken(g, provider, pod, nodeInfo) >= g.places[provider] {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable,
			// Without the number: who waits is told again whenever the words change.
			fmt.Sprintf("node(s) had no place left of those reserved in %s for this pod's owner", provider))
	}
	return nil
}

// taken counts the pods on a node that use a grant, assumed ones included.
func (p *Plugin) taken(g *grants, provider string, self *corev1.Pod, nodeInfo framework.NodeInfo) int32 {
	var n int32
	hold := demand.HoldLabel(g.holds[provider])
	for _, info := range nodeInfo.GetPods() {
		other := info.GetPod()
		if other.Namespace != g.key.Namespace || other.UID == self.UID || finished(other) {
			continue
		}
		// The label counts only for pods whose ReplicaSet is gone: users can
		// write it.
		known, ok := p.keys.of(other)
		if ok && known.key == g.key || !ok && other.Labels[broker.LabelHold] == hold {
			n++
		}
	}
	return n
}

// PreScore skips scoring where there is nothing to prefer.
func (p *Plugin) PreScore(_ context.Context, _ framework.CycleState, _ *corev1.Pod, nodes []framework.NodeInfo) *framework.Status {
	var home, virtual bool
	for _, n := range nodes {
		if providerOf(n.Node()) == "" {
			home = true
		} else {
			virtual = true
		}
	}
	if home && virtual {
		return nil
	}
	return framework.NewStatus(framework.Skip)
}

// Score prefers home.
func (p *Plugin) Score(_ context.Context, _ framework.CycleState, _ *corev1.Pod, nodeInfo framework.NodeInfo) (int64, *framework.Status) {
	if providerOf(nodeInfo.Node()) == "" {
		return framework.MaxNodeScore, nil
	}
	return framework.MinNodeScore, nil
}

// ScoreExtensions implements framework.ScorePlugin: scores are normal already.
func (p *Plugin) ScoreExtensions() framework.ScoreExtensions { return nil }

// SignPod lets pods be batched whose grants are the same; most have none.
func (p *Plugin) SignPod(_ context.Context, pod *corev1.Pod) ([]framework.SignFragment, *framework.Status) {
	var value string
	if g := p.grantsOf(pod); g != nil {
		value = g.key.String()
	}
	return []framework.SignFragment{{Key: signKey, Value: value}}, nil
}

// EventsToRegister names what may free a place for a pod that Filter turned
// away. Grants are not among them: they Activate the pods that they are for, so
// that scheduling does not depend on the CRD.
func (p *Plugin) EventsToRegister(context.Context) ([]framework.ClusterEventWithHint, error) {
	return []framework.ClusterEventWithHint{
		{Event: framework.ClusterEvent{Resource: framework.Pod, ActionType: framework.Delete}, QueueingHintFn: p.onPodGone},
		{Event: framework.ClusterEvent{Resource: framework.Node, ActionType: framework.Add}, QueueingHintFn: p.onNodeAdded},
	}, nil
}

// onPodGone wakes pods when one of their namespace leaves a virtual node.
func (p *Plugin) onPodGone(_ klog.Logger, pod *corev1.Pod, gone, _ any) (framework.QueueingHint, error) {
	other, ok := gone.(*corev1.Pod)
	if !ok {
		return framework.Queue, nil
	}
	if other.Namespace != pod.Namespace {
		return framework.QueueSkip, nil
	}
	if node, err := p.nodes.Get(other.Spec.NodeName); err == nil && providerOf(node) == "" {
		return framework.QueueSkip, nil
	}
	return framework.Queue, nil
}

// onNodeAdded wakes pods for a new node at home, and for a virtual node on which
// they have a grant already: it may have been told of before the node is seen.
func (p *Plugin) onNodeAdded(_ klog.Logger, pod *corev1.Pod, _, added any) (framework.QueueingHint, error) {
	node, ok := added.(*corev1.Node)
	if !ok || providerOf(node) == "" {
		return framework.Queue, nil
	}
	if g := p.grantsOf(pod); g == nil || g.places[providerOf(node)] == 0 {
		return framework.QueueSkip, nil
	}
	return framework.Queue, nil
}

// PostFilter notes the demand, in memory.
func (p *Plugin) PostFilter(_ context.Context, state framework.CycleState, pod *corev1.Pod, _ framework.NodeToStatusReader) (*framework.PostFilterResult, *framework.Status) {
	if !p.optedIn(pod.Namespace) {
		return nil, framework.NewStatus(framework.Unschedulable)
	}
	if p.victimsLeave(pod) {
		return nil, framework.NewStatus(framework.Unschedulable, "overflow: room at home is being freed for the pod")
	}
	p.inbox.note(pod)
	if !p.grantsOf(pod).equal(grantsIn(state)) {
		// Its cycle went by what the book said before; whoever was woken for the news
		// was not this pod, which nobody knew to wait.
		p.inbox.welcome(pod)
	}
	if ok, reason := demand.Admissible(pod); !ok {
		if reason == "" {
			return nil, framework.NewStatus(framework.Unschedulable)
		}
		return nil, framework.NewStatus(framework.Unschedulable, "the pod cannot overflow: "+reason)
	}
	if !p.synced() {
		return nil, framework.NewStatus(framework.Unschedulable, "overflow: Reservations cannot be read now")
	}
	if known, ok := p.keys.of(pod); ok && p.book.refused(known.key) {
		return nil, framework.NewStatus(framework.Unschedulable, "overflow: no other cluster has room now")
	}
	code := framework.Unschedulable
	if p.args.Overflow == BeforePreemption {
		// Ends the chain: nobody is pushed out while the answer is open.
		code = framework.UnschedulableAndUnresolvable
	}
	return nil, framework.NewStatus(code, "overflow: room in other clusters is being arranged")
}

func (p *Plugin) optedIn(namespace string) bool { return optedIn(p.namespaces, namespace) }

func optedIn(namespaces corelisters.NamespaceLister, name string) bool {
	namespace, err := namespaces.Get(name)
	return err == nil && namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled
}

// victimsLeave tells whether preemption has won the pod a node whose previous
// users are still leaving: it needs no room elsewhere.
func (p *Plugin) victimsLeave(pod *corev1.Pod) bool {
	if pod.Status.NominatedNodeName == "" {
		return false
	}
	node, err := p.handle.SnapshotSharedLister().NodeInfos().Get(pod.Status.NominatedNodeName)
	if err != nil {
		return false
	}
	for _, info := range node.GetPods() {
		if other := info.GetPod(); other.DeletionTimestamp != nil && priority(other) < priority(pod) {
			return true
		}
	}
	return false
}

func finished(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

func priority(pod *corev1.Pod) int32 {
	if pod.Spec.Priority == nil {
		return 0
	}
	return *pod.Spec.Priority
}

// Reserve notes that a node was found for the pod: it does not wait any more.
func (p *Plugin) Reserve(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) *framework.Status {
	p.placed.Store(pod.UID, nil)
	return nil
}

// Unreserve takes that back.
func (p *Plugin) Unreserve(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) {
	p.placed.Delete(pod.UID)
}

// PreBindPreFlight tells whether PreBind has anything to do.
func (p *Plugin) PreBindPreFlight(_ context.Context, _ framework.CycleState, _ *corev1.Pod, nodeName string) *framework.Status {
	if node, err := p.nodes.Get(nodeName); err == nil && providerOf(node) == "" {
		return framework.NewStatus(framework.Skip)
	}
	return nil
}

// PreBind writes the label that says whose hold the pod uses, and, unless the pod
// says something of its own, lets it be the first to go when its owner shrinks.
func (p *Plugin) PreBind(ctx context.Context, state framework.CycleState, pod *corev1.Pod, nodeName string) *framework.Status {
	node, err := p.nodes.Get(nodeName)
	if err != nil {
		return framework.AsStatus(fmt.Errorf("looking up node %s: %w", nodeName, err))
	}
	provider := providerOf(node)
	if provider == "" {
		return nil
	}
	g := grantsIn(state)
	if g == nil || g.holds[provider] == "" {
		return framework.AsStatus(fmt.Errorf("pod has no hold in %s", provider))
	}
	hold := demand.HoldLabel(g.holds[provider])
	if pod.Labels[broker.LabelHold] == hold {
		return nil
	}
	metadata := map[string]any{"uid": pod.UID, "labels": map[string]string{broker.LabelHold: hold}}
	if _, own := pod.Annotations[corev1.PodDeletionCost]; !own {
		metadata["annotations"] = map[string]string{corev1.PodDeletionCost: broker.OverflowedDeletionCost}
	}
	patch, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return framework.AsStatus(err)
	}
	_, err = p.handle.ClientSet().CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return framework.AsStatus(fmt.Errorf("labelling the pod with its hold: %w", err))
	}
	return nil
}

// Clone implements framework.StateData; grants are not changed during a cycle.
func (g *grants) Clone() framework.StateData { return g }

func grantsIn(state framework.CycleState) *grants {
	if data, err := state.Read(stateKey); err == nil {
		return data.(*grants)
	}
	return nil
}

// providerOf is the cluster whose capacity a node carries; empty for a node of
// this cluster.
func providerOf(node *corev1.Node) string {
	if node == nil {
		return ""
	}
	return node.Labels[broker.LabelProvider]
}

// keyring computes the keys of pods and remembers them: the same pods are looked
// at in every cycle. Safe for concurrent use.
type keyring struct {
	replicaSets appslisters.ReplicaSetLister
	cache       *lru.Cache
}

// identity is a pod's key and what was computed along with it.
type identity struct {
	key        demand.Key
	owner      metav1.OwnerReference
	set        broker.PodSet
	generation int64
}

// keysRemembered bounds the keyring's memory to some 20 MB.
const keysRemembered = 20_000

func newKeyring(replicaSets appslisters.ReplicaSetLister) *keyring {
	return &keyring{replicaSets: replicaSets, cache: lru.New(keysRemembered)}
}

// of is a pod's identity; ok is false where its owner is not known yet.
func (k *keyring) of(pod *corev1.Pod) (id *identity, ok bool) {
	if cached, hit := k.cache.Get(pod.UID); hit {
		// A resize changes the shape, and the generation with it.
		if id := cached.(*identity); id.generation == pod.Generation {
			return id, true
		}
	}
	id = &identity{generation: pod.Generation}
	if id.key, id.owner, id.set, ok = demand.KeyOf(pod, k.resolve); !ok {
		return nil, false
	}
	k.cache.Add(pod.UID, id)
	return id, true
}

func (k *keyring) resolve(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
	rs, err := k.replicaSets.ReplicaSets(namespace).Get(ref.Name)
	if err != nil || rs.UID != ref.UID {
		return nil, false
	}
	return metav1.GetControllerOfNoCopy(rs), true
}
