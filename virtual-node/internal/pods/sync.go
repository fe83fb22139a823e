package pods

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	spillwayevents "github.com/spillway-dev/spillway/broker/events"
	placement "github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

const (
	// retryPeriod is the retry delay where no event will announce a change.
	retryPeriod = 5 * time.Second
	// cacheDelay is the retry delay while a cache is behind the API server.
	cacheDelay = 300 * time.Millisecond
	// ownerTTL is how long the owner of guests is used without being read again.
	ownerTTL = time.Minute
)

// sync reconciles one pod with its guest, or removes unused copies. It is retried after
// requeueAfter, if that is not 0.
func (h *Handler) sync(ctx context.Context, key string) (requeueAfter time.Duration, err error) {
	if key == pruneKey {
		return 0, h.prune(ctx)
	}
	namespace, name, err := cache.SplitMetaNamespaceKey(key)
	if err != nil {
		return 0, nil
	}
	object, found, err := h.pods.GetByKey(key)
	if err != nil {
		return 0, fmt.Errorf("reading pod %s: %w", key, err)
	}
	guests, err := h.guests.ByIndex(indexOrigin, key)
	if err != nil {
		return 0, fmt.Errorf("looking up guests of pod %s: %w", key, err)
	}
	var cached *encodedPod
	if found {
		cached = object.(*encodedPod)
	}
	h.track(key, cached, guests)
	for _, object := range guests {
		if guest := object.(*encodedPod); cached == nil || guest.originUID != cached.UID {
			after, err := h.deleteOrphan(ctx, namespace, name, guest)
			if err != nil {
				return 0, err
			}
			requeueAfter = max(requeueAfter, after)
		}
	}
	var pod, guest *corev1.Pod
	if cached != nil {
		pod = cached.decode()
	}
	// A terminal pod of which a container seems to run still, as that of a lost node of the
	// provider, is ended when it is deleted.
	if pod == nil || isTerminal(pod) && (pod.DeletionTimestamp == nil || !isRunning(pod.Status)) {
		h.queue.AddAfter(pruneKey, pruneDelay)
		return requeueAfter, nil
	}
	var contents [2]uint64
	if found := h.guestOf(cached); found != nil {
		guest, contents = found.decode(), [2]uint64{cached.content, found.content}
	}
	var after time.Duration
	switch {
	case pod.DeletionTimestamp != nil:
		after, err = h.terminate(ctx, pod, guest)
	case guest == nil && h.isTerminating():
		// The controller of the virtual node deletes the pod.
	case guest == nil:
		after, err = h.create(ctx, pod)
	default:
		after, err = h.update(ctx, pod, guest, contents)
	}
	return earlier(requeueAfter, after), err
}

// earlier returns the shorter delay, where 0 is none.
func earlier(a, b time.Duration) time.Duration {
	if a == 0 || b > 0 && b < a {
		return b
	}
	return a
}

// deleteEnded deletes a pod that is being deleted once none of its containers runs, as a
// kubelet does. Until then it exists, even if its containers run at a provider that is
// unreachable for longer than the grace period.
func (h *Handler) deleteEnded(ctx context.Context, key string) (requeueAfter time.Duration, err error) {
	object, found, err := h.pods.GetByKey(key)
	if err != nil || !found || !object.(*encodedPod).ended {
		return 0, err
	}
	pod := object.(*encodedPod)
	err = h.ConsumerClient.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0), Preconditions: metav1.NewUIDPreconditions(string(pod.UID))})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return 0, fmt.Errorf("deleting pod %s, whose containers have ended: %w", key, err)
	}
	return 0, nil
}

// deleteOrphan deletes a guest whose pod no longer exists, having confirmed that
// at the API server: the cache may be stale.
func (h *Handler) deleteOrphan(ctx context.Context, namespace, name string, cached *encodedPod) (requeueAfter time.Duration, err error) {
	live, err := h.ConsumerClient.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err == nil && live.UID == cached.originUID && live.Spec.NodeName == h.nodeName {
		return cacheDelay, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("confirming that pod %s/%s was deleted: %w", namespace, name, err)
	}
	h.mu.Lock()
	delete(h.states, cached.originUID)
	h.mu.Unlock()
	guest := cached.decode()
	if guest.DeletionTimestamp != nil {
		return 0, nil
	}
	h.Log.V(1).Info("Deleting the guest of a deleted pod", "guest", guest.Name, "pod", namespace+"/"+name)
	return 0, h.deleteGuest(ctx, guest, nil)
}

