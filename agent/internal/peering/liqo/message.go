package liqo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"regexp"
)

// kind of a message; each is a statement that may be repeated.
type kind string

const (
	// From the consumer: a peering with this session is wanted; here is the
	// signed nonce; the session is over.
	kindHello    kind = "Hello"
	kindRequest  kind = "Request"
	kindTeardown kind = "Teardown"
	// From the provider: sign this nonce; here is what to connect with; nothing
	// of the session is left; no.
	kindOffer   kind = "Offer"
	kindGrant   kind = "Grant"
	kindGone    kind = "Gone"
	kindRefusal kind = "Refusal"
)

const (
	// maxMessage is the largest message in bytes, well within what is relayed
	// once it is sealed and twice encoded.
	maxMessage = 32 << 10
	// maxField is the largest key, request or certificate in it.
	maxField = 8 << 10
	maxText  = 512

	// reasonStale refuses a session older than one that is known already.
	reasonStale = "StaleSession"
)

// message is what the two sides say to each other.
type message struct {
	Kind    kind  `json:"kind"`
	Session int64 `json:"session"`
	// Nonce of an Offer.
	Nonce []byte `json:"nonce,omitempty"`
	// TenantNamespace of an Offer and a Grant is the consumer's at the provider.
	TenantNamespace string `json:"tenantNamespace,omitempty"`
	// PublicKey and CSR (PEM) and the Signature of the nonce: a Request.
	PublicKey []byte `json:"publicKey,omitempty"`
	CSR       []byte `json:"csr,omitempty"`
	Signature []byte `json:"signature,omitempty"`
	// Certificate and CA (PEM, the CA empty where any trusted one will do) and
	// the API server's address: a Grant.
	Certificate []byte `json:"certificate,omitempty"`
	CA          []byte `json:"ca,omitempty"`
	APIServer   string `json:"apiServer,omitempty"`
	ProxyURL    string `json:"proxyURL,omitempty"`
	// Current session at the provider, Reason and Text: a Refusal.
	Current int64  `json:"current,omitempty"`
	Reason  string `json:"reason,omitempty"`
	Text    string `json:"text,omitempty"`
}

var errMalformed = errors.New("malformed message")

// encode makes bytes of a message that decode takes.
func encode(m message) ([]byte, error) {
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

// decode reads a message of one of the kinds, and nothing else.
func decode(raw []byte, kinds ...kind) (message, error) {
	if len(raw) > maxMessage {
		return message{}, fmt.Errorf("%w: %d bytes are more than %d", errMalformed, len(raw), maxMessage)
	}
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.DisallowUnknownFields()
	var m message
	if err := decoder.Decode(&m); err != nil {
		return message{}, fmt.Errorf("%w: %w", errMalformed, err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return message{}, fmt.Errorf("%w: something follows it", errMalformed)
	}
	for _, kind := range kinds {
		if m.Kind == kind {
			return m, m.validate()
		}
	}
	return message{}, fmt.Errorf("%w: kind %q is not expected here", errMalformed, m.Kind)
}

var (
	namespacePattern = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)
	reasonPattern    = regexp.MustCompile(`^[A-Z][A-Za-z]{0,63}$`)
)

// validate checks that a message carries what its kind needs, and no more.
func (m message) validate() error {
	wrong := func(what string) error { return fmt.Errorf("%w: %s of a %s", errMalformed, what, m.Kind) }
	if m.Session <= 0 {
		return wrong("session")
	}
	for _, field := range [][]byte{m.Nonce, m.PublicKey, m.CSR, m.Signature, m.Certificate, m.CA} {
		if len(field) > maxField {
			return wrong("size of a field")
		}
	}
	rest := m
	rest.Kind, rest.Session = "", 0
	switch m.Kind {
	case kindHello, kindTeardown, kindGone:
	case kindOffer:
		if len(m.Nonce) < 16 {
			return wrong("nonce")
		}
		rest.Nonce, rest.TenantNamespace = nil, ""
	case kindRequest:
		if len(m.PublicKey) == 0 || len(m.CSR) == 0 || len(m.Signature) == 0 {
			return wrong("key, request or signature")
		}
		rest.PublicKey, rest.CSR, rest.Signature = nil, nil, nil
	case kindGrant:
		if len(m.Certificate) == 0 {
			return wrong("certificate")
		}
		if !isURL(m.APIServer, "https") {
			return wrong("API server's address")
		}
		if m.ProxyURL != "" && !isURL(m.ProxyURL, "http", "https") {
			return wrong("proxy")
		}
		rest.Certificate, rest.CA, rest.APIServer, rest.ProxyURL, rest.TenantNamespace = nil, nil, "", "", ""
	case kindRefusal:
		if !reasonPattern.MatchString(m.Reason) || len(m.Text) > maxText || m.Current < 0 {
			return wrong("reason")
		}
		rest.Current, rest.Reason, rest.Text = 0, "", ""
	default:
		return fmt.Errorf("%w: kind %q", errMalformed, m.Kind)
	}
	if (m.Kind == kindOffer || m.Kind == kindGrant) && !namespacePattern.MatchString(m.TenantNamespace) {
		return wrong("tenant namespace")
	}
	if !rest.empty() {
		return wrong("a field that is none")
	}
	return nil
}

func (m message) empty() bool {
	return len(m.Nonce)+len(m.PublicKey)+len(m.CSR)+len(m.Signature)+len(m.Certificate)+len(m.CA) == 0 &&
		m.TenantNamespace+m.APIServer+m.ProxyURL+m.Reason+m.Text == "" && m.Current == 0
}

func isURL(text string, schemes ...string) bool {
	parsed, err := url.Parse(text)
	if err != nil || parsed.Host == "" || parsed.User != nil || len(text) > maxText {
		return false
	}
	for _, scheme := range schemes {
		if parsed.Scheme == scheme {
			return true
		}
	}
	return false
}
