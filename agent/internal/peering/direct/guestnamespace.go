package direct

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	placement "github.com/spillway-dev/spillway/broker/guest"
)

// guestLabels are those of everything made for a consumer.
func guestLabels(consumer string) map[string]string {
	return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: consumer}
}

// podSecurityLabels hold guests to the Pod Security Standard of the options.
func (p *Provider) podSecurityLabels() map[string]string {
	labels := map[string]string{}
	for _, mode := range []string{"enforce", "audit", "warn"} {
		labels["pod-security.kubernetes.io/"+mode] = p.PodSecurity
	}
	return labels
}

// readNamespace reads the namespace for a consumer's guests, nil if it does not
// exist.
func (p *Provider) readNamespace(ctx context.Context, consumer string) (*corev1.Namespace, error) {
	name := broker.GuestNamespace(consumer)
	namespace, err := session.Find(ctx, p.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return nil, fmt.Errorf("reading namespace %s: %w", name, err)
	}
	return namespace, nil
}

// GuestNamespaces returns the namespace for a consumer's guests, if it exists for a peering and
// is not being deleted.
func (p *Provider) GuestNamespaces(ctx context.Context, consumer string) ([]string, error) {
	namespace, err := p.readNamespace(ctx, consumer)
	if err != nil || namespace == nil || !isGuestNamespace(namespace, consumer) || !namespace.DeletionTimestamp.IsZero() || isTrial(namespace) {
		return nil, err
	}
	return []string{namespace.Name}, nil
}

// isTrial reports whether a namespace for guests was made to try them, before a peering.
func isTrial(namespace *corev1.Namespace) bool {
	return session.Number(namespace, annotationSession) == 0
}

// EnsureTrialNamespace makes the namespace for a consumer's guests before the consumer peers. Its
// quota is that of the grant. The consumer has no permissions in it.
func (p *Provider) EnsureTrialNamespace(ctx context.Context, consumer string) (name string, progress peering.Progress, err error) {
	if err := session.ValidateClusterID(consumer); err != nil {
		return "", progress, err
	}
	namespace, err := p.readNamespace(ctx, consumer)
	if err != nil {
		return "", progress, err
	}
	if namespace == nil {
		namespace = p.newNamespace(consumer)
		if err := p.Client.Create(ctx, namespace); err != nil && !apierrors.IsAlreadyExists(err) {
			return "", progress, fmt.Errorf("creating namespace %s: %w", namespace.Name, err)
		} else if err != nil {
			return "", peering.Waiting("NamespacePending", "waiting for namespace "+namespace.Name), nil
		}
	}
	if refusal := unusable(namespace, consumer); refusal != nil {
		return "", peering.Waiting(refusal.Reason, refusal.Text), nil
	}
	return namespace.Name, peering.Done("TrialNamespaceReady", "guests can be tried in namespace "+namespace.Name), p.ensureAgentAccess(ctx, namespace)
}

// RemoveTrialNamespace deletes that namespace, unless the consumer has peered since.
func (p *Provider) RemoveTrialNamespace(ctx context.Context, consumer string) error {
	namespace, err := p.readNamespace(ctx, consumer)
	if err != nil || namespace == nil || !isGuestNamespace(namespace, consumer) || !isTrial(namespace) || !namespace.DeletionTimestamp.IsZero() {
		return err
	}
	// The consumer may peer at the same time.
	asRead := client.Preconditions{UID: &namespace.UID, ResourceVersion: &namespace.ResourceVersion}
	if err := p.Client.Delete(ctx, namespace, asRead); err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting namespace %s: %w", namespace.Name, err)
	}
	return nil
}

// isGuestNamespace reports whether a namespace is the one that Spillway made for a
// consumer's guests.
func isGuestNamespace(namespace *corev1.Namespace, consumer string) bool {
	return session.IsManaged(namespace) && consumer != "" && namespace.Labels[broker.LabelGuestsOf] == consumer && namespace.Name == broker.GuestNamespace(consumer)
}

