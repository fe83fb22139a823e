package server

import "net/http"

// Handler serves the calls without a listener, as Start does once the caches are
// synced. The caller is whom the Identity says.
func (s *Server) Handler() http.Handler {
	s.synced.Store(true)
	return s.handler()
}
