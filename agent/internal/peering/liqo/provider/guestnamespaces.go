package provider

import (
	"context"
	"fmt"
	"maps"
	"math/bits"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// labelLimited marks a namespace whose guests are limited, and labelPodSecurity holds its pods to a
// Pod Security Standard.
const labelLimited, labelPodSecurity = broker.Group + "/limited", consts.PodSecurityEnforceLevelLabel

// Liqo reflects all Services of a mapped namespace, and with a consumer's reflectAll all its
// ConfigMaps and Secrets, whether or not guests use them: baseSources and baseServices allow
// for those, sourcesPerPod for the ones of each guest.
const baseSources, sourcesPerPod, baseServices = 200, 20, 200

// baseEndpointSlices allows for two address families of each Service, and for Services with more
// endpoints than one slice lists. A guest that has finished keeps its ShadowPod as long as the
// consumer keeps the pod: by default Kubernetes removes finished pods beyond finishedPods.
const baseEndpointSlices, finishedPods = 5 * baseServices, 12500

// What a quota counts of the objects of Liqo's own types.
const (
	countEndpointSlices corev1.ResourceName = "count/shadowendpointslices.offloading.liqo.io"
	countShadowPods     corev1.ResourceName = "count/shadowpods.offloading.liqo.io"
)

// isGuestNamespace reports whether Liqo created a namespace for the guests of a consumer.
func isGuestNamespace(namespace *corev1.Namespace) bool {
	_, tenant := namespace.Labels[consts.TenantNamespaceLabel]
	return namespace.Labels[consts.RemoteClusterID] != "" && !tenant && !isTrial(namespace)
}

// confineGuests limits what guests can do in the namespaces that Liqo has created for a
// consumer with a peering that Spillway made. The labels come last: the chart's policy
// refuses guests in a namespace without them.
func (p *Provider) confineGuests(ctx context.Context, consumer string) error {
	if _, known := p.grants.Get(consumer); !known {
		return nil
	}
	tenant, err := session.Find(ctx, p.Client, "", liqo.TenantNamespace(consumer), &corev1.Namespace{})
	if err != nil || tenant == nil || !session.IsManaged(tenant) {
		return err
	}
	namespaces, trial, err := p.namespaces(ctx, consumer)
	if err != nil {
		return err
	}
	for i := range namespaces {
		namespace := &namespaces[i]
		err := p.confine(ctx, namespace, consumer)
		// It may be deleted meanwhile.
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return fmt.Errorf("limiting the guests of namespace %s: %w", namespace.Name, err)
		}
	}
	if trial && len(namespaces) > 0 {
		return p.RemoveTrialNamespace(ctx, consumer)
	}
	return nil
}

// GuestNamespaces returns the names of the namespaces that Liqo has created for the guests
// of a consumer and that are not being deleted.
func (p *Provider) GuestNamespaces(ctx context.Context, consumer string) (names []string, _ error) {
	namespaces, _, err := p.namespaces(ctx, consumer)
	for i := range namespaces {
		names = append(names, namespaces[i].Name)
	}
	return names, err
}

// namespaces returns those of a consumer's guests that are not being deleted, and whether there is
// one to try guests in.
func (p *Provider) namespaces(ctx context.Context, consumer string) (guests []corev1.Namespace, trial bool, err error) {
	var found corev1.NamespaceList
	if err := p.Client.List(ctx, &found, client.MatchingLabels{consts.RemoteClusterID: consumer}); err != nil {
		return nil, false, fmt.Errorf("listing namespaces for guests of %s: %w", consumer, err)
	}
	for i := range found.Items {
		namespace := &found.Items[i]
		trial = trial || isTrial(namespace)
		if isGuestNamespace(namespace) && namespace.DeletionTimestamp.IsZero() {
			guests = append(guests, *namespace)
		}
	}
	return guests, trial, nil
}

// confine limits what guests can do in one namespace.
func (p *Provider) confine(ctx context.Context, namespace *corev1.Namespace, consumer string) error {
	if err := p.BindRole(ctx, p.GuestsRole, metav1.ObjectMeta{Namespace: namespace.Name, Name: "spillway-agent", Labels: liqo.ManagedLabels(consumer)}); err != nil {
		return err
	}
	networks := p.Networks
	// As at home, the pods of the consumer's namespaces reach each other; what Liqo
	// connects is outside this cluster.
	networks.Peers = []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{
		MatchLabels:      map[string]string{consts.RemoteClusterID: consumer},
		MatchExpressions: []metav1.LabelSelectorRequirement{{Key: consts.TenantNamespaceLabel, Operator: metav1.LabelSelectorOpDoesNotExist}},
	}}}
	networks.DNS = true
	confined := confine.Namespace{Client: p.Client, Name: namespace.Name, Labels: liqo.ManagedLabels(consumer)}
	if err := confined.EnsureNetworkPolicies(ctx, networks); err != nil {
		return err
	}
	// The webhook for guests limits their memory. A default limit would be below the requests
	// of those that are created while it does not answer.
	if err := confined.EnsureLimits(ctx, resource.Quantity{}); err != nil {
		return err
	}
	if err := p.ensureNamespaceQuota(ctx, confined, consumer); err != nil {
		return err
	}
	if p.isLimited(namespace) {
		return nil
	}
	before := namespace.DeepCopy()
	metav1.SetMetaDataLabel(&namespace.ObjectMeta, labelLimited, "true")
	metav1.SetMetaDataLabel(&namespace.ObjectMeta, labelPodSecurity, p.PodSecurity)
	return p.Client.Patch(ctx, namespace, client.MergeFrom(before))
}

// isLimited reports whether the guests of a namespace are limited, to the Pod Security Standard of
// the options.
func (p *Provider) isLimited(namespace *corev1.Namespace) bool {
	return namespace.Labels[labelLimited] == "true" && namespace.Labels[labelPodSecurity] == p.PodSecurity
}

// ensureNamespaceQuota limits what a consumer may keep in a namespace for guests, and what the
// guests there request together to what is granted. Liqo's own Quota bounds the guests of all its
// namespaces, but not those that are being deleted, which run on.
func (p *Provider) ensureNamespaceQuota(ctx context.Context, confined confine.Namespace, consumer string) error {
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: confined.Name, Name: confine.Quota}}
	return confined.Ensure(ctx, quota, func() {
		// Read after the quota: a total that is set later is also written later, and a write
		// computed from the older total is then a conflict.
		total, _ := p.grants.Get(consumer)
		hard := confine.Requests(total)
		pods := atLeast(total.Pods().Value())
		maps.Copy(hard, confine.Objects{Sources: baseSources + sourcesPerPod*pods, Services: baseServices}.Hard())
		hard[countEndpointSlices] = *resource.NewQuantity(baseEndpointSlices, resource.DecimalSI)
		hard[countShadowPods] = *resource.NewQuantity(finishedPods+pods, resource.DecimalSI)
		if !session.Equal(quota.Spec.Hard, hard) || len(quota.Spec.Hard) != len(hard) {
			quota.Spec = corev1.ResourceQuotaSpec{Hard: hard}
		}
	})
}

// atLeast is the next power of two, so that few changes of a grant change the quota.
func atLeast(pods int64) int64 {
	if pods <= 1 {
		return 1
	}
	return 1 << bits.Len64(uint64(pods-1))
}
