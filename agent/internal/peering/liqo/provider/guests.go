package provider

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
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
		changed, err := makeEvictable(request.Object.Raw)
		if err == nil && request.Operation == admissionv1.Create {
			changed, err = changeShadowPod(changed, func(pod *corev1.PodSpec) { makeGuest(pod, handOver) })
		}
		if err != nil {
			log.FromContext(ctx).Info("Cannot decode ShadowPod; it stays as it is", "namespace", request.Namespace, "name", request.Name, "reason", err.Error())
			return admission.Allowed("")
		}
		return admission.PatchResponseFromRaw(request.Object.Raw, changed)
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

// makeEvictable lets the cluster autoscaler evict the pod of an encoded ShadowPod whose
// annotation forbids that.
func makeEvictable(raw []byte) ([]byte, error) {
	var shadow, meta map[string]json.RawMessage
	var annotations map[string]string
	if err := json.Unmarshal(raw, &shadow); err != nil {
		return nil, err
	}
	if raw := shadow["metadata"]; raw != nil {
		if err := json.Unmarshal(raw, &meta); err != nil {
			return nil, fmt.Errorf("metadata: %w", err)
		}
	}
	if raw := meta["annotations"]; raw != nil {
		if err := json.Unmarshal(raw, &annotations); err != nil {
			return nil, fmt.Errorf("metadata.annotations: %w", err)
		}
	}
	if value, ok := annotations[guest.AnnotationEvict]; !ok || value == "true" {
		return raw, nil
	}
	annotations[guest.AnnotationEvict] = "true"
	var err error
	if meta["annotations"], err = json.Marshal(annotations); err != nil {
		return nil, err
	}
	if shadow["metadata"], err = json.Marshal(meta); err != nil {
		return nil, err
	}
	return json.Marshal(shadow)
}

// changeShadowPod changes the pod of an encoded ShadowPod, and nothing else of it.
func changeShadowPod(raw []byte, change func(*corev1.PodSpec)) ([]byte, error) {
	var shadow, spec map[string]json.RawMessage
	var pod *corev1.PodSpec
	if err := json.Unmarshal(raw, &shadow); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(shadow["spec"], &spec); err != nil {
		return nil, fmt.Errorf("spec: %w", err)
	}
	if err := json.Unmarshal(spec["pod"], &pod); err != nil {
		return nil, fmt.Errorf("spec.pod: %w", err)
	}
	if pod == nil {
		return nil, errors.New("it has no pod")
	}
	change(pod)
	var err error
	if spec["pod"], err = json.Marshal(pod); err != nil {
		return nil, err
	}
	if shadow["spec"], err = json.Marshal(spec); err != nil {
		return nil, err
	}
	return json.Marshal(shadow)
}
