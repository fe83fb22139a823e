// Package objects is what agents and the broker say to each other through objects in a cluster's
// namespace of the hub, where that is the transport. A call is an annotation of the object that
// it concerns, and so is its answer; what a stream would send is an annotation of the view's
// object. All of it has the types of package protocol, and the same meaning.
package objects

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

const (
	// LabelTenant of a namespace, and of the objects in it, is the ID of the cluster whose it is.
	LabelTenant = broker.Group + "/tenant"
	// AnnotationRequest has a Request, which the agent writes, AnnotationAnswer an Answer.
	AnnotationRequest = broker.Group + "/request"
	AnnotationAnswer  = broker.Group + "/answer"
	// AnnotationView of a Reservation has a ConsumerView, of a ProviderInstruction a
	// ProviderView, packed. The broker writes it.
	AnnotationView = broker.Group + "/view"
	// AnnotationInbox of the ClusterAdvertisement has an Inbox. The broker writes it.
	AnnotationInbox = broker.Group + "/inbox"

	// RenewSeconds is the interval at which an agent renews its sessions. The broker keeps the
	// views of a session up to date until it is not renewed for three intervals.
	RenewSeconds = 10
	// MaxAnswer is the maximum size of an answer's body in bytes.
	MaxAnswer = 64 << 10
	// maxView is the maximum size of a view in bytes.
	maxView = 64 << 20
)

// Namespace of a cluster in the hub.
func Namespace(cluster string) string { return "spillway-cluster-" + cluster }

// AnnotationSession of the ClusterAdvertisement has the session in which the agent follows a role's
// views, and how often it was renewed. The agent writes it.
func AnnotationSession(role protocol.Role) string { return broker.Group + "/session-" + name(role) }

// AnnotationListed has the session of which all views are there, and the ID of the stream that has
// listed them. The broker writes it.
func AnnotationListed(role protocol.Role) string { return broker.Group + "/listed-" + name(role) }

func name(role protocol.Role) string {
	if role == "" {
		return "relay"
	}
	return string(role)
}

// Session is the value of AnnotationSession, with the number of renewals, and of AnnotationListed,
// with the stream.
func Session(id, rest string) string { return id + " " + rest }

// SessionOf is the session in such a value.
func SessionOf(value string) string {
	id, _, _ := strings.Cut(value, " ")
	return id
}

// Request is a call of the REST interface. The spec of a Reservation or an advertisement is that of
// the object, and not in the body.
type Request struct {
	// ID of the request, to which the answer refers, and the version of the protocol.
	ID      string `json:"id"`
	Version string `json:"version"`
	// Expires is a while after the agent has stopped to wait for the answer: a broker that starts
	// later must not make the call.
	Expires time.Time `json:"expires"`

	Method string          `json:"method"`
	Path   string          `json:"path"`
	Body   json.RawMessage `json:"body,omitempty"`
}

// Answer is the response to a request: its body if the status is 2xx, or an error.
type Answer struct {
	ID         string          `json:"id"`
	Body       json.RawMessage `json:"body,omitempty"`
	Error      *protocol.Error `json:"error,omitempty"`
	RetryAfter time.Duration   `json:"retryAfter,omitempty"`
}

// Inbox has a relayed message.
type Inbox struct {
	// Session of the agent that follows the messages, the ID of the broker's stream for it, of which
	// each broker opens its own, and the number of the message in that.
	Session string                `json:"session"`
	Stream  string                `json:"stream"`
	Number  int                   `json:"number"`
	Message protocol.RelayMessage `json:"message"`
}

// Pack compresses a view, which repeats itself, into the size of an annotation.
func Pack(view any) (string, error) {
	raw, err := json.Marshal(view)
	if err != nil {
		return "", fmt.Errorf("encoding a view: %w", err)
	}
	var packed bytes.Buffer
	writer := gzip.NewWriter(&packed)
	// A buffer takes all.
	_, _ = writer.Write(raw)
	_ = writer.Close()
	return base64.StdEncoding.EncodeToString(packed.Bytes()), nil
}

// Unpack reads what Pack has written.
func Unpack(packed string, view any) error {
	compressed, err := base64.StdEncoding.DecodeString(packed)
	if err != nil {
		return fmt.Errorf("decoding a view: %w", err)
	}
	reader, err := gzip.NewReader(bytes.NewReader(compressed))
	if err != nil {
		return fmt.Errorf("decompressing a view: %w", err)
	}
	raw, err := io.ReadAll(io.LimitReader(reader, maxView))
	if err != nil {
		return fmt.Errorf("decompressing a view: %w", err)
	}
	if err := json.Unmarshal(raw, view); err != nil {
		return fmt.Errorf("decoding a view: %w", err)
	}
	return nil
}
