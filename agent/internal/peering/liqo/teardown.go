package liqo

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
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// stage of a teardown: what must be gone next. The order strands nothing: pods
// leave while the virtual kubelet and its credentials still work, and the
// credentials stay until crd-replicator has ended every copy at the provider.
//
// Pods and kubelet are ended here, before the VirtualNode is, although Liqo would
// do it: it does one VirtualNode after another, waiting without end for each
// pod, and where a kubelet is still ending it tries again only after a time that
// doubles, up to a quarter of an hour. Tries that are left over then drain and
// delete the node of the next VirtualNode of the same name.
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
	stageNothing        stage = "Nothing"
)

// remains is what exists of a link in which this cluster consumes.
type remains struct {
	virtualNode *offloadingv1beta1.VirtualNode
	// pods on the node, but those of DaemonSets; and the virtual kubelet's own.
	pods, kubelets []corev1.Pod
	node           *corev1.Node
	slice          *authv1beta1.ResourceSlice
	maps           []offloadingv1beta1.NamespaceMap
	// offloadings of ours, where this is the last link.
	offloadings []offloadingv1beta1.NamespaceOffloading
	// credentials are the identities, the Secrets made of them, and what Liqo
	// keeps to renew them.
	credentials []client.Object
	// namespace is nil too where it is not ours.
	namespace      *corev1.Namespace
	foreignCluster *liqov1beta1.ForeignCluster
	// session of the link, 0 where none is noted.
	session int64
	// released is whether the provider said that nothing is left there, or is
	// waited for no longer, in which case it is unconfirmed.
	released, unconfirmed bool
	// shared is whether the namespace and the ForeignCluster serve something
	// else, too.
	shared bool
}

