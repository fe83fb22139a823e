// Package steering is the admission webhook of scheduler mode "beside": it hands
// the pods of opted-in namespaces to Spillway's scheduler.
//
// Which namespaces those are is the webhook configuration's business. A pod that
// names a scheduler of its own keeps it, and so do pods that never overflow.
// Whatever goes wrong, the pod is admitted as it is: it then runs at home.
package steering

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Path that the webhook configuration names.
const Path = "/steer"

// maxBody bounds a request: a pod can be 1.5 MiB in etcd, and a review carries
// it once on creation.
const maxBody = 4 << 20

// Handler answers AdmissionReviews (admission.k8s.io/v1). Other requests, and
// reviews that cannot be read, get a status of 400 or above, which the webhook's
// failurePolicy Ignore turns into an admission.
func Handler(log logr.Logger) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			http.Error(w, "want POST", http.StatusMethodNotAllowed)
			return
		}
		if kind, _, err := mime.ParseMediaType(r.Header.Get("Content-Type")); err != nil || kind != "application/json" {
			http.Error(w, "want application/json", http.StatusUnsupportedMediaType)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err != nil {
			var tooLarge *http.MaxBytesError
			if errors.As(err, &tooLarge) {
				http.Error(w, "the review is too large", http.StatusRequestEntityTooLarge)
				return
			}
			http.Error(w, "reading the review failed", http.StatusBadRequest)
			return
		}
		var review admissionv1.AdmissionReview
		if err := json.Unmarshal(body, &review); err != nil {
			http.Error(w, "the body is not an AdmissionReview", http.StatusBadRequest)
			return
		}
		if review.GroupVersionKind() != admissionv1.SchemeGroupVersion.WithKind("AdmissionReview") || review.Request == nil || review.Request.UID == "" {
			http.Error(w, "want an AdmissionReview of admission.k8s.io/v1 with a request", http.StatusBadRequest)
			return
		}
		answer := admissionv1.AdmissionReview{TypeMeta: review.TypeMeta, Response: respond(log, review.Request)}
		w.Header().Set("Content-Type", "application/json")
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			log.V(1).Info("Answering failed", "reason", err.Error())
		}
	})
}

// patch hands a pod to Spillway's scheduler. On an object, "add" replaces too.
var patch = []byte(fmt.Sprintf(`[{"op":"add","path":"/spec/schedulerName","value":%q}]`, broker.SchedulerName))

// respond always admits.
func respond(log logr.Logger, request *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
	response := &admissionv1.AdmissionResponse{UID: request.UID, Allowed: true}
	if request.Operation != admissionv1.Create || request.SubResource != "" ||
		request.Resource != (metav1.GroupVersionResource{Version: "v1", Resource: "pods"}) {
		return response
	}
	var pod corev1.Pod
	if err := json.Unmarshal(request.Object.Raw, &pod); err != nil {
		log.Info("A pod could not be read; it keeps its scheduler", "namespace", request.Namespace, "pod", request.Name, "reason", err.Error())
		return response
	}
	if steers(&pod) {
		response.Patch, response.PatchType = patch, ptr.To(admissionv1.PatchTypeJSONPatch)
	}
	return response
}

// steers tells whether a new pod goes to Spillway's scheduler.
func steers(pod *corev1.Pod) bool {
	if name := pod.Spec.SchedulerName; name != "" && name != corev1.DefaultSchedulerName {
		return false
	}
	if pod.Spec.NodeName != "" || pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled {
		return false
	}
	controller := metav1.GetControllerOfNoCopy(pod)
	return controller == nil || controller.Kind != "DaemonSet"
}

// Serve answers on a listener until ctx ends. The certificate and key are
// tls.crt and tls.key in certDir, read anew when they change; while they are
// missing, callers are turned away.
func Serve(ctx context.Context, log logr.Logger, listener net.Listener, certDir string) error {
	mux := http.NewServeMux()
	mux.Handle(Path, Handler(log))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	pair := &keyPair{dir: certDir}
	server := &http.Server{
		Handler:           mux,
		TLSConfig:         &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: pair.get},
		ReadHeaderTimeout: 5 * time.Second,
		ReadTimeout:       10 * time.Second,
		WriteTimeout:      10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    16 << 10,
	}
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		if err := server.Shutdown(grace); err != nil {
			server.Close()
		}
	})
	defer stop()
	log.Info("Steering pods", "address", listener.Addr().String())
	if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the steering webhook: %w", err)
	}
	return nil
}

// keyPair is a certificate that is read again when its files change.
type keyPair struct {
	dir string

	mu       sync.Mutex
	cert     *tls.Certificate
	modified [2]time.Time
}

// get implements tls.Config.GetCertificate. A pair that cannot be read, as while
// it is being written, leaves the one before in use.
func (k *keyPair) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	certFile, keyFile := filepath.Join(k.dir, corev1.TLSCertKey), filepath.Join(k.dir, corev1.TLSPrivateKeyKey)
	var modified [2]time.Time
	for i, name := range []string{certFile, keyFile} {
		info, err := os.Stat(name)
		if err != nil {
			return k.orBefore(err)
		}
		modified[i] = info.ModTime()
	}
	if k.cert != nil && modified == k.modified {
		return k.cert, nil
	}
	cert, err := tls.LoadX509KeyPair(certFile, keyFile)
	if err != nil {
		return k.orBefore(err)
	}
	k.cert, k.modified = &cert, modified
	return k.cert, nil
}

func (k *keyPair) orBefore(err error) (*tls.Certificate, error) {
	if k.cert != nil {
		return k.cert, nil
	}
	return nil, fmt.Errorf("reading the steering certificate: %w", err)
}
