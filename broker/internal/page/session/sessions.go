package session

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"sync"
	"time"

	"k8s.io/utils/clock"
)

const (
	// most is the maximum number of sessions, mostOfOne that of one user: a further one ends
	// the oldest.
	most, mostOfOne = 512, 128
	// lifetime is after which time a session ends, if its token does not end before.
	lifetime = 12 * time.Hour
	// reviewedFor is for how long an answer of the API server is used.
	reviewedFor = time.Minute
	// reviewTimeout is how long a review of a session may take, and failedFor for how long its
	// failure is the answer.
	reviewTimeout, failedFor = 5 * time.Second, 5 * time.Second
)

// ErrNone means that there is no such session, or that it has ended.
var ErrNone = errors.New("not signed in")

// Sessions are those of one broker, in memory. They are safe for concurrent use.
type Sessions struct {
	review func(ctx context.Context, token string) (User, error)
	clock  clock.PassiveClock

	mutex sync.Mutex
	// open are the sessions by the hash of their names.
	open map[[sha256.Size]byte]*session
}

// session is that of one browser.
type session struct {
	token, user string
	since       time.Time

	mutex    sync.Mutex
	known    User
	reviewed time.Time
	// failure is why the last review failed, if it did, and failed when.
	failure error
	failed  time.Time
}

// New returns Sessions without any. review says whose a token is.
func New(review func(ctx context.Context, token string) (User, error), clock clock.PassiveClock) *Sessions {
	return &Sessions{review: review, clock: clock, open: map[[sha256.Size]byte]*session{}}
}

// Open opens a session for who has a token, and returns its name, which is secret; empty for who may
// list nothing.
func (s *Sessions) Open(ctx context.Context, token string) (name string, user User, err error) {
	if user, err = s.review(ctx, token); err != nil {
		return "", User{}, err
	}
	if !user.Clusters && !user.Reservations {
		return "", user, nil
	}
	now := s.clock.Now()
	name = rand.Text()
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.makeRoom(user.Name, now)
	s.open[sha256.Sum256([]byte(name))] = &session{token: token, user: user.Name, since: now, known: user, reviewed: now}
	return name, user, nil
}

// makeRoom ends sessions that are over, and the oldest where there are as many as there may be. The
// caller holds the lock.
func (s *Sessions) makeRoom(user string, now time.Time) {
	var oldest, oldestOfUser [sha256.Size]byte
	of := 0
	for key, open := range s.open {
		if now.Sub(open.since) >= lifetime {
			delete(s.open, key)
			continue
		}
		if known := s.open[oldest]; known == nil || open.since.Before(known.since) {
			oldest = key
		}
		if open.user != user {
			continue
		}
		of++
		if known := s.open[oldestOfUser]; known == nil || open.since.Before(known.since) {
			oldestOfUser = key
		}
	}
	switch {
	case of >= mostOfOne:
		delete(s.open, oldestOfUser)
	case len(s.open) >= most:
		delete(s.open, oldest)
	}
}

// User returns whose a session is. The error is ErrNone if it is no one's, and ErrToken if its token is
// no longer accepted, which ends it; with another one, the API server could not be asked.
func (s *Sessions) User(ctx context.Context, name string) (User, error) {
	key := sha256.Sum256([]byte(name))
	s.mutex.Lock()
	open := s.open[key]
	s.mutex.Unlock()
	if open == nil {
		return User{}, ErrNone
	}
	now := s.clock.Now()
	if now.Sub(open.since) >= lifetime {
		s.Close(name)
		return User{}, ErrNone
	}
	open.mutex.Lock()
	defer open.mutex.Unlock()
	if now.Sub(open.reviewed) < reviewedFor {
		return open.known, nil
	}
	if open.failure != nil && now.Sub(open.failed) < failedFor {
		return User{}, open.failure
	}
	// Others wait for the answer, too: it does not end with the call that asked.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), reviewTimeout)
	defer cancel()
	user, err := s.review(ctx, open.token)
	if open.failure = err; err != nil {
		open.failed = s.clock.Now()
		if errors.Is(err, ErrToken) {
			s.Close(name)
		}
		return User{}, err
	}
	open.known, open.reviewed = user, now
	return user, nil
}

// Close ends a session.
func (s *Sessions) Close(name string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	delete(s.open, sha256.Sum256([]byte(name)))
}
