package consumer

import (
	"context"
	"fmt"
	"slices"
	"strings"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// remoteNamespace is a namespace's name at every provider.
func (d *Driver) remoteNamespace(namespace string) string { return namespace + "-" + d.ClusterID }

// labelMapping with the name of a namespace, on a virtual node, maps the namespace to
// the node's provider.
const labelMapping = "namespace." + broker.Group + "/"

// reasonNamespacePending is why a namespace is not mapped while Liqo and the provider may yet map it.
const reasonNamespacePending = "NamespacePending"

// Unmappable implements peering.Driver: Liqo appends this cluster's ID to a namespace's
// name, unless a NamespaceOffloading of the user has another strategy.
func (d *Driver) Unmappable(ctx context.Context, namespace string) (why string, err error) {
	if !d.tooLong(namespace, nil) {
		return "", nil
	}
	offloading, err := session.Find(ctx, d.Client, namespace, consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
	if err != nil {
		return "", fmt.Errorf("reading the offloading of namespace %s: %w", namespace, err)
	}
	if !d.tooLong(namespace, offloading) {
		return "", nil
	}
	return d.tooLongMessage(namespace), nil
}

// tooLong reports whether a namespace cannot have its name at a provider. The offloading is
// nil if there is none.
func (d *Driver) tooLong(namespace string, offloading *offloadingv1beta1.NamespaceOffloading) bool {
	return len(d.remoteNamespace(namespace)) > validation.DNS1123LabelMaxLength &&
		(offloading == nil || session.IsManaged(offloading) || offloading.Spec.NamespaceMappingStrategy == offloadingv1beta1.DefaultNameMappingStrategyType)
}

func (d *Driver) tooLongMessage(namespace string) string {
	return fmt.Sprintf("namespace %s would be %s at a provider, longer than %d characters; move the pods to a namespace with a shorter name, or create a NamespaceOffloading with namespaceMappingStrategy EnforceSameName in it",
		namespace, d.remoteNamespace(namespace), validation.DNS1123LabelMaxLength)
}

// mappings are how namespaces are mapped to one provider.
type mappings struct {
	// labels of the virtual node that map them.
	labels map[string]string
	// unmapped are those that do not exist at the provider, and why.
	unmapped map[string]peering.Unmapped
}

// mapNamespaces lets namespaces be mapped to a provider. What keeps one of them from it
// concerns no other: such a namespace gets neither a NamespaceOffloading nor a label.
func (d *Driver) mapNamespaces(ctx context.Context, provider string, virtualNode *offloadingv1beta1.VirtualNode, namespaces []string) (mappings, error) {
	result := mappings{labels: map[string]string{}, unmapped: map[string]peering.Unmapped{}}
	found, err := d.namespaceMaps(ctx, provider)
	if err != nil {
		return result, err
	}
	for _, namespace := range namespaces {
		label := labelMapping + namespace
		wanted, why := d.mapNamespace(ctx, provider, namespace, found, virtualNode != nil && virtualNode.Spec.Labels[label] != "")
		if wanted {
			result.labels[label] = "true"
		}
		if why != nil {
			result.unmapped[namespace] = *why
		}
	}
	return result, nil
}

// mapNamespace maps one namespace. It returns whether the virtual node is to have the label
// for it, and why its pods cannot start at the provider: nil if it exists there, or if it is
// gone here. labelled is whether the virtual node has the label now. A namespace that was
// unmapped gets the label again only once the provider has deleted it: Liqo would accept one
// that is still being deleted.
func (d *Driver) mapNamespace(ctx context.Context, provider, namespace string, found []offloadingv1beta1.NamespaceMap, labelled bool) (label bool, why *peering.Unmapped) {
	remote := d.remoteNamespace(namespace)
	offloading, err := d.ensureOffloading(ctx, namespace)
	if err != nil {
		return labelled, &peering.Unmapped{Reason: "NamespaceOffloadingRefused", Final: session.Refused(err),
			Message: fmt.Sprintf("no NamespaceOffloading can be created in namespace %s: %v; let %s create it, or use another namespace", namespace, err, d.ServiceAccount)}
	}
	exists := slices.ContainsFunc(found, func(m offloadingv1beta1.NamespaceMap) bool {
		_, current := m.Status.CurrentMapping[namespace]
		return current
	})
	// That of a user does not go by the label.
	byLabel := offloading == nil || session.IsManaged(offloading)
	switch phase := mapping(found, namespace); {
	case exists && !labelled && byLabel:
		return false, &peering.Unmapped{Reason: reasonNamespacePending, Message: fmt.Sprintf("waiting for provider %s to delete namespace %s, which was used before", provider, remote)}
	case phase == offloadingv1beta1.MappingAccepted:
		return true, nil
	case phase == offloadingv1beta1.MappingCreationLoopBackOff:
		return true, &peering.Unmapped{Reason: "NamespaceRejected", Final: true,
			Message: fmt.Sprintf("provider %s cannot create namespace %s; if one of that name exists there, its administrator must delete it, or use another namespace here", provider, remote)}
	case d.tooLong(namespace, offloading):
		return false, &peering.Unmapped{Reason: "NamespaceNameTooLong", Message: d.tooLongMessage(namespace), Final: true}
	}
	local, err := session.Find(ctx, d.Client, "", namespace, &corev1.Namespace{})
	switch {
	case err != nil:
		return labelled, &peering.Unmapped{Reason: reasonNamespacePending, Message: fmt.Sprintf("reading namespace %s: %v", namespace, err)}
	case local == nil || !local.DeletionTimestamp.IsZero():
		return false, nil
	case offloading != nil && !session.IsManaged(offloading):
		return false, &peering.Unmapped{Reason: "NamespaceOffloadingConflict", Final: true,
			Message: fmt.Sprintf("NamespaceOffloading of namespace %s is not managed by Spillway and does not select provider %s; delete it or let it select that cluster", namespace, provider)}
	}
	return true, &peering.Unmapped{Reason: reasonNamespacePending, Message: fmt.Sprintf("waiting for namespace %s at provider %s, one of %d namespaces of this cluster there. The provider limits their number: if it does not appear, "+
		"let fewer namespaces overflow, or let the administrator of %s raise the value liqo.maxNamespaces", remote, provider, mapped(found), provider)}
}

// removeLabels removes the labels from a virtual node that are not wanted any more: Liqo
// removes them from the Node, and deletes namespaces at the provider. The labels of namespaces
// that have a pod on the node stay.
func (d *Driver) removeLabels(ctx context.Context, virtualNode *offloadingv1beta1.VirtualNode, wanted map[string]string) error {
	own := nodeLabels(string(virtualNode.Spec.ClusterID))
	for label := range virtualNode.Spec.Labels {
		if _, keep := wanted[label]; keep || own[label] != "" {
			continue
		}
		namespace, mapped := strings.CutPrefix(label, labelMapping)
		if !mapped {
			delete(virtualNode.Spec.Labels, label)
			continue
		}
		var pods corev1.PodList
		if err := d.Client.List(ctx, &pods, client.InNamespace(namespace), client.MatchingFields{"spec.nodeName": virtualNode.Name}, client.Limit(1)); err != nil {
			return fmt.Errorf("listing pods of namespace %s: %w", namespace, err)
		}
		if len(pods.Items) == 0 {
			delete(virtualNode.Spec.Labels, label)
		}
	}
	return nil
}

// ensureOffloading lets a namespace be mapped to the providers whose virtual nodes have the
// label for it, without changing how its pods are scheduled. It returns the one that exists,
// which may be a user's; nil if the namespace's name is too long, or if it is gone. Providers
// are not in the selector: Liqo would delete remote namespaces while it is changed.
func (d *Driver) ensureOffloading(ctx context.Context, namespace string) (*offloadingv1beta1.NamespaceOffloading, error) {
	existing, err := session.Find(ctx, d.Client, namespace, consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
	if err != nil {
		return nil, fmt.Errorf("reading the offloading of namespace %s: %w", namespace, err)
	}
	if existing != nil || d.tooLong(namespace, nil) {
		return existing, nil
	}
	offloading := &offloadingv1beta1.NamespaceOffloading{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: consts.DefaultNamespaceOffloadingName,
			Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Spec: offloadingv1beta1.NamespaceOffloadingSpec{
			NamespaceMappingStrategy: offloadingv1beta1.DefaultNameMappingStrategyType,
			PodOffloadingStrategy:    offloadingv1beta1.LocalPodOffloadingStrategyType,
			ClusterSelector: corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: labelMapping + namespace, Operator: corev1.NodeSelectorOpExists}},
			}}},
		},
	}
	err = d.Client.Create(ctx, offloading)
	if apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil, nil // no pod can start there
	}
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return nil, fmt.Errorf("offloading namespace %s: %w", namespace, err)
	}
	return offloading, nil
}

