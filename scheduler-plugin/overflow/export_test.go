package overflow

import (
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
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
	p := plugin.(*Plugin).placements
	p.mu.Lock()
	defer p.mu.Unlock()
	counts := map[string]int64{}
	for name, n := range p.nodes {
		counts["pods on "+name] = n.used[corev1.ResourcePods]
		counts["CPU on "+name] = n.used[corev1.ResourceCPU]
	}
	for at, byNamespace := range p.charged {
		for namespace, u := range byNamespace {
			counts[fmt.Sprintf("pods of %s charged to hold %q on %s", namespace, at.hold, at.node)] = int64(u.count)
		}
	}
	for by, byHold := range p.used {
		for hold, n := range byHold {
			counts[fmt.Sprintf("pods that use hold %q on %s", hold, by.node)] += int64(n)
		}
	}
	for by, n := range p.unresolved {
		counts[fmt.Sprintf("pods that use hold %q on %s", by.hold, by.node)] += int64(n)
	}
	for _, byHold := range p.living {
		for hold, n := range byHold {
			counts[fmt.Sprintf("living pods of hold %q", hold)] += int64(n)
		}
	}
	maps.DeleteFunc(counts, func(_ string, n int64) bool { return n == 0 })
	return counts
}

// Nominees returns how many pods of other schedulers keep room on a node, as a plugin knows.
func Nominees(plugin framework.Plugin, node string) int {
	return len(plugin.(*Plugin).placements.nominees.on(node, func(types.UID) bool { return false }))
}
