package protocol

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net/http"
	"testing"

	"github.com/go-logr/logr"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// responses is a broker that responds to everything with one body.
type responses struct {
	status int
	body   []byte
}

func (r responses) RoundTrip(request *http.Request) (*http.Response, error) {
	return &http.Response{StatusCode: r.status, Status: http.StatusText(r.status), Body: io.NopCloser(bytes.NewReader(r.body)), Request: request}, nil
}

func receiving(t *testing.T, r responses) *Client {
	t.Helper()
	client, err := NewClient("https://hub.test", &tls.Config{}, logr.Discard())
	expect.NoError(t, err)
	client.calls = &http.Client{Transport: r}
	return client
}

// FuzzResponses reads arbitrary responses, refusals and streams.
func FuzzResponses(f *testing.F) {
	for _, seed := range []string{
		``, `null`, `{}`, `[`, `{"code":"NotFound","message":"no"}`, `{"items":[{"id":"a","status":{"allocations":[{"cluster":"paris"}]}}]}`,
		`{"items":[{"id":"a","status":{"withdrawals":[{"cluster":"paris","attempt":1,"leaveWithin":"10m"},{"leaveWithin":"-9e99h"}]}}]}`,
		"{\"type\":\"Relist\",\"consumer\":[{\"id\":\"a\"}]}\n{\"type\":\"Put\"}\n{\"type\":\"Delete\",\"id\":\"a\"}\n", "{\"type\":\"Put\"}\n", "{\"type\":\"Newer\"}\n\n",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		ok, refused := receiving(t, responses{http.StatusOK, body}), receiving(t, responses{http.StatusForbidden, body})
		// Any outcome but a panic, or a success that is none.
		_, _ = do[ConsumerList](t.Context(), ok, http.MethodGet, PathReservations, nil, nil)
		_, _ = do[AdvertisementResponse](t.Context(), ok, http.MethodPost, PathAdvertisements, nil, nil)
		if err := refused.once(t.Context(), http.MethodGet, PathReservations, nil, nil, nil); err == nil {
			t.Fatal("a refusal is a success")
		}
		for _, role := range []Role{RoleRequester, RoleProvider, ""} {
			list := polled{role: role}
			first, err := list.read(body)
			if err == nil && (len(first) != 1 || first[0].Type != EventRelist) {
				t.Fatalf("the first list is %+v", first)
			}
			_, _ = list.read(body)
		}
		listed := false
		_, err := ok.stream(t.Context(), RoleRequester, func(event Event) {
			switch event.Type {
			case EventRelist:
				listed = true
			case EventPut, EventDelete:
				if !listed {
					t.Fatalf("a %s came before a Relist", event.Type)
				}
			default:
				t.Fatalf("an event of type %q was handled", event.Type)
			}
		})
		if err == nil {
			t.Fatal("a stream that has ended returned no error")
		}
	})
}

// FuzzJoin sends arbitrary certificate requests, and reads arbitrary certificates.
func FuzzJoin(f *testing.F) {
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\nAA==\n-----END CERTIFICATE REQUEST-----\n"), []byte("x"))
	f.Add([]byte(""), []byte("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, csr, certificate []byte) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // no broker is called
		if _, err := Join(ctx, "https://hub.test", "sha256:x", "rome", "token", csr); err == nil {
			t.Fatal("it joined without a broker")
		}
		response := JoinResponse{Certificate: string(certificate), CA: string(certificate)}
		if err := verifyIssued(response, "sha256:x", "rome", &x509.CertificateRequest{}); err == nil {
			t.Fatal("a certificate of another authority was accepted")
		}
	})
}
