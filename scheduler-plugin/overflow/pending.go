package overflow

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// pendingPods are the pods that PostFilter reported and that have no node yet, with
// the events that they have got. Safe for concurrent use.
type pendingPods struct {
	mu   sync.Mutex
	pods map[types.UID]*pendingPod
}

type pendingPod struct {
	name types.NamespacedName
	// events has the key of the last event by reason.
	events map[string]string
}

func newPendingPods() *pendingPods { return &pendingPods{pods: map[types.UID]*pendingPod{}} }

func (p *pendingPods) add(uid types.UID, name types.NamespacedName) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pods[uid] == nil {
		p.pods[uid] = &pendingPod{name: name, events: map[string]string{}}
	}
}

func (p *pendingPods) remove(uid types.UID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
}

func (p *pendingPods) has(uid types.UID) bool {
	_, ok := p.name(uid)
	return ok
}

func (p *pendingPods) name(uid types.UID) (types.NamespacedName, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil {
		return types.NamespacedName{}, false
	}
	return pod.name, true
}

// in calls f for each pod of a namespace.
func (p *pendingPods) in(namespace string, f func(types.UID, types.NamespacedName)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for uid, pod := range p.pods {
		if pod.name.Namespace == namespace {
			f(uid, pod.name)
		}
	}
}

// announce reports whether a pod is to get an event, and which pod that is: not if the
// event repeats its last one of that reason.
func (p *pendingPods) announce(uid types.UID, e event) (name types.NamespacedName, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pod := p.pods[uid]
	if pod == nil {
		return name, false
	}
	if last, known := pod.events[e.reason]; known && last == e.key {
		return name, false
	}
	pod.events[e.reason] = e.key
	return pod.name, true
}

// untriedPods are the pods of a scheduler that it has not tried yet. Safe for
// concurrent use.
type untriedPods struct {
	mu   sync.Mutex
	pods map[types.UID]*corev1.Pod
}

func newUntriedPods() *untriedPods { return &untriedPods{pods: map[types.UID]*corev1.Pod{}} }

// set records whether a pod is one of them.
func (u *untriedPods) set(pod *corev1.Pod, untried bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if untried {
		u.pods[pod.UID] = pod
	} else {
		delete(u.pods, pod.UID)
	}
}

// count counts them by the key that keyOf returns.
func (u *untriedPods) count(keyOf func(*corev1.Pod) (demand.Key, bool)) map[demand.Key]int32 {
	u.mu.Lock()
	defer u.mu.Unlock()
	counts := map[demand.Key]int32{}
	for _, pod := range u.pods {
		if key, ok := keyOf(pod); ok {
			counts[key]++
		}
	}
	return counts
}