// next is the first stage with anything left.
func (r remains) next() stage {
	living := r.virtualNode != nil && r.virtualNode.DeletionTimestamp.IsZero()
	switch {
	case living && len(r.pods) > 0:
		return stagePods
	case living && (len(r.kubelets) > 0 || !isStopped(r.virtualNode)):
		return stageKubelet
	case r.virtualNode != nil:
		return stageVirtualNode
	case r.node != nil:
		return stageNode
	case r.slice != nil:
		return stageSlice
	case len(r.maps) > 0:
		return stageMaps
	case len(r.offloadings) > 0:
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
	return stageNothing
}

// Teardown removes the virtual node, the link and everything made for them.
func (d *Driver) Teardown(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := validateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	d.mu.Lock()
	delete(d.wanted, provider)
	d.conversation(provider) // answers are welcome
	d.mu.Unlock()
	left, err := d.remains(ctx, provider)
	if err != nil {
		return peering.Progress{}, err
	}
	stage := left.next()
	waited := d.waitedFor(provider, string(stage))
	waiting := func(message string) (peering.Progress, error) {
		return peering.Waiting(string(stage)+"Going", message), nil
	}
	fail := func(err error) (peering.Progress, error) {
		return peering.Progress{}, fmt.Errorf("tearing down the link to %s: %s: %w", provider, stage, err)
	}

	switch stage {
	case stagePods, stageKubelet, stageVirtualNode:
		if err := d.endVirtualNode(ctx, provider, left, waited > d.UnreachableAfter); err != nil {
			return fail(err)
		}
		return waiting("waiting for node " + left.virtualNode.Name + " to be drained and removed")
	case stageNode:
		if err := remove(ctx, d.Client, left.node); err != nil {
			return fail(err)
		}
		return waiting("waiting for node " + left.node.Name + " to go")
	case stageSlice:
		if err := d.end(ctx, left.slice, waited > d.StuckAfter); err != nil {
			return fail(err)
		}
		return waiting("waiting for Liqo to end the slice at " + provider)
	case stageMaps:
		for i := range left.maps {
			if err := d.end(ctx, &left.maps[i], waited > d.StuckAfter); err != nil {
				return fail(err)
			}
		}
		return waiting("waiting for Liqo to remove the namespaces at " + provider)
	case stageOffloadings:
		for i := range left.offloadings {
			if err := remove(ctx, d.Client, &left.offloadings[i]); err != nil {
				return fail(err)
			}
		}
		return waiting("waiting for Liqo to end the mapping of namespaces")
	case stageIdentity:
		for _, object := range left.credentials {
			if err := d.end(ctx, object, waited > d.StuckAfter); err != nil {
				return fail(err)
			}
		}
		return waiting("waiting for Liqo to let go of the credentials for " + provider)
	case stageProvider:
		d.mu.Lock()
		said, ever := d.conversation(provider).said[kindTeardown]
		d.mu.Unlock()
		if !ever || d.Clock.Now().Sub(said) >= d.ResendAfter {
			if err := d.send(ctx, peer, message{Kind: kindTeardown, Session: left.session}); err != nil {
				return fail(err)
			}
		}
		return waiting("waiting for " + provider + " to confirm that nothing is left there")
	case stageNamespace:
		if left.unconfirmed {
			d.Log.Info("the provider did not say that nothing is left there; its agent clears up when it is back", "provider", provider)
		}
		if left.shared {
			err = setSession(ctx, d.Client, left.namespace, annotationSession, 0)
		} else {
			err = remove(ctx, d.Client, left.namespace)
		}
		if err != nil {
			return fail(err)
		}
		return waiting("waiting for namespace " + left.namespace.Name + " to go")
	case stageForeignCluster:
		if err := remove(ctx, d.Client, left.foreignCluster); err != nil {
			return fail(err)
		}
		return waiting("waiting for ForeignCluster " + left.foreignCluster.Name + " to go")
	}
	d.forget(provider)
	return peering.Done("Gone", "nothing is left of the link to "+provider), nil
}

// remains gathers what is left of a link.
func (d *Driver) remains(ctx context.Context, provider string) (remains, error) {
	var r remains
	name, namespaceName := sliceName(provider), tenantNamespace(provider)
	fail := func(err error) (remains, error) {
		return remains{}, fmt.Errorf("looking for what is left of the link to %s: %w", provider, err)
	}
	namespace, found, err := get(ctx, d.Client, "", namespaceName, &corev1.Namespace{})
	if err != nil {
		return fail(err)
	}
	if found && !isOurs(namespace) {
		// Somebody else's peering, which this program never entered.
		return remains{}, nil
	}
	if node, found, err := get(ctx, d.Client, "", name, &corev1.Node{}); err != nil {
		return fail(err)
	} else if found && node.Labels[broker.LabelProvider] == provider {
		r.node = node
	}
	if r.foreignCluster, r.shared, err = d.foreignCluster(ctx, provider); err != nil {
		return fail(err)
	}
	if !found {
		return r, nil
	}
	r.namespace, r.session = namespace, sessionOf(namespace, annotationSession)
	r.shared = r.shared || sessionOf(namespace, annotationLentSession) != 0
	if !namespace.DeletionTimestamp.IsZero() {
		// Asked for once all else was gone.
		r.released, r.shared = true, false
		return r, nil
	}
	if object, found, err := get(ctx, d.Client, namespaceName, name, &offloadingv1beta1.VirtualNode{}); err != nil {
		return fail(err)
	} else if found {
		r.virtualNode = object
		if r.pods, r.kubelets, err = d.podsOf(ctx, object); err != nil {
			return fail(err)
		}
	}
	if object, found, err := get(ctx, d.Client, namespaceName, name, &authv1beta1.ResourceSlice{}); err != nil {
		return fail(err)
	} else if found {
		r.slice = object
	}
	if r.maps, err = d.maps(ctx, provider); err != nil {
		return fail(err)
	}
	if r.offloadings, err = d.lastOffloadings(ctx, provider); err != nil {
		return fail(err)
	}
	if r.credentials, err = d.credentials(ctx, provider); err != nil {
		return fail(err)
	}
	d.mu.Lock()
	c := d.conversation(provider)
	gone, heard := c.heard[kindGone]
	since, asking := c.since[string(stageProvider)]
	// A provider with another driver has nothing of this one.
	confirmed := heard && gone.Session == r.session || c.otherDriver != ""
	r.unconfirmed = !confirmed && asking && d.Clock.Now().Sub(since) > d.UnreachableAfter
	r.released = confirmed || r.unconfirmed
	d.mu.Unlock()
	return r, nil
}

// foreignCluster is Liqo's summary of a peer, and whether somebody has joined
// the networks of the two clusters, which is not ours to undo.
func (o *Options) foreignCluster(ctx context.Context, peer string) (*liqov1beta1.ForeignCluster, bool, error) {
	foreign, found, err := get(ctx, o.Client, "", peer, &liqov1beta1.ForeignCluster{})
	if err != nil || !found {
		return nil, false, err
	}
	return foreign, foreign.Status.Modules.Networking.Enabled, nil
}

// credentials are the identities for a provider and what Liqo makes of them.
// Names tell the consumer's from the provider's in a namespace that both use.
func (d *Driver) credentials(ctx context.Context, provider string) ([]client.Object, error) {
	var found []client.Object
	namespace := tenantNamespace(provider)
	for _, identity := range []string{controlPlaneIdentity(provider), sliceIdentity(provider)} {
		for _, object := range []client.Object{&authv1beta1.Identity{}, &authv1beta1.Renew{}, &corev1.Secret{}} {
			name := identity
			if _, secret := object.(*corev1.Secret); secret {
				name = "kubeconfig-" + identity
			}
			object, ok, err := get(ctx, d.Client, namespace, name, object)
			if err != nil {
				return nil, err
			}
			if ok {
				found = append(found, object)
			}
		}
	}
	return found, nil
}

// lastOffloadings are ours, if no other provider's link stands.
func (d *Driver) lastOffloadings(ctx context.Context, provider string) ([]offloadingv1beta1.NamespaceOffloading, error) {
	links, err := d.Observe(ctx)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(links, func(link peering.Observed) bool { return link.ClusterID != provider }) {
		return nil, nil
	}
	var offloadings offloadingv1beta1.NamespaceOffloadingList
	err = d.Client.List(ctx, &offloadings, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway})
	return offloadings.Items, err
}

