package direct

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
	"time"
	"unicode/utf8"
)

// driverName stands in every message: no other driver's is taken for one.
const driverName = "direct"

// kind of a message; each is a statement that may be repeated.
type kind string

const (
	// From the consumer: a link with this session is wanted, or goes on and needs
	// another token; the session is over.
	kindHello    kind = "Hello"
	kindTeardown kind = "Teardown"
	// From the provider: here is what to connect with; nothing of the session is
	// left; no.
	kindGrant   kind = "Grant"
	kindGone    kind = "Gone"
	kindRefusal kind = "Refusal"
)

const (
	// maxMessage is the largest message in bytes, well within what is relayed
	// once it is sealed and twice encoded.
	maxMessage = 48 << 10
	maxToken   = 8 << 10
	maxCA      = 24 << 10
	maxText    = 512
	// maxSession leaves room for counting on from what the other side says.
	maxSession = 1 << 60
	// maxSeconds is the longest life of a token that is believed, a day.
	maxSeconds = 24 * 60 * 60
)

// message is what the two sides say to each other.
type message struct {
	Driver  string `json:"driver"`
	Kind    kind   `json:"kind"`
	Session int64  `json:"session"`
	// Ask is the number of a Hello, which a Grant and a Refusal repeat.
	Ask int64 `json:"ask,omitempty"`

	// A Grant: the namespace for guests, a token that is good for Seconds and, by
	// the provider's clock, until Expires, the API server and its CA (PEM).
	Namespace string     `json:"namespace,omitempty"`
	Token     string     `json:"token,omitempty"`
	Seconds   int64      `json:"seconds,omitempty"`
	Expires   *time.Time `json:"expires,omitempty"`
	Endpoint  string     `json:"endpoint,omitempty"`
	CA        []byte     `json:"ca,omitempty"`

	// A Refusal: why, in a word and in a sentence, and the session that the
	// provider knows.
	Reason  string `json:"reason,omitempty"`
	Text    string `json:"text,omitempty"`
	Current int64  `json:"current,omitempty"`
}

// Reasons of a Refusal that the consumer acts on: by a later session, or by
// asking again soon, since they pass by themselves.
const (
	reasonStale       = "StaleSession"
	reasonNoHold      = "NoHold"
	reasonTerminating = "Terminating"
	reasonNotReady    = "NotReady"
)

func passes(reason string) bool {
	return reason == reasonNoHold || reason == reasonTerminating || reason == reasonNotReady
}

var errMalformed = errors.New("malformed message")

// encode makes bytes of a message that decode takes.
func encode(m message) ([]byte, error) {
	m.Driver = driverName
	if err := m.validate(); err != nil {
		return nil, fmt.Errorf("writing a %s: %w", m.Kind, err)
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return nil, fmt.Errorf("writing a %s: %w", m.Kind, err)
	}
	if len(raw) > maxMessage {
		return nil, fmt.Errorf("writing a %s: %d bytes are more than %d", m.Kind, len(raw), maxMessage)
	}
	return raw, nil
}

// decode reads a message of one of the kinds, and nothing else. Its errors never
// carry what a message holds.
func decode(raw []byte, kinds ...kind) (message, error) {
	if len(raw) > maxMessage {
		return message{}, fmt.Errorf("%w: %d bytes are more than %d", errMalformed, len(raw), maxMessage)
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	var m message
	if err := decoder.Decode(&m); err != nil {
		return message{}, fmt.Errorf("%w: it is not the JSON that is expected", errMalformed)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return message{}, fmt.Errorf("%w: something follows it", errMalformed)
	}
	for _, kind := range kinds {
		if m.Kind == kind {
			return m, m.validate()
		}
	}
	return message{}, fmt.Errorf("%w: kind %.32q is not expected here", errMalformed, m.Kind)
}

var (
	namespacePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	reasonPattern    = regexp.MustCompile(`^[A-Z][A-Za-z]{0,63}$`)
	tokenPattern     = regexp.MustCompile(`^[A-Za-z0-9._~+/=-]+$`)
)

// validate checks that a message carries what its kind needs, and no more.
func (m message) validate() error {
	wrong := func(what string) error { return fmt.Errorf("%w: %s of a %s", errMalformed, what, m.Kind) }
	if m.Driver != driverName {
		return wrong("driver")
	}
	if m.Session <= 0 || m.Session > maxSession {
		return wrong("session")
	}
	rest := m
	rest.Driver, rest.Kind, rest.Session = "", "", 0
	if m.Kind == kindHello || m.Kind == kindGrant || m.Kind == kindRefusal {
		if m.Ask <= 0 {
			return wrong("number")
		}
		rest.Ask = 0
	}
	switch m.Kind {
	case kindHello, kindTeardown, kindGone:
	case kindGrant:
		switch {
		case !namespacePattern.MatchString(m.Namespace):
			return wrong("namespace")
		case len(m.Token) > maxToken || !tokenPattern.MatchString(m.Token):
			return wrong("token")
		case m.Seconds <= 0 || m.Seconds > maxSeconds || m.Expires == nil:
			return wrong("expiry")
		case !isEndpoint(m.Endpoint):
			return wrong("endpoint")
		case len(m.CA) == 0 || len(m.CA) > maxCA:
			return wrong("CA")
		}
		rest.Namespace, rest.Token, rest.Seconds, rest.Expires, rest.Endpoint, rest.CA = "", "", 0, nil, "", nil
	case kindRefusal:
		if !reasonPattern.MatchString(m.Reason) || len(m.Text) > maxText || !utf8.ValidString(m.Text) || m.Current < 0 || m.Current >= maxSession {
			return wrong("reason")
		}
		rest.Reason, rest.Text, rest.Current = "", "", 0
	default:
		return fmt.Errorf("%w: kind %.32q", errMalformed, m.Kind)
	}
	if !rest.empty() {
		return wrong("a field that is none")
	}
	return nil
}

func (m message) empty() bool {
	return m.Driver+string(m.Kind)+m.Namespace+m.Token+m.Endpoint+m.Reason+m.Text == "" &&
		m.Session == 0 && m.Ask == 0 && m.Seconds == 0 && m.Current == 0 && m.Expires == nil && len(m.CA) == 0
}

// isEndpoint reports whether text is https://host[:port], and nothing else.
func isEndpoint(text string) bool {
	parsed, err := url.Parse(text)
	return err == nil && len(text) <= maxText && parsed.Scheme == "https" && parsed.Hostname() != "" && parsed.User == nil &&
		(parsed.Path == "" || parsed.Path == "/") && parsed.RawQuery == "" && parsed.Fragment == ""
}

// refusal is a Refusal, its text cut to what a message carries.
func refusal(reason, text string) *message {
	for len(text) > maxText || !utf8.ValidString(text) {
		text = text[:min(len(text)-1, maxText)]
	}
	return &message{Kind: kindRefusal, Reason: reason, Text: text}
}
