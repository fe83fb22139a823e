package hosting

import (
	"context"
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

	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
)

const (
	// lookAgain is the pause where only time will tell.
	lookAgain = 5 * time.Second
	// catchUp is the pause where a cache is behind the API server.
	catchUp = 300 * time.Millisecond

	reasonWaiting = "CreateContainerConfigError"
	reasonRefused = "ProviderRefused"
	reasonLost    = "GuestLost"
	// exitLost is the exit code of a container of which nobody can say more: that
	// of one that was killed.
	exitLost = 137
)

// sync brings one pod and its guest together.
func (h *Host) sync(ctx context.Context, key string) (again time.Duration, err error) {
	namespace, name, err := cache.SplitMetaNamespaceKey(key)
	if err != nil {
		return 0, nil
	}
	home, err := h.pods.Pods(namespace).Get(name)
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("looking for pod %s: %w", key, err)
	}
	if err != nil {
		home = nil
	}
	strays, err := h.guests.ByIndex(indexOrigin, key)
	if err != nil {
		return 0, fmt.Errorf("looking for guests of %s: %w", key, err)
	}
	h.remember(key, home, strays)
	for _, object := range strays {
		g := object.(*corev1.Pod)
		if _, _, uid, _ := guest.Origin(g); home == nil || uid != home.UID {
			wait, err := h.removeStray(ctx, namespace, name, g)
			if err != nil {
				return 0, err
			}
			again = max(again, wait)
		}
	}
	if home == nil {
		h.queue.AddAfter(pruneKey, pruneAfter)
		return again, nil
	}
	if over(home) {
		h.queue.AddAfter(pruneKey, pruneAfter)
		return again, nil
	}
	g := h.guestOf(home)
	var own time.Duration
	switch {
	case home.DeletionTimestamp != nil:
		own, err = h.end(ctx, home, g)
	case g == nil:
		own, err = h.begin(ctx, home)
	default:
		own, err = h.keep(ctx, home, g)
	}
	if again == 0 || own > 0 && own < again {
		again = own
	}
	return again, err
}

// removeStray removes a guest whose pod is gone from home. The cache may be
// behind, so home is asked.
func (h *Host) removeStray(ctx context.Context, namespace, name string, g *corev1.Pod) (again time.Duration, err error) {
	_, _, uid, _ := guest.Origin(g)
	live, err := h.Home.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err == nil && live.UID == uid && live.Spec.NodeName == h.nodeName {
		return catchUp, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("making sure that pod %s/%s is gone: %w", namespace, name, err)
	}
	h.forget(uid)
	if g.DeletionTimestamp != nil {
		return 0, nil
	}
	h.Log.V(1).Info("Removing a guest whose pod is gone", "guest", g.Name, "pod", namespace+"/"+name)
	return 0, h.remove(ctx, g, nil)
}

// remember forgets the pod that had a name before, once it has no guest.
func (h *Host) remember(key string, home *corev1.Pod, guests []any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.seen[key]
	switch {
	case home != nil:
		h.seen[key] = home.UID
	case len(guests) == 0:
		delete(h.seen, key)
	}
	if before == "" || home != nil && home.UID == before {
		return
	}
	if !slices.ContainsFunc(guests, func(g any) bool {
		_, _, uid, _ := guest.Origin(g.(*corev1.Pod))
		return uid == before
	}) {
		h.drop(before)
	}
}

func (h *Host) forget(uid types.UID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(uid)
}

func (h *Host) drop(uid types.UID) {
	delete(h.refs, uid)
	delete(h.noted, uid)
	delete(h.made, uid)
	delete(h.last, uid)
}

// tried tells whether a guest for the pod may have been made before, and from now
// on it may have.
func (h *Host) tried(uid types.UID) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.made[uid]
	h.made[uid] = true
	return before
}

// remove deletes a guest, with its own grace period where none is given.
func (h *Host) remove(ctx context.Context, g *corev1.Pod, grace *int64) error {
	err := h.Remote.CoreV1().Pods(g.Namespace).Delete(ctx, g.Name, metav1.DeleteOptions{
		GracePeriodSeconds: grace, Preconditions: metav1.NewUIDPreconditions(string(g.UID))})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("deleting guest %s: %w", g.Name, err)
	}
	return nil
}

