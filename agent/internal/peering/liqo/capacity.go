package liqo

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// settling is how long a virtual node's name is left alone after its end: for a
// moment Liqo still repeats that end, whoever bears the name by then.
const settling = 3 * time.Second

// floor is the least that a slice carries: without cpu and memory Liqo's node is
// not Ready.
func floor() corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: *resource.NewMilliQuantity(1, resource.DecimalSI), corev1.ResourceMemory: *resource.NewQuantity(1<<20, resource.BinarySI)}
}

// target is the exact allocatable for a capacity, with an explicit zero for
// every resource in known: Liqo's node never drops one.
func target(capacity peering.Capacity, known ...corev1.ResourceList) corev1.ResourceList {
	list := floor()
	for name, amount := range capacity.Resources {
		if least, ok := list[name]; !ok || amount.Cmp(least) > 0 {
			list[name] = amount.DeepCopy()
		}
	}
	list[corev1.ResourcePods] = *resource.NewQuantity(int64(capacity.Pods), resource.DecimalSI)
	if capacity.Parked() {
		list[corev1.ResourcePods] = resource.Quantity{Format: resource.DecimalSI}
	}
	for _, other := range known {
		for name := range other {
			if _, ok := list[name]; !ok {
				list[name] = resource.Quantity{Format: resource.DecimalSI}
			}
		}
	}
	return list
}

// atMost is list with nothing above limit, where absent is zero.
func atMost(list, limit corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, amount := range list {
		if most := limit[name]; most.Cmp(amount) < 0 {
			amount = most
		}
		out[name] = amount.DeepCopy()
	}
	return out
}

// same reports whether two lists are of equal amounts, where absent is zero.
func same(a, b corev1.ResourceList) bool {
	for name, amount := range a {
		if other := b[name]; amount.Cmp(other) != 0 {
			return false
		}
	}
	for name, amount := range b {
		if _, ok := a[name]; !ok && !amount.IsZero() {
			return false
		}
	}
	return true
}

// answerTo begins the message of a Provider's answer to a request. An answer
// travels back by itself and may be to an older request; by this it is told.
func answerTo(requested corev1.ResourceList) string {
	hash := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(requested)) {
		if amount := requested[name]; !amount.IsZero() {
			fmt.Fprintf(hash, "%s=%d;", name, amount.MilliValue())
		}
	}
	return fmt.Sprintf("request %x: ", hash.Sum(nil)[:8])
}

func conditionOf(slice *authv1beta1.ResourceSlice, conditionType authv1beta1.ResourceSliceConditionType) authv1beta1.ResourceSliceCondition {
	for _, condition := range slice.Status.Conditions {
		if condition.Type == conditionType {
			return condition
		}
	}
	return authv1beta1.ResourceSliceCondition{}
}

// granted is what the provider answered to the request as it stands now.
func granted(slice *authv1beta1.ResourceSlice) (resources corev1.ResourceList, message string, answered bool) {
	message, answered = strings.CutPrefix(conditionOf(slice, authv1beta1.ResourceSliceConditionTypeResources).Message, answerTo(slice.Spec.Resources))
	return slice.Status.Resources, message, answered
}

