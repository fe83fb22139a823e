package server

import (
	"context"
	"net/http"
	"testing"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Explain knows the Reservation "placed" of rome.
func (a *agents) Explain(_ context.Context, requester, name string) ([]broker.ClusterRejection, error) {
	if requester != "rome" || name != "placed" {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "reservations"}, name)
	}
	return []broker.ClusterRejection{{Cluster: "paris", Reason: "InsufficientCapacity", Message: "No."}}, nil
}

// TestDecision: only the requester reads the decision, and only one is explained at a
// time.
func TestDecision(t *testing.T) {
	m := newMemory(t, logr.Discard())
	const path = protocol.PathReservations + "/placed/decision"
	const want = `{"rejections":[{"cluster":"paris","reason":"InsufficientCapacity","message":"No."}]}` + "\n"
	if got := m.call(http.MethodGet, path, "", "rome"); got.status != http.StatusOK || string(got.body) != want {
		t.Errorf("got %d %s", got.status, got.body)
	}
	m.call(http.MethodGet, path, "", "paris").expect(t, http.StatusNotFound, "belongs to another cluster")
	m.call(http.MethodGet, protocol.PathReservations+"/other/decision", "", "rome").expect(t, http.StatusNotFound, "belongs to another cluster")
	m.explaining.Lock()
	m.call(http.MethodGet, path, "", "rome").expect(t, http.StatusTooManyRequests, "retry")
	m.explaining.Unlock()
	if got := m.call(http.MethodGet, path, "", "rome"); got.status != http.StatusOK {
		t.Errorf("got %d %s afterwards", got.status, got.body)
	}
}