// end deletes an object that crd-replicator copies, or copies with. Where that
// does not let go in time its finalizer is taken away: it loses hold of copies
// when its credentials end too early, or when the provider is gone, and never
// finds it again. Nothing is lost by it: the provider is asked afterwards, and
// removes every copy before it says that none is left.
func (d *Driver) end(ctx context.Context, object client.Object, stuck bool) error {
	if err := remove(ctx, d.Client, object); err != nil || !stuck || object.GetDeletionTimestamp().IsZero() {
		return err
	}
	before := object.DeepCopyObject().(client.Object)
	held := controllerutil.RemoveFinalizer(object, replicatorFinalizer)
	if !controllerutil.RemoveFinalizer(object, replicatorSecretFinalizer) && !held {
		return nil
	}
	d.Log.Info("taking crd-replicator's finalizer away, it has lost hold of the object",
		"kind", fmt.Sprintf("%T", object), "namespace", object.GetNamespace(), "name", object.GetName())
	err := d.Client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
	if apierrors.IsConflict(err) {
		return nil // somebody is still at it
	}
	return client.IgnoreNotFound(err)
}

// isStopped reports whether a VirtualNode's kubelet is to stop.
func isStopped(virtualNode *offloadingv1beta1.VirtualNode) bool {
	template := virtualNode.Spec.Template
	return virtualNode.Labels[labelWebhookSkip] == "true" && (template == nil || template.Spec.Replicas != nil && *template.Spec.Replicas == 0)
}

// podsOf lists the pods on a virtual node that have to leave it, and those that
// its kubelet consists of.
func (d *Driver) podsOf(ctx context.Context, virtualNode *offloadingv1beta1.VirtualNode) (guests, kubelets []corev1.Pod, err error) {
	var on, of corev1.PodList
	if err := d.Client.List(ctx, &on, client.MatchingFields{"spec.nodeName": virtualNode.Name}); err != nil {
		return nil, nil, fmt.Errorf("listing the pods of node %s: %w", virtualNode.Name, err)
	}
	if err := d.Client.List(ctx, &of, client.InNamespace(virtualNode.Namespace), client.MatchingLabels{
		consts.OffloadingComponentKey: consts.VirtualKubeletComponentValue, consts.VirtualNodeLabel: virtualNode.Name,
	}); err != nil {
		return nil, nil, fmt.Errorf("listing the virtual kubelet's pods: %w", err)
	}
	guests = slices.DeleteFunc(on.Items, func(pod corev1.Pod) bool {
		owner := metav1.GetControllerOf(&pod)
		return owner != nil && owner.Kind == "DaemonSet"
	})
	return guests, of.Items, nil
}

