package consumer

import (
	"context"
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
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
)

// recreateDelay is how long a virtual node's name is not reused after its deletion:
// Liqo repeats parts of the deletion for a moment, on whatever has the name then.
const recreateDelay = 3 * time.Second

// noHostname is the value of label kubernetes.io/hostname by which a virtual node loses it: it
// is no domain in which the pods of this cluster spread. Liqo's kubelet sets the label, and
// removes only what the VirtualNode has had: once the Node shows this value, the VirtualNode's
// label is removed, and with it the Node's.
const noHostname = "none"

// nodeLabels are the labels of a provider's virtual node whatever its capacity.
func nodeLabels(provider string) map[string]string {
	return map[string]string{
		consts.RemoteClusterID:           provider,
		broker.LabelProvider:             provider,
		broker.LabelNodeType:             broker.NodeTypeVirtual,
		corev1.LabelNodeExcludeBalancers: "true",
	}
}

// allocatableFor is the exact allocatable for a capacity, at least that of a parked
// node, because without cpu and memory Liqo's node is not Ready. Resources in known
// that it does not have are explicitly zero, because Liqo's node never drops one.
func allocatableFor(wanted peering.Capacity, known ...corev1.ResourceList) corev1.ResourceList {
	list := capacity.Larger(session.ParkedResources(), wanted.Resources)
	list[corev1.ResourcePods] = *resource.NewQuantity(int64(wanted.Pods), resource.DecimalSI)
	if wanted.Parked() {
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

// granted is the provider's answer to a slice's present request, if there is one.
func granted(slice *authv1beta1.ResourceSlice) (resources corev1.ResourceList, message string, answered bool) {
	message, answered = strings.CutPrefix(liqo.ConditionOf(slice, authv1beta1.ResourceSliceConditionTypeResources).Message, liqo.AnswerPrefix(slice.Spec.Resources))
	return slice.Status.Resources, message, answered
}

// capacityObjects are the objects of a provider's virtual node, nil if they do not
// exist.
type capacityObjects struct {
	slice       *authv1beta1.ResourceSlice
	virtualNode *offloadingv1beta1.VirtualNode
	node        *corev1.Node
}

func (d *Driver) readCapacity(ctx context.Context, provider string) (objects capacityObjects, err error) {
	name, namespace := liqo.SliceName(provider), liqo.TenantNamespace(provider)
	if objects.slice, err = session.Find(ctx, d.Client, namespace, name, &authv1beta1.ResourceSlice{}); err != nil {
		return objects, fmt.Errorf("reading resource slice %s: %w", name, err)
	}
	if objects.virtualNode, err = session.Find(ctx, d.Client, namespace, name, &offloadingv1beta1.VirtualNode{}); err != nil {
		return objects, fmt.Errorf("reading virtual node %s: %w", name, err)
	}
	objects.node, err = session.Node(ctx, d.Client, provider)
	return objects, err
}

// allocatableFor is that of a capacity, with a zero for every other resource that
// the objects have.
func (o capacityObjects) allocatableFor(wanted peering.Capacity) corev1.ResourceList {
	var known []corev1.ResourceList
	if o.slice != nil {
		known = append(known, o.slice.Spec.Resources)
	}
	if o.virtualNode != nil {
		known = append(known, o.virtualNode.Spec.ResourceQuota.Hard)
	}
	if o.node != nil {
		known = append(known, o.node.Status.Allocatable)
	}
	return allocatableFor(wanted, known...)
}

// EnsureCapacity makes the provider's virtual node provide exactly the wanted
// capacity. Requests to Liqo and to the provider that do not depend on each other
// are made in the same call.
func (d *Driver) EnsureCapacity(ctx context.Context, peer peering.Peer, wanted peering.Capacity) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := session.ValidateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	d.mu.Lock()
	d.wanted[provider] = slices.Clone(wanted.Namespaces)
	d.mu.Unlock()
	if peered, err := d.EnsurePeering(ctx, peer); err != nil || !peered.Done {
		return peered, err
	}
	objects, err := d.readCapacity(ctx, provider)
	if err != nil {
		return peering.Progress{}, err
	}
	want := objects.allocatableFor(wanted)
	if waiting, err := d.ensureSlice(ctx, provider, objects.slice, want); err != nil || waiting != nil {
		return ptr.Deref(waiting, peering.Progress{}), err
	}
	mapped, err := d.mapNamespaces(ctx, provider, objects.virtualNode, wanted.Namespaces)
	if err != nil {
		return peering.Progress{}, err
	}
	if err := d.pruneOffloadings(ctx); err != nil {
		return peering.Progress{}, err
	}
	labels := mapped.labels
	maps.Copy(labels, wanted.Labels)
	if waiting, err := d.ensureVirtualNode(ctx, provider, objects, want, labels); err != nil || waiting != nil {
		return ptr.Deref(waiting, peering.Progress{}), err
	}
	if pending := session.NodePending(objects.node, provider, want); pending != "" {
		return peering.Waiting("NodePending", "node "+liqo.SliceName(provider)+" "+pending), nil
	}
	for key, value := range wanted.Labels {
		if objects.node.Labels[key] != value {
			return peering.Waiting("NodePending", "node "+liqo.SliceName(provider)+" does not have label "+key+" yet"), nil
		}
	}
	ready := peering.Done("Ready", fmt.Sprintf("node %s provides %s", liqo.SliceName(provider), broker.FromList(wanted.Resources)))
	ready.Namespaces = mapped.unmapped
	return ready, nil
}

// ensureSlice requests resources from the provider. The progress is nil if the
// request is made.
func (d *Driver) ensureSlice(ctx context.Context, provider string, slice *authv1beta1.ResourceSlice, want corev1.ResourceList) (*peering.Progress, error) {
	switch {
	case slice == nil:
		return nil, d.createSlice(ctx, provider, want)
	case !session.IsManaged(slice) || slice.Spec.Class != liqo.SliceClass:
		return ptr.To(peering.Waiting(liqo.ReasonConflict, "ResourceSlice "+slice.Name+" already exists and is not managed by Spillway; rename or delete it")), nil
	case !slice.DeletionTimestamp.IsZero():
		return ptr.To(peering.Waiting(session.ReasonTerminating, "the resource slice of the previous peering is still being deleted")), nil
	case session.Equal(slice.Spec.Resources, want):
		return nil, nil
	}
	before := slice.DeepCopy()
	slice.Spec.Resources = want
	if err := d.Client.Patch(ctx, slice, client.MergeFrom(before)); err != nil {
		return nil, fmt.Errorf("resizing resource slice %s: %w", slice.Name, err)
	}
	return nil, nil
}

func (d *Driver) createSlice(ctx context.Context, provider string, want corev1.ResourceList) error {
	slice := &authv1beta1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: liqo.TenantNamespace(provider), Name: liqo.SliceName(provider),
			Labels: liqo.ManagedLabels(provider, map[string]string{
				consts.ReplicationRequestedLabel:   consts.ReplicationRequestedLabelValue,
				consts.ReplicationDestinationLabel: provider,
			}),
		},
		Spec: authv1beta1.ResourceSliceSpec{
			Class:             liqo.SliceClass,
			ProviderClusterID: ptr.To(liqov1beta1.ClusterID(provider)),
			Resources:         want,
		},
	}
	if err := d.Client.Create(ctx, slice); err != nil {
		return fmt.Errorf("creating resource slice %s: %w", slice.Name, err)
	}
	return nil
}

