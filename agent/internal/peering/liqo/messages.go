package liqo

import (
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// maxField is the maximum size of a key, request or certificate in bytes.
const maxField = 8 << 10

// Message is what the two sides send to each other.
type Message struct {
	session.Header
	// Nonce of an Offer.
	Nonce []byte `json:"nonce,omitempty"`
	// TenantNamespace of an Offer and a Grant is the consumer's at the provider.
	TenantNamespace string `json:"tenantNamespace,omitempty"`
	// PublicKey and CSR (PEM) and the Signature of the nonce: a Request.
	PublicKey []byte `json:"publicKey,omitempty"`
	CSR       []byte `json:"csr,omitempty"`
	Signature []byte `json:"signature,omitempty"`
	// Certificate and CA (PEM, the CA empty if the system's CAs will do) and the
	// API server's address: a Grant.
	Certificate []byte `json:"certificate,omitempty"`
	CA          []byte `json:"ca,omitempty"`
	APIServer   string `json:"apiServer,omitempty"`
	ProxyURL    string `json:"proxyURL,omitempty"`
}

// Codec's MaxSize is well within what is relayed once a message is sealed and twice
// encoded.
var Codec = &session.Codec[*Message]{
	Driver: "liqo", MaxSize: 32 << 10, New: func() *Message { return &Message{} },
	Fields: map[session.Kind][]string{
		session.Hello: nil, session.Teardown: nil, session.Gone: nil, session.Refusal: nil,
		session.Offer:   {"nonce", "tenantNamespace"},
		session.Request: {"publicKey", "csr", "signature"},
		session.Grant:   {"certificate", "ca", "apiServer", "proxyURL", "tenantNamespace"},
	},
}

// InvalidField implements session.Message.
func (m *Message) InvalidField() string {
	for _, field := range [][]byte{m.Nonce, m.PublicKey, m.CSR, m.Signature, m.Certificate, m.CA} {
		if len(field) > maxField {
			return "size of a field"
		}
	}
	switch m.Kind {
	case session.Offer:
		if len(m.Nonce) < 16 {
			return "nonce"
		}
	case session.Request:
		if len(m.PublicKey) == 0 || len(m.CSR) == 0 || len(m.Signature) == 0 {
			return "publicKey, csr or signature"
		}
	case session.Grant:
		switch {
		case len(m.Certificate) == 0:
			return "certificate"
		case !session.IsURL(m.APIServer, "https"):
			return "apiServer"
		case m.ProxyURL != "" && !session.IsURL(m.ProxyURL, "http", "https"):
			return "proxyURL"
		}
	}
	if (m.Kind == session.Offer || m.Kind == session.Grant) && !session.IsNamespace(m.TenantNamespace) {
		return "tenantNamespace"
	}
	return ""
}
