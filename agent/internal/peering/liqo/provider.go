package liqo

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// nonceSecret is Liqo's name for it.
	nonceSecret = "liqo-nonce"
	// patience is how long an answer waits for Liqo to do its part (it signs in
	// less than a second, and lets go of a tenant in a few): a reply is the only
	// way to tell the consumer, and being asked again takes longer.
	patience     = 8 * time.Second
	pollInterval = 50 * time.Millisecond
)

// Provider is the provider's side.
type Provider struct {
	Options

	mu sync.Mutex
	// totals that consumers may use, as last told. A consumer without one is
	// left as it is.
	totals map[string]corev1.ResourceList
}

var _ peering.Provider = (*Provider)(nil)

// NewProvider makes the provider's side.
func NewProvider(options Options) (*Provider, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	return &Provider{Options: options, totals: map[string]corev1.ResourceList{}}, nil
}

// Handle answers one message of a consumer.
func (l *Provider) Handle(ctx context.Context, consumer peering.Peer, raw []byte) ([]byte, error) {
	if err := validateClusterID(consumer.ClusterID); err != nil {
		return nil, err
	}
	in, err := decode(raw, kindHello, kindRequest, kindTeardown)
	if err != nil {
		l.Log.Info("A consumer says what this driver cannot read: does it use another one?", "consumer", consumer.ClusterID, "reason", err.Error())
		return peering.Unreadable(driverName), nil
	}
	if !consumer.Holds && in.Kind != kindTeardown {
		return nil, fmt.Errorf("%s holds nothing here (yet): it gets no link", consumer.ClusterID) // it asks again
	}
	namespace, found, err := get(ctx, l.Client, "", tenantNamespace(consumer.ClusterID), &corev1.Namespace{})
	if err != nil {
		return nil, fmt.Errorf("reading the namespace of %s: %w", consumer.ClusterID, err)
	}
	var session int64
	if found && isOurs(namespace) {
		session = sessionOf(namespace, annotationLentSession)
	}

	var out *message
	switch {
	case in.Kind == kindTeardown && in.Session < session:
		out = &message{Kind: kindGone} // that one made way for a later one
	case in.Kind == kindTeardown:
		err = l.soon(ctx, func() (bool, error) {
			progress, err := l.Teardown(ctx, consumer.ClusterID)
			if progress.Done {
				out = &message{Kind: kindGone}
			}
			return progress.Done, err
		})
	case in.Session < session:
		out = refusal(reasonStale, "a later session than this is known here")
		out.Current = session
	case in.Session > session && session != 0:
		// The consumer has begun anew: so does this side, from nothing.
		if progress, err := l.Teardown(ctx, consumer.ClusterID); err != nil || !progress.Done {
			return nil, err
		}
		return l.Handle(ctx, consumer, raw)
	case in.Kind == kindHello:
		out, err = l.offer(ctx, consumer.ClusterID, in.Session)
	case session == 0:
		out = refusal("UnknownSession", "begin with a Hello")
	default:
		out, err = l.grant(ctx, consumer.ClusterID, namespace, in)
	}
	if out == nil || err != nil {
		return nil, err
	}
	out.Session = in.Session
	return encode(*out)
}

func refusal(reason, text string) *message {
	return &message{Kind: kindRefusal, Reason: reason, Text: text[:min(len(text), maxText)]}
}

