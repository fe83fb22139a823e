// Package steering is the admission webhook of the scheduler. At Path it assigns the pods of
// opted-in namespaces to Spillway's scheduler and lets them tolerate virtual nodes: that
// scheduler admits them there only within a grant. There, and at AvoidPath in all other
// namespaces, it keeps pods of other schedulers that tolerate all taints away from virtual
// nodes. At GangPath it keeps what names the gang of a pod of Kubernetes 1.35.
//
// The webhook configuration selects the namespaces, the handlers the pods. Pods that name
// another scheduler keep it, and so do pods that never overflow. The webhook admits
// every pod: one that it cannot read or that is not eligible stays as it is. While no
// replica of the scheduler leads, no pod is assigned to it.
package steering

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Paths that the webhook configuration and the readiness probe name.
const (
	Path      = "/steer"
	AvoidPath = "/avoid"
	GangPath  = "/gang"
	ReadyPath = "/readyz"
)

// Options of the webhook.
type Options struct {
	// Leads reports whether a replica of the scheduler leads; nil means always.
	Leads func() bool
	// SchedulerName that pods are assigned to. Default: broker.SchedulerName.
	SchedulerName string
	// NotReady says why the program is not ready, for ReadyPath; nil or "" means that it is.
	NotReady func() string
	// Tolerations that pods need on virtual nodes beside the one for
	// broker.TaintOverflow.
	Tolerations []corev1.Toleration
}

func (o Options) schedulerName() string { return cmp.Or(o.SchedulerName, broker.SchedulerName) }

// Serve serves the webhook, ReadyPath and /healthz on address until ctx ends. The
// certificate and key are tls.crt and tls.key in certDir, reloaded when they
// change; the server starts as soon as they exist.
func Serve(ctx context.Context, address, certDir string, options Options) error {
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
	server.Register(Path, Handler(options))
	server.Register(AvoidPath, AvoidHandler(options))
	server.Register(GangPath, GangHandler())
	server.WebhookMux().Handle("/healthz", healthz.CheckHandler{Checker: healthz.Ping})
	server.WebhookMux().Handle(ReadyPath, ReadyHandler(options))
	if err := server.Start(ctx); err != nil {
		return fmt.Errorf("serving the steering webhook: %w", err)
	}
	return nil
}

// Handler answers AdmissionReviews at Path; pods that it does not steer, as AvoidHandler. What is not one gets a response without
// UID, and a panic closes the connection: both count as failed calls, which the
// webhook's failurePolicy Ignore turns into an admission.
func Handler(options Options) http.Handler {
	return newHandler(func(pod *corev1.Pod, _ []byte) []jsonpatch.Operation {
		if demand.Steerable(pod) && (options.Leads == nil || options.Leads()) {
			return steer(pod, options)
		}
		return avoid(pod, options)
	})
}

// ReadyHandler answers the readiness probe: with status 503 and the reason while the program is
// not ready.
func ReadyHandler(options Options) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if options.NotReady == nil {
			return
		}
		if reason := options.NotReady(); reason != "" {
			http.Error(w, reason, http.StatusServiceUnavailable)
		}
	})
}

// AvoidHandler answers AdmissionReviews at AvoidPath, as Handler does.
func AvoidHandler(options Options) http.Handler {
	return newHandler(func(pod *corev1.Pod, _ []byte) []jsonpatch.Operation { return avoid(pod, options) })
}

// GangHandler answers AdmissionReviews at GangPath, for the pods of Kubernetes 1.35 that have a
// workloadRef: it tells the scheduler of their gang.
func GangHandler() http.Handler { return newHandler(annotateWorkload) }

func newHandler(change func(pod *corev1.Pod, raw []byte) []jsonpatch.Operation) http.Handler {
	return (&webhook.Admission{Handler: admission.HandlerFunc(func(ctx context.Context, request admission.Request) admission.Response {
		return handle(ctx, request, change)
	})}).WithRecoverPanic(false)
}

func handle(ctx context.Context, request admission.Request, change func(*corev1.Pod, []byte) []jsonpatch.Operation) admission.Response {
	response := admission.Allowed("")
	if request.Operation != admissionv1.Create || request.SubResource != "" ||
		request.Resource != (metav1.GroupVersionResource{Version: "v1", Resource: "pods"}) {
		return response
	}
	var pod corev1.Pod
	if err := json.Unmarshal(request.Object.Raw, &pod); err != nil {
		log.FromContext(ctx).Info("Cannot decode pod; it stays as it is", "reason", err.Error())
		return response
	}
	if operations := change(&pod, request.Object.Raw); len(operations) > 0 {
		return admission.Patched("", operations...)
	}
	return response
}

