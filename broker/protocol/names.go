package protocol

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"regexp"

	"k8s.io/apimachinery/pkg/types"
)

// MaxClusterID is the longest cluster ID, in bytes.
const MaxClusterID = 40

var (
	clusterID = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	sourceUID = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
)

// ValidClusterID reports whether id may name a cluster.
func ValidClusterID(id string) bool {
	return len(id) <= MaxClusterID && clusterID.MatchString(id)
}

// ValidSourceUID reports whether uid is one that an API server gives. Its fixed
// length is what keeps the IDs of two requesters' reservations apart.
func ValidSourceUID(uid types.UID) bool { return sourceUID.MatchString(string(uid)) }

// ReservationID is the broker's name of a requester's reservation. It fits into
// a label value, because pods carry it in one: the IDs of clusters with long
// names begin with a shortened name and its hash.
func ReservationID(requester string, sourceUID types.UID) string {
	const room = 63 - len("-") - 36
	if len(requester) > room {
		sum := sha256.Sum256([]byte(requester))
		hash := hex.EncodeToString(sum[:5])
		requester = requester[:room-len(hash)-1] + "-" + hash
	}
	return requester + "-" + string(sourceUID)
}

// CAHash identifies a certificate authority by its public key: agents are told
// it beforehand, and trust no other.
func CAHash(ca *x509.Certificate) string {
	return "sha256:" + KeyFingerprint(ca.RawSubjectPublicKeyInfo)
}

// KeyFingerprint is the SHA-256 of a public key's DER form (SPKI), in hex.
func KeyFingerprint(spki []byte) string {
	sum := sha256.Sum256(spki)
	return hex.EncodeToString(sum[:])
}
