package commit

import (
	"sync"

	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Specs has one copy of what each cluster advertises. Without it there are two: in the
// answer to the broker's own write, and in what the watch repeats of it. Its zero value is
// ready, and it is safe for concurrent use. A nil Specs shares nothing.
type Specs struct {
	mu sync.Mutex
	of map[string]spec
}

// spec is a version of what a cluster advertises. The generation changes with the content;
// sequence and time tell the same generation of a restored hub apart.
type spec struct {
	uid        types.UID
	generation int64
	content    *broker.ClusterAdvertisementSpec
}

// Transform returns a cache's transform that shares the specs of advertisements after
// another transform.
func (s *Specs) Transform(first toolscache.TransformFunc) toolscache.TransformFunc {
	return func(object any) (any, error) {
		object, err := first(object)
		if ad, ok := object.(*broker.ClusterAdvertisement); ok && err == nil {
			s.share(ad)
		}
		return object, err
	}
}

// share replaces the spec of an object that only the caller knows by that of an equal one
// that was shared before: it must not be changed afterwards.
func (s *Specs) share(ad *broker.ClusterAdvertisement) {
	if s == nil || ad.UID == "" || ad.Generation == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	known, exists := s.of[ad.Name]
	switch {
	case exists && known.uid == ad.UID && known.generation == ad.Generation &&
		known.content.Sequence == ad.Spec.Sequence && known.content.Timestamp.Equal(&ad.Spec.Timestamp):
		ad.Spec = *known.content
	case exists && known.uid == ad.UID && known.generation > ad.Generation:
		// The watch is behind.
	default:
		if s.of == nil {
			s.of = map[string]spec{}
		}
		content := ad.Spec
		s.of[ad.Name] = spec{ad.UID, ad.Generation, &content}
	}
}

// Forget ends the sharing with a deleted object.
func (s *Specs) Forget(ad *broker.ClusterAdvertisement) {
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[ad.Name].uid == ad.UID {
		delete(s.of, ad.Name)
	}
}