// offer makes ready for a consumer and gives it a nonce to sign.
func (l *Provider) offer(ctx context.Context, consumer string, session int64) (*message, error) {
	namespace, wait, err := l.ensureTenantNamespace(ctx, consumer, annotationLentSession, session)
	switch {
	case err != nil:
		return nil, err
	case wait != nil && wait.Reason == reasonPeeredByOthers:
		return refusal(wait.Reason, wait.Message), nil
	case wait != nil:
		return nil, nil // the consumer asks again
	}
	nonce, found, err := get(ctx, l.Client, namespace.Name, nonceSecret, &corev1.Secret{})
	if err != nil {
		return nil, fmt.Errorf("reading the nonce for %s: %w", consumer, err)
	}
	if !found {
		nonce = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: nonceSecret, Labels: ours(consumer, map[string]string{consts.NonceSecretLabelKey: "true"})},
			Data:       map[string][]byte{consts.NonceSecretField: newNonce()},
		}
		if err := l.Client.Create(ctx, nonce); err != nil {
			return nil, fmt.Errorf("storing a nonce for %s: %w", consumer, err)
		}
	}
	return &message{Kind: kindOffer, TenantNamespace: namespace.Name, Nonce: nonce.Data[consts.NonceSecretField]}, nil
}

// grant has Liqo sign a consumer's certificate.
func (l *Provider) grant(ctx context.Context, consumer string, namespace *corev1.Namespace, request message) (*message, error) {
	nonce, found, err := get(ctx, l.Client, namespace.Name, nonceSecret, &corev1.Secret{})
	if err != nil {
		return nil, fmt.Errorf("reading the nonce for %s: %w", consumer, err)
	}
	if !found {
		return refusal("UnknownSession", "begin with a Hello"), nil
	}
	if err := checkProof(request, consumer, nonce.Data[consts.NonceSecretField]); err != nil {
		l.Log.Info("refusing a consumer's proof", "consumer", consumer, "reason", err.Error())
		return refusal("ProofRefused", err.Error()), nil
	}
	tenant, found, err := get(ctx, l.Client, namespace.Name, consumer, &authv1beta1.Tenant{})
	if err != nil {
		return nil, fmt.Errorf("reading tenant %s: %w", consumer, err)
	}
	switch {
	case !found:
		tenant = &authv1beta1.Tenant{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: consumer, Labels: ours(consumer)},
			Spec: authv1beta1.TenantSpec{
				ClusterID: liqov1beta1.ClusterID(consumer),
				PublicKey: request.PublicKey, CSR: request.CSR, Signature: request.Signature,
			},
		}
		if err := l.Client.Create(ctx, tenant); err != nil {
			return nil, fmt.Errorf("creating tenant %s: %w", consumer, err)
		}
	case !isOurs(tenant):
		return refusal(reasonPeeredByOthers, "Tenant "+consumer+" exists and is not Spillway's"), nil
	case !tenant.DeletionTimestamp.IsZero():
		return nil, nil
	case !bytes.Equal(tenant.Spec.PublicKey, request.PublicKey):
		// Another key needs another session.
		out := refusal(reasonStale, "this session was begun with another key")
		out.Current = request.Session
		return out, nil
	}
	var out *message
	err = l.soon(ctx, func() (bool, error) {
		tenant, found, err := get(ctx, l.Client, namespace.Name, consumer, &authv1beta1.Tenant{})
		if err != nil || !found {
			return !found, err
		}
		params := tenant.Status.AuthParams
		switch {
		case params == nil || len(params.SignedCRT) == 0 || tenant.Status.TenantNamespace == "":
			return false, nil
		case params.AwsConfig != nil:
			out = refusal("Unsupported", "this provider's Liqo hands out AWS credentials, which Spillway does not carry")
		default:
			out = &message{
				Kind: kindGrant, TenantNamespace: tenant.Status.TenantNamespace,
				Certificate: params.SignedCRT, CA: params.CA, APIServer: params.APIServer, ProxyURL: ptr.Deref(params.ProxyURL, ""),
			}
		}
		return true, nil
	})
	return out, err
}

// soon repeats an attempt until it is done, fails, or has taken too long, in
// which case the consumer will ask again.
func (l *Provider) soon(ctx context.Context, attempt func() (done bool, err error)) error {
	for deadline := l.Clock.Now().Add(patience); ; {
		if done, err := attempt(); done || err != nil || l.Clock.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pollInterval):
		}
	}
}

