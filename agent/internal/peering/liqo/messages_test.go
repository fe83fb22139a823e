package liqo_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

func samples() map[session.Kind]*liqo.Message {
	out := map[session.Kind]*liqo.Message{
		session.Hello: {}, session.Teardown: {}, session.Gone: {}, session.Refusal: {},
		session.Offer:   {Nonce: bytes.Repeat([]byte("n"), 64), TenantNamespace: "liqo-tenant-rome"},
		session.Request: {PublicKey: []byte("key"), CSR: []byte("csr"), Signature: []byte("signature")},
		session.Grant:   {Certificate: []byte("crt"), CA: []byte("ca"), APIServer: "https://192.0.2.1:6443", TenantNamespace: "liqo-tenant-rome"},
	}
	for kind, m := range out {
		m.Kind, m.Session = kind, 7
	}
	out[session.Refusal].Reason, out[session.Refusal].Text, out[session.Refusal].Current = session.ReasonStale, "too late", 9
	return out
}

func TestMessages(t *testing.T) {
	contract.Messages(t, liqo.Codec, samples(), map[string]string{
		"message of another driver":  `{"driver":"direct","kind":"Hello","session":7,"requestID":1}`,
		"request ID":                 `{"kind":"Hello","session":7,"requestID":1}`,
		"field of another kind":      `{"kind":"Hello","session":7,"nonce":"bm9uY2U="}`,
		"short nonce":                `{"kind":"Offer","session":7,"nonce":"bm9uY2U=","tenantNamespace":"liqo-tenant-rome"}`,
		"namespace is a path":        `{"kind":"Offer","session":7,"nonce":"bm9uY2Vub25jZW5vbmNlbm9uY2U=","tenantNamespace":"../kube-system"}`,
		"request without a key":      `{"kind":"Request","session":7,"csr":"eA==","signature":"eA=="}`,
		"API server without TLS":     `{"kind":"Grant","session":7,"certificate":"eA==","apiServer":"http://192.0.2.1","tenantNamespace":"a"}`,
		"API server with a password": `{"kind":"Grant","session":7,"certificate":"eA==","apiServer":"https://me:pw@192.0.2.1","tenantNamespace":"a"}`,
		"size of a field":            `{"kind":"Request","session":7,"publicKey":"eA==","signature":"eA==","csr":"` + strings.Repeat("eHh4", 8<<10/2) + `"}`,
		"size of the message":        `{"kind":"Hello","session":7}` + strings.Repeat(" ", liqo.Codec.MaxSize),
	})
}

func FuzzDecode(f *testing.F) { contract.FuzzMessages(f, liqo.Codec, samples()) }
