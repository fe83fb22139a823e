package overflow

import "time"

// SetBindingTimes changes how long the bindings of schedulers that are started later may
// take, until restore is called.
func SetBindingTimes(turn, deadline time.Duration) (restore func()) {
	before := defaultBindingTimes
	defaultBindingTimes = bindingTimes{turn: turn, deadline: deadline}
	return func() { defaultBindingTimes = before }
}