// EnsureCapacity makes the provider's virtual node carry exactly capacity.
func (d *Driver) EnsureCapacity(ctx context.Context, peer peering.Peer, capacity peering.Capacity) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := validateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	d.mu.Lock()
	d.wanted[provider] = slices.Clone(capacity.Namespaces)
	d.mu.Unlock()
	if peered, err := d.EnsurePeering(ctx, peer); err != nil || !peered.Done {
		return peered, err
	}

	name, namespace := sliceName(provider), tenantNamespace(provider)
	slice, sliceFound, err := get(ctx, d.Client, namespace, name, &authv1beta1.ResourceSlice{})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading slice %s: %w", name, err)
	}
	virtualNode, virtualNodeFound, err := get(ctx, d.Client, namespace, name, &offloadingv1beta1.VirtualNode{})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading virtual node %s: %w", name, err)
	}
	node, nodeFound, err := get(ctx, d.Client, "", name, &corev1.Node{})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading node %s: %w", name, err)
	}
	want := target(capacity, slice.Spec.Resources, virtualNode.Spec.ResourceQuota.Hard, node.Status.Allocatable)

	// What can be asked for at once is asked for at once.
	if !sliceFound {
		if err := d.createSlice(ctx, provider, want); err != nil {
			return peering.Progress{}, err
		}
	} else if progress, err := d.resizeSlice(ctx, slice, want); err != nil || progress != nil {
		return ptr.Deref(progress, peering.Progress{}), err
	}
	if err := d.createOffloadings(ctx, capacity.Namespaces); err != nil {
		return peering.Progress{}, err
	}
	if err := d.pruneOffloadings(ctx); err != nil {
		return peering.Progress{}, err
	}
	if nodeFound && node.Spec.Unschedulable != capacity.Parked() && node.Labels[broker.LabelProvider] == provider {
		before := node.DeepCopy()
		node.Spec.Unschedulable = capacity.Parked()
		if err := d.Client.Patch(ctx, node, client.MergeFrom(before)); err != nil {
			return peering.Progress{}, fmt.Errorf("cordoning node %s: %w", name, err)
		}
	}
	if !sliceFound {
		return peering.Waiting(peering.ReasonGrantPending, "waiting for "+provider+" to answer"), nil
	}

	resources, answer, answered := granted(slice)
	switch {
	case conditionOf(slice, authv1beta1.ResourceSliceConditionTypeAuthentication).Status == authv1beta1.ResourceSliceConditionDenied:
		return peering.Waiting("AuthenticationDenied", provider+" did not sign the slice's certificate; its Liqo logs why"), nil
	case !virtualNodeFound && !answered:
		return peering.Waiting(peering.ReasonGrantPending, "waiting for "+provider+" to answer"), nil
	case !virtualNodeFound:
		return d.createVirtualNode(ctx, provider, node, nodeFound, atMost(want, resources))
	case !isOurs(virtualNode):
		return peering.Waiting(reasonPeeredByOthers, "VirtualNode "+name+" is not Spillway's"), nil
	case !virtualNode.DeletionTimestamp.IsZero() || virtualNode.Labels[labelWebhookSkip] == "true":
		// Its end has begun, and is brought to an end before the next one begins.
		left, err := d.remains(ctx, provider)
		if err == nil && left.virtualNode != nil {
			err = d.endVirtualNode(ctx, provider, left, false)
		}
		return peering.Waiting(reasonTerminating, "the virtual node of an earlier peering is still going"), err
	}
	// Never more than is granted; and more than now only by an answer to the
	// present request.
	limit := virtualNode.Spec.ResourceQuota.Hard
	if answered {
		limit = resources
	}
	hard := atMost(want, limit)
	if !same(hard, virtualNode.Spec.ResourceQuota.Hard) {
		before := virtualNode.DeepCopy()
		virtualNode.Spec.ResourceQuota.Hard = hard
		if err := d.Client.Patch(ctx, virtualNode, client.MergeFrom(before)); err != nil {
			return peering.Progress{}, fmt.Errorf("resizing virtual node %s: %w", name, err)
		}
	}
	switch {
	case !answered:
		return peering.Waiting(peering.ReasonGrantPending, "waiting for "+provider+" to answer"), nil
	case !same(hard, want):
		return peering.Waiting("GrantTooSmall", provider+" grants less than its hold: "+answer), nil
	}
	if waiting := nodeShows(node, nodeFound, provider, want, capacity.Parked()); waiting != "" {
		return peering.Waiting("NodePending", "node "+name+" "+waiting), nil
	}
	if waiting, err := d.unmapped(ctx, provider, capacity.Namespaces); err != nil || waiting != nil {
		return ptr.Deref(waiting, peering.Progress{}), err
	}
	return peering.Done("Ready", fmt.Sprintf("node %s carries %s", name, broker.FromList(capacity.Resources))), nil
}

func (d *Driver) createSlice(ctx context.Context, provider string, want corev1.ResourceList) error {
	slice := &authv1beta1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: tenantNamespace(provider), Name: sliceName(provider),
			Labels: ours(provider, map[string]string{
				consts.ReplicationRequestedLabel:   consts.ReplicationRequestedLabelValue,
				consts.ReplicationDestinationLabel: provider,
			}),
		},
		Spec: authv1beta1.ResourceSliceSpec{
			Class:             SliceClass,
			ProviderClusterID: ptr.To(liqov1beta1.ClusterID(provider)),
			Resources:         want,
		},
	}
	if err := d.Client.Create(ctx, slice); err != nil {
		return fmt.Errorf("creating slice %s: %w", slice.Name, err)
	}
	return nil
}

