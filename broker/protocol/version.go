package protocol

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// HeaderVersion is the header in which a client states the versions of the protocol that
// it speaks, as VersionRange, and in which the broker states the version that applies to
// the connection. A peer without it speaks version 1 only.
//
// Within a version both sides may add optional fields. So each side ignores the fields
// and event types that it does not know. What a peer must not ignore needs a new version,
// and the side that depends on it raises its oldest version.
const HeaderVersion = "Spillway-Protocol"

const (
	// Version is the newest version of the protocol that this package speaks. Version 2
	// has renewals, and refusals with the capacity that is still held.
	Version = 2
	// OldestVersion is the oldest one that it speaks.
	OldestVersion = 1
)

// VersionRange is the range of versions that a side speaks.
type VersionRange struct{ Oldest, Newest int }

// Versions is the range of this package.
var Versions = VersionRange{Oldest: OldestVersion, Newest: Version}

// String is the range as in HeaderVersion, such as "1-2".
func (r VersionRange) String() string { return fmt.Sprintf("%d-%d", r.Oldest, r.Newest) }

// ParseVersions parses a header's range. The empty string is version 1.
func ParseVersions(text string) (VersionRange, error) {
	if text == "" {
		return VersionRange{1, 1}, nil
	}
	first, last, isRange := strings.Cut(text, "-")
	if !isRange {
		last = first
	}
	oldest, err := strconv.ParseUint(first, 10, 16)
	newest, err2 := strconv.ParseUint(last, 10, 16)
	if err != nil || err2 != nil || oldest < 1 || newest < oldest {
		return VersionRange{}, &Error{Code: CodeInvalid, Message: fmt.Sprintf("header %s must be a range of versions such as %s, not %.32q", HeaderVersion, Versions, text)}
	}
	return VersionRange{int(oldest), int(newest)}, nil
}

// Negotiate returns the newest version that both sides speak. The error, an *Error with
// CodeUnsupported, says which side to upgrade.
func (r VersionRange) Negotiate(peer VersionRange) (int, error) {
	version := min(r.Newest, peer.Newest)
	switch {
	case version < r.Oldest:
		return 0, &Error{Code: CodeUnsupported, Message: fmt.Sprintf("the broker speaks versions %s of the protocol, the client %s: upgrade the client's agent", r, peer)}
	case version < peer.Oldest:
		return 0, &Error{Code: CodeUnsupported, Message: fmt.Sprintf("the broker speaks versions %s of the protocol, the client %s: upgrade the broker", r, peer)}
	}
	return version, nil
}

// stated is the version in a broker's response.
func stated(header http.Header) int {
	versions, err := ParseVersions(header.Get(HeaderVersion))
	if err != nil {
		return 1
	}
	return versions.Newest
}
