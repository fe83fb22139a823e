package direct

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// guestLabels are those of everything made for a consumer.
func guestLabels(consumer string) map[string]string {
	return map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: consumer}
}

// podSecurity holds guests to the Pod Security Standard "baseline".
var podSecurity = map[string]string{
	"pod-security.kubernetes.io/enforce": "baseline",
	"pod-security.kubernetes.io/audit":   "baseline",
	"pod-security.kubernetes.io/warn":    "baseline",
}

// ensureNamespace makes the namespace for a consumer's guests, or finds it. The
// message is what to answer where it cannot be used.
func (l *Provider) ensureNamespace(ctx context.Context, consumer string, session int64) (*corev1.Namespace, *message, error) {
	namespace, found, err := l.namespaceOf(ctx, consumer)
	if err != nil {
		return nil, nil, err
	}
	if !found {
		namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: broker.GuestNamespace(consumer), Labels: guestLabels(consumer),
			Annotations: map[string]string{annotationSession: strconv.FormatInt(session, 10)},
		}}
		for key, value := range podSecurity {
			namespace.Labels[key] = value
		}
		if err := l.Client.Create(ctx, namespace); err != nil {
			return nil, nil, fmt.Errorf("creating namespace %s: %w", namespace.Name, err)
		}
		return namespace, nil, nil
	}
	switch {
	case !isGuests(namespace, consumer):
		return nil, refusal("NamespaceTaken", "namespace "+namespace.Name+" exists there and is not Spillway's"), nil
	case !namespace.DeletionTimestamp.IsZero():
		return nil, refusal(reasonTerminating, "what an earlier link left is still going"), nil
	}
	before := namespace.DeepCopy()
	for key, value := range podSecurity {
		namespace.Labels[key] = value
	}
	// A namespace with this label would send its guests on to a third cluster.
	delete(namespace.Labels, broker.LabelOverflow)
	if sessionOf(namespace) != session {
		metav1.SetMetaDataAnnotation(&namespace.ObjectMeta, annotationSession, strconv.FormatInt(session, 10))
	}
	if !equality.Semantic.DeepEqual(before, namespace) {
		if err := l.Client.Patch(ctx, namespace, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return nil, nil, fmt.Errorf("mending namespace %s: %w", namespace.Name, err)
		}
	}
	return namespace, nil, nil
}

// ensureAgentAccess gives this agent its rights in a namespace for guests.
func (l *Provider) ensureAgentAccess(ctx context.Context, namespace *corev1.Namespace) error {
	if l.AgentRole == "" {
		return nil
	}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: "spillway-agent", Labels: guestLabels(namespace.Labels[broker.LabelGuestsOf])},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: l.AgentRole},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: l.ServiceAccount.Namespace, Name: l.ServiceAccount.Name}},
	}
	if err := l.Client.Create(ctx, binding); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("taking rights in namespace %s: %w", namespace.Name, err)
	}
	return nil
}

func (l *Provider) setTotal(consumer string, total corev1.ResourceList, pods int32) {
	stored := corev1.ResourceList{}
	for name, amount := range total {
		stored[name] = amount.DeepCopy()
	}
	stored[corev1.ResourcePods] = *resource.NewQuantity(int64(pods), resource.DecimalSI)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.totals[consumer] = stored
}

func (l *Provider) total(consumer string) (corev1.ResourceList, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	total, known := l.totals[consumer]
	return total, known
}

// sourcesAtFirst and sourcesEach bound how many ConfigMaps, and how many Secrets, a
// consumer may keep for its guests.
const sourcesAtFirst, sourcesEach = 20, 20

// hardLimits is a consumer's total as a quota says it. CPU, memory and ephemeral
// storage are always listed. Of other kinds only those are that are lent: the
// chart's policy spillway-guest-pods refuses every kind that the quota does not
// list, also such as come to the cluster later.
//
// ConfigMaps and Secrets come along with guests, and what they take up is the
// lender's own store: so many for each guest, and some to begin with.
func hardLimits(total corev1.ResourceList) corev1.ResourceList {
	hard := corev1.ResourceList{}
	for _, name := range []corev1.ResourceName{"count/configmaps", "count/secrets"} {
		hard[name] = *resource.NewQuantity(sourcesAtFirst+sourcesEach*total.Pods().Value(), resource.DecimalSI)
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceRequestsCPU, corev1.ResourceRequestsMemory, corev1.ResourceRequestsEphemeralStorage} {
		hard[name] = resource.Quantity{Format: resource.DecimalSI}
	}
	for name, amount := range total {
		switch {
		case name == corev1.ResourcePods:
			hard[name] = amount.DeepCopy()
		default:
			hard[corev1.DefaultResourceRequestsPrefix+name] = amount.DeepCopy()
		}
	}
	return hard
}

// exactly reports whether two lists name the same kinds with the same amounts.
func exactly(a, b corev1.ResourceList) bool { return len(a) == len(b) && same(a, b) }