// EnsureGrant lets a consumer use up to total and pods.
func (l *Provider) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if err := validateClusterID(consumer); err != nil {
		return peering.Progress{}, err
	}
	stored := corev1.ResourceList{}
	for name, amount := range total {
		stored[name] = amount.DeepCopy()
	}
	stored[corev1.ResourcePods] = *resource.NewQuantity(int64(pods), resource.DecimalSI)
	l.mu.Lock()
	l.totals[consumer] = stored
	l.mu.Unlock()
	return l.answer(ctx, consumer)
}

func (l *Provider) total(consumer string) (corev1.ResourceList, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	total, known := l.totals[consumer]
	return total, known
}

// answer answers a consumer's slices. Nothing but what is stored now decides,
// so any number of answers may be under way.
func (l *Provider) answer(ctx context.Context, consumer string) (peering.Progress, error) {
	var found authv1beta1.ResourceSliceList
	if err := l.Client.List(ctx, &found, client.InNamespace(tenantNamespace(consumer)), client.MatchingLabels{
		consts.ReplicationStatusLabel: "true", consts.ReplicationOriginLabel: consumer,
	}); err != nil {
		return peering.Progress{}, fmt.Errorf("listing slices of %s: %w", consumer, err)
	}
	progress := peering.Done("NoSlice", consumer+" asks for nothing yet")
	for i := range found.Items {
		if found.Items[i].Spec.Class != SliceClass || !found.Items[i].DeletionTimestamp.IsZero() {
			continue
		}
		var answered peering.Progress
		err := retry.RetryOnConflict(retry.DefaultBackoff, func() (err error) {
			answered, err = l.answerSlice(ctx, consumer, client.ObjectKeyFromObject(&found.Items[i]))
			return err
		})
		if err != nil {
			return peering.Progress{}, fmt.Errorf("answering slice %s of %s: %w", found.Items[i].Name, consumer, err)
		}
		if !answered.Done {
			return answered, nil
		}
		if found.Items[i].Name == sliceName(l.ClusterID) {
			progress = answered
		}
	}
	return progress, nil
}

// answerSlice answers one slice: its status says what is granted, and Liqo's
// Quota, by which guests are refused, says the same.
func (l *Provider) answerSlice(ctx context.Context, consumer string, key client.ObjectKey) (peering.Progress, error) {
	slice, found, err := get(ctx, l.Client, key.Namespace, key.Name, &authv1beta1.ResourceSlice{})
	if err != nil || !found {
		return peering.Done("NoSlice", consumer+" asks for nothing"), err
	}
	// Read after the slice: whoever stores another total later also answers
	// later, and an answer to what was read before is then refused as a conflict.
	total, known := l.total(consumer)
	if !known {
		return peering.Waiting("Unknown", "what "+consumer+" holds is not known yet"), nil
	}
	only := key.Name == sliceName(l.ClusterID)
	user := userOf(key.Name, consumer)
	finished, err := l.finished(ctx, user)
	if err != nil {
		return peering.Progress{}, err
	}
	verdict := decide(slice.Spec.Resources, total, finished, only)

	// A cordoned slice is one whose Quota lets no guest start, whatever its size.
	cordoned := slice.Annotations[consts.CordonResourceAnnotation] == "true"
	if cordoned != verdict.cordoned {
		before := slice.DeepCopy()
		if slice.Annotations == nil {
			slice.Annotations = map[string]string{}
		}
		if verdict.cordoned {
			slice.Annotations[consts.CordonResourceAnnotation] = "true"
		} else {
			delete(slice.Annotations, consts.CordonResourceAnnotation)
		}
		if err := l.Client.Patch(ctx, slice, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return peering.Progress{}, err
		}
	}
	condition := authv1beta1.ResourceSliceCondition{
		Type: authv1beta1.ResourceSliceConditionTypeResources, Status: verdict.status, Reason: verdict.reason,
		Message: answerTo(slice.Spec.Resources) + verdict.message,
	}
	current := conditionOf(slice, condition.Type)
	condition.LastTransitionTime = current.LastTransitionTime
	if condition != current || !same(slice.Status.Resources, verdict.resources) {
		before := slice.DeepCopy()
		if current.Status != condition.Status {
			condition.LastTransitionTime = metav1.NewTime(l.Clock.Now())
		}
		slice.Status.Resources = verdict.resources
		slice.Status.Conditions = append(slices.DeleteFunc(slices.Clone(slice.Status.Conditions), func(c authv1beta1.ResourceSliceCondition) bool {
			return c.Type == condition.Type
		}), condition)
		if err := l.Client.Status().Patch(ctx, slice, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{})); err != nil {
			return peering.Progress{}, err
		}
		l.Log.Info("answered a slice", "consumer", consumer, "slice", key.Name, "status", verdict.status, "message", verdict.message)
	}
	return l.enforce(ctx, key.Namespace, user, verdict)
}

