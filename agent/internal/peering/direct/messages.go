package direct

import (
	"net/url"
	"regexp"
	"time"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

const (
	maxToken = 8 << 10
	maxCA    = 24 << 10
	// maxSeconds is the maximum accepted lifetime of a token: one day.
	maxSeconds = 24 * 60 * 60
)

// message is what the two sides send to each other.
type message struct {
	session.Header

	// A Grant: the namespace for guests, a token that is valid for Seconds and, by
	// the provider's clock, until Expires, the API server's URL and its CA (PEM).
	Namespace string     `json:"namespace,omitempty"`
	Token     string     `json:"token,omitempty"`
	Seconds   int64      `json:"seconds,omitempty"`
	Expires   *time.Time `json:"expires,omitempty"`
	Endpoint  string     `json:"endpoint,omitempty"`
	CA        []byte     `json:"ca,omitempty"`
}

// codec's messages name their driver. MaxSize is well within what is relayed once
// a message is sealed and twice encoded.
var codec = &session.Codec[*message]{
	Driver: "direct", Named: true, MaxSize: 48 << 10, New: func() *message { return &message{} },
	Fields: map[session.Kind][]string{
		session.Hello: {"requestID"}, session.Teardown: nil, session.Gone: nil, session.Refusal: {"requestID"},
		session.Grant: {"requestID", "namespace", "token", "seconds", "expires", "endpoint", "ca"},
	},
}

var tokenPattern = regexp.MustCompile(`^[A-Za-z0-9._~+/=-]+$`)

// InvalidField implements session.Message.
func (m *message) InvalidField() string {
	if m.Kind != session.Grant {
		return ""
	}
	switch {
	case !session.IsNamespace(m.Namespace):
		return "namespace"
	case len(m.Token) > maxToken || !tokenPattern.MatchString(m.Token):
		return "token"
	case m.Seconds <= 0 || m.Seconds > maxSeconds || m.Expires == nil:
		return "seconds or expires"
	case !isEndpoint(m.Endpoint):
		return "endpoint"
	case len(m.CA) == 0 || len(m.CA) > maxCA:
		return "ca"
	}
	return ""
}

// isEndpoint reports whether text is https://host[:port], and nothing else.
func isEndpoint(text string) bool {
	parsed, err := url.Parse(text)
	return err == nil && session.IsURL(text, "https") && (parsed.Path == "" || parsed.Path == "/") && parsed.RawQuery == "" && parsed.Fragment == ""
}
