package protocol

import "fmt"

// HeaderVersion is the header in which an agent and the broker state the version of the protocol
// that they speak. A caller without it is no program of Spillway.
//
// Within a version both sides may add optional fields. So each side ignores the fields and event
// types that it does not know. What a peer must not ignore needs a new version.
const HeaderVersion = "Spillway-Protocol"

// Version is the version of the protocol that this package speaks.
const Version = "1"

// CheckVersion refuses a caller that states another version: an *Error with CodeUnsupported.
func CheckVersion(stated string) error {
	if stated == "" || stated == Version {
		return nil
	}
	return &Error{Code: CodeUnsupported, Message: fmt.Sprintf("the broker speaks version %s of the protocol, the client %.32q: install the same version of Spillway in both clusters", Version, stated)}
}
