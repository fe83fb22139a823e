package steering_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

func review(t *testing.T, pod any, change ...func(*admissionv1.AdmissionRequest)) []byte {
	t.Helper()
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	request := &admissionv1.AdmissionRequest{
		UID:       "review-1",
		Operation: admissionv1.Create,
		Resource:  metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
	}
	request.Object.Raw = raw
	for _, c := range change {
		c(request)
	}
	body, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request:  request,
	})
	if err != nil {
		t.Fatal(err)
	}
	return body
}

func post(body []byte) *httptest.ResponseRecorder {
	r := httptest.NewRequest(http.MethodPost, steering.Path, bytes.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	steering.Handler(logr.Discard()).ServeHTTP(w, r)
	return w
}

func TestWhoIsSteered(t *testing.T) {
	pod := func(change ...func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: corev1.DefaultSchedulerName}}
		for _, c := range change {
			c(p)
		}
		return p
	}
	controlled := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Controller: ptr.To(true)}}
		}
	}
	cases := map[string]struct {
		body    []byte
		steered bool
	}{
		"the default scheduler's":   {review(t, pod()), true},
		"nobody's":                  {review(t, pod(func(p *corev1.Pod) { p.Spec.SchedulerName = "" })), true},
		"a ReplicaSet's":            {review(t, pod(controlled("ReplicaSet"))), true},
		"another scheduler's":       {review(t, pod(func(p *corev1.Pod) { p.Spec.SchedulerName = "volcano" })), false},
		"opted out":                 {review(t, pod(func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} })), false},
		"bound":                     {review(t, pod(func(p *corev1.Pod) { p.Spec.NodeName = "home" })), false},
		"a DaemonSet's":             {review(t, pod(controlled("DaemonSet"))), false},
		"an update":                 {review(t, pod(), func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Update }), false},
		"a binding":                 {review(t, pod(), func(r *admissionv1.AdmissionRequest) { r.SubResource = "binding" }), false},
		"something else":            {review(t, pod(), func(r *admissionv1.AdmissionRequest) { r.Resource.Resource = "deployments" }), false},
		"a pod that cannot be read": {review(t, map[string]any{"spec": "none"}), false},
		"a field of a newer API":    {review(t, map[string]any{"spec": map[string]any{"novelty": true}}), true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			w := post(tc.body)
			var answer admissionv1.AdmissionReview
			if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || w.Code != http.StatusOK {
				t.Fatalf("status %d: %v", w.Code, err)
			}
			if answer.Kind != "AdmissionReview" || answer.Response == nil || answer.Response.UID != "review-1" || !answer.Response.Allowed {
				t.Fatalf("not admitted: %+v", answer.Response)
			}
			const patch = `[{"op":"add","path":"/spec/schedulerName","value":"spillway-scheduler"}]`
			if got := string(answer.Response.Patch); (got == patch) != tc.steered || got != "" && got != patch {
				t.Errorf("patch %q, want steered %t", got, tc.steered)
			}
		})
	}
}

func TestWhatIsNoReview(t *testing.T) {
	other := strings.Replace(string(review(t, &corev1.Pod{})), "admission.k8s.io/v1", "admission.k8s.io/v1beta1", 1)
	for name, tc := range map[string]struct {
		body string
		want int
	}{
		"not JSON":        {"nonsense", http.StatusBadRequest},
		"empty":           {"", http.StatusBadRequest},
		"no request":      {`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`, http.StatusBadRequest},
		"another version": {other, http.StatusBadRequest},
		"too large":       {`{"x":"` + strings.Repeat("x", 5<<20) + `"}`, http.StatusRequestEntityTooLarge},
	} {
		if got := post([]byte(tc.body)).Code; got != tc.want {
			t.Errorf("%s: got %d, want %d", name, got, tc.want)
		}
	}
	w := httptest.NewRecorder()
	steering.Handler(logr.Discard()).ServeHTTP(w, httptest.NewRequest(http.MethodGet, steering.Path, nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("GET: got %d", w.Code)
	}
	w = httptest.NewRecorder()
	steering.Handler(logr.Discard()).ServeHTTP(w, httptest.NewRequest(http.MethodPost, steering.Path, strings.NewReader("{}")))
	if w.Code != http.StatusUnsupportedMediaType {
		t.Errorf("no content type: got %d", w.Code)
	}
}

// TestCertificateIsReadAgain: the server starts without a certificate, and takes
// another as soon as the files change.
func TestCertificateIsReadAgain(t *testing.T) {
	dir := t.TempDir()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- steering.Serve(ctx, logr.Discard(), listener, dir) }()

	serial := func() int64 {
		conn, err := tls.Dial("tcp", listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return 0
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	if got := serial(); got != 0 {
		t.Fatalf("served certificate %d before there was one", got)
	}
	writeCertificate(t, dir, 1, time.Unix(1000, 0))
	if got := serial(); got != 1 {
		t.Errorf("got certificate %d, want 1", got)
	}
	writeCertificate(t, dir, 2, time.Unix(2000, 0))
	if got := serial(); got != 2 {
		t.Errorf("got certificate %d, want 2", got)
	}
	if err := os.Remove(filepath.Join(dir, corev1.TLSPrivateKeyKey)); err != nil {
		t.Fatal(err)
	}
	if got := serial(); got != 2 {
		t.Errorf("got certificate %d while the files change, want the one before", got)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func writeCertificate(t *testing.T, dir string, serial int64, modified time.Time) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for name, block := range map[string]*pem.Block{
		corev1.TLSCertKey:       {Type: "CERTIFICATE", Bytes: cert},
		corev1.TLSPrivateKeyKey: {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, modified, modified); err != nil {
			t.Fatal(err)
		}
	}
}