// verdict is the answer to a slice.
type verdict struct {
	// resources are granted, and what finished guests still hold of the Quota.
	resources       corev1.ResourceList
	status          authv1beta1.ResourceSliceConditionStatus
	reason, message string
	cordoned        bool
}

// decide answers a request: the whole of it where the total allows, else as much
// as it does. A parked slice is always granted. Only one slice of a consumer may
// draw on its total.
func decide(requested, total, finished corev1.ResourceList, only bool) verdict {
	limit := floor()
	if only {
		for name, amount := range total {
			if least, ok := limit[name]; !ok || amount.Cmp(least) > 0 {
				limit[name] = amount
			}
		}
	}
	granted := atMost(requested, limit)
	v := verdict{
		resources: granted, status: authv1beta1.ResourceSliceConditionAccepted, reason: "Granted",
		message:  fmt.Sprintf("granted %s and %d pods", broker.FromList(granted), granted.Pods().Value()),
		cordoned: !only || !slices.ContainsFunc(keys(total), func(name corev1.ResourceName) bool { amount := total[name]; return !amount.IsZero() }),
	}
	if !same(granted, requested) {
		v.status, v.reason = authv1beta1.ResourceSliceConditionDenied, "MoreThanHeld"
		v.message = fmt.Sprintf("asked for %s and %d pods, but holds %s and %d pods", broker.FromList(requested), requested.Pods().Value(), broker.FromList(total), total.Pods().Value())
		if !only {
			v.reason, v.message = "SecondSlice", "a consumer's holds are granted to its slice named "+broker.VirtualNodePrefix+"<provider> only"
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

func keys(list corev1.ResourceList) []corev1.ResourceName {
	names := make([]corev1.ResourceName, 0, len(list))
	for name := range list {
		names = append(names, name)
	}
	return names
}

// enforce brings the Quota in line. Liqo makes it of an accepted slice, and of
// nothing else, so a lower answer is carried over here.
func (l *Provider) enforce(ctx context.Context, namespace, user string, v verdict) (peering.Progress, error) {
	quota, found, err := get(ctx, l.Client, namespace, user, &offloadingv1beta1.Quota{})
	switch {
	case err != nil:
		return peering.Progress{}, fmt.Errorf("reading quota %s: %w", user, err)
	case !found && v.status == authv1beta1.ResourceSliceConditionAccepted:
		return peering.Waiting("QuotaPending", "waiting for Liqo to enforce the grant"), nil
	case !found:
		return peering.Done(v.reason, v.message), nil // without one no guest starts
	}
	if !same(quota.Spec.Resources, v.resources) || ptr.Deref(quota.Spec.Cordoned, false) != v.cordoned {
		quota.Spec.Resources = v.resources
		quota.Spec.Cordoned = nil
		if v.cordoned {
			quota.Spec.Cordoned = ptr.To(true)
		}
		if err := l.Client.Update(ctx, quota); err != nil {
			return peering.Progress{}, err
		}
	}
	return peering.Done(v.reason, v.message), nil
}

// userOf is the user that Liqo makes of a slice at the provider: its name and
// the first six bytes of the hash of the consumer's ID.
func userOf(slice, consumer string) string {
	sum := sha256.Sum256([]byte(consumer))
	return fmt.Sprintf("%s-%x", slice, sum[:6])
}

// finished is what a user's guests that have ended still hold of its Quota,
// which they do until the consumer deletes them. Its scheduler counts them no
// more, so it is granted on top.
func (l *Provider) finished(ctx context.Context, user string) (corev1.ResourceList, error) {
	var guests offloadingv1beta1.ShadowPodList
	if err := l.Client.List(ctx, &guests, client.MatchingLabels{consts.CreatorLabelKey: user}); err != nil {
		return nil, fmt.Errorf("listing the guests of %s: %w", user, err)
	}
	sum := corev1.ResourceList{}
	for i := range guests.Items {
		if isFinished(&guests.Items[i]) {
			broker.AddTo(sum, quotaOf(&guests.Items[i].Spec.Pod))
		}
	}
	return sum, nil
}

func isFinished(guest *offloadingv1beta1.ShadowPod) bool {
	return guest.DeletionTimestamp.IsZero() && (guest.Status.Phase == corev1.PodSucceeded || guest.Status.Phase == corev1.PodFailed)
}

// quotaOf is what Liqo charges a pod with: the larger of its containers' sum and
// its largest init container, by resource.
func quotaOf(pod *corev1.PodSpec) corev1.ResourceList {
	charge := corev1.ResourceList{}
	for i := range pod.Containers {
		broker.AddTo(charge, pod.Containers[i].Resources.Requests)
	}
	for i := range pod.InitContainers {
		for name, amount := range pod.InitContainers[i].Resources.Requests {
			if sum := charge[name]; sum.Cmp(amount) < 0 {
				charge[name] = amount.DeepCopy()
			}
		}
	}
	return charge
}

// Consumers lists the consumers for which anything exists here.
func (l *Provider) Consumers(ctx context.Context) ([]string, error) {
	var namespaces corev1.NamespaceList
	if err := l.Client.List(ctx, &namespaces, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway, consts.TenantNamespaceLabel: "true"}); err != nil {
		return nil, fmt.Errorf("listing tenant namespaces: %w", err)
	}
	var consumers []string
	for i := range namespaces.Items {
		if sessionOf(&namespaces.Items[i], annotationLentSession) != 0 {
			consumers = append(consumers, namespaces.Items[i].Labels[consts.RemoteClusterID])
		}
	}
	slices.Sort(consumers)
	return consumers, nil
}

// Teardown removes everything that was made for a consumer here: what is copied
// from it first, then its right to copy, then the rest.
func (l *Provider) Teardown(ctx context.Context, consumer string) (peering.Progress, error) {
	fail := func(err error) (peering.Progress, error) {
		return peering.Progress{}, fmt.Errorf("removing what was made for %s: %w", consumer, err)
	}
	if err := validateClusterID(consumer); err != nil {
		return fail(err)
	}
	foreign, shared, err := l.foreignCluster(ctx, consumer)
	if err != nil {
		return fail(err)
	}
	name := tenantNamespace(consumer)
	namespace, found, err := get(ctx, l.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return fail(err)
	}
	if !found {
		if foreign != nil && !shared {
			if err := remove(ctx, l.Client, foreign); err != nil {
				return fail(err)
			}
			return peering.Waiting("ForeignClusterGoing", "waiting for ForeignCluster "+consumer+" to go"), nil
		}
		return peering.Done("Gone", "nothing is left of "+consumer), nil
	}
	if !isOurs(namespace) {
		return peering.Done("NotOurs", "what there is of "+consumer+" is not Spillway's"), nil
	}
	if !namespace.DeletionTimestamp.IsZero() {
		return peering.Waiting("NamespaceGoing", "waiting for namespace "+name+" to go"), nil
	}
	shared = shared || sessionOf(namespace, annotationSession) != 0
	if shared && sessionOf(namespace, annotationLentSession) == 0 {
		return peering.Done("Gone", "nothing is left of "+consumer+" as a consumer"), nil
	}

	tenant, tenantFound, err := get(ctx, l.Client, name, consumer, &authv1beta1.Tenant{})
	if err != nil {
		return fail(err)
	}
	copies, err := l.copies(ctx, consumer)
	if err != nil {
		return fail(err)
	}
	if len(copies) > 0 {
		// The consumer has ended its copies, or is not to be heard of any more.
		// Should it still be there, it must not make them anew.
		if tenantFound && isOurs(tenant) && tenant.DeletionTimestamp.IsZero() && tenant.Spec.TenantCondition != authv1beta1.TenantConditionDrained {
			before := tenant.DeepCopy()
			tenant.Spec.TenantCondition = authv1beta1.TenantConditionDrained
			if err := l.Client.Patch(ctx, tenant, client.MergeFrom(before)); err != nil {
				return fail(err)
			}
		}
		var names []string
		for _, object := range copies {
			if err := remove(ctx, l.Client, object); err != nil {
				return fail(err)
			}
			names = append(names, strings.TrimPrefix(fmt.Sprintf("%T", object), "*v1beta1.")+" "+object.GetName())
		}
		return peering.Waiting("CopiesGoing", "waiting for "+strings.Join(names, ", ")+" to go"), nil
	}
	if tenantFound {
		if err := remove(ctx, l.Client, tenant); err != nil {
			return fail(err)
		}
		return peering.Waiting("TenantGoing", "waiting for Liqo to take the rights of "+consumer+" away"), nil
	}
	// The nonce, and the certificates that Liqo keeps; the kubeconfigs that are
	// there too belong to the other direction.
	var secrets corev1.SecretList
	if err := l.Client.List(ctx, &secrets, client.InNamespace(name), client.MatchingLabels{consts.RemoteClusterID: consumer}); err != nil {
		return fail(err)
	}
	var failed error
	for i := range secrets.Items {
		if _, kubeconfig := secrets.Items[i].Labels[consts.IdentityTypeLabelKey]; !kubeconfig {
			failed = errors.Join(failed, remove(ctx, l.Client, &secrets.Items[i]))
		}
	}
	if failed != nil {
		return fail(failed)
	}
	if shared {
		if err := setSession(ctx, l.Client, namespace, annotationLentSession, 0); err != nil {
			return fail(err)
		}
		return peering.Done("Gone", "nothing is left of "+consumer+" as a consumer"), nil
	}
	if err := remove(ctx, l.Client, namespace); err != nil {
		return fail(err)
	}
	return peering.Waiting("NamespaceGoing", "waiting for namespace "+name+" to go"), nil
}

// copies are the objects that a consumer's crd-replicator made here, and the
// Quotas made of them.
func (l *Provider) copies(ctx context.Context, consumer string) ([]client.Object, error) {
	var (
		slices  authv1beta1.ResourceSliceList
		maps    offloadingv1beta1.NamespaceMapList
		renews  authv1beta1.RenewList
		quotas  offloadingv1beta1.QuotaList
		objects []client.Object
	)
	in := client.InNamespace(tenantNamespace(consumer))
	copied := client.MatchingLabels{consts.ReplicationStatusLabel: "true", consts.ReplicationOriginLabel: consumer}
	if err := errors.Join(l.Client.List(ctx, &slices, in, copied), l.Client.List(ctx, &maps, in, copied),
		l.Client.List(ctx, &renews, in, copied), l.Client.List(ctx, &quotas, in)); err != nil {
		return nil, fmt.Errorf("listing what %s copied here: %w", consumer, err)
	}
	for i := range maps.Items {
		objects = append(objects, &maps.Items[i])
	}
	for i := range slices.Items {
		objects = append(objects, &slices.Items[i])
	}
	for i := range renews.Items {
		objects = append(objects, &renews.Items[i])
	}
	for i := range quotas.Items {
		objects = append(objects, &quotas.Items[i])
	}
	return objects, nil
}