// ensureVirtualNode creates or resizes the VirtualNode within what the provider
// granted. The progress is nil if it has the wanted size.
func (d *Driver) ensureVirtualNode(ctx context.Context, provider string, objects capacityObjects, want corev1.ResourceList, labels map[string]string) (*peering.Progress, error) {
	grantPending := ptr.To(peering.Waiting(peering.ReasonGrantPending, "waiting for provider "+provider+" to answer the resource slice"))
	if objects.slice == nil {
		return grantPending, nil
	}
	virtualNode := objects.virtualNode
	limit, answer, answered := granted(objects.slice)
	switch {
	case liqo.ConditionOf(objects.slice, authv1beta1.ResourceSliceConditionTypeAuthentication).Status == authv1beta1.ResourceSliceConditionDenied:
		return ptr.To(peering.Waiting("AuthenticationDenied", "Liqo of provider "+provider+" did not sign the resource slice's certificate; see its logs")), nil
	case virtualNode == nil && !answered:
		return grantPending, nil
	case virtualNode == nil:
		waiting, err := d.createVirtualNode(ctx, provider, objects.node, liqo.AtMost(want, limit), labels)
		return &waiting, err
	case !session.IsManaged(virtualNode):
		return ptr.To(peering.Waiting(liqo.ReasonConflict, "VirtualNode "+virtualNode.Name+" already exists and is not managed by Spillway; rename or delete it")), nil
	case !virtualNode.DeletionTimestamp.IsZero() || virtualNode.Labels[labelWebhookSkip] == "true":
		// A teardown that has begun is completed before the node is made again.
		left, err := d.remaining(ctx, provider)
		if err == nil && left.virtualNode != nil {
			err = d.removeVirtualNode(ctx, provider, left, false)
		}
		return ptr.To(peering.Waiting(session.ReasonTerminating, "the virtual node of the previous peering is still being removed")), err
	case !answered:
		// It may shrink, but grows only by an answer to the present request.
		limit = virtualNode.Spec.ResourceQuota.Hard
	}
	hard := liqo.AtMost(want, limit)
	before := virtualNode.DeepCopy()
	if virtualNode.Spec.Labels == nil {
		virtualNode.Spec.Labels = map[string]string{}
	}
	if err := d.removeLabels(ctx, virtualNode, labels); err != nil {
		return nil, err
	}
	maps.Copy(virtualNode.Spec.Labels, labels)
	if node := objects.node; node != nil && !slices.Contains([]string{"", noHostname}, node.Labels[corev1.LabelHostname]) {
		virtualNode.Spec.Labels[corev1.LabelHostname] = noHostname
	}
	withoutAddresses, err := d.ProviderNetworks.none(ctx, provider)
	if err != nil {
		return nil, err
	}
	if setAddresses(virtualNode, withoutAddresses) || !session.Equal(hard, virtualNode.Spec.ResourceQuota.Hard) || !maps.Equal(before.Spec.Labels, virtualNode.Spec.Labels) {
		virtualNode.Spec.ResourceQuota.Hard = hard
		if err := d.Client.Patch(ctx, virtualNode, client.MergeFrom(before)); err != nil {
			return nil, fmt.Errorf("resizing virtual node %s: %w", virtualNode.Name, err)
		}
	}
	switch {
	case !answered:
		return grantPending, nil
	case !session.Equal(hard, want):
		return ptr.To(peering.Waiting("GrantInsufficient", "provider "+provider+" grants less than the holds: "+answer)), nil
	}
	return nil, nil
}

