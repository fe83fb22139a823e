package limits

import "sync"

// InProgress counts the calls of each caller that are in progress.
type InProgress struct {
	mutex sync.Mutex
	calls map[string]int
}

// Begin counts a call, unless there are as many as there may be at most.
func (p *InProgress) Begin(caller string, most int) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.calls == nil {
		p.calls = map[string]int{}
	}
	if p.calls[caller] >= most {
		return false
	}
	p.calls[caller]++
	return true
}

// End counts the end of a call that Begin has counted.
func (p *InProgress) End(caller string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.calls[caller]--; p.calls[caller] == 0 {
		delete(p.calls, caller)
	}
}
