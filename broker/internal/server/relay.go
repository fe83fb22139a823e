package server

import (
	"net/http"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// maxMessageID is the maximum length of a message's ID in bytes.
const maxMessageID = 128

func (s *Server) postRelay(w http.ResponseWriter, r *http.Request, caller string) error {
	if err := s.takeWrite(caller, 0); err != nil {
		return err
	}
	var message protocol.RelayMessage
	if err := decode(r, &message); err != nil {
		return err
	}
	audit(r, "to", short(message.To), "bytes", len(message.Sealed))
	switch {
	case message.From != "" && message.From != caller:
		return refuse(protocol.CodeForbidden, "cluster %s cannot send as cluster %q: leave from empty", caller, short(message.From))
	case !protocol.ValidClusterID(message.To) || message.To == caller:
		return refuse(protocol.CodeInvalid, "to must be the ID of another cluster")
	case message.ID == "" || len(message.ID) > maxMessageID:
		return refuse(protocol.CodeInvalid, "id must have 1 to %d characters", maxMessageID)
	case len(message.Sealed) == 0:
		return refuse(protocol.CodeInvalid, "sealed must not be empty")
	case len(message.Sealed) > protocol.MaxSealed:
		return refuse(protocol.CodeTooLarge, "sealed has %d bytes, the maximum is %d", len(message.Sealed), protocol.MaxSealed)
	}
	// Whether that cluster has joined is not the caller's to know: it gets the same answer, and
	// the message expires.
	message.From = caller
	if err := s.mailboxes.Post(message, s.Store.Settings().RelayBytesPerCluster); err != nil {
		return err
	}
	s.broadcaster.Notify(message.To, "")
	return respond(w, http.StatusAccepted, nil)
}

// getRelay takes the caller's messages: those whose response is lost are sent again by their
// senders.
func (s *Server) getRelay(w http.ResponseWriter, r *http.Request, caller string) error {
	if watching(r) {
		return s.stream(w, r, caller, "", s.mailboxes.Source())
	}
	return respond(w, http.StatusOK, protocol.RelayList{Items: s.mailboxes.Take(caller)})
}
