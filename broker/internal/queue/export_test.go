package queue

// Len is the number of entries.
func (q *Queue) Len() int { return len(q.sorted) }
