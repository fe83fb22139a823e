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
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/resource"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
)

// PodSetName is the name of the one pod set of a Reservation, unless that is for a gang.
const PodSetName = "pods"

// GangShape is the Shape of the key of a gang's Reservation: it is for pods of all shapes,
// each of which is the name of one of its pod sets.
const GangShape = "gang"

// Key identifies interchangeable pods.
type Key struct {
	Namespace string
	// OwnerUID is the UID of the pods' root owner, SharedOwner, or made from a gang's name.
	OwnerUID types.UID
	// Shape is the hash of the pods' scheduling requirements (ShapeOf).
	Shape string
}

// String returns the key as namespace/ownerUID/shape.
func (k Key) String() string { return k.Namespace + "/" + string(k.OwnerUID) + "/" + k.Shape }

// OfReservation returns the key of the Reservation that serves pods of a key: the same, but
// for a gang, which is requested as a whole.
func (k Key) OfReservation() Key {
	if k.IsGang() {
		k.Shape = GangShape
	}
	return k
}

func (k Key) compare(other Key) int {
	return cmp.Or(
		cmp.Compare(k.Namespace, other.Namespace),
		cmp.Compare(k.OwnerUID, other.OwnerUID),
		cmp.Compare(k.Shape, other.Shape),
	)
}

// Resolve looks up the object of an owner reference and returns its controller,
// nil if it has none or its kind is not looked up. found is false if the object is not known
// (yet). It is called for one pod after another, and must not block.
type Resolve func(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found bool)

// KeyOf returns a pod's key, its root owner and the pod set (of count 0) that
// describes it. ok is false if the root owner cannot be resolved.
func KeyOf(pod *corev1.Pod, resolve Resolve) (key Key, owner metav1.OwnerReference, set broker.PodSet, ok bool) {
	owner, ok = OwnerOf(pod, resolve)
	if !ok {
		return Key{}, owner, set, false
	}
	shape, set := ShapeOf(pod)
	if _, gang := GangOf(pod); gang {
		set.Name = shape
	}
	return Key{Namespace: pod.Namespace, OwnerUID: owner.UID, Shape: shape}, owner, set, true
}

// KeyOfReservation returns the key in the labels of a Reservation. ok is false if
// it has none: such a Reservation serves no pods.
func KeyOfReservation(r *broker.Reservation) (key Key, ok bool) {
	key = Key{Namespace: r.Namespace, OwnerUID: types.UID(r.Labels[broker.LabelOwnerUID]), Shape: r.Labels[broker.LabelShape]}
	return key, key.OwnerUID != "" && key.Shape != ""
}

// PodKeys returns the keys of the pods that a Reservation serves; none if it has no key.
func PodKeys(r *broker.Reservation) []Key {
	key, ok := KeyOfReservation(r)
	switch {
	case !ok:
		return nil
	case !key.IsGang():
		return []Key{key}
	}
	keys := make([]Key, 0, len(r.Spec.PodSets))
	for _, set := range r.Spec.PodSets {
		keys = append(keys, Key{Namespace: key.Namespace, OwnerUID: key.OwnerUID, Shape: set.Name})
	}
	return keys
}

// SharedOwner is the OwnerUID of bare pods and of Jobs without a controller: those of one
// namespace and shape share a Reservation.
const SharedOwner types.UID = "shared"

// gangPrefix of the OwnerUID of a gang.
const gangPrefix = "gang-"

// The API groups of the kinds that describe gangs: that of Kubernetes itself, and that of the
// coscheduling plugins.
const (
	KubernetesGangs   = "scheduling.k8s.io"
	CoschedulingGangs = "scheduling.x-k8s.io"
)

// Gang identifies a group of pods of one namespace of which none is of use alone.
type Gang struct {
	// API is KubernetesGangs or CoschedulingGangs.
	API string
	// PodGroup is the name of a PodGroup; if Workload is not empty, of a pod group in that
	// Workload (Kubernetes 1.35), of which Replica is a replica.
	PodGroup, Workload, Replica string
}

