package protocol

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Beat states that the content of the caller's advertisement is still that of its digest.
type Beat struct {
	// Sequence increases with each measurement, as that of an advertisement.
	Sequence int64 `json:"sequence"`
	// Digest is the SHA-256, in hexadecimal, of the advertisement as JSON, with sequence 0 and
	// without a timestamp.
	Digest string `json:"digest"`
}

// BeatResponse acknowledges a Beat.
type BeatResponse struct {
	// Known is false if the broker has another content, a later sequence or no advertisement:
	// the beat was ignored, and the advertisement must be sent.
	Known bool `json:"known"`
}

// Digest of an advertisement's content, for a Beat. It is the same before and after an API
// server has stored it.
func Digest(spec broker.ClusterAdvertisementSpec) string {
	spec.Sequence, spec.Timestamp = 0, metav1.Time{}
	// What is of these types can be encoded: quantities are canonical, maps are sorted.
	raw, _ := json.Marshal(spec)
	return fmt.Sprintf("%x", sha256.Sum256(raw))
}
