package request

import (
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// PolicyCache has the OverflowPolicies.
type PolicyCache struct {
	Decoded cache.Store
	Objects *undecoded.Objects
}

// List returns the policies as they are now.
func (c PolicyCache) List() demand.Policies {
	p := demand.Policies{Undecoded: c.Objects.Of("OverflowPolicy")}
	for _, obj := range c.Decoded.List() {
		p.Decoded = append(p.Decoded, obj.(*broker.OverflowPolicy))
	}
	return p
}

// OptedIn reports whether the pods of a namespace may overflow.
func OptedIn(namespaces corelisters.NamespaceLister, name string) bool {
	namespace, err := namespaces.Get(name)
	return err == nil && namespace.Labels[broker.LabelOverflow] == broker.OverflowEnabled
}
