package liqo

import (
	"context"
	"fmt"
	"slices"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// remoteNamespace is a namespace's name at every provider.
func (d *Driver) remoteNamespace(namespace string) string { return namespace + "-" + d.ClusterID }

// createOffloadings has namespaces mapped at every provider, without touching
// how their pods are scheduled. A selector of providers would have Liqo delete
// remote namespaces while it is being changed, so there is none.
func (d *Driver) createOffloadings(ctx context.Context, namespaces []string) error {
	for _, namespace := range namespaces {
		if len(d.remoteNamespace(namespace)) > validation.DNS1123LabelMaxLength {
			continue // unmapped says so
		}
		_, found, err := get(ctx, d.Client, namespace, consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
		if err != nil {
			return fmt.Errorf("reading the offloading of namespace %s: %w", namespace, err)
		}
		if found {
			continue
		}
		offloading := &offloadingv1beta1.NamespaceOffloading{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: consts.DefaultNamespaceOffloadingName,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Spec: offloadingv1beta1.NamespaceOffloadingSpec{
				NamespaceMappingStrategy: offloadingv1beta1.DefaultNameMappingStrategyType,
				PodOffloadingStrategy:    offloadingv1beta1.LocalPodOffloadingStrategyType,
				ClusterSelector:          corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{}},
			},
		}
		err = d.Client.Create(ctx, offloading)
		if apierrors.IsNotFound(err) || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			continue // no pod can start there anyway
		}
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("offloading namespace %s: %w", namespace, err)
		}
	}
	return nil
}

// maps lists the NamespaceMaps towards a provider.
func (d *Driver) maps(ctx context.Context, provider string) ([]offloadingv1beta1.NamespaceMap, error) {
	var maps offloadingv1beta1.NamespaceMapList
	if err := d.Client.List(ctx, &maps, client.MatchingLabels{consts.ReplicationDestinationLabel: provider, consts.ReplicationRequestedLabel: consts.ReplicationRequestedLabelValue}); err != nil {
		return nil, fmt.Errorf("listing namespace maps: %w", err)
	}
	return maps.Items, nil
}

// unmapped says which namespace is not there at the provider, and why; nil where
// all are.
func (d *Driver) unmapped(ctx context.Context, provider string, namespaces []string) (*peering.Progress, error) {
	maps, err := d.maps(ctx, provider)
	if err != nil {
		return nil, err
	}
	for _, namespace := range namespaces {
		switch phase := mapping(maps, namespace); {
		case phase == offloadingv1beta1.MappingAccepted:
			continue
		case phase == offloadingv1beta1.MappingCreationLoopBackOff:
			return ptr.To(peering.Waiting("NamespaceRefused", fmt.Sprintf("%s cannot create namespace %s: it may exist there already", provider, d.remoteNamespace(namespace)))), nil
		}
		if remote := d.remoteNamespace(namespace); len(remote) > validation.DNS1123LabelMaxLength {
			return ptr.To(peering.Waiting("NamespaceNameTooLong", fmt.Sprintf("namespace %s would be %s at %s, longer than %d characters: use a shorter name", namespace, remote, provider, validation.DNS1123LabelMaxLength))), nil
		}
		local, found, err := get(ctx, d.Client, "", namespace, &corev1.Namespace{})
		if err != nil {
			return nil, fmt.Errorf("reading namespace %s: %w", namespace, err)
		}
		if !found || !local.DeletionTimestamp.IsZero() {
			continue // no pod can start there anyway
		}
		offloading, found, err := get(ctx, d.Client, namespace, consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
		if err != nil {
			return nil, fmt.Errorf("reading the offloading of namespace %s: %w", namespace, err)
		}
		if found && !isOurs(offloading) {
			return ptr.To(peering.Waiting("NamespaceOffloadedByOthers", fmt.Sprintf("namespace %s has a NamespaceOffloading of its own that does not reach %s, and Spillway does not change it: delete it or let it select that cluster", namespace, provider))), nil
		}
		return ptr.To(peering.Waiting("NamespacePending", fmt.Sprintf("waiting for namespace %s at %s", d.remoteNamespace(namespace), provider))), nil
	}
	return nil, nil
}

// mapping is the state of a namespace at the provider of maps.
func mapping(maps []offloadingv1beta1.NamespaceMap, namespace string) offloadingv1beta1.MappingPhase {
	for i := range maps {
		if _, desired := maps[i].Spec.DesiredMapping[namespace]; desired && maps[i].DeletionTimestamp.IsZero() {
			return maps[i].Status.CurrentMapping[namespace].Phase
		}
	}
	return ""
}

// pruneOffloadings ends the mapping of namespaces that no provider needs any
// more, which deletes them there. It does nothing until every provider with a
// virtual node has said once what it needs.
func (d *Driver) pruneOffloadings(ctx context.Context) error {
	var virtualNodes offloadingv1beta1.VirtualNodeList
	if err := d.Client.List(ctx, &virtualNodes, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
		return fmt.Errorf("listing virtual nodes: %w", err)
	}
	d.mu.Lock()
	var needed []string
	known := true
	for i := range virtualNodes.Items {
		_, ok := d.wanted[string(virtualNodes.Items[i].Spec.ClusterID)]
		known = known && ok
	}
	for _, namespaces := range d.wanted {
		needed = append(needed, namespaces...)
	}
	d.mu.Unlock()
	if !known {
		return nil
	}
	var offloadings offloadingv1beta1.NamespaceOffloadingList
	if err := d.Client.List(ctx, &offloadings, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
		return fmt.Errorf("listing offloadings: %w", err)
	}
	for i := range offloadings.Items {
		offloading := &offloadings.Items[i]
		if slices.Contains(needed, offloading.Namespace) || !offloading.DeletionTimestamp.IsZero() {
			continue
		}
		var pods corev1.PodList
		if err := d.Client.List(ctx, &pods, client.InNamespace(offloading.Namespace)); err != nil {
			return fmt.Errorf("listing pods of namespace %s: %w", offloading.Namespace, err)
		}
		if slices.ContainsFunc(pods.Items, func(pod corev1.Pod) bool {
			return slices.ContainsFunc(virtualNodes.Items, func(vn offloadingv1beta1.VirtualNode) bool { return vn.Name == pod.Spec.NodeName })
		}) {
			continue
		}
		if err := remove(ctx, d.Client, offloading); err != nil {
			return fmt.Errorf("ending the offloading of namespace %s: %w", offloading.Namespace, err)
		}
		d.Log.Info("namespace is no longer mapped", "namespace", offloading.Namespace)
	}
	return nil
}
