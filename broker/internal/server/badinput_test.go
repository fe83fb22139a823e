package server

import (
	"crypto/tls"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// badInput is a request that the broker must refuse, with a message that says why.
type badInput struct {
	// route is the method and path as in routes.
	route string
	// id replaces {id} in the path, query is added to it.
	id, query string
	body      string
	// version of the protocol that the caller states.
	version string
	status  int
	want    string
}

func badInputs(t *testing.T) []badInput {
	t.Helper()
	request := func(spoil func(*protocol.ReservationRequest)) string {
		request := newRequest("home")
		spoil(&request)
		return encode(t, request)
	}
	advertisement := func(spoil func(*broker.ClusterAdvertisementSpec)) string {
		spec := newAdvertisement("rome")
		spoil(&spec)
		return encode(t, spec)
	}
	const (
		ads, ad            = protocol.PathAdvertisements, protocol.PathAdvertisements + "/{id}"
		reservations, item = protocol.PathReservations, protocol.PathReservations + "/{id}"
		relay              = protocol.PathRelay
	)
	huge := `{"to":"` + strings.Repeat("x", protocol.MaxBody) + `"}`
	return []badInput{
		{route: "GET " + protocol.PathHealthz, version: "none", status: 400, want: "the same version"},
		{route: "GET " + protocol.PathReadyz, version: "7", status: 400, want: "the same version"},
		{route: "GET " + protocol.PathOpenAPI, version: "1-2", status: 400, want: "the same version"},
		{route: "POST " + protocol.PathJoin, body: `{"token":1}`, status: 400, want: "does not match the schema"},
		{route: "POST " + protocol.PathJoin, body: `{}`, status: 401, want: "the join token is wrong"},

		{route: "POST " + ads, body: `{"clusterID":"rome","resources":{"lent":{}}}`, status: 400, want: `unknown field "lent"`},
		{route: "POST " + ads, body: `{"clusterID":"rome"} {}`, status: 400, want: "unexpected data after"},
		{route: "POST " + ads, body: `[]`, version: "1", status: 400, want: "does not match the schema"},
		{route: "POST " + ads, body: ``, status: 400, want: "does not match the schema"},
		{route: "POST " + ads, body: huge, status: 413, want: "bytes"},
		{route: "POST " + protocol.PathBeat, body: `{"digest":7}`, status: 400, want: "does not match the schema"},
		{route: "POST " + protocol.PathBeat, body: huge, status: 413, want: "bytes"},
		{route: "POST " + ads, body: `{"clusterID":"paris"}`, status: 403, want: "set clusterID to rome"},
		{route: "POST " + ads, body: `{"clusterID":"rome","resources":{"capacity":{"cpu":"1e-2147483648"}}}`, status: 400, want: "exponent"},
		{route: "POST " + ads, body: advertisement(func(s *broker.ClusterAdvertisementSpec) { s.Resources.Allocatable.CPU = quantity("-1") }), status: 400, want: "must not be negative"},
		{route: "POST " + ads, body: advertisement(func(s *broker.ClusterAdvertisementSpec) {
			s.NodeClasses[0].Labels = map[string]string{"zone": strings.Repeat("z", 64)}
		}), status: 400, want: "nodeClasses[0].labels: Invalid value"},
		{route: "POST " + ads, body: advertisement(func(s *broker.ClusterAdvertisementSpec) { s.NodeClasses[0].FreeShapes[0].Nodes = maxNodes + 1 }), status: 400, want: "the maximum is"},
		{route: "GET " + ads, version: "0", status: 400, want: "the same version"},
		{route: "GET " + ad, id: "nowhere", status: 404, want: "no advertisement of that cluster"},
		{route: "GET " + ad, id: "..%2Fx", status: 404, want: "does not exist"},

		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.Spec.RequesterID = "paris" }), status: 403, want: "must be empty or its own"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.SourceUID = "../x" }), status: 400, want: "sourceUID"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.SourceNamespace = "A" }), status: 400, want: "sourceNamespace"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.SourceName = "" }), status: 400, want: "sourceName"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.SourceGeneration = 0 }), status: 400, want: "sourceGeneration"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) {
			r.Spec.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"not a key": "x"}}
		}), status: 400, want: "spec.podSelector: key: Invalid value"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.Spec.PodSets[0].Requests.CPU = quantity("-1") }), status: 400, want: "must not be negative"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.Spec.PodSets[0].Count = -1 }), status: 400, want: "podSets"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.Spec.PodSets = nil }), status: 400, want: "set exactly one of"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) { r.Spec.TargetClusterID = "rome" }), status: 400, want: "must not be the requester itself"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) {
			r.Spec.PodSets[0].NodeSelector = map[string]string{"long": strings.Repeat("x", maxSpec)}
		}), status: 400, want: "shorten its node selectors"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) {
			r.Spec.PodSets[0].NodeSelector = map[string]string{"long": strings.Repeat("x", maxSpec-1024)}
		}), status: 413, want: "raise spec.quotas.reservationBytes"},
		{route: "POST " + reservations, body: request(func(r *protocol.ReservationRequest) {
			r.Spec.Retained = make([]broker.RetainedPods, broker.MaxRetained+1)
		}), status: 400, want: "spec.retained"},
		{route: "GET " + reservations, query: "?watch=true", status: 400, want: "add ?role="},
		{route: "GET " + reservations, query: "?role=owner&watch=true", status: 400, want: "role is invalid"},
		{route: "GET " + item, id: "some", status: 400, want: "role is invalid"},
		{route: "GET " + item, id: "some", query: "?role=provider", status: 404, want: "does not exist"},
		{route: "GET " + item + "/decision", id: "some", status: 404, want: "does not exist"},
		{route: "DELETE " + item, id: "some", status: 404, want: "does not exist"},
		{route: "DELETE " + item, id: "a%2Fb", status: 404, want: "does not exist"},
		{route: "POST " + item + "/ack", id: "some", body: `{}`, status: 400, want: "role is invalid"},
		{route: "POST " + item + "/ack", id: "some", query: "?role=provider", body: `{"attempt":"1"}`, status: 400, want: "does not match the schema"},
		{route: "POST " + item + "/ack", id: "some", query: "?role=provider", body: `{"attempt":1}`, status: 404, want: "does not exist"},
		{route: "POST " + item + "/ack", id: "some", query: "?role=requester", body: `{"ready":{}}`, status: 400, want: "does not match the schema"},
		{route: "POST " + item + "/renew", id: "some", query: "?role=provider", body: `{}`, status: 400, want: "role is invalid"},
		{route: "POST " + item + "/renew", id: "some", query: "?role=requester", body: `{"reservationUID":7}`, status: 400, want: "does not match the schema"},
		{route: "POST " + item + "/renew", id: "some", query: "?role=requester", body: `{"reservationUID":"u"}`, status: 404, want: "does not exist"},

		{route: "GET " + protocol.PathHistory, query: "?requester=paris", status: 400, want: "there is no parameter"},
		{route: "GET " + protocol.PathUsage, query: "?from=yesterday", status: 400, want: "from must be a day"},

		{route: "POST " + relay, body: huge, status: 413, want: "bytes"},
		{route: "POST " + relay, body: `{"from":"paris","to":"berlin","id":"1","sealed":"eA=="}`, status: 403, want: "leave from empty"},
		{route: "POST " + relay, body: `{"to":"rome","id":"1","sealed":"eA=="}`, status: 400, want: "another cluster"},
		{route: "POST " + relay, body: `{"to":"paris","id":"","sealed":"eA=="}`, status: 400, want: "id must have"},
		{route: "POST " + relay, body: `{"to":"paris","id":"1"}`, status: 400, want: "sealed must not be empty"},
		{route: "POST " + relay, body: `{"to":"paris","id":"1","sealed":"?"}`, status: 400, want: "does not match the schema"},
		{route: "GET " + relay, version: "2", status: 400, want: "speaks version"},
		{route: "POST /api/v2/reservations", body: `{}`, status: 404, want: "there is no POST"},
	}
}

