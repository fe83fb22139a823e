package provider

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	podresource "k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
)

// replicatedFrom selects the objects that a consumer's crd-replicator made here.
func replicatedFrom(consumer string) client.MatchingLabels {
	return client.MatchingLabels{consts.ReplicationStatusLabel: "true", consts.ReplicationOriginLabel: consumer}
}

// answerSlices answers a consumer's ResourceSlices. Only what is stored now decides,
// so concurrent calls are safe.
func (p *Provider) answerSlices(ctx context.Context, consumer string) (peering.Progress, error) {
	var found authv1beta1.ResourceSliceList
	if err := p.Client.List(ctx, &found, client.InNamespace(liqo.TenantNamespace(consumer)), replicatedFrom(consumer)); err != nil {
		return peering.Progress{}, fmt.Errorf("listing resource slices of %s: %w", consumer, err)
	}
	progress := peering.Done("NoResourceSlice", consumer+" has not requested capacity yet")
	for i := range found.Items {
		if found.Items[i].Spec.Class != liqo.SliceClass || !found.Items[i].DeletionTimestamp.IsZero() {
			continue
		}
		var answered peering.Progress
		err := retry.RetryOnConflict(retry.DefaultBackoff, func() (err error) {
			answered, err = p.answerSlice(ctx, consumer, found.Items[i].Name)
			return err
		})
		if err != nil {
			return peering.Progress{}, fmt.Errorf("answering resource slice %s of %s: %w", found.Items[i].Name, consumer, err)
		}
		if !answered.Done {
			return answered, nil
		}
		if found.Items[i].Name == liqo.SliceName(p.ClusterID) {
			progress = answered
		}
	}
	return progress, nil
}

// answerSlice answers one slice: its status shows what is granted, and Liqo's Quota
// limits guests to the same, as Liqo counts.
func (p *Provider) answerSlice(ctx context.Context, consumer, name string) (peering.Progress, error) {
	slice, err := session.Find(ctx, p.Client, liqo.TenantNamespace(consumer), name, &authv1beta1.ResourceSlice{})
	if err != nil || slice == nil {
		return peering.Done("NoResourceSlice", consumer+" requests no capacity"), err
	}
	// Read after the slice: a total that is set later is also answered later, and an
	// answer computed from the older total is then a conflict.
	total, known := p.grants.Get(consumer)
	if !known {
		return peering.Waiting("HoldsUnknown", "the holds of "+consumer+" are not known yet"), nil
	}
	user := userOf(name, consumer)
	finished, err := p.finished(ctx, user)
	if err != nil {
		return peering.Progress{}, err
	}
	v := decide(slice.Spec.Resources, total, finished, name == liqo.SliceName(p.ClusterID))
	if err := p.setCordon(ctx, slice, v.cordoned); err != nil {
		return peering.Progress{}, err
	}
	if err := p.setAnswer(ctx, consumer, slice, v); err != nil {
		return peering.Progress{}, err
	}
	return p.ensureQuota(ctx, slice.Namespace, user, v)
}