// ensureNamespace creates or corrects the namespace for a consumer's guests. The
// message is a Refusal if the namespace cannot be used.
func (p *Provider) ensureNamespace(ctx context.Context, consumer string, number int64) (*corev1.Namespace, *message, error) {
	namespace, err := p.readNamespace(ctx, consumer)
	if err != nil {
		return nil, nil, err
	}
	if namespace == nil {
		namespace = p.newNamespace(consumer)
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, annotationSession, session.FormatNumber(number))
		err := p.Client.Create(ctx, namespace)
		if err == nil {
			return namespace, nil, nil
		}
		if apierrors.IsAlreadyExists(err) {
			// It was made meanwhile, to try guests.
			err = p.Client.Get(ctx, client.ObjectKeyFromObject(namespace), namespace)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("creating namespace %s: %w", namespace.Name, err)
		}
	}
	if refusal := unusable(namespace, consumer); refusal != nil {
		return nil, &message{Header: *refusal}, nil
	}
	before := namespace.DeepCopy()
	p.setLabels(namespace)
	metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, annotationSession, session.FormatNumber(number))
	p.setHandOver(namespace)
	if !equality.Semantic.DeepEqual(before, namespace) {
		if err := p.Client.Patch(ctx, namespace, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return nil, nil, fmt.Errorf("updating namespace %s: %w", namespace.Name, err)
		}
	}
	return namespace, nil, nil
}

// newNamespace is the namespace for a consumer's guests.
func (p *Provider) newNamespace(consumer string) *corev1.Namespace {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.GuestNamespace(consumer), Labels: guestLabels(consumer)}}
	p.setLabels(namespace)
	p.setHandOver(namespace)
	return namespace
}

// unusable is why a namespace cannot be used for a consumer's guests, nil if it can.
func unusable(namespace *corev1.Namespace, consumer string) *session.Header {
	switch {
	case !isGuestNamespace(namespace, consumer):
		return ptr.To(session.Refuse("NamespaceTaken", "namespace "+namespace.Name+" already exists at the provider and is not managed by Spillway; rename or delete it there"))
	case !namespace.DeletionTimestamp.IsZero():
		return ptr.To(session.Refuse(session.ReasonTerminating, "the previous peering is still being removed"))
	}
	return nil
}

// setLabels holds the guests of a namespace to their Pod Security Standard, and keeps them from
// overflowing to a third cluster.
func (p *Provider) setLabels(namespace *corev1.Namespace) {
	maps.Copy(namespace.Labels, p.podSecurityLabels())
	delete(namespace.Labels, broker.LabelOverflow)
}

// setHandOver asks the consumer to create guests that wait for a place, or not to.
func (p *Provider) setHandOver(namespace *corev1.Namespace) {
	if p.HandOver {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, broker.AnnotationHandOver, broker.HandOverEnabled)
	} else {
		delete(namespace.Annotations, broker.AnnotationHandOver)
	}
}

// ensureSettings makes a namespace of former settings one of the present ones.
func (p *Provider) ensureSettings(ctx context.Context, namespace *corev1.Namespace) error {
	before := namespace.DeepCopy()
	p.setLabels(namespace)
	if p.setHandOver(namespace); equality.Semantic.DeepEqual(before.ObjectMeta, namespace.ObjectMeta) {
		return nil
	}
	if err := p.Client.Patch(ctx, namespace, client.MergeFrom(before)); err != nil {
		return fmt.Errorf("updating namespace %s: %w", namespace.Name, err)
	}
	return nil
}

// ensureAgentAccess binds this agent's role in a namespace for guests.
func (p *Provider) ensureAgentAccess(ctx context.Context, namespace *corev1.Namespace) error {
	return p.BindRole(ctx, p.AgentRole, metav1.ObjectMeta{Namespace: namespace.Name, Name: "spillway-agent", Labels: guestLabels(namespace.Labels[broker.LabelGuestsOf])})
}

// baseSources and sourcesPerPod bound how many ConfigMaps, and how many Secrets, a
// consumer may keep for its guests.
const baseSources, sourcesPerPod = 20, 20

