package consumer

import (
	"context"
	"errors"
	"fmt"
	"slices"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// stage of a teardown: what is removed next. The order leaves nothing behind: pods
// leave while the virtual kubelet and its credentials still work, and the
// credentials stay until crd-replicator has removed every copy at the provider.
//
// Pods and kubelet are ended here before the VirtualNode is deleted, although Liqo
// would do it: Liqo drains one VirtualNode after another and waits for each pod
// without a deadline; while a kubelet is still ending it retries with a backoff of
// up to a quarter of an hour. Retries that are left over then drain and delete the
// node of the next VirtualNode of the same name.
type stage string

const (
	stagePods           stage = "Pod"
	stageKubelet        stage = "Kubelet"
	stageVirtualNode    stage = "VirtualNode"
	stageNode           stage = "Node"
	stageSlice          stage = "ResourceSlice"
	stageMaps           stage = "NamespaceMap"
	stageOffloadings    stage = "NamespaceOffloading"
	stageIdentity       stage = "Identity"
	stageProvider       stage = "Provider"
	stageNamespace      stage = "Namespace"
	stageForeignCluster stage = "ForeignCluster"
	stageDone           stage = ""
)

// remaining is what exists of a peering in which this cluster is the consumer.
type remaining struct {
	virtualNode *offloadingv1beta1.VirtualNode
	// pods on the node except those of DaemonSets; kubelets are the virtual
	// kubelet's own pods.
	pods, kubelets []corev1.Pod
	node           *corev1.Node
	slice          *authv1beta1.ResourceSlice
	maps           []offloadingv1beta1.NamespaceMap
	// offloadings that Spillway made, if this is the last peering; keepOffloadings if
	// they are not waited for any longer.
	offloadings     []offloadingv1beta1.NamespaceOffloading
	keepOffloadings bool
	// credentials are the identities, the Secrets made of them, and Liqo's Renews.
	credentials []client.Object
	// namespace is nil also if Spillway did not make it.
	namespace      *corev1.Namespace
	foreignCluster *liqov1beta1.ForeignCluster
	// session of the peering, 0 if none is recorded.
	session int64
	// released is whether the provider confirmed that nothing is left there or is
	// not waited for any longer; in the latter case it is unconfirmed.
	released, unconfirmed bool
	// shared is whether something else uses the namespace and the ForeignCluster.
	shared bool
}

// next is the first stage with anything left.
func (r remaining) next() stage {
	running := r.virtualNode != nil && r.virtualNode.DeletionTimestamp.IsZero()
	switch {
	case running && len(r.pods) > 0:
		return stagePods
	case running && (len(r.kubelets) > 0 || !isScaledDown(r.virtualNode)):
		return stageKubelet
	case r.virtualNode != nil:
		return stageVirtualNode
	case r.node != nil:
		return stageNode
	case r.slice != nil:
		return stageSlice
	case len(r.maps) > 0:
		return stageMaps
	case len(r.offloadings) > 0 && !r.keepOffloadings:
		return stageOffloadings
	case len(r.credentials) > 0:
		return stageIdentity
	case r.session != 0 && !r.released:
		return stageProvider
	case r.namespace != nil && (!r.shared || r.session != 0):
		return stageNamespace
	case r.foreignCluster != nil && !r.shared:
		return stageForeignCluster
	}
	return stageDone
}

// Teardown removes the virtual node, the peering and everything made for them.
func (d *Driver) Teardown(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := session.ValidateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	d.mu.Lock()
	delete(d.wanted, provider)
	d.mu.Unlock()
	left, err := d.remaining(ctx, provider)
	if err != nil {
		return peering.Progress{}, fmt.Errorf("reading what is left of the peering with %s: %w", provider, err)
	}
	stage := left.next()
	if stage == stageDone {
		d.handshake.Reset(provider)
		return peering.Done("Removed", "the peering with "+provider+" is removed"), nil
	}
	waitingFor, err := d.removeStage(ctx, peer, stage, left)
	if err != nil {
		return peering.Progress{}, fmt.Errorf("tearing down the peering with %s: %s: %w", provider, stage, err)
	}
	return peering.Waiting(string(stage)+"Terminating", "waiting for "+waitingFor), nil
}

// removeStage removes what is left of one stage and describes what it waits for.
func (d *Driver) removeStage(ctx context.Context, peer peering.Peer, stage stage, left remaining) (waitingFor string, err error) {
	provider := peer.ClusterID
	waited := d.handshake.Waited(provider, string(stage))
	stuck := waited > d.StuckAfter
	switch stage {
	case stagePods, stageKubelet, stageVirtualNode:
		return "node " + left.virtualNode.Name + " to be drained and removed", d.removeVirtualNode(ctx, provider, left, waited > d.UnreachableAfter)
	case stageNode:
		return "node " + left.node.Name + " to be deleted", session.Delete(ctx, d.Client, left.node)
	case stageSlice:
		return "Liqo to delete the resource slice at provider " + provider, d.deleteReplicated(ctx, left.slice, stuck)
	case stageMaps:
		for i := range left.maps {
			err = errors.Join(err, d.deleteReplicated(ctx, &left.maps[i], stuck))
		}
		return "Liqo to delete the namespaces at provider " + provider, err
	case stageOffloadings:
		err = d.unmark(ctx, func(string) bool { return false })
		for i := range left.offloadings {
			err = errors.Join(err, session.Delete(ctx, d.Client, &left.offloadings[i]))
		}
		return "Liqo to unmap the namespaces", err
	case stageIdentity:
		for _, object := range left.credentials {
			err = errors.Join(err, d.deleteReplicated(ctx, object, stuck))
		}
		return "Liqo to release the credentials for provider " + provider, err
	case stageProvider:
		if d.handshake.Exchange(provider).Due(session.Teardown, d.Clock.Now(), d.ResendAfter) {
			err = d.handshake.Send(ctx, peer, &liqo.Message{Header: session.Header{Kind: session.Teardown, Session: left.session}})
		}
		return "provider " + provider + " to remove its part of the peering", err
	case stageNamespace:
		if left.keepOffloadings {
			for i := range left.offloadings {
				d.Log.Info("A namespace is still offloaded; the next peering unmaps it", "namespace", left.offloadings[i].Namespace)
			}
		}
		if left.unconfirmed {
			d.Log.Info("Provider did not confirm the teardown; its agent cleans up when it is reachable again", "provider", provider)
		}
		if left.shared {
			err = liqo.SetSession(ctx, d.Client, left.namespace, liqo.AnnotationSession, 0)
		} else {
			err = session.Delete(ctx, d.Client, left.namespace)
		}
		return "namespace " + left.namespace.Name + " to be deleted", err
	default: // stageForeignCluster
		return "ForeignCluster " + left.foreignCluster.Name + " to be deleted", session.Delete(ctx, d.Client, left.foreignCluster)
	}
}

// remaining reads what is left of a peering.
func (d *Driver) remaining(ctx context.Context, provider string) (r remaining, err error) {
	namespace, err := session.Find(ctx, d.Client, "", liqo.TenantNamespace(provider), &corev1.Namespace{})
	if err != nil {
		return r, err
	}
	if namespace != nil && !session.IsManaged(namespace) {
		return r, nil // a peering made manually
	}
	node, err := session.Node(ctx, d.Client, provider)
	if err != nil {
		return r, err
	}
	if node != nil && node.Labels[broker.LabelProvider] == provider {
		r.node = node
	}
	if r.foreignCluster, r.shared, err = d.ForeignCluster(ctx, provider); err != nil || namespace == nil {
		return r, err
	}
	r.namespace, r.session = namespace, session.Number(namespace, liqo.AnnotationSession)
	r.shared = r.shared || session.Number(namespace, liqo.AnnotationProviderSession) != 0
	if !namespace.DeletionTimestamp.IsZero() {
		// It is deleted after everything else.
		r.released, r.shared = true, false
		return r, nil
	}
	if err := d.remainingIn(ctx, provider, &r); err != nil {
		return r, err
	}
	r.keepOffloadings = len(r.offloadings) > 0 && d.handshake.Waiting(provider, string(stageOffloadings)) > d.UnreachableAfter
	confirmed := d.handshake.Exchange(provider).Removed(r.session)
	r.unconfirmed = !confirmed && d.handshake.Waiting(provider, string(stageProvider)) > d.UnreachableAfter
	r.released = confirmed || r.unconfirmed
	return r, nil
}

// remainingIn reads what is left in a provider's tenant namespace and on its node.
func (d *Driver) remainingIn(ctx context.Context, provider string, r *remaining) (err error) {
	namespace, name := liqo.TenantNamespace(provider), liqo.SliceName(provider)
	if r.virtualNode, err = session.Find(ctx, d.Client, namespace, name, &offloadingv1beta1.VirtualNode{}); err != nil {
		return err
	}
	if r.virtualNode != nil {
		if r.pods, r.kubelets, err = d.podsOf(ctx, r.virtualNode); err != nil {
			return err
		}
	}
	if r.slice, err = session.Find(ctx, d.Client, namespace, name, &authv1beta1.ResourceSlice{}); err != nil {
		return err
	}
	if r.maps, err = d.namespaceMaps(ctx, provider); err != nil {
		return err
	}
	if r.offloadings, err = d.lastOffloadings(ctx, provider); err != nil {
		return err
	}
	r.credentials, err = d.credentials(ctx, provider)
	return err
}

// credentials are the identities for a provider and what Liqo makes of them. Their
// names are different from those of the other direction in the same namespace.
func (d *Driver) credentials(ctx context.Context, provider string) ([]client.Object, error) {
	var found []client.Object
	for _, identity := range []string{controlPlaneIdentity(provider), sliceIdentity(provider)} {
		for _, into := range []client.Object{&authv1beta1.Identity{}, &authv1beta1.Renew{}, &corev1.Secret{}} {
			name := identity
			if _, secret := into.(*corev1.Secret); secret {
				name = "kubeconfig-" + identity
			}
			object, err := session.Find(ctx, d.Client, liqo.TenantNamespace(provider), name, into)
			if err != nil {
				return nil, err
			}
			if object != nil {
				found = append(found, object)
			}
		}
	}
	return found, nil
}

// lastOffloadings are those that Spillway made, if there is no other peering.
func (d *Driver) lastOffloadings(ctx context.Context, provider string) ([]offloadingv1beta1.NamespaceOffloading, error) {
	peerings, err := d.Observe(ctx)
	if err != nil || slices.ContainsFunc(peerings, func(other string) bool { return other != provider }) {
		return nil, err
	}
	var offloadings offloadingv1beta1.NamespaceOffloadingList
	err = d.Client.List(ctx, &offloadings, session.Managed)
	return offloadings.Items, err
}

// deleteReplicated deletes an object that crd-replicator copies, or copies with. If
// it is stuck, crd-replicator's finalizer is removed: it loses track of copies when
// its credentials end too early or the provider is gone, and never recovers.
// Nothing is left behind: the provider receives Teardown afterwards, and removes every copy
// before it confirms.
func (d *Driver) deleteReplicated(ctx context.Context, object client.Object, stuck bool) error {
	if err := session.Delete(ctx, d.Client, object); err != nil || !stuck || object.GetDeletionTimestamp().IsZero() {
		return err
	}
	before := object.DeepCopyObject().(client.Object)
	held := controllerutil.RemoveFinalizer(object, replicatorFinalizer)
	if !controllerutil.RemoveFinalizer(object, replicatorSecretFinalizer) && !held {
		return nil
	}
	d.Log.Info("Removing crd-replicator's finalizer from an object that it lost track of",
		"kind", fmt.Sprintf("%T", object), "namespace", object.GetNamespace(), "name", object.GetName())
	err := d.Client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // it is still being processed
	}
	return client.IgnoreNotFound(err)
}