// namespaceMaps lists the NamespaceMaps for a provider.
func (d *Driver) namespaceMaps(ctx context.Context, provider string) ([]offloadingv1beta1.NamespaceMap, error) {
	var maps offloadingv1beta1.NamespaceMapList
	if err := d.Client.List(ctx, &maps, client.MatchingLabels{consts.ReplicationDestinationLabel: provider, consts.ReplicationRequestedLabel: consts.ReplicationRequestedLabelValue}); err != nil {
		return nil, fmt.Errorf("listing namespace maps: %w", err)
	}
	return maps.Items, nil
}

// mapping is the phase of a namespace's mapping in a provider's NamespaceMaps, "" if
// it is not mapped.
func mapping(maps []offloadingv1beta1.NamespaceMap, namespace string) offloadingv1beta1.MappingPhase {
	for i := range maps {
		if _, desired := maps[i].Spec.DesiredMapping[namespace]; desired && maps[i].DeletionTimestamp.IsZero() {
			return maps[i].Status.CurrentMapping[namespace].Phase
		}
	}
	return ""
}

// mapped is how many namespaces a provider's NamespaceMaps map or still have there, as its limit
// counts them.
func mapped(maps []offloadingv1beta1.NamespaceMap) int {
	namespaces := map[string]bool{}
	for i := range maps {
		for namespace := range maps[i].Spec.DesiredMapping {
			namespaces[namespace] = true
		}
		for namespace := range maps[i].Status.CurrentMapping {
			namespaces[namespace] = true
		}
	}
	return len(namespaces)
}

