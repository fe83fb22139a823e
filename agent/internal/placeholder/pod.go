package placeholder

import (
	"encoding/json"
	"fmt"
	"hash/fnv"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

const (
	// DefaultNamespace is the namespace of placeholders.
	DefaultNamespace = "spillway-holds"
	// DefaultImage runs in placeholders.
	DefaultImage = "registry.k8s.io/pause:3.10.2"
	// PriorityClass of placeholders: they preempt no pod, and a pod of the default
	// priority does not preempt them.
	PriorityClass = "spillway-hold"

	// labelHold is the UID of the hold whose place a placeholder holds; the annotation
	// broker.LabelHold is its name.
	labelHold = broker.Group + "/hold-uid"
	// annotationDelay keeps the cluster autoscaler from adding a node for a placeholder:
	// one that finds no place is deleted long before.
	annotationDelay = "cluster-autoscaler.kubernetes.io/pod-scale-up-delay"
	// unprivileged is the user and group of a placeholder.
	unprivileged = 65535
)

// Options of the pods.
type Options struct {
	Namespace, Image string
	// Owner of the pods, their controller: kubectl drain refuses pods without one.
	Owner metav1.OwnerReference
}

// Hold is what one hold needs placeholders for.
type Hold struct {
	// UID of the hold, and the name of its Reservation.
	UID      types.UID
	Name     string
	Consumer string
	// Unused is the part of it that no guest uses. Of a divisible total, it includes what guests
	// are about to take the places for.
	Unused broker.HeldCapacity
}

// ConsumerOf returns the consumer that a pod in a namespace of placeholders holds a
// place for.
func ConsumerOf(pod *corev1.Pod, namespace string) (consumer string, ok bool) {
	if pod.Namespace != namespace || pod.Labels[broker.LabelManagedBy] != broker.ManagedBySpillway {
		return "", false
	}
	consumer, ok = pod.Labels[broker.LabelRequester]
	return consumer, ok
}

// keyOf identifies the shape of a pod set, whatever its name and count.
func keyOf(set broker.PodSet) string {
	set.Name, set.Count = "", 0
	// A pod set can always be marshalled.
	text, _ := json.Marshal(set)
	return hash(string(text))
}

func hash(parts ...string) string {
	sum := fnv.New64a()
	for _, part := range parts {
		sum.Write([]byte(part))
		sum.Write([]byte{0})
	}
	return fmt.Sprintf("%016x", sum.Sum64())
}

// pod returns a placeholder of a hold. It may run where the guests of the set may.
func (o Options) pod(h Hold, s shape, ordinal int) *corev1.Pod {
	pod := shaped(s.set, o.Image)
	pod.ObjectMeta = metav1.ObjectMeta{
		Namespace: o.Namespace, Name: podName(h, s, ordinal),
		Labels:          map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelRequester: h.Consumer, labelHold: string(h.UID), broker.LabelShape: s.key},
		Annotations:     map[string]string{broker.LabelHold: h.Name, annotationDelay: "24h", guest.AnnotationEvict: "true"},
		OwnerReferences: []metav1.OwnerReference{o.Owner},
	}
	if len(s.size) > 0 {
		// Quantities can always be marshalled.
		holds, _ := json.Marshal(s.set.Requests)
		pod.Annotations[AnnotationPart] = string(holds)
	}
	pod.Spec.PriorityClassName = PriorityClass
	return pod
}

// Guest returns a pod as the guests of a pod set are in a namespace: what decides about its
// admission that is known before they come.
func Guest(set broker.PodSet, namespace string) *corev1.Pod {
	pod := shaped(set, DefaultImage)
	pod.ObjectMeta = metav1.ObjectMeta{
		Namespace: namespace, GenerateName: "hold-",
		Labels:      map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
		Annotations: map[string]string{guest.AnnotationEvict: "true"},
	}
	pod.Spec.PriorityClassName = guest.PriorityClass
	if set.PodSecurity == broker.PodSecurityBaseline {
		pod.Spec.SecurityContext, pod.Spec.Containers[0].SecurityContext = nil, nil
	}
	// Without a limit, it would get the namespace's default one, which may be less. A guest
	// of driver direct always has one that is not.
	if memory, requested := requestsOf(pod)[corev1.ResourceMemory]; requested {
		pod.Spec.Containers[0].Resources.Limits[corev1.ResourceMemory] = memory
	}
	return pod
}

// shaped returns a pod that requests what those of a pod set do, and may run where their
// guests may.
func shaped(set broker.PodSet, image string) *corev1.Pod {
	requests := set.Requests.List()
	limits := corev1.ResourceList{}
	for name, amount := range requests {
		if name != corev1.ResourceCPU && name != corev1.ResourceMemory && name != corev1.ResourceEphemeralStorage {
			// Extended resources require a limit equal to the request.
			limits[name] = amount.DeepCopy()
		}
	}
	pod := &corev1.Pod{
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			NodeSelector:                  set.NodeSelector, Tolerations: guest.Tolerations(set.Tolerations),
			Affinity:                     &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: guest.NodeAffinity(set.NodeAffinity)}},
			AutomountServiceAccountToken: ptr.To(false), EnableServiceLinks: ptr.To(false),
			SecurityContext: &corev1.PodSecurityContext{
				RunAsNonRoot: ptr.To(true), RunAsUser: ptr.To[int64](unprivileged), RunAsGroup: ptr.To[int64](unprivileged),
				SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			},
			Containers: []corev1.Container{{
				Name: "placeholder", Image: image, Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits},
				SecurityContext: &corev1.SecurityContext{
					AllowPrivilegeEscalation: ptr.To(false), ReadOnlyRootFilesystem: ptr.To(true),
					Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
				},
			}},
		},
	}
	// Clients write what was created into the pod: no two share a map.
	return pod.DeepCopy()
}

func podName(h Hold, s shape, ordinal int) string {
	return fmt.Sprintf("hold-%s-%d", hash(string(h.UID), s.key), ordinal)
}

// requestsOf is what a placeholder requests.
func requestsOf(pod *corev1.Pod) corev1.ResourceList {
	if len(pod.Spec.Containers) == 0 {
		return nil
	}
	return pod.Spec.Containers[0].Resources.Requests
}

// HoldOf returns the UID of the hold of a placeholder.
func HoldOf(pod *corev1.Pod) types.UID { return types.UID(pod.Labels[labelHold]) }

// unschedulable returns why the scheduler has found no place for a pod, "" if it has
// not tried yet.
func unschedulable(pod *corev1.Pod) string {
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
	if i < 0 {
		return ""
	}
	return pod.Status.Conditions[i].Message
}