// isScaledDown reports whether a VirtualNode's kubelet has no replicas.
func isScaledDown(virtualNode *offloadingv1beta1.VirtualNode) bool {
	template := virtualNode.Spec.Template
	return virtualNode.Labels[labelWebhookSkip] == "true" && (template == nil || template.Spec.Replicas != nil && *template.Spec.Replicas == 0)
}

// podsOf lists the pods on a virtual node that have to leave it, and those of its
// kubelet.
func (d *Driver) podsOf(ctx context.Context, virtualNode *offloadingv1beta1.VirtualNode) (pods, kubelets []corev1.Pod, err error) {
	var on, of corev1.PodList
	if err := d.Client.List(ctx, &on, client.MatchingFields{"spec.nodeName": virtualNode.Name}); err != nil {
		return nil, nil, fmt.Errorf("listing pods of node %s: %w", virtualNode.Name, err)
	}
	if err := d.Client.List(ctx, &of, client.InNamespace(virtualNode.Namespace), client.MatchingLabels{
		consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue, consts.VirtualNodeLabel: virtualNode.Name,
	}); err != nil {
		return nil, nil, fmt.Errorf("listing the virtual kubelet's pods: %w", err)
	}
	pods = slices.DeleteFunc(on.Items, func(pod corev1.Pod) bool {
		owner := metav1.GetControllerOf(&pod)
		return owner != nil && owner.Kind == "DaemonSet"
	})
	return pods, of.Items, nil
}