// setCordon cordons a slice, so that its Quota lets no guest start whatever its
// size, or uncordons it.
func (p *Provider) setCordon(ctx context.Context, slice *authv1beta1.ResourceSlice, cordoned bool) error {
	if cordoned == (slice.Annotations[consts.CordonResourceAnnotation] == "true") {
		return nil
	}
	before := slice.DeepCopy()
	metav1.SetMetaDataAnnotation(&slice.ObjectMeta, consts.CordonResourceAnnotation, "true")
	if !cordoned {
		delete(slice.Annotations, consts.CordonResourceAnnotation)
	}
	return p.Client.Patch(ctx, slice, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// setAnswer writes an answer to a slice's status.
func (p *Provider) setAnswer(ctx context.Context, consumer string, slice *authv1beta1.ResourceSlice, v answer) error {
	condition := authv1beta1.ResourceSliceCondition{
		Type: authv1beta1.ResourceSliceConditionTypeResources, Status: v.status, Reason: v.reason,
		Message: liqo.AnswerPrefix(slice.Spec.Resources) + v.message,
	}
	current := liqo.ConditionOf(slice, condition.Type)
	condition.LastTransitionTime = current.LastTransitionTime
	if condition == current && session.Equal(slice.Status.Resources, v.resources) {
		return nil
	}
	before := slice.DeepCopy()
	if current.Status != condition.Status {
		condition.LastTransitionTime = metav1.NewTime(p.Clock.Now())
	}
	slice.Status.Resources = v.resources
	slice.Status.Conditions = append(slices.DeleteFunc(slices.Clone(slice.Status.Conditions), func(c authv1beta1.ResourceSliceCondition) bool {
		return c.Type == condition.Type
	}), condition)
	if err := p.Client.Status().Patch(ctx, slice, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
		return err
	}
	p.Log.Info("Answered a resource slice", "consumer", consumer, "slice", slice.Name, "status", v.status, "message", v.message)
	return nil
}

// answer to a slice.
type answer struct {
	// resources are those granted, and what finished guests still hold of the Quota.
	resources       corev1.ResourceList
	status          authv1beta1.ResourceSliceConditionStatus
	reason, message string
	cordoned        bool
}

// decide answers a request: all of it if the total allows, else as much as it does.
// A parked slice is always granted. Only one slice of a consumer uses its total: the chart's
// policy refuses others, which may be from before it.
func decide(requested, total, finished corev1.ResourceList, only bool) answer {
	limit, cordoned := session.ParkedResources(), true
	if only {
		limit = capacity.Larger(limit, total)
		cordoned = session.Equal(total, nil)
	}
	granted := liqo.AtMost(requested, limit)
	v := answer{
		resources: granted, status: authv1beta1.ResourceSliceConditionAccepted, reason: "Granted", cordoned: cordoned,
		message: fmt.Sprintf("granted %s and %d pods", broker.FromList(granted), granted.Pods().Value()),
	}
	if !session.Equal(granted, requested) {
		v.status, v.reason = authv1beta1.ResourceSliceConditionDenied, "ExceedsHolds"
		v.message = fmt.Sprintf("requested %s and %d pods, but the holds are %s and %d pods", broker.FromList(requested), requested.Pods().Value(), broker.FromList(total), total.Pods().Value())
		if !only {
			v.reason, v.message = "DuplicateResourceSlice", "the holds of a consumer are granted only to its resource slice "+broker.VirtualNodePrefix+"<provider>"
		}
	}
	for _, name := range guest.Listed() {
		if _, ok := granted[name]; !ok {
			granted[name] = resource.Quantity{Format: resource.DecimalSI}
		}
	}
	for name, amount := range finished {
		if sum, ok := granted[name]; ok {
			sum.Add(amount)
			granted[name] = sum
		}
	}
	return v
}

// ensureQuota makes the Quota match an answer. Liqo creates it for an accepted slice
// and never lowers it, so a lower answer is applied here.
func (p *Provider) ensureQuota(ctx context.Context, namespace, user string, v answer) (peering.Progress, error) {
	quota, err := session.Find(ctx, p.Client, namespace, user, &offloadingv1beta1.Quota{})
	switch {
	case err != nil:
		return peering.Progress{}, fmt.Errorf("reading quota %s: %w", user, err)
	case quota == nil && v.status == authv1beta1.ResourceSliceConditionAccepted:
		return peering.Waiting("QuotaPending", "waiting for Liqo to create the quota for the grant"), nil
	case quota == nil:
		return peering.Done(v.reason, v.message), nil // without a Quota no guest starts
	}
	if !session.Equal(quota.Spec.Resources, v.resources) || ptr.Deref(quota.Spec.Cordoned, false) != v.cordoned {
		quota.Spec.Resources = v.resources
		quota.Spec.Cordoned = nil
		if v.cordoned {
			quota.Spec.Cordoned = ptr.To(true)
		}
		if err := p.Client.Update(ctx, quota); err != nil {
			return peering.Progress{}, err
		}
	}
	return peering.Done(v.reason, v.message), nil
}

// userOf is the user that Liqo creates for a slice at the provider: the slice's name
// and the first six bytes of the hash of the consumer's ID.
func userOf(slice, consumer string) string {
	sum := sha256.Sum256([]byte(consumer))
	return fmt.Sprintf("%s-%x", slice, sum[:6])
}

// finished is what a user's terminated guests still hold of its Quota at most, until the
// consumer deletes them. The consumer's scheduler no longer counts them, so it is
// granted on top.
func (p *Provider) finished(ctx context.Context, user string) (corev1.ResourceList, error) {
	var guests offloadingv1beta1.ShadowPodList
	if err := p.Client.List(ctx, &guests, client.MatchingLabels{consts.CreatorLabelKey: user}); err != nil {
		return nil, fmt.Errorf("listing guests of %s: %w", user, err)
	}
	sum := corev1.ResourceList{}
	for i := range guests.Items {
		if guest := &guests.Items[i]; guest.DeletionTimestamp.IsZero() && (guest.Status.Phase == corev1.PodSucceeded || guest.Status.Phase == corev1.PodFailed) {
			broker.AddTo(sum, requestsOf(&guest.Spec.Pod))
		}
	}
	return sum, nil
}

// requestsOf is what the scheduler counts for a pod. Liqo's Quota counts no more of it, and less
// with sidecars: it admits what is within the grant, which a ResourceQuota and places bound.
func requestsOf(pod *corev1.PodSpec) corev1.ResourceList {
	return podresource.PodRequests(&corev1.Pod{Spec: *pod}, podresource.PodResourcesOptions{ExcludeOverhead: true, SkipPodLevelResources: true})
}
