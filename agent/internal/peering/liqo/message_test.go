package liqo

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var samples = map[kind]message{
	kindHello:    {Kind: kindHello, Session: 7},
	kindTeardown: {Kind: kindTeardown, Session: 7},
	kindGone:     {Kind: kindGone, Session: 7},
	kindOffer:    {Kind: kindOffer, Session: 7, Nonce: bytes.Repeat([]byte("n"), 64), TenantNamespace: "liqo-tenant-rome"},
	kindRequest:  {Kind: kindRequest, Session: 7, PublicKey: []byte("key"), CSR: []byte("csr"), Signature: []byte("signature")},
	kindGrant:    {Kind: kindGrant, Session: 7, Certificate: []byte("crt"), CA: []byte("ca"), APIServer: "https://192.0.2.1:6443", TenantNamespace: "liqo-tenant-rome"},
	kindRefusal:  {Kind: kindRefusal, Session: 7, Current: 9, Reason: reasonStale, Text: "too late"},
}

func TestMessagesSurviveTheWay(t *testing.T) {
	for kind, m := range samples {
		raw, err := encode(m)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		got, err := decode(raw, kind)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Errorf("%s changed (-sent +received):\n%s", kind, diff)
		}
		for other := range samples {
			if _, err := decode(raw, other); other != kind && !errors.Is(err, errMalformed) {
				t.Errorf("a %s was taken for a %s: %v", kind, other, err)
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	all := []kind{kindHello, kindTeardown, kindGone, kindOffer, kindRequest, kindGrant, kindRefusal}
	cases := map[string]string{
		"nothing":                       ``,
		"not JSON":                      `hello`,
		"an unknown field":              `{"kind":"Hello","session":7,"extra":1}`,
		"an unknown kind":               `{"kind":"Hallo","session":7}`,
		"no session":                    `{"kind":"Hello"}`,
		"a negative session":            `{"kind":"Hello","session":-1}`,
		"something behind it":           `{"kind":"Hello","session":7}{}`,
		"another kind's field":          `{"kind":"Hello","session":7,"nonce":"bm9uY2U="}`,
		"a short nonce":                 `{"kind":"Offer","session":7,"nonce":"bm9uY2U=","tenantNamespace":"liqo-tenant-rome"}`,
		"a namespace that is none":      `{"kind":"Offer","session":7,"nonce":"bm9uY2Vub25jZW5vbmNlbm9uY2U=","tenantNamespace":"../kube-system"}`,
		"a request without a key":       `{"kind":"Request","session":7,"csr":"eA==","signature":"eA=="}`,
		"an API server without TLS":     `{"kind":"Grant","session":7,"certificate":"eA==","apiServer":"http://192.0.2.1","tenantNamespace":"a"}`,
		"an API server with a secret":   `{"kind":"Grant","session":7,"certificate":"eA==","apiServer":"https://me:pw@192.0.2.1","tenantNamespace":"a"}`,
		"a refusal without reason":      `{"kind":"Refusal","session":7}`,
		"a reason that is a sentence":   `{"kind":"Refusal","session":7,"reason":"no way"}`,
		"a refusal that goes on and on": `{"kind":"Refusal","session":7,"reason":"No","text":"` + strings.Repeat("x", maxText+1) + `"}`,
		"a field that is too large":     `{"kind":"Request","session":7,"publicKey":"eA==","signature":"eA==","csr":"` + strings.Repeat("eHh4", maxField/2) + `"}`,
		"too much of everything":        `{"kind":"Hello","session":7}` + strings.Repeat(" ", maxMessage),
	}
	for name, raw := range cases {
		t.Run(name, func(t *testing.T) {
			if m, err := decode([]byte(raw), all...); !errors.Is(err, errMalformed) {
				t.Fatalf("was read as %+v, %v", m, err)
			}
		})
	}
}

// FuzzDecode checks that whatever is taken for a message is one: within the
// bounds, and the same again after another trip.
func FuzzDecode(f *testing.F) {
	kinds := []kind{}
	for kind, m := range samples {
		raw, err := encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
		kinds = append(kinds, kind)
	}
	f.Add([]byte(`{"kind":"Hello","session":1e3}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := decode(raw, kinds...)
		if err != nil {
			if !errors.Is(err, errMalformed) {
				t.Fatalf("an error of another sort: %v", err)
			}
			return
		}
		again, err := encode(m)
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", m, err)
		}
		got, err := decode(again, m.Kind)
		if err != nil {
			t.Fatalf("%s cannot be read again: %v", again, err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Fatalf("changed:\n%s", diff)
		}
	})
}