// GangOf returns the gang that a pod belongs to: by its schedulingGroup (Kubernetes 1.36 and
// later) or workloadRef (1.35), or else by the label of the coscheduling plugins. ok is false
// if it belongs to none.
func GangOf(pod *corev1.Pod) (gang Gang, ok bool) {
	if group := pod.Spec.SchedulingGroup; group != nil && group.PodGroupName != nil {
		return Gang{API: KubernetesGangs, PodGroup: *group.PodGroupName}, true
	}
	if ref, ok := pod.Annotations[broker.AnnotationWorkload]; ok {
		workload, group, _ := strings.Cut(ref, "/")
		group, replica, _ := strings.Cut(group, "/")
		return Gang{API: KubernetesGangs, Workload: workload, PodGroup: group, Replica: replica}, true
	}
	name := pod.Labels[broker.LabelPodGroup]
	return Gang{API: CoschedulingGangs, PodGroup: name}, name != ""
}

// UID returns the OwnerUID of the keys of a gang.
func (g Gang) UID() types.UID {
	name := g.PodGroup
	if g.API == KubernetesGangs {
		name = strings.Join([]string{g.Workload, g.PodGroup, g.Replica}, "/") // no name has a slash
	}
	return types.UID(gangPrefix + digest(name)[:16])
}

// String describes a gang, for messages.
func (g Gang) String() string {
	switch {
	case g.Workload == "":
		return "PodGroup " + g.PodGroup
	case g.Replica == "":
		return "pod group " + g.PodGroup + " of Workload " + g.Workload
	}
	return "pod group " + g.PodGroup + " (replica " + g.Replica + ") of Workload " + g.Workload
}

// owner returns the object that describes a gang, with a UID made from the names.
func (g Gang) owner() metav1.OwnerReference {
	if g.Workload != "" {
		return metav1.OwnerReference{APIVersion: g.API + "/v1alpha1", Kind: "Workload", Name: g.Workload, UID: g.UID()}
	}
	version := "v1alpha1"
	if g.API == KubernetesGangs {
		version = "v1beta1"
	}
	return metav1.OwnerReference{APIVersion: g.API + "/" + version, Kind: "PodGroup", Name: g.PodGroup, UID: g.UID()}
}

// IsGang reports whether a key is that of a gang's pods.
func (k Key) IsGang() bool { return strings.HasPrefix(string(k.OwnerUID), gangPrefix) }

// maxOwners limits the controllers that are looked up for one pod.
const maxOwners = 8

// Resolvable returns the kind of an owner whose own controller always has to be looked up:
// one of those that Kubernetes' own controllers create.
func Resolvable(ref metav1.OwnerReference) (kind schema.GroupVersionKind, ok bool) {
	kind = schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind)
	switch kind.GroupKind() {
	case schema.GroupKind{Group: "apps", Kind: "ReplicaSet"}, schema.GroupKind{Group: "apps", Kind: "StatefulSet"}, schema.GroupKind{Group: "batch", Kind: "Job"}:
		kind.Version = "v1"
		return kind, true
	}
	return kind, false
}

// OwnerOf returns the root owner of a pod: the last one of its controller, the controller
// of that, and so on, as far as resolve knows them. The owner of bare pods and of Jobs
// without a controller is their namespace, with UID SharedOwner; that of a gang is its
// Workload or PodGroup, with a UID made from the gang's names. ok is false if an owner cannot be resolved.
func OwnerOf(pod *corev1.Pod, resolve Resolve) (owner metav1.OwnerReference, ok bool) {
	if gang, ok := GangOf(pod); ok {
		return gang.owner(), true
	}
	controller := metav1.GetControllerOfNoCopy(pod)
	for range maxOwners {
		if controller == nil {
			break
		}
		above, found := resolve(pod.Namespace, *controller)
		if !found {
			return metav1.OwnerReference{}, false
		}
		if above == nil {
			break
		}
		controller = above
	}
	if controller == nil || controller.Kind == "Job" && strings.HasPrefix(controller.APIVersion, "batch/") {
		return metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: pod.Namespace, UID: SharedOwner}, true
	}
	return metav1.OwnerReference{APIVersion: controller.APIVersion, Kind: controller.Kind, Name: controller.Name, UID: controller.UID}, true
}