// ensureQuota holds a consumer's guests to its total. It is done when the status
// says so, too: that is what the API server goes by.
func (l *Provider) ensureQuota(ctx context.Context, consumer string) (peering.Progress, error) {
	var progress peering.Progress
	namespace := broker.GuestNamespace(consumer)
	lost := func(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
	err := retry.OnError(retry.DefaultBackoff, lost, func() error {
		quota, found, err := get(ctx, l.Client, namespace, quotaName, &corev1.ResourceQuota{})
		if err != nil {
			return err
		}
		// Read after the quota: whoever stores another total later also writes
		// later, and one that was made of an older total is then a conflict.
		total, known := l.total(consumer)
		if !known {
			progress = peering.Waiting("Unknown", "what "+consumer+" holds is not known yet")
			return nil
		}
		hard := hardLimits(total)
		switch {
		case !found:
			quota = &corev1.ResourceQuota{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: quotaName, Labels: guestLabels(consumer)},
				Spec:       corev1.ResourceQuotaSpec{Hard: hard},
			}
			err = l.Client.Create(ctx, quota)
		case !exactly(quota.Spec.Hard, hard) || len(quota.Spec.Scopes) > 0 || quota.Spec.ScopeSelector != nil:
			quota.Spec = corev1.ResourceQuotaSpec{Hard: hard}
			err = l.Client.Update(ctx, quota)
		}
		if err != nil {
			return err
		}
		if !exactly(quota.Status.Hard, hard) {
			progress = peering.Waiting("QuotaPending", "waiting for the cluster to count what the guests of "+consumer+" use")
			return nil
		}
		progress = peering.Done("Granted", fmt.Sprintf("granted %s and %d pods", broker.FromList(total), total.Pods().Value()))
		return nil
	})
	if err != nil {
		return peering.Progress{}, fmt.Errorf("bounding the guests of %s: %w", consumer, err)
	}
	return progress, nil
}

// ensureWalls keeps guests from talking with anybody that the lender does not
// name.
func (l *Provider) ensureWalls(ctx context.Context, namespace *corev1.Namespace) error {
	both := []networkingv1.PolicyType{networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}
	policies := map[string]networkingv1.NetworkPolicySpec{"spillway-deny": {PolicyTypes: both}}
	allowed := networkingv1.NetworkPolicySpec{}
	if from := blocks(l.AllowIngressFrom); len(from) > 0 {
		allowed.Ingress = []networkingv1.NetworkPolicyIngressRule{{From: from}}
		allowed.PolicyTypes = append(allowed.PolicyTypes, networkingv1.PolicyTypeIngress)
	}
	if to := blocks(l.AllowEgressTo); len(to) > 0 {
		allowed.Egress = []networkingv1.NetworkPolicyEgressRule{{To: to}}
		allowed.PolicyTypes = append(allowed.PolicyTypes, networkingv1.PolicyTypeEgress)
	}
	if len(allowed.PolicyTypes) == 0 {
		// It denies what the other one does already, where it was more once.
		allowed.PolicyTypes = both
	}
	policies["spillway-allow"] = allowed
	for name, spec := range policies {
		policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: name}}
		if err := l.ensure(ctx, policy, namespace, func() { policy.Spec = spec }); err != nil {
			return err
		}
	}
	return nil
}

// ensureAccount makes the account that a consumer's tokens are of.
func (l *Provider) ensureAccount(ctx context.Context, namespace *corev1.Namespace) error {
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: guestAccount}}
	return l.ensure(ctx, account, namespace, func() { account.AutomountServiceAccountToken = ptr.To(false) })
}

// ensureGuestAccess lets that account run pods.
func (l *Provider) ensureGuestAccess(ctx context.Context, namespace *corev1.Namespace) error {
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: guestAccount}}
	return l.ensure(ctx, binding, namespace, func() {
		binding.RoleRef = rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: GuestRole}
		binding.Subjects = []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: namespace.Name, Name: guestAccount}}
	})
}

// ensure makes an object of a namespace for guests, or mends it.
func (l *Provider) ensure(ctx context.Context, object client.Object, namespace *corev1.Namespace, fill func()) error {
	_, err := controllerutil.CreateOrUpdate(ctx, l.Client, object, func() error {
		labels := object.GetLabels()
		if labels == nil {
			labels = map[string]string{}
		}
		for key, value := range guestLabels(namespace.Labels[broker.LabelGuestsOf]) {
			labels[key] = value
		}
		object.SetLabels(labels)
		fill()
		return nil
	})
	if err != nil {
		return fmt.Errorf("furnishing namespace %s with %T %s: %w", namespace.Name, object, object.GetName(), err)
	}
	return nil
}

func blocks(cidrs []string) []networkingv1.NetworkPolicyPeer {
	var peers []networkingv1.NetworkPolicyPeer
	for _, cidr := range cidrs {
		peers = append(peers, networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr}})
	}
	return peers
}

func validateCIDR(cidr string) error {
	prefix, err := netip.ParsePrefix(strings.TrimSpace(cidr))
	if err != nil {
		return fmt.Errorf("%q is not a network such as 10.0.0.0/8: %w", cidr, err)
	}
	if prefix.Masked() != prefix {
		return fmt.Errorf("%q has bits beyond its mask: %s", cidr, prefix.Masked())
	}
	return nil
}