// track records the UID of the pod with this key, and drops the state of its
// predecessor once that has no guest.
func (h *Handler) track(key string, pod *encodedPod, guests []any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	previous := h.uids[key]
	switch {
	case pod != nil:
		h.uids[key] = pod.UID
	case len(guests) == 0:
		delete(h.uids, key)
	}
	if previous == "" || pod != nil && pod.UID == previous {
		return
	}
	if !slices.ContainsFunc(guests, func(guest any) bool { return guest.(*encodedPod).originUID == previous }) {
		delete(h.states, previous)
	}
}

// setCreated records that a guest of the pod may exist, and reports whether that
// was recorded before.
func (h *Handler) setCreated(uid types.UID) (before bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.state(uid)
	before, state.created = state.created, true
	return before
}

// deleteGuest deletes a guest; without gracePeriod its own applies.
func (h *Handler) deleteGuest(ctx context.Context, guest *corev1.Pod, gracePeriod *int64) error {
	err := h.ProviderClient.CoreV1().Pods(guest.Namespace).Delete(ctx, guest.Name, metav1.DeleteOptions{
		GracePeriodSeconds: gracePeriod, Preconditions: metav1.NewUIDPreconditions(string(guest.UID))})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting guest %s: %w", guest.Name, err)
	}
	return nil
}

// terminate deletes the guest of a pod that is being deleted, and reports the pod
// as terminated when the guest is gone.
func (h *Handler) terminate(ctx context.Context, pod, guest *corev1.Pod) (requeueAfter time.Duration, err error) {
	if guest == nil {
		if exists, err := h.guestExists(ctx, pod); err != nil {
			return 0, err
		} else if exists {
			return cacheDelay, nil
		}
		return h.writeStatus(ctx, pod, terminatedStatus(pod, "Deleted", "the guest was deleted", metav1.Time{Time: h.Clock.Now()}))
	}
	requeueAfter, err = h.writeStatus(ctx, pod, h.mirror(pod, guest))
	gracePeriod := pod.DeletionGracePeriodSeconds
	if guest.DeletionTimestamp != nil && ptr.Deref(guest.DeletionGracePeriodSeconds, 0) <= ptr.Deref(gracePeriod, 0) {
		return requeueAfter, err
	}
	return requeueAfter, errors.Join(err, h.deleteGuest(ctx, guest, gracePeriod))
}

// guestExists reads from the provider's API server, since the cache may be stale.
func (h *Handler) guestExists(ctx context.Context, pod *corev1.Pod) (bool, error) {
	_, err := h.ProviderClient.CoreV1().Pods(h.GuestNamespace).Get(ctx, translate.GuestName(pod), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("reading the guest at %s: %w", h.Provider, err)
	}
	return true, nil
}

