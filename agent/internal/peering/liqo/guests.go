package liqo

import (
	"context"
	"encoding/json"
	"net/http"

	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// GuestsPath is the path of the webhook that GuestsHandler serves.
const GuestsPath = "/guests"

// GuestsHandler answers AdmissionReviews of new ShadowPods, whose pods Liqo creates
// unchanged: a guest gets the PriorityClass of guests, so that it preempts no pod and keeps
// the node that it is nominated to. With handOver it gets the scheduling gate, too, and
// waits until the agent hands over a place. The handler admits every ShadowPod: who may
// write what is up to the chart's policies.
func GuestsHandler(handOver bool) http.Handler {
	return (&webhook.Admission{Handler: admission.HandlerFunc(func(ctx context.Context, request admission.Request) admission.Response {
		response := admission.Allowed("")
		var shadow struct {
			Spec struct {
				Pod *struct{} `json:"pod"`
			} `json:"spec"`
		}
		if request.Operation != admissionv1.Create || request.Kind.Kind != kindShadowPod {
			return response
		}
		if err := json.Unmarshal(request.Object.Raw, &shadow); err != nil || shadow.Spec.Pod == nil {
			log.FromContext(ctx).Info("Cannot decode ShadowPod; it stays as it is", "namespace", request.Namespace, "name", request.Name)
			return response
		}
		// On an object, "add" replaces too.
		operations := []jsonpatch.Operation{jsonpatch.NewOperation("add", "/spec/pod/priorityClassName", guest.PriorityClass)}
		if handOver {
			operations = append(operations, jsonpatch.NewOperation("add", "/spec/pod/schedulingGates", []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}))
		}
		return admission.Patched("", operations...)
	})}).WithRecoverPanic(false)
}