// set sets a field: on an object, "add" replaces too.
func set(path string, value any) jsonpatch.Operation {
	return jsonpatch.NewOperation("add", path, value)
}

// annotateWorkload copies the workloadRef of a pod of Kubernetes 1.35 to where the scheduler and
// the agent can read it: the field is gone from the types of later versions.
func annotateWorkload(pod *corev1.Pod, raw []byte) []jsonpatch.Operation {
	var of struct {
		Spec struct {
			WorkloadRef *struct{ Name, PodGroup, PodGroupReplicaKey string }
		}
	}
	if err := json.Unmarshal(raw, &of); err != nil || of.Spec.WorkloadRef == nil {
		return nil
	}
	ref := of.Spec.WorkloadRef
	annotations := maps.Clone(pod.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[broker.AnnotationWorkload] = ref.Name + "/" + ref.PodGroup + "/" + ref.PodGroupReplicaKey
	return []jsonpatch.Operation{set("/metadata/annotations", annotations)}
}

// steer assigns a pod to Spillway's scheduler. The tolerations come after those of the
// author: package demand relies on it.
func steer(pod *corev1.Pod, options Options) []jsonpatch.Operation {
	operations := []jsonpatch.Operation{set("/spec/schedulerName", options.schedulerName())}
	overflow := corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	tolerations := slices.Clone(pod.Spec.Tolerations)
	for _, t := range append([]corev1.Toleration{overflow}, options.Tolerations...) {
		if !slices.Contains(tolerations, t) {
			tolerations = append(tolerations, t)
		}
	}
	if len(tolerations) > len(pod.Spec.Tolerations) {
		operations = append(operations, set("/spec/tolerations", tolerations))
	}
	return operations
}

// avoid requires nodes that are not virtual for a pod that would otherwise prefer an
// empty virtual node to which its scheduler cannot bind it: one that tolerates their
// taint, is not Spillway's, and is not a DaemonSet's.
func avoid(pod *corev1.Pod, options Options) []jsonpatch.Operation {
	if cmp.Or(pod.Spec.SchedulerName, corev1.DefaultSchedulerName) == options.schedulerName() {
		return nil
	}
	controller := metav1.GetControllerOfNoCopy(pod)
	if pod.Spec.NodeName != "" || controller != nil && controller.Kind == "DaemonSet" || !toleratesOverflow(pod) {
		return nil
	}
	affinity := cmp.Or(pod.Spec.Affinity.DeepCopy(), &corev1.Affinity{})
	affinity.NodeAffinity = cmp.Or(affinity.NodeAffinity, &corev1.NodeAffinity{})
	required := affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if required == nil {
		required = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{}}}
		affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution = required
	} else {
		// An empty term matches no node, and must not match some now.
		required.NodeSelectorTerms = slices.DeleteFunc(required.NodeSelectorTerms, func(t corev1.NodeSelectorTerm) bool {
			return len(t.MatchExpressions) == 0 && len(t.MatchFields) == 0
		})
	}
	notVirtual := corev1.NodeSelectorRequirement{Key: broker.LabelProvider, Operator: corev1.NodeSelectorOpDoesNotExist}
	changed := false
	for i := range required.NodeSelectorTerms {
		term := &required.NodeSelectorTerms[i]
		if !slices.ContainsFunc(term.MatchExpressions, func(r corev1.NodeSelectorRequirement) bool {
			return r.Key == notVirtual.Key && r.Operator == notVirtual.Operator
		}) {
			term.MatchExpressions, changed = append(term.MatchExpressions, notVirtual), true
		}
	}
	if !changed {
		return nil
	}
	return []jsonpatch.Operation{set("/spec/affinity", affinity)}
}

// toleratesOverflow reports whether a pod tolerates the taint of some virtual node.
func toleratesOverflow(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool {
		return (t.Key == "" && t.Operator == corev1.TolerationOpExists || t.Key == broker.TaintOverflow) &&
			(t.Effect == "" || t.Effect == corev1.TaintEffectNoSchedule)
	})
}
