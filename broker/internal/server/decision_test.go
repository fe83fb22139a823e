package server

import (
	"context"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Explain knows the Reservation "placed" of every cluster but berlin.
func (a *agents) Explain(requester, name string) ([]broker.ClusterRejection, error) {
	if err := a.wait(context.Background(), requester); err != nil {
		return nil, err
	}
	if requester == "berlin" || name != "placed" {
		return nil, apierrors.NewNotFound(schema.GroupResource{Resource: "reservations"}, name)
	}
	return rejections(), nil
}

// rejections are those of a cluster that lends to rome, of two that do not, and of rome.
func rejections() []broker.ClusterRejection {
	return []broker.ClusterRejection{
		{Cluster: "athens", Reason: capacity.ReasonConsumerNotAdmitted, Message: "The cluster does not offer capacity to rome."},
		{Cluster: "paris", Reason: capacity.ReasonInsufficientCapacity, Message: "No."},
		{Cluster: "oslo", Reason: capacity.ReasonLendingDisabled, Message: "The cluster offers no capacity."},
		{Cluster: "rome", Reason: decide.ReasonRequesterItself, Message: "The cluster is the requester itself."},
	}
}

// namedDecision is what rome sees of these rejections.
const namedDecision = `"rejections":[{"cluster":"paris","reason":"InsufficientCapacity","message":"No."}],"rejectionCounts":[{"reason":"ConsumerNotAdmitted","count":2}]`

const decisionPath = protocol.PathReservations + "/placed/decision"

// TestDecision: only the requester reads the decision, which names the clusters that lend to
// it.
func TestDecision(t *testing.T) {
	m := newMemory(t, logr.Discard())
	const want = "{" + namedDecision + "}\n"
	if got := m.call(http.MethodGet, decisionPath, "", "rome"); got.status != http.StatusOK || string(got.body) != want {
		t.Errorf("got %d %s", got.status, got.body)
	}
	m.call(http.MethodGet, decisionPath, "", "berlin").expect(t, http.StatusNotFound, "belongs to another cluster")
	m.call(http.MethodGet, protocol.PathReservations+"/other/decision", "", "rome").expect(t, http.StatusNotFound, "belongs to another cluster")
}

// TestDecisionsInViews: wherever a consumer reads its Reservations, their decision names the
// clusters that lend to it. The stored one names all.
func TestDecisionsInViews(t *testing.T) {
	m := newMemory(t, logr.Discard())
	reservation := stored("r")
	reservation.Status.Decision = &broker.Decision{Rejections: rejections()}
	m.Observe(reservation, false)
	of := func(view any) string {
		encoded, err := json.Marshal(view)
		expect.NoError(t, err)
		return string(encoded)
	}
	events := m.open(t, "rome", protocol.RoleRequester)
	seen := map[string]string{
		"get":    string(m.call(http.MethodGet, protocol.PathReservations+"/r?role=requester", "", "rome").body),
		"list":   string(m.call(http.MethodGet, protocol.PathReservations+"?role=requester", "", "rome").body),
		"relist": of(next(t, events)),
	}
	changed := reservation.DeepCopy()
	changed.Status.Phase = broker.ReservationPending
	m.Observe(changed, false)
	seen["put"] = of(next(t, events))
	for where, text := range seen {
		if !strings.Contains(text, namedDecision) || strings.Contains(text, "athens") || strings.Contains(text, "oslo") {
			t.Errorf("%s: %s", where, text)
		}
	}
	if got := reservation.Status.Decision.Rejections; !slices.Equal(got, rejections()) {
		t.Errorf("the stored decision is %+v", got)
	}
}
