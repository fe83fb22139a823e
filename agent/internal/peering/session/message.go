package session

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"slices"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/spillway-dev/spillway/broker/events"
)

// Kind of a message.
type Kind string

// Kinds that the consumer sends.
const (
	// Hello requests a peering in this session or, once it is granted, another token.
	Hello Kind = "Hello"
	// Request completes the handshake.
	Request Kind = "Request"
	// Teardown ends the session.
	Teardown Kind = "Teardown"
)

// Kinds that the provider sends.
const (
	// Offer has the input of the consumer's Request.
	Offer Kind = "Offer"
	// Grant has the credentials.
	Grant Kind = "Grant"
	// Gone confirms that nothing is left of the session.
	Gone Kind = "Gone"
	// Refusal refuses a request, with a reason.
	Refusal Kind = "Refusal"
)

// Reasons of a Refusal that the consumer acts on: ReasonStale by beginning a
// later session, the others by sending Hello again, because they are transient.
const (
	ReasonStale       = "StaleSession"
	ReasonNoHold      = "NoHold"
	ReasonTerminating = "Terminating"
	ReasonNotReady    = "NotReady"
)

// maxText is the maximum length of a Refusal's text and of a URL, in bytes.
const maxText = 512

// ErrMalformed marks a message that does not follow its driver's protocol. The
// error text never contains a value from the message.
var ErrMalformed = errors.New("malformed message")

// Header is what the messages of all drivers have in common. Drivers embed it.
type Header struct {
	// Driver is set by Encode for drivers whose messages name their driver.
	Driver  string `json:"driver,omitempty"`
	Kind    Kind   `json:"kind"`
	Session int64  `json:"session"`
	// RequestID is the number of a Hello, repeated by the reply to it. Only
	// drivers that list the field "requestID" use it.
	RequestID int64 `json:"requestID,omitempty"`

	// Reason (CamelCase), Text (a sentence) and Current (the session that the
	// provider knows) belong to a Refusal.
	Reason  string `json:"reason,omitempty"`
	Text    string `json:"text,omitempty"`
	Current int64  `json:"current,omitempty"`
}

// Head implements Message for every struct that embeds Header.
func (h *Header) Head() *Header { return h }

// Refuse returns the Header of a Refusal; text is truncated to maxText.
func Refuse(reason, text string) Header {
	return Header{Kind: Refusal, Reason: reason, Text: events.TruncateTo(text, maxText)}
}

// transient reports whether a Refusal's reason ends without user intervention.
func (h *Header) transient() bool {
	return h.Reason == ReasonNoHold || h.Reason == ReasonTerminating || h.Reason == ReasonNotReady
}

// Message is a pointer to a driver's message struct, which embeds Header.
type Message interface {
	Head() *Header
	// InvalidField names a field of the driver's own whose value is not valid for
	// the message's kind, "" if there is none.
	InvalidField() string
}

// Codec encodes and decodes the messages of one driver.
type Codec[M Message] struct {
	// Driver is the driver's name.
	Driver string
	// Named is whether messages carry the name.
	Named bool
	// MaxSize is the maximum size of a message in bytes.
	MaxSize int
	// Fields are the kinds that the driver uses, each with the JSON names of the
	// fields that it may carry beside those that all messages or all Refusals have.
	Fields map[Kind][]string
	// New returns an empty message.
	New func() M
}

// Encode returns the bytes of a valid message and sets its Driver.
func (c *Codec[M]) Encode(m M) ([]byte, error) {
	if c.Named {
		m.Head().Driver = c.Driver
	}
	raw, err := c.marshal(m)
	if err != nil {
		return nil, fmt.Errorf("encoding %s: %w", m.Head().Kind, err)
	}
	return raw, nil
}

// Decode reads one message of the given kinds and nothing else. Empty fields are the
// same as absent ones.
func (c *Codec[M]) Decode(raw []byte, kinds ...Kind) (M, error) {
	m := c.New()
	canonical, err := c.canonical(raw, kinds)
	if err == nil {
		err = json.Unmarshal(canonical, m)
	}
	if err != nil {
		var none M
		return none, err
	}
	return m, nil
}

// canonical checks a message and returns it without empty fields.
func (c *Codec[M]) canonical(raw []byte, kinds []Kind) ([]byte, error) {
	if len(raw) > c.MaxSize {
		return nil, fmt.Errorf("%w: %d bytes exceed the limit of %d", ErrMalformed, len(raw), c.MaxSize)
	}
	m := c.New()
	if !decodeStrict(raw, m) {
		return nil, fmt.Errorf("%w: not a single JSON object with the expected fields", ErrMalformed)
	}
	if !slices.Contains(kinds, m.Head().Kind) {
		return nil, fmt.Errorf("%w: kind %.32q is not expected here", ErrMalformed, m.Head().Kind)
	}
	return c.marshal(m)
}

var reasonPattern = regexp.MustCompile(`^[A-Z][A-Za-z]{0,63}$`)

// marshal returns a message's bytes after checking that it carries what its kind
// needs, and no more.
func (c *Codec[M]) marshal(m M) ([]byte, error) {
	head := m.Head()
	invalid := func(field string) error { return fmt.Errorf("%w: invalid %s in %.32q", ErrMalformed, field, head.Kind) }
	fields, known := c.Fields[head.Kind]
	switch {
	case !known:
		return nil, invalid("kind")
	case c.Named && head.Driver != c.Driver, !c.Named && head.Driver != "":
		return nil, invalid("driver")
	case head.Session <= 0 || head.Session > maxNumber:
		return nil, invalid("session")
	case slices.Contains(fields, "requestID") && head.RequestID <= 0:
		return nil, invalid("requestID")
	case head.Kind == Refusal && (!reasonPattern.MatchString(head.Reason) || len(head.Text) > maxText || !utf8.ValidString(head.Text)):
		return nil, invalid("reason or text")
	case head.Current < 0 || head.Current >= maxNumber:
		return nil, invalid("current")
	}
	raw, err := json.Marshal(m)
	var present map[string]json.RawMessage
	if err == nil {
		err = json.Unmarshal(raw, &present)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	allowed := slices.Concat([]string{"driver", "kind", "session"}, fields)
	if head.Kind == Refusal {
		allowed = append(allowed, "reason", "text", "current")
	}
	for field := range present {
		if !slices.Contains(allowed, field) {
			return nil, invalid("field " + field)
		}
	}
	if field := m.InvalidField(); field != "" {
		return nil, invalid(field)
	}
	if len(raw) > c.MaxSize {
		return nil, fmt.Errorf("%w: %d bytes exceed the limit of %d", ErrMalformed, len(raw), c.MaxSize)
	}
	return raw, nil
}

// decodeStrict reports whether raw is one JSON value for into, without unknown
// fields and with nothing after it.
func decodeStrict(raw []byte, into any) bool {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	if decoder.Decode(into) != nil {
		return false
	}
	_, err := decoder.Token()
	return errors.Is(err, io.EOF)
}

// IsNamespace reports whether text can be the name of a namespace.
func IsNamespace(text string) bool { return len(validation.IsDNS1123Label(text)) == 0 }

// IsURL reports whether text is a URL of one of the schemes, with a host, without
// credentials and of bounded length.
func IsURL(text string, schemes ...string) bool {
	parsed, err := url.Parse(text)
	return err == nil && len(text) <= maxText && parsed.Hostname() != "" && parsed.User == nil && slices.Contains(schemes, parsed.Scheme)
}
