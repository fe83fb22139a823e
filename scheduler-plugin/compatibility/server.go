package compatibility

import (
	"cmp"
	"context"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery"
)

// Server is what a process knows of its API server's minor. Safe for concurrent use.
type Server struct{ minor atomic.Int64 }

// askFor is how long Find asks an API server that does not answer: less than a liveness probe
// waits.
const askFor = 15 * time.Second

// Find asks the API server for its minor, once a second until it answers. If it does not, the
// minor is Oldest.
func (s *Server) Find(ctx context.Context, server discovery.ServerVersionInterface) (minor Minor, err error) {
	waited := wait.PollUntilContextTimeout(ctx, time.Second, askFor, true, func(context.Context) (bool, error) {
		minor, err = Of(server)
		return err == nil, nil
	})
	if waited != nil {
		minor, err = Oldest, cmp.Or(err, waited)
	}
	s.minor.Store(int64(minor))
	return minor, err
}

// Minor is what was found.
func (s *Server) Minor() Minor { return Minor(s.minor.Load()) }

// sure is how many looks in a row must find a later minor: while a control plane of several API
// servers is upgraded, they differ, and a scheduler must not be newer than any of them.
const sure = 5

// AwaitUpgrade looks at the API server's minor once a period, and returns it when that is no
// longer what was found, or when ctx ends.
func (s *Server) AwaitUpgrade(ctx context.Context, server discovery.ServerVersionInterface, period time.Duration) (after Minor) {
	later := 0
	_ = wait.PollUntilContextCancel(ctx, period, false, func(context.Context) (bool, error) {
		minor, err := Of(server)
		switch {
		case err != nil:
			return false, nil
		case minor == s.Minor():
			later = 0
		default:
			later, after = later+1, minor
		}
		return later == sure || minor < s.Minor(), nil
	})
	return after
}