// hardLimits is a consumer's total as the hard limits of a quota. The memory limits of its
// guests add up to what guest.BoundMemory gives those that have none. The chart's policy
// spillway-guests rejects every resource that the quota does not list, including those
// that the cluster gets later. ConfigMaps and Secrets of guests take up the provider's etcd,
// so their number is bounded per pod.
func hardLimits(total corev1.ResourceList) corev1.ResourceList {
	hard := confine.Requests(total)
	maps.Copy(hard, confine.Objects{Sources: baseSources + sourcesPerPod*total.Pods().Value()}.Hard())
	hard[corev1.ResourceLimitsMemory] = *resource.NewQuantity(placement.MemoryOvercommit*total.Memory().Value()+placement.MemoryPerPod*total.Pods().Value(), resource.BinarySI)
	return hard
}

// identical reports whether two lists name the same resources with equal amounts.
func identical(a, b corev1.ResourceList) bool { return len(a) == len(b) && session.Equal(a, b) }

// ensureQuotaOrWait is ensureQuota, waiting while this agent has no permissions in
// the namespace yet. No guest can start in it before that.
func (p *Provider) ensureQuotaOrWait(ctx context.Context, consumer string) (peering.Progress, error) {
	progress, err := p.ensureQuota(ctx, consumer)
	if apierrors.IsForbidden(err) {
		return peering.Waiting("AccessPending", "waiting for this agent's permissions in namespace "+broker.GuestNamespace(consumer)), nil
	}
	return progress, err
}

// ensureQuota limits a consumer's guests to its total. It is done when the status
// shows the limits, because the API server enforces those.
func (p *Provider) ensureQuota(ctx context.Context, consumer string) (peering.Progress, error) {
	var progress peering.Progress
	namespace := broker.GuestNamespace(consumer)
	conflict := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	err := retry.OnError(retry.DefaultBackoff, conflict, func() error {
		quota, err := session.Find(ctx, p.Client, namespace, quotaName, &corev1.ResourceQuota{})
		if err != nil {
			return err
		}
		// Read after the quota: a total that is set later is also written later, and a
		// write computed from the older total is then a conflict.
		total, known := p.grants.Get(consumer)
		if !known {
			progress = peering.Waiting("HoldsUnknown", "the holds of "+consumer+" are not known yet")
			return nil
		}
		hard := hardLimits(total)
		switch {
		case quota == nil:
			quota = &corev1.ResourceQuota{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: quotaName, Labels: guestLabels(consumer)},
				Spec:       corev1.ResourceQuotaSpec{Hard: hard},
			}
			err = p.Client.Create(ctx, quota)
		case !identical(quota.Spec.Hard, hard) || len(quota.Spec.Scopes) > 0 || quota.Spec.ScopeSelector != nil:
			quota.Spec = corev1.ResourceQuotaSpec{Hard: hard}
			err = p.Client.Update(ctx, quota)
		}
		if err != nil {
			return err
		}
		if !identical(quota.Status.Hard, hard) {
			progress = peering.Waiting("QuotaPending", "waiting for the quota of namespace "+namespace+" to take effect")
			return nil
		}
		progress = peering.Done("Granted", fmt.Sprintf("granted %s and %d pods", broker.FromList(total), total.Pods().Value()))
		return nil
	})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("setting the quota of namespace %s: %w", namespace, err)
	}
	return progress, nil
}

// ensureGuestAccess limits guests to the networks of the options, and what another admission plugin of
// this cluster adds to them to what the quota requires of each container. Then it lets the
// ServiceAccount of the consumer's tokens run pods.
func (p *Provider) ensureGuestAccess(ctx context.Context, namespace *corev1.Namespace) error {
	confined := confine.Namespace{Client: p.Client, Name: namespace.Name, Labels: guestLabels(namespace.Labels[broker.LabelGuestsOf])}
	if err := confined.EnsureNetworkPolicies(ctx, p.Networks); err != nil {
		return err
	}
	if err := confined.EnsureLimits(ctx, *resource.NewQuantity(placement.MemoryPerPod, resource.BinarySI)); err != nil {
		return err
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: guestAccount}}
	if err := confined.Ensure(ctx, account, func() { account.AutomountServiceAccountToken = ptr.To(false) }); err != nil {
		return err
	}
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: guestAccount}}
	return confined.Ensure(ctx, binding, func() {
		binding.RoleRef = rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: guestRole}
		binding.Subjects = []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace.Name, Name: guestAccount}}
	})
}
