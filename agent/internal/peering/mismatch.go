package peering

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"regexp"
)

// mismatch is the one message that every driver reads: the answer to a message
// that its receiver could not read.
type mismatch struct {
	// ReadsOnly is the driver of whoever could not read it.
	ReadsOnly string `json:"readsOnly"`
}

const maxMismatch = 256

var driverPattern = regexp.MustCompile(`^[a-z]{1,32}$`)

// Unreadable is the reply to a message that is none of driver's: two clusters
// whose drivers differ learn it from this, and not from silence.
func Unreadable(driver string) []byte {
	raw, err := json.Marshal(mismatch{ReadsOnly: driver})
	if err != nil {
		return nil // it is one string
	}
	return raw
}

// ReadsOnly reads such a reply: the driver of the cluster that sent it.
func ReadsOnly(raw []byte) (driver string, ok bool) {
	if len(raw) > maxMismatch {
		return "", false
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	var m mismatch
	if decoder.Decode(&m) != nil || !driverPattern.MatchString(m.ReadsOnly) {
		return "", false
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return "", false
	}
	return m.ReadsOnly, true
}

// Mismatched is what a link waits for whose provider could not read the driver's
// messages: somebody has to choose.
func Mismatched(provider, theirs, ours string) Progress {
	message := provider + " uses another driver: " + theirs + ", and this cluster " + ours + "; give both the same (value driver of the agent's chart), or keep this provider out by a policy"
	if theirs == ours {
		message = provider + " cannot read what this cluster's driver " + ours + " says: give both clusters the same release"
	}
	return Waiting("OtherDriver", message)
}
