package demand

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// PodSetName is the name of the one pod set of a Reservation made for a Key.
const PodSetName = "pods"

// TolerationLiqo is the taint of Liqo's virtual nodes, which the agent makes
// granted pods tolerate.
const TolerationLiqo = "virtual-node.liqo.io/not-allowed"

// Key identifies interchangeable pods.
type Key struct {
	Namespace string
	// OwnerUID is the UID of their root owner; a bare pod's own.
	OwnerUID types.UID
	// Shape is the hash of what each of them needs (ShapeOf).
	Shape string
}

// String is the key as namespace/owner/shape.
func (k Key) String() string { return k.Namespace + "/" + string(k.OwnerUID) + "/" + k.Shape }

func (k Key) compare(other Key) int {
	return cmp.Or(
		cmp.Compare(k.Namespace, other.Namespace),
		cmp.Compare(k.OwnerUID, other.OwnerUID),
		cmp.Compare(k.Shape, other.Shape),
	)
}

// Resolve looks up an object named by an owner reference and returns its
// controller, nil where it has none. found is false where the object is not
// known, or not yet.
type Resolve func(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found bool)

// KeyOf computes a pod's key, its root owner and the pod set (of count 0) that
// describes it. ok is false where the root owner cannot be told now.
func KeyOf(pod *corev1.Pod, resolve Resolve) (key Key, owner metav1.OwnerReference, set broker.PodSet, ok bool) {
	owner, ok = OwnerOf(pod, resolve)
	if !ok {
		return Key{}, owner, set, false
	}
	shape, set := ShapeOf(pod)
	return Key{Namespace: pod.Namespace, OwnerUID: owner.UID, Shape: shape}, owner, set, true
}

// KeyOfReservation reads the key from the labels of a Reservation. ok is false
// for one that was not made for a key: it serves no pods.
func KeyOfReservation(r *broker.Reservation) (key Key, ok bool) {
	key = Key{Namespace: r.Namespace, OwnerUID: types.UID(r.Labels[broker.LabelOwnerUID]), Shape: r.Labels[broker.LabelShape]}
	return key, key.OwnerUID != "" && key.Shape != ""
}

// OwnerOf is the root owner of a pod: its controller; the controller of that
// where it is a ReplicaSet that has one; the pod itself where it is bare. A Job
// is a root also where a CronJob made it: each run asks for itself.
func OwnerOf(pod *corev1.Pod, resolve Resolve) (owner metav1.OwnerReference, ok bool) {
	controller := metav1.GetControllerOfNoCopy(pod)
	if controller == nil {
		return metav1.OwnerReference{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}, true
	}
	if controller.Kind == "ReplicaSet" && strings.HasPrefix(controller.APIVersion, "apps/") {
		above, found := resolve(pod.Namespace, *controller)
		if !found {
			return metav1.OwnerReference{}, false
		}
		if above != nil {
			controller = above
		}
	}
	return metav1.OwnerReference{APIVersion: controller.APIVersion, Kind: controller.Kind, Name: controller.Name, UID: controller.UID}, true
}

// ShapeOf describes what one pod needs of a node, and its hash: 16 hexadecimal
// digits, fit for a label. The tolerations that Kubernetes and the agent add to
// pods are left out, so that the shape of a pod stays what it was.
func ShapeOf(pod *corev1.Pod) (hash string, set broker.PodSet) {
	set = broker.PodSet{
		Name:         PodSetName,
		Requests:     broker.FromList(resource.PodRequests(pod, resource.PodResourcesOptions{})),
		NodeSelector: pod.Spec.NodeSelector,
		Tolerations:  ownTolerations(pod.Spec.Tolerations),
	}
	if affinity := pod.Spec.Affinity; affinity != nil && affinity.NodeAffinity != nil {
		set.NodeAffinity = affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	// Amounts are hashed as numbers: "1" and "1000m" are the same need.
	amounts := map[corev1.ResourceName]int64{}
	for name, amount := range set.Requests.List() {
		if name == corev1.ResourceCPU {
			amounts[name] = amount.MilliValue()
		} else {
			amounts[name] = amount.Value()
		}
	}
	raw, err := json.Marshal(struct {
		Amounts      map[corev1.ResourceName]int64
		NodeSelector map[string]string
		NodeAffinity *corev1.NodeSelector
		Tolerations  []corev1.Toleration
	}{amounts, set.NodeSelector, set.NodeAffinity, set.Tolerations})
	if err != nil {
		// Strings, numbers and maps of them cannot fail to marshal.
		panic(err)
	}
	return digest(string(raw))[:16], set
}

// ownTolerations is what the pod's author wrote, in an order of its own.
func ownTolerations(all []corev1.Toleration) []corev1.Toleration {
	var own []corev1.Toleration
	for _, t := range all {
		switch t.Key {
		case broker.TaintOverflow, TolerationLiqo, corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable:
		default:
			own = append(own, t)
		}
	}
	slices.SortFunc(own, func(a, b corev1.Toleration) int {
		return cmp.Or(
			cmp.Compare(a.Key, b.Key),
			cmp.Compare(a.Operator, b.Operator),
			cmp.Compare(a.Value, b.Value),
			cmp.Compare(a.Effect, b.Effect),
			cmp.Compare(seconds(a), seconds(b)),
		)
	})
	return own
}

func seconds(t corev1.Toleration) int64 {
	if t.TolerationSeconds == nil {
		return -1
	}
	return *t.TolerationSeconds
}

// Name is the name of the Reservation for a key: always the same one, and
// telling whose it is.
func (k Key) Name(ownerName string) string {
	const longest = 50
	if len(ownerName) > longest {
		ownerName = strings.TrimRight(ownerName[:longest], "-.")
	}
	return ownerName + "-" + digest(string(k.OwnerUID) + "/" + k.Shape)[:8]
}

// HoldLabel is the value of label broker.LabelHold for a reservation ID: the ID
// itself, or as much of it as a label holds and a hash.
func HoldLabel(id string) string {
	const longest = 63
	if len(id) <= longest {
		return id
	}
	return strings.TrimRight(id[:longest-17], "-.") + "-" + digest(id)[:16]
}

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}