// createVirtualNode creates the VirtualNode once Liqo has credentials for it. The
// Node has its labels and taints from the beginning.
func (d *Driver) createVirtualNode(ctx context.Context, provider string, stale *corev1.Node, hard corev1.ResourceList, labels map[string]string) (peering.Progress, error) {
	name, namespace := liqo.SliceName(provider), liqo.TenantNamespace(provider)
	if stale != nil {
		// Liqo rejects a VirtualNode whose Node exists.
		if stale.Labels[broker.LabelProvider] != provider {
			return session.NodeNameTaken(provider), nil
		}
		if err := session.Delete(ctx, d.Client, stale); err != nil {
			return peering.Progress{}, fmt.Errorf("deleting stale node %s: %w", name, err)
		}
		return peering.Waiting(session.ReasonTerminating, "the node of the previous peering is still being deleted"), nil
	}
	d.mu.Lock()
	sinceEnd := d.Clock.Now().Sub(d.ended[provider])
	d.mu.Unlock()
	if sinceEnd < recreateDelay {
		return peering.Waiting(session.ReasonTerminating, "the virtual node of the previous peering was deleted a moment ago"), nil
	}
	identity, err := session.Find(ctx, d.Client, namespace, sliceIdentity(provider), &authv1beta1.Identity{})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading the resource slice's identity: %w", err)
	}
	if identity == nil || identity.Status.KubeconfigSecretRef == nil {
		return peering.Waiting("CredentialsPending", "waiting for provider "+provider+" to sign the resource slice's certificate"), nil
	}
	if waiting, err := d.ensureKubeletOptions(ctx, provider); err != nil || waiting != nil {
		return ptr.Deref(waiting, peering.Progress{}), err
	}
	virtualNode := &offloadingv1beta1.VirtualNode{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: name,
			Labels: liqo.ManagedLabels(provider, map[string]string{consts.ResourceSliceNameLabelKey: name}),
		},
		Spec: offloadingv1beta1.VirtualNodeSpec{
			ClusterID:            liqov1beta1.ClusterID(provider),
			CreateNode:           ptr.To(true),
			DisableNetworkCheck:  ptr.To(true),
			KubeconfigSecretRef:  identity.Status.KubeconfigSecretRef,
			ResourceQuota:        corev1.ResourceQuotaSpec{Hard: hard},
			VkOptionsTemplateRef: &corev1.ObjectReference{Namespace: namespace, Name: kubeletOptions},
			// Liqo drops the node selection of a pod, but adds this one to every guest.
			OffloadingPatch: &offloadingv1beta1.OffloadingPatch{
				Affinity: &offloadingv1beta1.Affinity{NodeAffinity: &corev1.NodeAffinity{
					RequiredDuringSchedulingIgnoredDuringExecution: guest.NodeAffinity(nil),
				}},
				AnnotationsNotReflected: []string{guest.AnnotationEvict},
			},
			Labels: nodeLabels(provider),
			Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: provider, Effect: corev1.TaintEffectNoSchedule}},
		},
	}
	for key, value := range labels {
		if _, own := virtualNode.Spec.Labels[key]; !own {
			virtualNode.Spec.Labels[key] = value
		}
	}
	virtualNode.Spec.Labels[corev1.LabelHostname] = noHostname
	if err := d.Client.Create(ctx, virtualNode); err != nil {
		return peering.Progress{}, fmt.Errorf("creating virtual node %s: %w", name, err)
	}
	return peering.Waiting("NodePending", "waiting for node "+name+" to become Ready"), nil
}