// removeVirtualNode takes the removal of a virtual node one stage further.
func (d *Driver) removeVirtualNode(ctx context.Context, provider string, left remaining, unreachable bool) error {
	var err error
	switch left.next() {
	case stagePods:
		err = d.drain(ctx, left)
	case stageKubelet:
		err = d.scaleDownKubelet(ctx, left.virtualNode)
	case stageVirtualNode:
		d.mu.Lock()
		d.ended[provider] = d.Clock.Now()
		d.mu.Unlock()
		err = session.Delete(ctx, d.Client, left.virtualNode)
	}
	if err != nil || !unreachable {
		return err
	}
	return d.forceDeletePods(ctx, provider, left)
}

// drain evicts the pods of the node.
func (d *Driver) drain(ctx context.Context, left remaining) error {
	for i := range left.pods {
		if !left.pods[i].DeletionTimestamp.IsZero() {
			continue
		}
		// The chart's policy for the agent's evictions goes by the label.
		labels := map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}
		err := d.Client.SubResource("eviction").Create(ctx, &left.pods[i], &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Labels: labels}})
		// A disruption budget may delay it; the deletion of the namespace deletes the
		// pod as well.
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsTooManyRequests(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return fmt.Errorf("evicting pod %s/%s: %w", left.pods[i].Namespace, left.pods[i].Name, err)
		}
	}
	return nil
}

