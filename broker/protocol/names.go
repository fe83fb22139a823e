package protocol

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"regexp"

	"k8s.io/apimachinery/pkg/types"
)

// MaxClusterID is the maximum length of a cluster ID in bytes.
const MaxClusterID = 40

var (
	clusterID = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	sourceUID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// ValidClusterID reports whether id is a valid cluster ID.
func ValidClusterID(id string) bool {
	return len(id) <= MaxClusterID && clusterID.MatchString(id)
}

// ValidSourceUID reports whether uid is a UID as API servers generate them. The fixed
// length makes ReservationID unique.
func ValidSourceUID(uid types.UID) bool { return sourceUID.MatchString(string(uid)) }

// ReservationID is the name of the broker's Reservation for a consumer's one. It is
// short enough for a label value: a long cluster ID is truncated and its hash added.
func ReservationID(requester string, sourceUID types.UID) string {
	const available = 63 - len("-") - 36
	if len(requester) > available {
		sum := sha256.Sum256([]byte(requester))
		hash := hex.EncodeToString(sum[:5])
		requester = requester[:available-len(hash)-1] + "-" + hash
	}
	return requester + "-" + string(sourceUID)
}

// CAHash identifies a certificate authority by its public key, as in the agent chart's
// value broker.caHash.
func CAHash(ca *x509.Certificate) string {
	return "sha256:" + KeyFingerprint(ca.RawSubjectPublicKeyInfo)
}

// KeyFingerprint is the SHA-256 of a public key in DER form (SPKI), in hex.
func KeyFingerprint(spki []byte) string {
	sum := sha256.Sum256(spki)
	return hex.EncodeToString(sum[:])
}
