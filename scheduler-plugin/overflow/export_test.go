package overflow

import (
	"time"

	"k8s.io/apimachinery/pkg/types"
	framework "k8s.io/kube-scheduler/framework"
)

// SetBindingTimes changes how long the bindings of schedulers that are started later may
// take, until restore is called.
func SetBindingTimes(turn, deadline time.Duration) (restore func()) {
	before := defaultBindingTimes
	defaultBindingTimes = bindingTimes{turn: turn, deadline: deadline}
	return func() { defaultBindingTimes = before }
}

// Counted returns what a plugin has counted in its placements, without what is zero.
func Counted(plugin framework.Plugin) map[string]int64 {
	return plugin.(*Plugin).placements.Counted()
}

// Nominees returns how many pods of other schedulers keep room on a node, as a plugin knows.
func Nominees(plugin framework.Plugin, node string) int {
	return len(plugin.(*Plugin).placements.Nominees.On(node, func(types.UID) bool { return false }))
}
