package overflow

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Name of the plugin in KubeSchedulerConfiguration.
const Name = "Overflow"

// Messages of the statuses that Filter and PostFilter return. Those of Filter
// contain no figures: each new message is a write to the pod's status.
const (
	errNoReservation   = "node(s) had no reservation for this pod (provider %s)"
	errReservationFull = "node(s) had no reserved capacity left for this pod (provider %s)"
	errPreempting      = "waiting for preemption victims to terminate"
	errCannotOverflow  = "the pod cannot overflow: %s"
	errNotSynced       = "cannot overflow: Reservations are not synced"
	errRefused         = "insufficient capacity in other clusters"
	errWaiting         = "waiting for capacity in another cluster"
)

// stateKey is where PreFilter stores a pod's grants for the rest of its cycle.
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
	keys       *keyCache
	grants     *grantCache
	queue      *workQueue
	// assumed has the UIDs of the pods for which a node was found, until the
	// informer shows them bound.
	assumed *sync.Map
	// synced reports whether grants is complete.
	synced func() bool
	// scheduling is set by the first scheduling cycle: only the leader has any.
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

// New returns the plugin and starts its informers and its controller in the
// background, until ctx ends. It runs in standby replicas too.
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
		keys:       newKeyCache(handle.SharedInformerFactory().Apps().V1().ReplicaSets().Lister()),
		grants:     newGrantCache(),
		queue:      newWorkQueue(),
		assumed:    &sync.Map{},
	}
	if err := p.start(ctx); err != nil {
		return nil, fmt.Errorf("plugin %s: %w", Name, err)
	}
	return p, nil
}

// Name implements framework.Plugin.
func (p *Plugin) Name() string { return Name }

// PreFilter looks up the pod's grants.
func (p *Plugin) PreFilter(_ context.Context, state framework.CycleState, pod *corev1.Pod, _ []framework.NodeInfo) (*framework.PreFilterResult, *framework.Status) {
	if !p.scheduling.Load() {
		p.scheduling.Store(true)
		p.queue.signal()
	}
	if g := p.grantsOf(pod); g != nil {
		state.Write(stateKey, g)
	}
	return nil, nil
}

// grantsOf returns what the pod may use in other clusters; nil if nothing.
func (p *Plugin) grantsOf(pod *corev1.Pod) *grants {
	if !p.grants.hasNamespace(pod.Namespace) || pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled {
		return nil
	}
	key, ok := p.keys.get(pod)
	if !ok {
		return nil
	}
	return p.grants.get(key.key)
}

// grantsIn returns the grants that PreFilter stored; nil if there are none.
func grantsIn(state framework.CycleState) *grants {
	if data, err := state.Read(stateKey); err == nil {
		return data.(*grants)
	}
	return nil
}

// PreFilterExtensions implements framework.PreFilterPlugin: grants do not depend
// on the pods of a node.
func (p *Plugin) PreFilterExtensions() framework.PreFilterExtensions { return nil }

// Filter admits a pod to a virtual node only within a grant of its owner and
// shape. It returns UnschedulableAndUnresolvable, because otherwise the guests
// there would be candidates for preemption.
func (p *Plugin) Filter(_ context.Context, state framework.CycleState, pod *corev1.Pod, nodeInfo framework.NodeInfo) *framework.Status {
	provider := providerOf(nodeInfo.Node())
	if provider == "" {
		return nil
	}
	g := grantsIn(state)
	slots := g.slotsAt(provider)
	if slots == 0 {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errNoReservation, provider))
	}
	if p.used(g, provider, pod, nodeInfo) >= slots {
		return framework.NewStatus(framework.UnschedulableAndUnresolvable, fmt.Sprintf(errReservationFull, provider))
	}
	return nil
}

// used counts the pods on a node that use a grant, including assumed ones.
func (p *Plugin) used(g *grants, provider string, self *corev1.Pod, nodeInfo framework.NodeInfo) int32 {
	var n int32
	hold := demand.HoldLabel(g.holds[provider])
	for _, info := range nodeInfo.GetPods() {
		other := info.GetPod()
		if other.Namespace != g.key.Namespace || other.UID == self.UID || podutil.IsPodTerminal(other) {
			continue
		}
		// Users can write the label: it counts only for pods whose ReplicaSet is
		// deleted.
		key, ok := p.keys.get(other)
		if ok && key.key == g.key || !ok && other.Labels[broker.LabelHold] == hold {
			n++
		}
	}
	return n
}

// PreScore skips scoring unless there are both local and virtual nodes.
func (p *Plugin) PreScore(_ context.Context, _ framework.CycleState, _ *corev1.Pod, nodes []framework.NodeInfo) *framework.Status {
	var local, virtual bool
	for _, n := range nodes {
		if providerOf(n.Node()) == "" {
			local = true
		} else {
			virtual = true
		}
	}
	if local && virtual {
		return nil
	}
	return framework.NewStatus(framework.Skip)
}

// Score prefers the nodes of this cluster.
func (p *Plugin) Score(_ context.Context, _ framework.CycleState, _ *corev1.Pod, nodeInfo framework.NodeInfo) (int64, *framework.Status) {
	if providerOf(nodeInfo.Node()) == "" {
		return framework.MaxNodeScore, nil
	}
	return framework.MinNodeScore, nil
}

// ScoreExtensions implements framework.ScorePlugin: scores are normalized.
func (p *Plugin) ScoreExtensions() framework.ScoreExtensions { return nil }