// end ends the guest of a pod that is to go, and tells home when it is gone.
func (h *Host) end(ctx context.Context, home, g *corev1.Pod) (time.Duration, error) {
	if g == nil {
		found, err := h.live(ctx, home)
		if err != nil {
			return 0, err
		}
		if found {
			return catchUp, nil
		}
		h.report(home, ended(home, "Deleted", "its guest is gone", metav1.Time{Time: h.Clock.Now()}))
		return 0, nil
	}
	h.report(home, h.mirror(home, g))
	grace := home.DeletionGracePeriodSeconds
	if g.DeletionTimestamp != nil && ptr.Deref(g.DeletionGracePeriodSeconds, 0) <= ptr.Deref(grace, 0) {
		return 0, nil
	}
	return 0, h.remove(ctx, g, grace)
}

// live asks the provider whether a pod's guest is there, whatever the cache says.
func (h *Host) live(ctx context.Context, home *corev1.Pod) (bool, error) {
	_, err := h.Remote.CoreV1().Pods(h.Namespace).Get(ctx, guest.Name(home), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("asking %s for the guest: %w", h.Provider, err)
	}
	return true, nil
}

// begin makes the guest of a pod that has none.
func (h *Host) begin(ctx context.Context, home *corev1.Pod) (time.Duration, error) {
	if home.Status.StartTime != nil {
		// It had one.
		found, err := h.live(ctx, home)
		if err != nil {
			return 0, err
		}
		if found {
			return catchUp, nil
		}
		guestsLost.WithLabelValues(h.Provider).Inc()
		text := "its guest in " + h.Provider + " is gone: it was deleted or evicted there, or its node was lost"
		h.tell(home, corev1.EventTypeWarning, reasonLost, text)
		status := ended(home, reasonLost, text, metav1.Time{Time: h.Clock.Now()})
		status.Phase = corev1.PodFailed
		h.report(home, status)
		return 0, nil
	}
	made, refs, notes := guest.Translate(home, h.Namespace, h.DNS)
	if len(notes) > 0 {
		h.tell(home, corev1.EventTypeNormal, "NotAsAtHome", strings.Join(notes, " "))
	}
	missing, err := h.provide(ctx, home, refs)
	if err != nil {
		return h.refused(home, err)
	}
	if missing != "" {
		wait := lookAgain
		if h.sources.of(home.Namespace).synced() {
			h.tell(home, corev1.EventTypeWarning, "WaitingForConfiguration", missing)
		} else {
			wait = catchUp
		}
		status := waiting(home, reasonWaiting, missing)
		// What home itself lacks is no fault of the provider's: with a condition of
		// its own, nobody takes the pod for one that was left lying there.
		status.Conditions = setCondition(status.Conditions, corev1.PodCondition{
			Type: corev1.PodReady, Status: corev1.ConditionFalse, Reason: reasonWaiting, Message: missing, LastTransitionTime: metav1.Time{Time: h.Clock.Now()}})
		h.report(home, status)
		return wait, nil
	}
	// The cache may not show yet what was made a moment ago. Making it again would
	// fail, but not before the provider has charged its quota once more, which
	// takes it minutes to find out, and another guest would be refused meanwhile.
	if h.tried(home.UID) {
		if found, err := h.live(ctx, home); err != nil {
			return h.refused(home, err)
		} else if found {
			return catchUp, nil
		}
	}
	_, err = h.Remote.CoreV1().Pods(h.Namespace).Create(ctx, made, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return h.refused(home, err)
	}
	return 0, nil
}

// refused tells people what the provider says, and passes every other error on.
func (h *Host) refused(home *corev1.Pod, err error) (time.Duration, error) {
	if isRefusal(err) {
		text := fmt.Sprintf("%s does not take it: %v", h.Provider, err)
		h.tell(home, corev1.EventTypeWarning, reasonRefused, text)
		h.report(home, waiting(home, reasonRefused, text))
		return lookAgain, nil
	}
	return 0, err
}

