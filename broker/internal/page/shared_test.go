package page_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestSharedAddress: who guesses tokens keeps no other one of the same address, such as an Ingress, from
// signing in, and who is kept does not forget where to go.
func TestSharedAddress(t *testing.T) {
	s := serve(t, nil)
	s.review = func(ctx context.Context, token string) (session.User, error) {
		if strings.HasPrefix(token, "guess") {
			return session.User{}, session.ErrToken
		}
		return everyone(ctx, token)
	}
	for i := range 30 {
		do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {fmt.Sprint("guess-", i)}})
	}
	s.signIn(t, "ada")
	for range 30 {
		if a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {"guess"}, "next": {"/queue"}}); a.StatusCode == http.StatusTooManyRequests {
			if !strings.Contains(a.body, `value="/queue"`) {
				t.Error("who tries too often does not go on to the queue then")
			}
			return
		}
	}
	t.Error("one token has no rate")
}

// TestSharedUser: people who share a user do not use up each other's requests and streams.
func TestSharedUser(t *testing.T) {
	s := serve(t, nil)
	ada, other := s.signIn(t, "viewer"), s.signIn(t, "viewer")
	codes := map[int]int{}
	for range 200 {
		codes[do(t, ada, http.MethodGet, s.url+"/queue", nil).StatusCode]++
	}
	if codes[http.StatusTooManyRequests] == 0 {
		t.Errorf("a session has no rate: %v", codes)
	}
	if a := do(t, other, http.MethodGet, s.url+"/queue", nil); a.StatusCode != http.StatusOK {
		t.Errorf("another session: %s", a.Status)
	}
}

// TestSigningInAgain ends the browser's session before, and asks no standby.
func TestSigningInAgain(t *testing.T) {
	s := serve(t, nil)
	b := s.signIn(t, "ada")
	at, err := url.Parse(s.url)
	expect.NoError(t, err)
	before := b.Jar.Cookies(at)[0]
	if a := do(t, b, http.MethodPost, s.url+"/sign-in", url.Values{"token": {"bob"}}); a.StatusCode != http.StatusSeeOther {
		t.Fatal(a.Status)
	}
	if a := do(t, browser(t), http.MethodGet, s.url+"/clusters", nil, "Cookie", before.String()); a.StatusCode != http.StatusSeeOther {
		t.Errorf("with the cookie before: %s", a.Status)
	}
	s.ready = errors.New("this replica is not the leader")
	if a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {"eve"}}); a.StatusCode != http.StatusServiceUnavailable || len(a.Cookies()) > 0 {
		t.Errorf("a standby: %s", a.Status)
	}
}