// pruneOffloadings unmaps namespaces that are wanted at no provider any more, which
// deletes them there. It does nothing until EnsureCapacity was called for every
// provider with a virtual node.
func (d *Driver) pruneOffloadings(ctx context.Context) error {
	var virtualNodes offloadingv1beta1.VirtualNodeList
	if err := d.Client.List(ctx, &virtualNodes, session.Managed); err != nil {
		return fmt.Errorf("listing virtual nodes: %w", err)
	}
	wanted, complete := d.wantedNamespaces(virtualNodes.Items)
	if !complete {
		return nil
	}
	var offloadings offloadingv1beta1.NamespaceOffloadingList
	if err := d.Client.List(ctx, &offloadings, session.Managed); err != nil {
		return fmt.Errorf("listing namespace offloadings: %w", err)
	}
	used := func(namespace string) bool { return slices.Contains(wanted, namespace) }
	for i := range offloadings.Items {
		offloading := &offloadings.Items[i]
		if used(offloading.Namespace) || !offloading.DeletionTimestamp.IsZero() {
			continue
		}
		var pods corev1.PodList
		if err := d.Client.List(ctx, &pods, client.InNamespace(offloading.Namespace)); err != nil {
			return fmt.Errorf("listing pods of namespace %s: %w", offloading.Namespace, err)
		}
		if slices.ContainsFunc(pods.Items, func(pod corev1.Pod) bool {
			return slices.ContainsFunc(virtualNodes.Items, func(vn offloadingv1beta1.VirtualNode) bool { return vn.Name == pod.Spec.NodeName })
		}) {
			wanted = append(wanted, offloading.Namespace)
			continue
		}
		// What is kept in one namespace holds up no other.
		if err := session.Delete(ctx, d.Client, offloading); err != nil {
			d.Log.Error(err, "Failed to unmap a namespace; trying again", "namespace", offloading.Namespace)
			continue
		}
		d.Log.Info("Unmapped a namespace that no provider needs", "namespace", offloading.Namespace)
	}
	// An object that may not be changed must not keep the virtual nodes as they are.
	if err := d.unmark(ctx, used); err != nil {
		d.Log.Error(err, "Failed to remove marks for Liqo; trying again")
	}
	return nil
}

// wantedNamespaces are the namespaces wanted at any provider. They are complete if
// the providers of all virtual nodes are known.
func (d *Driver) wantedNamespaces(virtualNodes []offloadingv1beta1.VirtualNode) (wanted []string, complete bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range virtualNodes {
		if _, known := d.wanted[string(virtualNodes[i].Spec.ClusterID)]; !known {
			return nil, false
		}
	}
	for _, namespaces := range d.wanted {
		wanted = append(wanted, namespaces...)
	}
	return wanted, true
}
