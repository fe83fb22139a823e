package provider

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// guestsPath is the path of the webhook that guestsHandler serves.
const guestsPath = "/guests"

// guestsHandler answers AdmissionReviews of ShadowPods, whose pods Liqo creates unchanged. A
// guest gets the PriorityClass of guests, so that it preempts no pod and keeps the node that it
// is nominated to, the node affinity and the tolerations of guests, because it was judged with
// these, and bounds of its memory where it has none, but no requests of nothing: Liqo refuses what
// the Quota does not list, whatever the amount. With handOver it gets the scheduling gate, too, and
// waits until the agent hands over a place. None keeps its node from being removed, also by an
// annotation that it gets later.
// The handler admits every ShadowPod: who may write what is up to the chart's policies.
func guestsHandler(handOver bool) http.Handler {
	return (&webhook.Admission{Handler: admission.HandlerFunc(func(ctx context.Context, request admission.Request) admission.Response {
		if request.Kind.Kind != kindShadowPod {
			return admission.Allowed("")
		}
		operations, err := changes(request.Object.Raw, request.Operation == admissionv1.Create, handOver)
		if err != nil {
			log.FromContext(ctx).Info("Cannot decode ShadowPod; it stays as it is", "namespace", request.Namespace, "name", request.Name, "reason", err.Error())
			return admission.Allowed("")
		}
		return admission.Patched("", operations...)
	})}).WithRecoverPanic(false)
}

// makeGuest makes the pod of a ShadowPod one as was judged before its hold was accepted.
func makeGuest(pod *corev1.PodSpec, handOver bool) {
	pod.PriorityClassName = guest.PriorityClass
	if handOver {
		pod.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	pod.Affinity = cmp.Or(pod.Affinity, &corev1.Affinity{})
	pod.Affinity.NodeAffinity = cmp.Or(pod.Affinity.NodeAffinity, &corev1.NodeAffinity{})
	required := &pod.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	*required = guest.NodeAffinity(*required)
	// Liqo leaves out only the one of its own taint.
	pod.Tolerations = guest.Tolerations(pod.Tolerations)
	guest.DropZeros(pod)
	guest.BoundMemory(pod)
}

// changes makes a guest of the pod of an encoded ShadowPod that is created, and lets the cluster
// autoscaler evict that of one whose annotation forbids that. Nothing else of it changes.
func changes(raw []byte, created, handOver bool) (operations []jsonpatch.Operation, err error) {
	var shadow struct {
		Metadata struct {
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
		Spec struct {
			Pod json.RawMessage `json:"pod"`
		} `json:"spec"`
	}
	if err := utiljson.Unmarshal(raw, &shadow); err != nil {
		return nil, err
	}
	if value, set := shadow.Metadata.Annotations[guest.AnnotationEvict]; set && value != "true" {
		path := "/metadata/annotations/" + strings.ReplaceAll(guest.AnnotationEvict, "/", "~1")
		operations = append(operations, jsonpatch.NewOperation("add", path, "true"))
	}
	if !created {
		return operations, nil
	}
	var pod *corev1.PodSpec
	if err := utiljson.Unmarshal(shadow.Spec.Pod, &pod); err != nil {
		return nil, fmt.Errorf("spec.pod: %w", err)
	}
	if pod == nil {
		return nil, errors.New("it has no pod")
	}
	makeGuest(pod, handOver)
	return append(operations, jsonpatch.NewOperation("add", "/spec/pod", pod)), nil
}
