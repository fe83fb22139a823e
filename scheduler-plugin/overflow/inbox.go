package overflow

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// inbox is where the scheduling cycle and the informers leave word for the
// asker. Leaving word never blocks. Safe for concurrent use.
type inbox struct {
	// wake has a token whenever there is something to take.
	wake chan struct{}

	mu   sync.Mutex
	mail mail
	// known pods have been noted and are not gone: of all others, nobody needs to
	// hear that they are.
	known map[types.UID]bool
}

// mail is what the asker has to look at.
type mail struct {
	// pods that found no room.
	pods map[types.UID]types.NamespacedName
	// welcome pods wait, and have been let onto a virtual node since.
	welcome map[types.UID]types.NamespacedName
	// gone pods wait no more.
	gone map[types.UID]bool
	// news: keys whose Reservations say something new to their pods.
	news map[demand.Key]bool
	// touched: keys whose Reservations changed in any way.
	touched map[demand.Key]bool
}

func newMail() mail {
	return mail{pods: map[types.UID]types.NamespacedName{}, welcome: map[types.UID]types.NamespacedName{}, gone: map[types.UID]bool{}, news: map[demand.Key]bool{}, touched: map[demand.Key]bool{}}
}

func newInbox() *inbox {
	return &inbox{wake: make(chan struct{}, 1), mail: newMail(), known: map[types.UID]bool{}}
}

// note says that a pod found no room.
func (b *inbox) note(pod *corev1.Pod) {
	b.mu.Lock()
	b.mail.pods[pod.UID] = types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	delete(b.mail.gone, pod.UID)
	b.known[pod.UID] = true
	b.mu.Unlock()
	b.ring()
}

// welcome says that a pod may go to more nodes than before. Nobody needs to hear
// it of a pod that has not been turned away.
func (b *inbox) welcome(pod *corev1.Pod) {
	b.mu.Lock()
	known := b.known[pod.UID]
	if known {
		b.mail.welcome[pod.UID] = types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
	}
	b.mu.Unlock()
	if known {
		b.ring()
	}
}

// forget says that a pod waits no more: it was bound, is ending, or is gone.
func (b *inbox) forget(pod types.UID) {
	b.mu.Lock()
	known := b.known[pod]
	if known {
		delete(b.known, pod)
		delete(b.mail.pods, pod)
		delete(b.mail.welcome, pod)
		b.mail.gone[pod] = true
	}
	b.mu.Unlock()
	if known {
		b.ring()
	}
}

// drop is forget for the asker itself, which needs no word of it.
func (b *inbox) drop(pod types.UID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.known, pod)
}

// reservation says that a key's Reservation changed; news, that its pods should
// hear of it.
func (b *inbox) reservation(key demand.Key, news bool) {
	b.mu.Lock()
	b.mail.touched[key] = true
	if news {
		b.mail.news[key] = true
	}
	b.mu.Unlock()
	b.ring()
}

// take empties the inbox.
func (b *inbox) take() mail {
	b.mu.Lock()
	defer b.mu.Unlock()
	taken := b.mail
	b.mail = newMail()
	return taken
}

func (b *inbox) ring() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}