// testBadInput sends bad input to each endpoint, and fails for an endpoint without any.
func (c *clusters) testBadInput(t *testing.T) {
	covered := map[string]bool{}
	for _, bad := range badInputs(t) {
		covered[bad.route] = true
		method, path, _ := strings.Cut(bad.route, " ")
		path = strings.ReplaceAll(path, "{id}", bad.id) + bad.query
		c.hub.callAs(t, c.rome.tls, bad.version, method, path, []byte(bad.body)).expect(t, bad.status, bad.want)
	}
	for _, route := range (&Server{}).routes() {
		if !covered[route.method+" "+route.path] {
			t.Errorf("%s %s has no row in the table of bad input", route.method, route.path)
		}
	}
}

// callAs sends a request of a caller that states its version.
func (h *testHub) callAs(t *testing.T, config *tls.Config, version, method, path string, body []byte) answer {
	t.Helper()
	if version == "" {
		return h.call(t, config, method, path, body)
	}
	transport := &http.Transport{TLSClientConfig: config}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), method, h.url+path, strings.NewReader(string(body)))
	expect.NoError(t, err)
	request.Header.Set(protocol.HeaderVersion, version)
	return h.send(t, transport, request)
}

// testOriginalAgents: they send what they count as available and reserved, no lending and no
// sequence, and ask for reservations without a role.
func (c *clusters) testOriginalAgents(t *testing.T) {
	berlin := c.hub.join(t, "berlin-2")
	for body, lends := range map[string]bool{
		`{"clusterID":"berlin-2","clusterName":"Berlin","resources":{"capacity":{"cpu":"4"},"allocatable":{"cpu":"4"},"allocated":{"cpu":"1"},"reserved":{"cpu":"1"},"available":{"cpu":"2"}},"timestamp":"2025-11-19T16:00:00Z"}`: true,
		`{"clusterID":"berlin-2","lending":{"enabled":false},"resources":{"capacity":{"cpu":"4"},"allocatable":{"cpu":"4"},"allocated":{"cpu":"1"}},"timestamp":"2025-11-19T16:00:00Z"}`:                                           false,
	} {
		c.hub.callAs(t, berlin.tls, "", http.MethodPost, protocol.PathAdvertisements, []byte(body)).expect(t, http.StatusOK, "")
		ad := &broker.ClusterAdvertisement{}
		expect.NoError(t, c.hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "berlin-2"}, ad))
		if ad.Spec.Lending.Enabled != lends {
			t.Errorf("%s: lending is %+v", body, ad.Spec.Lending)
		}
	}
	c.hub.callAs(t, berlin.tls, "", http.MethodGet, protocol.PathReservations, nil).expect(t, http.StatusOK, "")
}