// scaleDownKubelet sets the virtual kubelet's replicas to 0. Liqo's webhook would
// reset them, so it is skipped first.
func (d *Driver) scaleDownKubelet(ctx context.Context, virtualNode *offloadingv1beta1.VirtualNode) error {
	patch := func(change func()) error {
		before := virtualNode.DeepCopy()
		change()
		if err := d.Client.Patch(ctx, virtualNode, client.MergeFrom(before)); err != nil {
			return fmt.Errorf("scaling down the virtual kubelet: %w", err)
		}
		return nil
	}
	if virtualNode.Labels[labelWebhookSkip] != "true" {
		if err := patch(func() { virtualNode.Labels[labelWebhookSkip] = "true" }); err != nil {
			return err
		}
	}
	if isScaledDown(virtualNode) {
		return nil
	}
	return patch(func() { virtualNode.Spec.Template.Spec.Replicas = ptr.To[int32](0) })
}

// forceDeletePods unblocks the drain of a node whose provider is unreachable: pods
// that are being deleted cannot be ended there, so they are deleted only here.
func (d *Driver) forceDeletePods(ctx context.Context, provider string, left remaining) error {
	if left.node == nil || session.Ready(left.node).Status == corev1.ConditionTrue {
		return nil
	}
	if foreign := left.foreignCluster; foreign != nil && foreign.Annotations[consts.ForeignClusterPermanentlyUnreachableAnnotationKey] != "true" {
		before := foreign.DeepCopy()
		metav1.SetMetaDataAnnotation(&foreign.ObjectMeta, consts.ForeignClusterPermanentlyUnreachableAnnotationKey, "true")
		if err := d.Client.Patch(ctx, foreign, client.MergeFrom(before)); err != nil {
			return fmt.Errorf("annotating ForeignCluster %s as unreachable: %w", foreign.Name, err)
		}
	}
	var failed error
	for i := range left.pods {
		if left.pods[i].DeletionTimestamp.IsZero() {
			continue
		}
		d.Log.Info("Force-deleting a pod whose provider is unreachable", "provider", provider, "namespace", left.pods[i].Namespace, "pod", left.pods[i].Name)
		failed = errors.Join(failed, session.Delete(ctx, d.Client, &left.pods[i], client.GracePeriodSeconds(0)))
	}
	return failed
}
