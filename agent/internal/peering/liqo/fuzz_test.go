package liqo

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzProof reads arbitrary keys, signatures and certificate signing requests of a peer.
func FuzzProof(f *testing.F) {
	nonce := []byte("nonce")
	proof := &message{Header: session.Header{Kind: session.Request, Session: 1}}
	expect.NoError(f, prove(keySecret(f, newEd25519(f)), "rome", nonce, proof))
	f.Add([]byte(proof.PublicKey), []byte(proof.Signature), []byte(proof.CSR))
	f.Add([]byte("-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----\n"), []byte(""), []byte("x"))
	f.Fuzz(func(t *testing.T, publicKey, signature, csr []byte) {
		m := &message{Header: proof.Header, PublicKey: publicKey, Signature: signature, CSR: csr}
		_ = checkProof(m, "rome", nonce)
		if checkProof(m, "paris", nonce) == nil {
			t.Fatal("the proof of rome is one of paris")
		}
	})
}

// FuzzGuests reviews arbitrary ShadowPods.
func FuzzGuests(f *testing.F) {
	for _, seed := range []string{`{}`, `{"spec":{"pod":{}}}`, `{"spec":{"pod":null}}`, `[`, `{"spec":{"pod":1}}`, `{"metadata":1}`,
		`{"metadata":{"annotations":{"cluster-autoscaler.kubernetes.io/safe-to-evict":"false"}},"spec":{"pod":{}}}`, `{"metadata":{"annotations":[]}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, object []byte) {
		body := append([]byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","operation":"CREATE","kind":{"kind":"ShadowPod"},"object":`), object...)
		request := httptest.NewRequest(http.MethodPost, GuestsPath, bytes.NewReader(append(body, "}}"...)))
		request.Header.Set("Content-Type", "application/json")
		response := httptest.NewRecorder()
		GuestsHandler(true).ServeHTTP(response, request)
		var review admissionv1.AdmissionReview
		expect.NoError(t, json.Unmarshal(response.Body.Bytes(), &review))
		if json.Valid(object) && review.Response.Result.Code == http.StatusOK && !review.Response.Allowed {
			t.Fatalf("%s is refused: %s", object, response.Body)
		}
	})
}

// FuzzAddresses takes the addresses of the consumer's own networks off arbitrary pods.
func FuzzAddresses(f *testing.F) {
	for _, seed := range []string{`{}`, `[`, `{"status":null}`, `{"status":{}}`, `{"status":{"podIP":1}}`, `{"status":{"podIP":"10.1.2.3"}}`,
		`{"status":{"podIP":"10.1.2.3","podIPs":[{"ip":"192.0.2.1"},{"ip":"10.1.2.4"}]}}`, `{"status":{"podIPs":[{"ip":"::ffff:10.1.2.3"}]}}`, `{"Status":{"PODIP":"10.1.2.3"}}`} {
		f.Add([]byte(seed))
	}
	own := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	f.Fuzz(func(t *testing.T, object []byte) {
		changed, err := changeAddresses(object, own)
		if err != nil {
			return
		}
		var pod corev1.Pod
		if utiljson.Unmarshal(changed, &pod) != nil {
			return // the API server refuses it
		}
		for _, p := range append(pod.Status.PodIPs, corev1.PodIP{IP: pod.Status.PodIP}) {
			if address, err := netip.ParseAddr(p.IP); err == nil && own[0].Contains(address.Unmap()) {
				t.Fatalf("%s keeps %s: %s", object, address, changed)
			}
		}
	})
}
