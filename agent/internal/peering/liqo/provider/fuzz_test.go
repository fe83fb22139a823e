package provider

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzGuests reviews arbitrary ShadowPods.
func FuzzGuests(f *testing.F) {
	for _, seed := range []string{`{}`, `{"spec":{"pod":{}}}`, `{"spec":{"pod":null}}`, `[`, `{"spec":{"pod":1}}`, `{"metadata":1}`,
		`{"metadata":{"annotations":{"cluster-autoscaler.kubernetes.io/safe-to-evict":"false"}},"spec":{"pod":{}}}`, `{"metadata":{"annotations":[]}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, object []byte) {
		body := append([]byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","operation":"CREATE","kind":{"kind":"ShadowPod"},"object":`), object...)
		request := httptest.NewRequest(http.MethodPost, guestsPath, bytes.NewReader(append(body, "}}"...)))
		request.Header.Set("Content-Type", "application/json")
		response := httptest.NewRecorder()
		guestsHandler(true).ServeHTTP(response, request)
		var review admissionv1.AdmissionReview
		expect.NoError(t, json.Unmarshal(response.Body.Bytes(), &review))
		if json.Valid(object) && review.Response.Result.Code == http.StatusOK && !review.Response.Allowed {
			t.Fatalf("%s is refused: %s", object, response.Body)
		}
	})
}
