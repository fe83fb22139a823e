package transport

import (
	"maps"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
)

// ResendAfter is how long the effect of a message may take to show in a Mirror
// before the message is sent again.
const ResendAfter = 10 * time.Second

// Resend keeps a controller from repeating a message to the broker while its
// effect has yet to show in the Mirror. The zero value is ready to use.
type Resend[Message any] struct {
	mu   sync.Mutex
	sent map[string]sentMessage[Message]
}

type sentMessage[Message any] struct {
	message Message
	due     time.Time
}

// Wait returns how long to wait before a message about id is sent; 0 means that
// it is due now.
func (r *Resend[Message]) Wait(id string, message Message, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if last, ok := r.sent[id]; ok && equality.Semantic.DeepEqual(last.message, message) {
		return max(0, last.due.Sub(now))
	}
	return 0
}

// Sent records a message and returns how long to wait for its effect.
func (r *Resend[Message]) Sent(id string, message Message, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.sent, func(_ string, last sentMessage[Message]) bool { return !now.Before(last.due) })
	if r.sent == nil {
		r.sent = map[string]sentMessage[Message]{}
	}
	r.sent[id] = sentMessage[Message]{message, now.Add(ResendAfter)}
	return ResendAfter
}

// Reset makes every message due now.
func (r *Resend[Message]) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.sent)
}
