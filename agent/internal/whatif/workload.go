package whatif

import (
	"encoding/json"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// maxCount is how many pods of a workload are looked at.
const maxCount = 100_000

// Workload is an object of a manifest that has pods, or is a Reservation.
type Workload struct {
	explain.Object
	// Pod is one of Count pods, nil of a Reservation.
	Pod         *corev1.Pod
	Count       int32
	Reservation *broker.Reservation
	// Least is how many pods the gang of the pod needs, nil if it is in none or that is unknown.
	Least *int32
}

// Of returns what an object of a manifest is; ok is false if it has no pods. The namespace is that
// of an object without one.
func Of(object *unstructured.Unstructured, namespace string) (w Workload, ok bool, err error) {
	if object.GetNamespace() != "" {
		namespace = object.GetNamespace()
	}
	w = Workload{Object: explain.Object{Kind: object.GetKind(), Namespace: namespace, Name: object.GetName()}, Count: 1}
	if w.Name == "" {
		w.Name = object.GetGenerateName()
	}
	var template map[string]any
	switch object.GroupVersionKind().GroupKind() {
	case broker.GroupVersion.WithKind("Reservation").GroupKind():
		w.Reservation = &broker.Reservation{}
		err = into(object.Object, w.Reservation)
		w.Reservation.Namespace = namespace
		return w, err == nil, w.wrong(err)
	case corev1.SchemeGroupVersion.WithKind("Pod").GroupKind():
		template = object.Object
	default:
		template, err = w.template(object)
	}
	if template == nil || err != nil {
		return w, false, w.wrong(err)
	}
	w.Pod = &corev1.Pod{}
	if err := into(template, w.Pod); err != nil || len(w.Pod.Spec.Containers) == 0 {
		if err == nil {
			err = fmt.Errorf("its pods have no containers")
		}
		return w, false, w.wrong(err)
	}
	w.Pod.Status, w.Pod.Spec.NodeName, w.Pod.UID = corev1.PodStatus{}, "", ""
	w.Pod.Namespace, w.Pod.Name = namespace, w.Name
	if w.Kind != "Pod" {
		w.Pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: object.GetAPIVersion(), Kind: w.Kind, Name: w.Name,
			UID: types.UID("what-if/" + w.Object.String()), Controller: ptr.To(true)}}
	}
	complete(w.Pod)
	return w, true, nil
}

// template returns the pod template of an object, nil if it has none, and counts its pods.
func (w *Workload) template(object *unstructured.Unstructured) (map[string]any, error) {
	spec, _, _ := unstructured.NestedMap(object.Object, "spec")
	if job, found, _ := unstructured.NestedMap(spec, "jobTemplate", "spec"); found {
		spec = job
	}
	template, found, _ := unstructured.NestedMap(spec, "template")
	if _, pods, _ := unstructured.NestedSlice(template, "spec", "containers"); !found || !pods {
		return nil, nil
	}
	group := object.GroupVersionKind().Group
	builtIn := group == "apps" || group == "batch" // elsewhere, these fields may be something else
	count := int64(1)
	for _, field := range []string{"replicas", "parallelism", "completions"} {
		n, found, err := unstructured.NestedInt64(spec, field)
		switch {
		case err != nil && spec[field] != nil && builtIn:
			return nil, fmt.Errorf("%s must be a whole number", field)
		case found && field == "completions":
			count = min(count, n)
		case found:
			count = n
		}
	}
	w.Count = int32(min(max(count, 0), maxCount))
	return template, nil
}

func (w *Workload) wrong(err error) error {
	if err != nil {
		return fmt.Errorf("%s: %w", w.Object, err)
	}
	return nil
}

// into decodes a part of a manifest. The error is that of encoding/json, which names the field.
func into(content map[string]any, object any) error {
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(content, object)
	if err == nil {
		return nil
	}
	var wrong *json.UnmarshalTypeError
	if encoded, encoding := json.Marshal(content); encoding == nil && errors.As(json.Unmarshal(encoded, object), &wrong) {
		return fmt.Errorf("%s cannot be a %s", wrong.Field, wrong.Value)
	}
	if errors.Is(err, resource.ErrFormatWrong) {
		return errors.New("an amount is no quantity, such as 500m or 8Gi")
	}
	return err
}

// complete sets the requests that the API server takes from limits.
func complete(pod *corev1.Pod) {
	for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range containers {
			r := &containers[i].Resources
			for name, limit := range r.Limits {
				if _, set := r.Requests[name]; !set {
					if r.Requests == nil {
						r.Requests = corev1.ResourceList{}
					}
					r.Requests[name] = limit
				}
			}
		}
	}
}
