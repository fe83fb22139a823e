package session

import (
	"context"
	"errors"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// replyTimeout is how long a reply waits for the cluster's controllers. A reply is
// the only way to reach the consumer, and its next message takes longer to arrive.
const replyTimeout = 8 * time.Second

// ErrNoReply is returned by Server.Answer where there is no reply yet; the
// consumer sends its message again.
var ErrNoReply = errors.New("no reply yet")

// Server is the provider's end of the handshake with all consumers. It checks a
// message's sender and session and leaves the rest to the driver.
type Server[M Message] struct {
	Codec *Codec[M]
	// Requests are the kinds of messages that consumers send.
	Requests []Kind
	// PollInterval is the interval of Poll.
	PollInterval time.Duration
	Log          logr.Logger
	// Recorded returns the session for which anything exists here, 0 if none.
	Recorded func(ctx context.Context, consumer string) (int64, error)
	// Teardown is that of peering.Provider.
	Teardown func(ctx context.Context, consumer string) (peering.Progress, error)
	// Answer replies to a message other than Teardown. The consumer holds capacity
	// here, and recorded is the message's session or 0.
	Answer func(ctx context.Context, consumer string, recorded int64, request M) (M, error)
}

// Handle implements peering.Provider.
func (s *Server[M]) Handle(ctx context.Context, consumer peering.Peer, raw []byte) ([]byte, error) {
	if err := ValidateClusterID(consumer.ClusterID); err != nil {
		return nil, err
	}
	request, err := s.Codec.Decode(raw, s.Requests...)
	if err != nil {
		s.Log.Info("Cannot decode a consumer's message; check that both clusters use the same driver", "consumer", consumer.ClusterID, "reason", err.Error())
		return Unreadable(s.Codec.Driver), nil
	}
	reply, err := s.reply(ctx, consumer, request)
	if errors.Is(err, ErrNoReply) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	reply.Head().Session, reply.Head().RequestID = request.Head().Session, request.Head().RequestID
	return s.Codec.Encode(reply)
}

func (s *Server[M]) reply(ctx context.Context, consumer peering.Peer, request M) (M, error) {
	message := func(header Header) (M, error) {
		m := s.Codec.New()
		*m.Head() = header
		return m, nil
	}
	fail := func(err error) (M, error) {
		var none M
		return none, err
	}
	recorded, err := s.Recorded(ctx, consumer.ClusterID)
	if err != nil {
		return fail(err)
	}
	head := request.Head()
	switch {
	case head.Kind == Teardown && head.Session < recorded:
		return message(Header{Kind: Gone}) // replaced by a later session
	case head.Kind == Teardown:
		if removed, err := s.remove(ctx, consumer.ClusterID); err != nil {
			return fail(err)
		} else if !removed {
			return fail(ErrNoReply)
		}
		return message(Header{Kind: Gone})
	case !consumer.Holds:
		return message(Refuse(ReasonNoHold, consumer.ClusterID+" holds no capacity here"))
	case head.Session < recorded:
		stale := Refuse(ReasonStale, "a later session exists")
		stale.Current = recorded
		return message(stale)
	case head.Session > recorded && recorded != 0:
		// The consumer began a new session: remove what is left of the recorded one.
		if removed, err := s.remove(ctx, consumer.ClusterID); err != nil {
			return fail(err)
		} else if !removed {
			return message(Refuse(ReasonTerminating, "the previous peering is still being removed"))
		}
		recorded = 0
	}
	return s.Answer(ctx, consumer.ClusterID, recorded, request)
}

// remove repeats Teardown and reports whether it was done in time.
func (s *Server[M]) remove(ctx context.Context, consumer string) (bool, error) {
	return s.Poll(ctx, func() (bool, error) {
		progress, err := s.Teardown(ctx, consumer)
		return progress.Done, err
	})
}

// Poll repeats check until it reports done, fails, or replyTimeout is over, in
// which case done is false.
func (s *Server[M]) Poll(ctx context.Context, check func() (done bool, err error)) (bool, error) {
	err := wait.PollUntilContextTimeout(ctx, s.PollInterval, replyTimeout, true, func(context.Context) (bool, error) { return check() })
	if wait.Interrupted(err) && ctx.Err() == nil {
		return false, nil
	}
	return err == nil, err
}
