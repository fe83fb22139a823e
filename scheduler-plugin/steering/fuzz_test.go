package steering_test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

// FuzzPods reviews arbitrary pods: none is refused.
func FuzzPods(f *testing.F) {
	for _, seed := range []string{`{}`, `{"spec":{"schedulerName":"default-scheduler"}}`, `{"spec":{"tolerations":[{"key":1}]}}`, `[`, `{"metadata":{"labels":{"a":null}}}`, `{"spec":{"workloadRef":{"name":"train","podGroup":"workers"}}}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, pod []byte) {
		body := append([]byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"1","operation":"CREATE","resource":{"version":"v1","resource":"pods"},"object":`), pod...)
		for _, handler := range []http.Handler{steering.Handler(steering.Options{}), steering.GangHandler()} {
			request := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(append(body, "}}"...)))
			request.Header.Set("Content-Type", "application/json")
			response := httptest.NewRecorder()
			handler.ServeHTTP(response, request)
			var review admissionv1.AdmissionReview
			expect.NoError(t, json.Unmarshal(response.Body.Bytes(), &review))
			if !json.Valid(pod) || !review.Response.Allowed {
				continue
			}
			if patch := review.Response.Patch; len(patch) > 0 && !json.Valid(patch) {
				t.Fatalf("the patch of %s is %s", pod, patch)
			}
		}
	})
}
