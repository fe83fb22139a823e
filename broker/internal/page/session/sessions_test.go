package session_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// hub is what the API server says of tokens: that they are those of the users with these names.
type hub struct {
	err   error
	asked int
	may   bool
}

func (h *hub) review(_ context.Context, token string) (session.User, error) {
	h.asked++
	return session.User{Name: token, Reservations: h.may}, h.err
}

func TestSessions(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(1_000_000, 0))
	pass := func(d time.Duration) { clock.SetTime(clock.Now().Add(d)) }
	api := &hub{may: true}
	sessions := session.New(api.review, clock)
	name, user, err := sessions.Open(t.Context(), "ada")
	if err != nil || user.Name != "ada" || len(name) < 26 {
		t.Fatalf("%q, %+v, %v", name, user, err)
	}
	is := func(what string, may bool, want error, asked int) {
		t.Helper()
		user, err := sessions.User(t.Context(), name)
		if !errors.Is(err, want) || err == nil && user != (session.User{Name: "ada", Reservations: may}) || api.asked != asked {
			t.Errorf("%s: %+v, %v, asked %d times", what, user, err, api.asked)
		}
	}
	is("at once", true, nil, 1)
	pass(59 * time.Second)
	is("within a minute", true, nil, 1)
	api.may = false
	pass(time.Second)
	is("what a user may see is reviewed after a minute", false, nil, 2)
	api.err = errors.New("no answer")
	pass(time.Minute)
	is("an API server that does not answer shows nothing", false, api.err, 3)
	is("nor is it asked at once again", false, api.err, 3)
	pass(5 * time.Second)
	api.err = nil
	is("and ends no session", false, nil, 4)
	api.err = session.ErrToken
	pass(time.Minute)
	is("a token that is not accepted any more", false, session.ErrToken, 5)
	api.err, api.may = nil, true
	is("ends the session", false, session.ErrNone, 5)

	name, _, err = sessions.Open(t.Context(), "ada")
	expect.NoError(t, err)
	pass(12 * time.Hour)
	is("a session ends after 12 hours", false, session.ErrNone, 6)
	name, _, err = sessions.Open(t.Context(), "ada")
	expect.NoError(t, err)
	sessions.Close(name)
	is("one that was closed", false, session.ErrNone, 7)
	api.err = session.ErrToken
	if name, _, err = sessions.Open(t.Context(), "ada"); !errors.Is(err, session.ErrToken) || name != "" {
		t.Errorf("%q, %v", name, err)
	}
	is("an empty name", false, session.ErrNone, 8)
}

// One user's many sessions end their own, and those of all are bounded.
func TestSessionsAreBounded(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(time.Unix(1_000_000, 0))
	api := &hub{may: true}
	sessions := session.New(api.review, clock)
	open := func(user string) string {
		t.Helper()
		clock.SetTime(clock.Now().Add(time.Millisecond))
		name, _, err := sessions.Open(t.Context(), user)
		expect.NoError(t, err)
		return name
	}
	alive := func(name string) bool {
		_, err := sessions.User(t.Context(), name)
		return err == nil
	}
	first := open("ada")
	var all []string
	for range 129 {
		all = append(all, open("bob"))
	}
	if !alive(first) || alive(all[0]) || !alive(all[1]) || !alive(all[128]) {
		t.Error("want the oldest session of the same user to end")
	}
	api.may = false
	if name := open("bob"); name != "" || !alive(all[1]) {
		t.Error("who may list nothing ends a session of others")
	}
	api.may = true
	for i := range 600 {
		open(fmt.Sprint("user-", i))
	}
	if alive(first) || !alive(open("ada")) {
		t.Error("want the oldest session to end")
	}
}
