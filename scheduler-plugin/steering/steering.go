// Package steering is the admission webhook of scheduler mode "beside": it
// assigns the pods of opted-in namespaces to Spillway's scheduler.
//
// The webhook configuration selects the namespaces. Pods that name another
// scheduler keep it, and so do pods that never overflow. The webhook admits
// every pod: one that it cannot read or that is not eligible keeps its scheduler.
package steering

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Path that the webhook configuration names.
const Path = "/steer"

// Serve serves the webhook and /healthz on address until ctx ends. The
// certificate and key are tls.crt and tls.key in certDir, reloaded when they
// change; the server starts as soon as they exist.
func Serve(ctx context.Context, address, certDir string) error {
	host, portText, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("parsing the address of the steering webhook: %w", err)
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return fmt.Errorf("parsing the port of the steering webhook: %w", err)
	}
	certFile, keyFile := filepath.Join(certDir, corev1.TLSCertKey), filepath.Join(certDir, corev1.TLSPrivateKeyKey)
	err = wait.PollUntilContextCancel(ctx, time.Second, true, func(context.Context) (bool, error) {
		_, err := tls.LoadX509KeyPair(certFile, keyFile)
		return err == nil, nil
	})
	if err != nil {
		return nil // ctx has ended
	}
	server := webhook.NewServer(webhook.Options{Host: host, Port: port, CertDir: certDir})
	server.Register(Path, Handler())
	server.WebhookMux().Handle("/healthz", healthz.CheckHandler{Checker: healthz.Ping})
	if err := server.Start(ctx); err != nil {
		return fmt.Errorf("serving the steering webhook: %w", err)
	}
	return nil
}

// Handler answers AdmissionReviews. What is not one gets a response without UID,
// and a panic closes the connection: both count as failed calls, which the
// webhook's failurePolicy Ignore turns into an admission.
func Handler() http.Handler {
	return (&webhook.Admission{Handler: admission.HandlerFunc(handle)}).WithRecoverPanic(false)
}

// patch assigns a pod to Spillway's scheduler. On an object, "add" replaces too.
var patch = fmt.Appendf(nil, `[{"op":"add","path":"/spec/schedulerName","value":%q}]`, broker.SchedulerName)

func handle(ctx context.Context, request admission.Request) admission.Response {
	response := admission.Allowed("")
	if request.Operation != admissionv1.Create || request.SubResource != "" ||
		request.Resource != (metav1.GroupVersionResource{Version: "v1", Resource: "pods"}) {
		return response
	}
	var pod corev1.Pod
	if err := json.Unmarshal(request.Object.Raw, &pod); err != nil {
		log.FromContext(ctx).Info("Cannot decode pod; it keeps its scheduler", "reason", err.Error())
		return response
	}
	if eligible(&pod) {
		response.Patch, response.PatchType = patch, ptr.To(admissionv1.PatchTypeJSONPatch)
	}
	return response
}

// eligible reports whether a new pod is assigned to Spillway's scheduler.
func eligible(pod *corev1.Pod) bool {
	if name := pod.Spec.SchedulerName; name != "" && name != corev1.DefaultSchedulerName {
		return false
	}
	if pod.Spec.NodeName != "" || pod.Labels[broker.LabelOverflow] == broker.OverflowDisabled {
		return false
	}
	controller := metav1.GetControllerOfNoCopy(pod)
	return controller == nil || controller.Kind != "DaemonSet"
}