// ShapeOf returns the scheduling requirements of one pod and their hash: 16
// hexadecimal digits, valid as a label value. The tolerations that Kubernetes and
// Spillway add to pods are left out, and a bound pod keeps the shape that it was bound
// with (label broker.LabelShape), so that the shape of a pod never changes: neither
// when it gets a grant nor when it is resized in place.
func ShapeOf(pod *corev1.Pod) (hash string, set broker.PodSet) {
	set = broker.PodSet{
		Name:         PodSetName,
		Requests:     broker.FromList(resource.PodRequests(pod, resource.PodResourcesOptions{})),
		NodeSelector: pod.Spec.NodeSelector,
		Tolerations:  ownTolerations(pod.Spec.Tolerations),
		PodSecurity:  guest.PodSecurity(&pod.Spec),
	}
	if affinity := pod.Spec.Affinity; affinity != nil && affinity.NodeAffinity != nil {
		set.NodeAffinity = affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	if bound := pod.Labels[broker.LabelShape]; bound != "" && pod.Spec.NodeName != "" {
		return bound, set
	}
	// Amounts are hashed as numbers: "1" and "1000m" are equal.
	raw, err := json.Marshal(struct {
		Amounts      capacity.Vector
		NodeSelector map[string]string
		NodeAffinity *corev1.NodeSelector
		Tolerations  []corev1.Toleration
		PodSecurity  string
	}{capacity.Ceil(set.Requests.List()), set.NodeSelector, set.NodeAffinity, set.Tolerations, set.PodSecurity})
	if err != nil {
		// Strings, numbers and maps of them cannot fail to marshal.
		panic(err)
	}
	return digest(string(raw))[:16], set
}

// AddedTolerations returns the tolerations that a pod has for virtual nodes: neither its
// author's nor those that Kubernetes adds to every pod. Spillway appends the one for
// broker.TaintOverflow, and then those of the driver, which have effect NoExecute. What else
// follows is not Spillway's: Kueue and other webhooks append tolerations for nodes of the cluster.
func AddedTolerations(all []corev1.Toleration) []corev1.Toleration {
	var added []corev1.Toleration
	for _, t := range all {
		if t.Key == broker.TaintOverflow || len(added) > 0 && t.Effect == corev1.TaintEffectNoExecute && !ofKubernetes(t) {
			added = append(added, t)
		}
	}
	return added
}

// ofKubernetes reports whether Kubernetes adds a toleration to every pod.
func ofKubernetes(t corev1.Toleration) bool {
	return t.Key == corev1.TaintNodeNotReady || t.Key == corev1.TaintNodeUnreachable
}

// ownTolerations returns the tolerations of a pod that its guest carries, sorted: those before the
// one for broker.TaintOverflow (guest.Tolerations).
func ownTolerations(all []corev1.Toleration) []corev1.Toleration {
	var own []corev1.Toleration
	for _, t := range all {
		if t.Key == broker.TaintOverflow {
			break
		}
		if !ofKubernetes(t) {
			own = append(own, t)
		}
	}
	slices.SortFunc(own, func(a, b corev1.Toleration) int {
		return cmp.Or(
			cmp.Compare(a.Key, b.Key),
			cmp.Compare(a.Operator, b.Operator),
			cmp.Compare(a.Value, b.Value),
			cmp.Compare(a.Effect, b.Effect),
			cmp.Compare(ptr.Deref(a.TolerationSeconds, -1), ptr.Deref(b.TolerationSeconds, -1)),
		)
	})
	return own
}

// Name returns the name of the Reservation that serves pods of a key: a prefix of the
// owner's name and a hash of the Reservation's key.
func (k Key) Name(ownerName string) string {
	k = k.OfReservation()
	const maxLength = 50
	if len(ownerName) > maxLength {
		ownerName = strings.TrimRight(ownerName[:maxLength], "-.")
	}
	return ownerName + "-" + digest(string(k.OwnerUID) + "/" + k.Shape)[:8]
}

func digest(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])
}
