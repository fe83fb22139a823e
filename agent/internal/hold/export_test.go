package hold

// MaxMoved is the number of guests that are given a place at a time.
const MaxMoved = maxMoved

// AnswerOf exposes what the result of a dry run says about the pod.
func AnswerOf(err error) string { return string(answerOf(err)) }

// Enqueued takes the consumers that were enqueued, in order.
func (r *Reconciler) Enqueued() (consumers []string) {
	for {
		select {
		case e := <-r.enqueue:
			consumers = append(consumers, e.Object.GetName())
		default:
			return consumers
		}
	}
}

// Known is the number of consumers of which anything is remembered.
func (r *Reconciler) Known() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.consumers) + len(r.changed)
}