// endVirtualNode takes the end of a virtual node one step further.
func (d *Driver) endVirtualNode(ctx context.Context, provider string, left remains, unreachable bool) error {
	switch left.next() {
	case stagePods:
		if left.node != nil && !left.node.Spec.Unschedulable {
			before := left.node.DeepCopy()
			left.node.Spec.Unschedulable = true
			if err := d.Client.Patch(ctx, left.node, client.MergeFrom(before)); err != nil {
				return fmt.Errorf("cordoning node %s: %w", left.node.Name, err)
			}
		}
		for i := range left.pods {
			if !left.pods[i].DeletionTimestamp.IsZero() {
				continue
			}
			err := d.Client.SubResource("eviction").Create(ctx, &left.pods[i], &policyv1.Eviction{})
			// A disruption budget may want it to wait; a namespace that is going
			// takes the pod with it.
			if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsTooManyRequests(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				return fmt.Errorf("evicting pod %s/%s: %w", left.pods[i].Namespace, left.pods[i].Name, err)
			}
		}
	case stageKubelet:
		// Liqo's webhook would put the number of replicas right again, so it is
		// kept away first.
		virtualNode := left.virtualNode
		if virtualNode.Labels[labelWebhookSkip] != "true" {
			before := virtualNode.DeepCopy()
			virtualNode.Labels[labelWebhookSkip] = "true"
			if err := d.Client.Patch(ctx, virtualNode, client.MergeFrom(before)); err != nil {
				return fmt.Errorf("stopping the virtual kubelet: %w", err)
			}
		}
		if !isStopped(virtualNode) {
			before := virtualNode.DeepCopy()
			virtualNode.Spec.Template.Spec.Replicas = ptr.To[int32](0)
			if err := d.Client.Patch(ctx, virtualNode, client.MergeFrom(before)); err != nil {
				return fmt.Errorf("stopping the virtual kubelet: %w", err)
			}
		}
	case stageVirtualNode:
		d.mu.Lock()
		d.ended[provider] = d.Clock.Now()
		d.mu.Unlock()
		if err := remove(ctx, d.Client, left.virtualNode); err != nil {
			return err
		}
	}
	if unreachable {
		return d.abandonPods(ctx, provider, left)
	}
	return nil
}

// abandonPods unblocks the draining of a node whose provider does not answer:
// its pods cannot be stopped there, so they are only forgotten here.
func (d *Driver) abandonPods(ctx context.Context, provider string, left remains) error {
	if left.node == nil || isReady(left.node) {
		return nil
	}
	if foreign := left.foreignCluster; foreign != nil && foreign.Annotations[consts.ForeignClusterPermanentlyUnreachableAnnotationKey] != "true" {
		before := foreign.DeepCopy()
		if foreign.Annotations == nil {
			foreign.Annotations = map[string]string{}
		}
		foreign.Annotations[consts.ForeignClusterPermanentlyUnreachableAnnotationKey] = "true"
		if err := d.Client.Patch(ctx, foreign, client.MergeFrom(before)); err != nil {
			return fmt.Errorf("marking ForeignCluster %s unreachable: %w", foreign.Name, err)
		}
	}
	var failed error
	for i := range left.pods {
		if left.pods[i].DeletionTimestamp.IsZero() {
			continue
		}
		d.Log.Info("forgetting a pod whose provider does not answer", "provider", provider, "namespace", left.pods[i].Namespace, "pod", left.pods[i].Name)
		failed = errors.Join(failed, remove(ctx, d.Client, &left.pods[i], client.GracePeriodSeconds(0)))
	}
	return failed
}
