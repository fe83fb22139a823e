package page_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/internal/page/session"
)

// TestViewsAreShared: a view is made once a second for all who may see it, and for no one else.
func TestViewsAreShared(t *testing.T) {
	s := serve(t, nil)
	clock := clocktesting.NewFakeClock(time.Now())
	s.Clock = clock
	s.review = func(_ context.Context, token string) (session.User, error) {
		return session.User{Name: token, Clusters: token != "eve", Reservations: true}, nil
	}
	ada, bob, eve := s.signIn(t, "ada"), s.signIn(t, "bob"), s.signIn(t, "eve")
	if a := do(t, ada, http.MethodGet, s.url+"/clusters", nil); a.StatusCode != http.StatusOK || strings.Contains(a.body, "paris") {
		t.Fatalf("%s:\n%s", a.Status, a.body)
	}
	s.put()
	if a := do(t, bob, http.MethodGet, s.url+"/clusters", nil); !strings.Contains(a.body, "bob") || strings.Contains(a.body, "ada") || strings.Contains(a.body, "paris") {
		t.Errorf("in the same second, bob does not see ada's view with his name:\n%s", a.body)
	}
	if a := do(t, bob, http.MethodGet, s.url+"/clusters?page=1", nil); !strings.Contains(a.body, "paris") {
		t.Error("another URL has the same view")
	}
	if a := do(t, eve, http.MethodGet, s.url+"/clusters", nil); a.StatusCode != http.StatusForbidden {
		t.Errorf("eve may not list clusters: %s", a.Status)
	}
	clock.Step(time.Second)
	if a := do(t, bob, http.MethodGet, s.url+"/clusters", nil); !strings.Contains(a.body, "paris") {
		t.Error("a second later, the view is the same")
	}
}
