package session

import (
	"encoding/json"
	"fmt"
	"regexp"

	"github.com/spillway-dev/spillway/agent/internal/peering"
)

// mismatch is the one message that every driver decodes: the reply to a message
// that its receiver could not decode.
type mismatch struct {
	// ReadsOnly is the driver of the receiver.
	ReadsOnly string `json:"readsOnly"`
}

const maxMismatch = 256

var driverPattern = regexp.MustCompile(`^[a-z]{1,32}$`)

// Unreadable is the reply of a cluster with the given driver to a message that it
// cannot decode.
func Unreadable(driver string) []byte {
	raw, err := json.Marshal(mismatch{ReadsOnly: driver})
	if err != nil {
		return nil // a struct of one string cannot fail
	}
	return raw
}

// ReadsOnly decodes a reply made by Unreadable and returns the driver in it.
func ReadsOnly(raw []byte) (driver string, ok bool) {
	var m mismatch
	if len(raw) > maxMismatch || !decodeStrict(raw, &m) || !driverPattern.MatchString(m.ReadsOnly) {
		return "", false
	}
	return m.ReadsOnly, true
}

// Mismatch is the Progress of a peering whose provider cannot decode this
// cluster's messages.
func Mismatch(provider, theirs, ours string) peering.Progress {
	if theirs == ours {
		return peering.Waiting("DriverMismatch", fmt.Sprintf("provider %s cannot decode messages of this cluster's driver %s; install the same release on both clusters", provider, ours))
	}
	return peering.Waiting("DriverMismatch", fmt.Sprintf("provider %s uses driver %s, this cluster uses %s; set the same driver on both clusters or exclude the provider with an OverflowPolicy", provider, theirs, ours))
}