// SignPod permits batching of pods with the same grants; most have none.
func (p *Plugin) SignPod(_ context.Context, pod *corev1.Pod) ([]framework.SignFragment, *framework.Status) {
	var value string
	if g := p.grantsOf(pod); g != nil {
		value = g.key.String()
	}
	return []framework.SignFragment{{Key: signKey, Value: value}}, nil
}

// EventsToRegister returns the events that may make a pod schedulable that Filter
// rejected. Grants are not among them: the demand controller activates their
// pods, so that scheduling does not depend on the CRD.
func (p *Plugin) EventsToRegister(context.Context) ([]framework.ClusterEventWithHint, error) {
	return []framework.ClusterEventWithHint{
		{Event: framework.ClusterEvent{Resource: framework.Pod, ActionType: framework.Delete}, QueueingHintFn: p.isSchedulableAfterPodDeleted},
		{Event: framework.ClusterEvent{Resource: framework.Node, ActionType: framework.Add}, QueueingHintFn: p.isSchedulableAfterNodeAdded},
	}, nil
}

// isSchedulableAfterPodDeleted queues the pod if a pod of its namespace left a
// virtual node.
func (p *Plugin) isSchedulableAfterPodDeleted(_ klog.Logger, pod *corev1.Pod, deleted, _ any) (framework.QueueingHint, error) {
	other, ok := deleted.(*corev1.Pod)
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

// isSchedulableAfterNodeAdded queues the pod for a local node, and for a virtual
// node on which it has a grant already: the grant may arrive before the node.
func (p *Plugin) isSchedulableAfterNodeAdded(_ klog.Logger, pod *corev1.Pod, _, added any) (framework.QueueingHint, error) {
	node, ok := added.(*corev1.Node)
	if !ok || providerOf(node) == "" || p.grantsOf(pod).slotsAt(providerOf(node)) > 0 {
		return framework.Queue, nil
	}
	return framework.QueueSkip, nil
}

// PostFilter adds the pod to the controller's queue, in memory.
func (p *Plugin) PostFilter(_ context.Context, state framework.CycleState, pod *corev1.Pod, _ framework.NodeToStatusReader) (*framework.PostFilterResult, *framework.Status) {
	if !optedIn(p.namespaces, pod.Namespace) {
		return nil, framework.NewStatus(framework.Unschedulable)
	}
	if p.victimsTerminating(pod) {
		return nil, framework.NewStatus(framework.Unschedulable, errPreempting)
	}
	p.queue.addUnschedulable(pod)
	if !reflect.DeepEqual(p.grantsOf(pod), grantsIn(state)) {
		// The grants changed during the cycle, when this pod was not known to be
		// pending and so was not activated.
		p.queue.addActivate(pod)
	}
	if ok, reason := demand.Admissible(pod); !ok {
		if reason == "" {
			return nil, framework.NewStatus(framework.Unschedulable)
		}
		return nil, framework.NewStatus(framework.Unschedulable, fmt.Sprintf(errCannotOverflow, reason))
	}
	if !p.synced() {
		return nil, framework.NewStatus(framework.Unschedulable, errNotSynced)
	}
	if key, ok := p.keys.get(pod); ok && p.grants.refused(key.key) {
		return nil, framework.NewStatus(framework.Unschedulable, errRefused)
	}
	code := framework.Unschedulable
	if p.args.Overflow == BeforePreemption {
		// No PostFilter plugin after this one runs: no preemption while the request
		// is undecided.
		code = framework.UnschedulableAndUnresolvable
	}
	return nil, framework.NewStatus(code, errWaiting)
}

func optedIn(namespaces corelisters.NamespaceLister, name string) bool {
	namespace, err := namespaces.Get(name)
	return err == nil && namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled
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
	for _, info := range node.GetPods() {
		if other := info.GetPod(); other.DeletionTimestamp != nil && corev1helpers.PodPriority(other) < corev1helpers.PodPriority(pod) {
			return true
		}
	}
	return false
}

// Reserve records that a node was found for the pod.
func (p *Plugin) Reserve(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) *framework.Status {
	p.assumed.Store(pod.UID, nil)
	return nil
}

// Unreserve reverts Reserve.
func (p *Plugin) Unreserve(_ context.Context, _ framework.CycleState, pod *corev1.Pod, _ string) {
	p.assumed.Delete(pod.UID)
}

// PreBindPreFlight skips PreBind for the nodes of this cluster.
func (p *Plugin) PreBindPreFlight(_ context.Context, _ framework.CycleState, _ *corev1.Pod, nodeName string) *framework.Status {
	if node, err := p.nodes.Get(nodeName); err == nil && providerOf(node) == "" {
		return framework.NewStatus(framework.Skip)
	}
	return nil
}

// PreBind labels the pod with the hold that it uses and, unless it has a deletion
// cost already, makes it the first to be deleted when its owner scales down.
func (p *Plugin) PreBind(ctx context.Context, state framework.CycleState, pod *corev1.Pod, nodeName string) *framework.Status {
	node, err := p.nodes.Get(nodeName)
	if err != nil {
		return framework.AsStatus(fmt.Errorf("getting node %s: %w", nodeName, err))
	}
	provider := providerOf(node)
	if provider == "" {
		return nil
	}
	g := grantsIn(state)
	if g == nil || g.holds[provider] == "" {
		return framework.AsStatus(fmt.Errorf("pod has no hold at provider %s", provider))
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

// providerOf returns the cluster whose capacity a node provides; empty for a node
// of this cluster.
func providerOf(node *corev1.Node) string {
	if node == nil {
		return ""
	}
	return node.Labels[broker.LabelProvider]
}