// keep mirrors a guest, and carries changes to it.
func (h *Host) keep(ctx context.Context, home, g *corev1.Pod) (time.Duration, error) {
	// Who writes statuses at home keeps to the last one that it was told, also when
	// somebody else has written another since: it must have been told this one.
	if status := h.mirror(home, g); !h.told(home.UID, status) || !equality.Semantic.DeepEqual(home.Status, status) {
		h.report(home, status)
	}
	if g.DeletionTimestamp != nil || over(g) {
		return 0, nil
	}
	made, refs, _ := guest.Translate(home, h.Namespace, h.DNS)
	// What has been deleted at home since stays with the guest, as it would with a
	// running pod at home.
	if _, err := h.provide(ctx, home, refs); err != nil {
		return h.objected(home, err)
	}
	changed := g.DeepCopy()
	if changed.Labels == nil {
		changed.Labels = map[string]string{}
	}
	if changed.Annotations == nil {
		changed.Annotations = map[string]string{}
	}
	for key := range changed.Labels {
		// Kubernetes' own labels are the provider's to write.
		domain, _, _ := strings.Cut(key, "/")
		if _, ok := made.Labels[key]; !ok && !strings.HasSuffix(domain, "kubernetes.io") {
			delete(changed.Labels, key)
		}
	}
	maps.Copy(changed.Labels, made.Labels)
	maps.Copy(changed.Annotations, made.Annotations)
	images := map[string]string{}
	for _, c := range append(made.Spec.InitContainers, made.Spec.Containers...) {
		images[c.Name] = c.Image
	}
	for _, list := range [][]corev1.Container{changed.Spec.InitContainers, changed.Spec.Containers} {
		for i := range list {
			if image, ok := images[list[i].Name]; ok {
				list[i].Image = image
			}
		}
	}
	if made.Spec.ActiveDeadlineSeconds != nil {
		changed.Spec.ActiveDeadlineSeconds = made.Spec.ActiveDeadlineSeconds
	}
	if equality.Semantic.DeepEqual(g, changed) {
		return 0, nil
	}
	patch := client.StrategicMergeFrom(g)
	data, err := patch.Data(changed)
	if err != nil {
		return 0, fmt.Errorf("comparing guest %s with its pod: %w", g.Name, err)
	}
	if _, err := h.Remote.CoreV1().Pods(g.Namespace).Patch(ctx, g.Name, patch.Type(), data, metav1.PatchOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return h.objected(home, err)
	}
	return 0, nil
}

// objected tells people that a change was refused. The guest runs on as it was.
func (h *Host) objected(home *corev1.Pod, err error) (time.Duration, error) {
	if !isRefusal(err) {
		return 0, err
	}
	h.tell(home, corev1.EventTypeWarning, reasonRefused, fmt.Sprintf("%s does not take a change: %v", h.Provider, err))
	return lookAgain, nil
}

func isRefusal(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsUnauthorized(err)
}

// waiting is the status of a pod that has no guest yet.
func waiting(home *corev1.Pod, reason, message string) corev1.PodStatus {
	status := *home.Status.DeepCopy()
	status.Phase, status.Reason, status.Message = corev1.PodPending, reason, message
	wait := func(containers []corev1.Container) []corev1.ContainerStatus {
		var out []corev1.ContainerStatus
		for _, c := range containers {
			out = append(out, corev1.ContainerStatus{Name: c.Name, Image: c.Image,
				State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}})
		}
		return out
	}
	status.ContainerStatuses, status.InitContainerStatuses = wait(home.Spec.Containers), wait(home.Spec.InitContainers)
	return status
}

// ended is the status of a pod whose guest is no more: no container runs.
func ended(home *corev1.Pod, reason, message string, now metav1.Time) corev1.PodStatus {
	status := *home.Status.DeepCopy()
	status.Reason, status.Message = reason, message
	for _, list := range [][]corev1.ContainerStatus{status.ContainerStatuses, status.InitContainerStatuses} {
		for i := range list {
			c := &list[i]
			c.Ready, c.Started = false, ptr.To(false)
			if c.State.Terminated != nil {
				continue
			}
			terminated := &corev1.ContainerStateTerminated{ExitCode: exitLost, Reason: reason, Message: message, FinishedAt: now, ContainerID: c.ContainerID}
			if c.State.Running != nil {
				terminated.StartedAt = c.State.Running.StartedAt
			}
			c.State = corev1.ContainerState{Terminated: terminated}
		}
	}
	for i := range status.Conditions {
		switch c := &status.Conditions[i]; c.Type {
		case corev1.PodReady, corev1.ContainersReady:
			if c.Status != corev1.ConditionFalse {
				c.Status, c.Reason, c.LastTransitionTime = corev1.ConditionFalse, reason, now
			}
		}
	}
	return status
}

func setCondition(conditions []corev1.PodCondition, c corev1.PodCondition) []corev1.PodCondition {
	for i := range conditions {
		if conditions[i].Type == c.Type {
			if conditions[i].Status == c.Status {
				c.LastTransitionTime = conditions[i].LastTransitionTime
			}
			conditions[i] = c
			return conditions
		}
	}
	return append(conditions, c)
}
