package sealing

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"golang.org/x/crypto/nacl/box"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// Kind is which side of a driver a message is for.
type Kind string

const (
	// kindRequest is sent by a consumer's Driver to a provider's Provider.
	kindRequest Kind = "request"
	// kindReply is the Provider's reply.
	kindReply Kind = "reply"
)

// Envelope is what is sealed. It names sender and receiver because a box can be opened
// with either side's key: without them a broker could return a message to its sender
// as if the other side had written it.
type Envelope struct {
	From    string `json:"from"`
	To      string `json:"to"`
	ID      string `json:"id"`
	Kind    Kind   `json:"kind"`
	Payload []byte `json:"payload"`
}

const nonceSize = 24

// errMessageRefused marks a relayed message that is not authentic.
var errMessageRefused = errors.New("relayed message refused")

// Seal returns a message for the owner of peerKey, with a new ID.
func (k *Key) Seal(from, to, peerKey string, kind Kind, payload []byte) (protocol.RelayMessage, error) {
	peer, err := decode(peerKey)
	if err != nil {
		return protocol.RelayMessage{}, fmt.Errorf("sealing a message for %s: key: %w", to, err)
	}
	envelope := Envelope{From: from, To: to, ID: rand.Text(), Kind: kind, Payload: payload}
	plain, err := json.Marshal(envelope)
	if err != nil {
		return protocol.RelayMessage{}, fmt.Errorf("sealing a message for %s: %w", to, err)
	}
	var nonce [nonceSize]byte
	if _, err := rand.Read(nonce[:]); err != nil {
		return protocol.RelayMessage{}, fmt.Errorf("sealing a message for %s: %w", to, err)
	}
	sealed := box.Seal(nonce[:], plain, &nonce, &peer, &k.private)
	if len(sealed) > protocol.MaxSealed {
		return protocol.RelayMessage{}, fmt.Errorf("sealing a message for %s: %d bytes exceed the limit of %d", to, len(sealed), protocol.MaxSealed)
	}
	return protocol.RelayMessage{From: from, To: to, ID: envelope.ID, Sealed: sealed}, nil
}

// Open opens a message to self from the owner of peerKey. The result was written by
// that owner, for self, as exactly this message.
func (k *Key) Open(self, peerKey string, message protocol.RelayMessage) (Envelope, error) {
	peer, err := decode(peerKey)
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: key of %s: %w", errMessageRefused, message.From, err)
	}
	if len(message.Sealed) < nonceSize || len(message.Sealed) > protocol.MaxSealed {
		return Envelope{}, fmt.Errorf("%w: %d bytes", errMessageRefused, len(message.Sealed))
	}
	nonce := [nonceSize]byte(message.Sealed[:nonceSize])
	plain, ok := box.Open(nil, message.Sealed[nonceSize:], &nonce, &peer, &k.private)
	if !ok {
		return Envelope{}, fmt.Errorf("%w: not sealed for this cluster with the key pinned for %s: either side has a new key, or the message was modified", errMessageRefused, message.From)
	}
	var envelope Envelope
	decoder := json.NewDecoder(bytes.NewReader(plain))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&envelope); err != nil {
		return Envelope{}, fmt.Errorf("%w: malformed: %w", errMessageRefused, err)
	}
	if _, err := decoder.Token(); err != io.EOF {
		return Envelope{}, fmt.Errorf("%w: malformed: data after the envelope", errMessageRefused)
	}
	switch {
	case envelope.From != message.From || envelope.To != self || envelope.From == self:
		return Envelope{}, fmt.Errorf("%w: sealed from %q to %q, relayed from %q to %q", errMessageRefused, envelope.From, envelope.To, message.From, self)
	case envelope.ID == "" || envelope.ID != message.ID:
		return Envelope{}, fmt.Errorf("%w: the ID was modified", errMessageRefused)
	case envelope.Kind != kindRequest && envelope.Kind != kindReply:
		return Envelope{}, fmt.Errorf("%w: unknown kind %q", errMessageRefused, envelope.Kind)
	}
	return envelope, nil
}

// seen has the last message IDs, so that a repeated message is handled once.
type seen struct {
	limit int
	order []string
	ids   map[string]struct{}
}

func newSeen(limit int) *seen { return &seen{limit: limit, ids: map[string]struct{}{}} }

// add reports whether id is new.
func (s *seen) add(id string) bool {
	if _, ok := s.ids[id]; ok {
		return false
	}
	s.ids[id] = struct{}{}
	s.order = append(s.order, id)
	if len(s.order) > s.limit {
		delete(s.ids, s.order[0])
		s.order = s.order[1:]
	}
	return true
}