// create creates the guest of a pod that has none in the cache. A pod that has
// started has lost its guest and fails, as after an eviction.
func (h *Handler) create(ctx context.Context, pod *corev1.Pod) (requeueAfter time.Duration, err error) {
	if pod.Status.StartTime != nil {
		if exists, err := h.guestExists(ctx, pod); err != nil {
			return 0, err
		} else if exists {
			return cacheDelay, nil
		}
		guestsLost.WithLabelValues(h.Provider).Inc()
		message := fmt.Sprintf("the guest at provider %s no longer exists: it was deleted or evicted there, or its node was lost", h.Provider)
		h.event(pod, corev1.EventTypeWarning, reasonGuestLost, message)
		status := terminatedStatus(pod, reasonGuestLost, message, metav1.Time{Time: h.Clock.Now()})
		status.Phase = corev1.PodFailed
		return h.writeStatus(ctx, pod, status)
	}
	guest, refs, notes := translate.Pod(pod, h.GuestNamespace, h.DNS)
	if len(notes) > 0 {
		h.reportDifferences(pod, strings.Join(notes, " "))
	}
	missing, err := h.copyReferences(ctx, pod, refs)
	if err != nil {
		return h.createFailed(ctx, pod, err)
	}
	if missing != (missingReference{}) {
		return h.waitForReference(ctx, pod, missing)
	}
	// The cache may not contain a guest that was just created. A second request
	// would be rejected as well, but only after the provider charged its quota: until
	// that is corrected, some minutes later, another guest may be refused.
	if h.setCreated(pod.UID) {
		if exists, err := h.guestExists(ctx, pod); err != nil {
			return h.createFailed(ctx, pod, err)
		} else if exists {
			return cacheDelay, nil
		}
	}
	owner, handsOver, err := h.guestOwner(ctx)
	if err != nil {
		return h.createFailed(ctx, pod, err)
	}
	guest.OwnerReferences = []metav1.OwnerReference{owner}
	if handsOver {
		guest.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	_, err = h.ProviderClient.CoreV1().Pods(h.GuestNamespace).Create(ctx, guest, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return h.createFailed(ctx, pod, err)
	}
	return 0, nil
}

// guestOwner returns the owner of new guests, and whether they are to wait until the
// provider hands a place over to them. Both are read again after ownerTTL: with the
// UID of a namespace that was replaced, the provider would delete its guests.
func (h *Handler) guestOwner(ctx context.Context) (owner metav1.OwnerReference, handsOver bool, err error) {
	h.mu.Lock()
	owner, handsOver, age := h.owner, h.handsOver, h.Clock.Since(h.ownerRead)
	h.mu.Unlock()
	if owner.UID != "" && age < ownerTTL {
		return owner, handsOver, nil
	}
	namespace, err := h.ProviderClient.CoreV1().Namespaces().Get(ctx, h.GuestNamespace, metav1.GetOptions{})
	if err != nil {
		return owner, false, fmt.Errorf("reading namespace %s at %s: %w", h.GuestNamespace, h.Provider, err)
	}
	owner, handsOver = placement.Controller(namespace), namespace.Annotations[broker.AnnotationHandOver] == broker.HandOverEnabled
	h.mu.Lock()
	h.owner, h.handsOver, h.ownerRead = owner, handsOver, h.Clock.Now()
	h.mu.Unlock()
	return owner, handsOver, nil
}

// pendingDelay is how long a guest is pending before that is reported, and the minimum time
// between two reports of a guest that is; gatedDelay while it waits for its place: when many
// do, they wait for up to minutes, and there is nothing to do about it.
const (
	pendingDelay = 10 * time.Second
	gatedDelay   = time.Minute
)

// settles returns how long the status of a pod is not reported yet, since its guest has been
// pending only for a moment, or was reported as such a moment ago. Most guests run a moment
// later: without the delay each of them would cost two or three more writes in this cluster.
// What a container waits for is reported at once if it does not end by itself.
func (h *Handler) settles(pod, guest *corev1.Pod, status corev1.PodStatus) (left time.Duration) {
	if status.Phase != corev1.PodPending || slices.ContainsFunc(slices.Concat(status.InitContainerStatuses, status.ContainerStatuses), isStuck) {
		return 0
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	state := h.state(pod.UID)
	gated := slices.ContainsFunc(guest.Spec.SchedulingGates, isHandOver) && !hasCondition(guest, broker.PodMustLeave)
	// A guest that has its place is about to run.
	if state.pending.IsZero() || state.pendingGated && !gated {
		state.pending = h.Clock.Now()
	}
	state.pendingGated = gated
	delay := pendingDelay
	if gated {
		delay = gatedDelay
	}
	return max(0, delay-h.Clock.Since(state.pending))
}

func hasCondition(pod *corev1.Pod, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
}

// isHandOver reports whether a gate keeps a guest until its place is handed over to it.
func isHandOver(g corev1.PodSchedulingGate) bool { return g.Name == broker.GateHandOver }

// isStuck reports whether a container waits for anything but its start.
func isStuck(c corev1.ContainerStatus) bool {
	return c.State.Waiting != nil && !slices.Contains([]string{"", "ContainerCreating", "PodInitializing"}, c.State.Waiting.Reason)
}

// waitForReference reports that a pod waits for a ConfigMap or Secret.
func (h *Handler) waitForReference(ctx context.Context, pod *corev1.Pod, missing missingReference) (requeueAfter time.Duration, err error) {
	requeueAfter = cacheDelay
	if h.sources.get(pod.Namespace).synced() {
		h.event(pod, corev1.EventTypeWarning, missing.reason, missing.message)
		requeueAfter = retryPeriod
	}
	status := waitingStatus(pod, reasonConfigMissing, missing.message)
	// The condition shows the agent that the pod waits for this cluster, not for the
	// provider: it does not reschedule the pod.
	status.Conditions = setCondition(status.Conditions, corev1.PodCondition{
		Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: reasonConfigMissing, Message: missing.message, LastTransitionTime: metav1.Time{Time: h.Clock.Now()}})
	again, err := h.writeStatus(ctx, pod, status)
	return earlier(requeueAfter, again), err
}

// maxRefusal is how much is repeated of a provider's refusal, which the pod's status has once
// for each container: one that is too large for the API server could not be updated any more.
const maxRefusal = 4096

// createFailed reports that the provider refused the guest; other errors are
// returned.
func (h *Handler) createFailed(ctx context.Context, pod *corev1.Pod, err error) (requeueAfter time.Duration, _ error) {
	if !isRefusal(err) {
		return 0, err
	}
	message := fmt.Sprintf("provider %s refused the guest: %s", h.Provider, spillwayevents.TruncateTo(err.Error(), maxRefusal))
	if strings.Contains(message, `violates PodSecurity "restricted`) {
		message += ". Set these fields of securityContext, or the provider's administrator sets guests.podSecurity to baseline"
	}
	h.event(pod, corev1.EventTypeWarning, reasonGuestRefused, message)
	requeueAfter, err = h.writeStatus(ctx, pod, waitingStatus(pod, reasonGuestRefused, message))
	return earlier(retryPeriod, requeueAfter), err
}

// update reports the guest's status and applies the pod's changes to the guest, unless that
// was done for these contents.
func (h *Handler) update(ctx context.Context, pod, guest *corev1.Pod, contents [2]uint64) (requeueAfter time.Duration, err error) {
	requeueAfter, err = h.reportGuest(ctx, pod, guest)
	if guest.DeletionTimestamp != nil || isTerminal(guest) || h.isApplied(pod.UID, contents) {
		return requeueAfter, err
	}
	// A status that cannot be written does not keep the guest from being updated.
	after, changeErr := h.applyChanges(ctx, pod, guest, contents)
	return earlier(requeueAfter, after), errors.Join(err, changeErr)
}

// reportGuest writes the status of a pod with a guest, also if another client has changed
// it, and returns how long it has not to be written yet.
func (h *Handler) reportGuest(ctx context.Context, pod, guest *corev1.Pod) (requeueAfter time.Duration, err error) {
	status := h.mirror(pod, guest)
	if settling := h.settles(pod, guest, status); settling > 0 {
		return settling, nil
	}
	return h.writeStatus(ctx, pod, status)
}

func (h *Handler) isApplied(uid types.UID, contents [2]uint64) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state(uid).applied == contents
}

// applyChanges applies the changes of a pod to its guest.
func (h *Handler) applyChanges(ctx context.Context, pod, guest *corev1.Pod, contents [2]uint64) (requeueAfter time.Duration, err error) {
	desired, refs, _ := translate.Pod(pod, h.GuestNamespace, h.DNS)
	// missing is ignored: like a running pod, the guest keeps what was deleted since.
	if _, err := h.copyReferences(ctx, pod, refs); err != nil {
		return h.updateFailed(pod, err)
	}
	changed := withChanges(guest, desired)
	if equality.Semantic.DeepEqual(guest, changed) {
		if len(refs.ConfigMaps)+len(refs.Secrets) == 0 && refs.DownwardFiles == nil {
			h.mu.Lock()
			h.state(pod.UID).applied = contents
			h.mu.Unlock()
		}
		return 0, nil
	}
	patch := client.StrategicMergeFrom(guest)
	data, err := patch.Data(changed)
	if err != nil {
		return 0, fmt.Errorf("computing the patch of guest %s: %w", guest.Name, err)
	}
	if _, err := h.ProviderClient.CoreV1().Pods(guest.Namespace).Patch(ctx, guest.Name, patch.Type(), data, metav1.PatchOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return h.updateFailed(pod, err)
	}
	return 0, nil
}

// withChanges returns the guest with the mutable fields of desired: labels,
// annotations, images and the active deadline.
func withChanges(guest, desired *corev1.Pod) *corev1.Pod {
	changed := guest.DeepCopy()
	if changed.Labels == nil {
		changed.Labels = map[string]string{}
	}
	if changed.Annotations == nil {
		changed.Annotations = map[string]string{}
	}
	for key := range changed.Labels {
		// Labels of Kubernetes are set by the provider.
		domain, _, _ := strings.Cut(key, "/")
		if _, ok := desired.Labels[key]; !ok && !strings.HasSuffix(domain, "kubernetes.io") {
			delete(changed.Labels, key)
		}
	}
	maps.Copy(changed.Labels, desired.Labels)
	maps.Copy(changed.Annotations, desired.Annotations)
	images := map[string]string{}
	for _, c := range slices.Concat(desired.Spec.InitContainers, desired.Spec.Containers) {
		images[c.Name] = c.Image
	}
	for _, containers := range [][]corev1.Container{changed.Spec.InitContainers, changed.Spec.Containers} {
		for i := range containers {
			if image, ok := images[containers[i].Name]; ok {
				containers[i].Image = image
			}
		}
	}
	if desired.Spec.ActiveDeadlineSeconds != nil {
		changed.Spec.ActiveDeadlineSeconds = desired.Spec.ActiveDeadlineSeconds
	}
	return changed
}

// updateFailed reports that the provider refused a change, and the guest keeps
// running unchanged; other errors are returned.
func (h *Handler) updateFailed(pod *corev1.Pod, err error) (requeueAfter time.Duration, _ error) {
	if !isRefusal(err) {
		return 0, err
	}
	h.event(pod, corev1.EventTypeWarning, reasonGuestRefused, fmt.Sprintf("provider %s refused a change to the guest: %s", h.Provider, spillwayevents.TruncateTo(err.Error(), maxRefusal)))
	return retryPeriod, nil
}

func isRefusal(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsUnauthorized(err)
}