// resizeSlice asks for another amount. The progress is nil when it is asked.
func (d *Driver) resizeSlice(ctx context.Context, slice *authv1beta1.ResourceSlice, want corev1.ResourceList) (*peering.Progress, error) {
	switch {
	case !isOurs(slice) || slice.Spec.Class != SliceClass:
		return ptr.To(peering.Waiting(reasonPeeredByOthers, "ResourceSlice "+slice.Name+" is not Spillway's")), nil
	case !slice.DeletionTimestamp.IsZero():
		return ptr.To(peering.Waiting(reasonTerminating, "the slice of an earlier peering is still going")), nil
	case same(slice.Spec.Resources, want):
		return nil, nil
	}
	before := slice.DeepCopy()
	slice.Spec.Resources = want
	if err := d.Client.Patch(ctx, slice, client.MergeFrom(before)); err != nil {
		return nil, fmt.Errorf("resizing slice %s: %w", slice.Name, err)
	}
	return nil, nil
}

// createVirtualNode makes the node, once Liqo holds credentials for it. Labels
// and taints are there from the node's first moment.
func (d *Driver) createVirtualNode(ctx context.Context, provider string, stale *corev1.Node, nodeFound bool, hard corev1.ResourceList) (peering.Progress, error) {
	name, namespace := sliceName(provider), tenantNamespace(provider)
	if nodeFound {
		// Liqo refuses a VirtualNode whose node exists.
		if stale.Labels[broker.LabelProvider] != provider {
			return peering.Waiting("NodeNameTaken", "node "+name+" exists and is not Spillway's: rename or remove it"), nil
		}
		if err := remove(ctx, d.Client, stale); err != nil {
			return peering.Progress{}, fmt.Errorf("deleting the left-over node %s: %w", name, err)
		}
		return peering.Waiting(reasonTerminating, "the node of an earlier peering is still going"), nil
	}
	d.mu.Lock()
	quiet := d.Clock.Now().Sub(d.ended[provider])
	d.mu.Unlock()
	if quiet < settling {
		return peering.Waiting(reasonTerminating, "the virtual node of an earlier peering has only just gone"), nil
	}
	identity, found, err := get(ctx, d.Client, namespace, sliceIdentity(provider), &authv1beta1.Identity{})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading the slice's identity: %w", err)
	}
	if !found || identity.Status.KubeconfigSecretRef == nil {
		return peering.Waiting("CredentialsPending", "waiting for "+provider+" to sign the slice's certificate"), nil
	}
	virtualNode := &offloadingv1beta1.VirtualNode{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name,
			Labels: ours(provider, map[string]string{consts.ResourceSliceNameLabelKey: name}),
		},
		Spec: offloadingv1beta1.VirtualNodeSpec{
			ClusterID:           liqov1beta1.ClusterID(provider),
			CreateNode:          ptr.To(true),
			DisableNetworkCheck: ptr.To(true),
			KubeconfigSecretRef: identity.Status.KubeconfigSecretRef,
			ResourceQuota:       corev1.ResourceQuotaSpec{Hard: hard},
			Labels: map[string]string{
				consts.RemoteClusterID: provider,
				broker.LabelProvider:   provider,
				broker.LabelNodeType:   broker.NodeTypeVirtual,
			},
			Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: provider, Effect: corev1.TaintEffectNoSchedule}},
		},
	}
	if err := d.Client.Create(ctx, virtualNode); err != nil {
		return peering.Progress{}, fmt.Errorf("creating virtual node %s: %w", name, err)
	}
	return peering.Waiting("NodePending", "waiting for node "+name+" to come up"), nil
}

// nodeShows says what a node lacks of being ready with exactly want, "" where
// nothing.
func nodeShows(node *corev1.Node, found bool, provider string, want corev1.ResourceList, parked bool) string {
	if !found {
		return "is not there yet"
	}
	marked := slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool {
		return taint.Key == broker.TaintOverflow && taint.Value == provider && taint.Effect == corev1.TaintEffectNoSchedule
	})
	switch {
	case !node.DeletionTimestamp.IsZero():
		return "is going"
	case !marked || node.Labels[broker.LabelProvider] != provider || node.Labels[broker.LabelNodeType] != broker.NodeTypeVirtual:
		return "does not carry Spillway's taint and labels yet"
	case !isReady(node):
		return "is not Ready yet"
	case !same(node.Status.Allocatable, want):
		return "does not show the capacity yet"
	case parked:
		return ""
	}
	for _, taint := range node.Spec.Taints {
		if strings.HasPrefix(taint.Key, "node.kubernetes.io/") {
			return "still has taint " + taint.Key
		}
	}
	return ""
}

func isReady(node *corev1.Node) bool {
	return slices.ContainsFunc(node.Status.Conditions, func(condition corev1.NodeCondition) bool {
		return condition.Type == corev1.NodeReady && condition.Status == corev1.ConditionTrue
	})
}
