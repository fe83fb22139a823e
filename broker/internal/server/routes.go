package server

import (
	"net/http"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// call handles a request of the cluster caller, which is empty on open paths. It writes
// a response or returns an error, not both.
type call func(w http.ResponseWriter, r *http.Request, caller string) error

// route is a method and path.
type route struct {
	method, path string
	// open paths need no client certificate.
	open bool
	// anyReplica paths are also served by replicas that are not the leader.
	anyReplica bool
	// audited calls change something. frequent ones are logged only if refused.
	audited, frequent bool
	// lists are calls whose cost grows with the number of objects. With watch=true,
	// those of streaming are streams.
	lists, streaming bool
	// maxBody is the maximum size of the body in bytes.
	maxBody int64
	call    call
}

// streams reports whether a request is for a stream.
func (r route) streams(request *http.Request) bool { return r.streaming && watching(request) }

// Sizes of bodies, with some room for fields of newer versions.
const (
	// maxSmall is for a join request, with a certificate request and a token, and a renewal.
	maxSmall = 32 << 10
	// maxMedium is for a Reservation, a hold, and a relayed message in base64.
	maxMedium = 128 << 10
)

func (s *Server) routes() []route {
	const id = "/{id}"
	return []route{
		{method: http.MethodGet, path: protocol.PathHealthz, open: true, anyReplica: true, call: s.healthz},
		{method: http.MethodGet, path: protocol.PathReadyz, open: true, anyReplica: true, call: s.readyz},
		{method: http.MethodGet, path: protocol.PathOpenAPI, open: true, anyReplica: true, call: s.openAPI},
		{method: http.MethodPost, path: protocol.PathJoin, open: true, audited: true, maxBody: maxSmall, call: s.join},
		{method: http.MethodPost, path: protocol.PathAdvertisements, audited: true, frequent: true, maxBody: protocol.MaxBody, call: s.postAdvertisement},
		{method: http.MethodPost, path: protocol.PathBeat, audited: true, frequent: true, maxBody: maxSmall, call: s.postBeat},
		{method: http.MethodGet, path: protocol.PathAdvertisements, lists: true, call: s.listAdvertisements},
		{method: http.MethodGet, path: protocol.PathAdvertisements + id, call: s.getAdvertisement},
		{method: http.MethodPost, path: protocol.PathReservations, audited: true, maxBody: maxMedium, call: s.postReservation},
		{method: http.MethodGet, path: protocol.PathReservations, lists: true, streaming: true, call: s.listReservations},
		{method: http.MethodGet, path: protocol.PathReservations + id, call: s.getReservation},
		{method: http.MethodGet, path: protocol.PathReservations + id + "/decision", lists: true, call: s.getDecision},
		{method: http.MethodDelete, path: protocol.PathReservations + id, audited: true, call: s.deleteReservation},
		{method: http.MethodPost, path: protocol.PathReservations + id + "/ack", audited: true, maxBody: maxMedium, call: s.ack},
		{method: http.MethodPost, path: protocol.PathReservations + id + "/renew", audited: true, frequent: true, maxBody: maxSmall, call: s.renew},
		{method: http.MethodGet, path: protocol.PathHistory, lists: true, call: s.History.List},
		{method: http.MethodGet, path: protocol.PathUsage, lists: true, call: s.History.Usage},
		{method: http.MethodPost, path: protocol.PathRelay, audited: true, frequent: true, maxBody: maxMedium, call: s.postRelay},
		{method: http.MethodGet, path: protocol.PathRelay, lists: true, streaming: true, call: s.getRelay},
	}
}

// Handler serves the REST interface, without a listener.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	for _, route := range s.routes() {
		mux.Handle(route.method+" "+route.path, s.serve(route))
	}
	mux.Handle("/", s.serve(route{open: true, anyReplica: true, call: func(_ http.ResponseWriter, r *http.Request, _ string) error {
		return refuse(protocol.CodeNotFound, "there is no %s %s: see %s for the available paths", r.Method, short(r.URL.Path), protocol.PathOpenAPI)
	}}))
	return mux
}

func (s *Server) healthz(w http.ResponseWriter, _ *http.Request, _ string) error {
	return respond(w, http.StatusOK, map[string]string{"status": "ok"})
}

func (s *Server) readyz(w http.ResponseWriter, r *http.Request, _ string) error {
	if err := s.Ready(r); err != nil {
		return refuse(protocol.CodeUnavailable, "not ready: %v", err)
	}
	return respond(w, http.StatusOK, map[string]string{"status": "ok"})
}

func (s *Server) openAPI(w http.ResponseWriter, _ *http.Request, _ string) error {
	w.Header().Set("Content-Type", "application/json")
	_, err := w.Write(protocol.OpenAPI)
	return err
}

func (s *Server) join(w http.ResponseWriter, r *http.Request, _ string) error {
	if wait := s.joiners.Take(remoteIP(r), 1); wait > 0 {
		return slower(wait, "too many join requests from this address")
	}
	var request protocol.JoinRequest
	if err := decode(r, &request); err != nil {
		return err
	}
	audit(r, "clusterID", short(request.ClusterID), "remote", remoteIP(r))
	response, err := s.Identity.Join(r.Context(), request)
	if err != nil {
		return err
	}
	return respond(w, http.StatusOK, response)
}
