package translate

import (
	"crypto/sha256"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Keys on the objects that virtual-node creates at the provider: the object in
// the consumer that each was made from.
const (
	AnnotationNamespace = broker.Group + "/origin-namespace"
	AnnotationName      = broker.Group + "/origin-name"
	LabelUID            = broker.Group + "/origin-uid"
	// LabelCopy marks copies of ConfigMaps and Secrets; its value is the kind in
	// lower case.
	LabelCopy = broker.Group + "/copy-of"
)

// maxName is the maximum length of a DNS label, which a guest's host name must be.
const maxName = 63

// GuestName returns the name of a pod's guest. It depends on the pod's UID, so
// that a guest of a deleted pod is never taken for one of its successor.
func GuestName(pod *corev1.Pod) string {
	return nameWithHash(pod.Name, pod.Namespace, pod.Name, string(pod.UID))
}

// CopyName returns the name at the provider of the copy of a ConfigMap or Secret.
// It depends on the namespace: guests of all namespaces share one.
func CopyName(namespace, name string) string { return nameWithHash(name, namespace, name) }

// fileKey returns the key of a field in References.DownwardFiles.
// Each field has one key, however many files show it, which bounds the size of
// the ConfigMap.
func fileKey(path string) string {
	field, subscript, found := strings.Cut(path, "[")
	if !found {
		return field
	}
	return nameWithHash(field, subscript)
}

// filesName returns the name of References.DownwardFiles.
func filesName(pod *corev1.Pod) string {
	return nameWithHash(pod.Name+"-downward", pod.Namespace, pod.Name, string(pod.UID), "downward")
}

// nameWithHash returns the beginning of prefix with a hash of all parts. Only the
// last part may contain a slash.
func nameWithHash(prefix string, parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "/")))
	// 80 bits: a name that collides with that of another namespace's Secret must
	// not be feasible to find.
	hash := fmt.Sprintf("%x", sum[:10])
	prefix = strings.ReplaceAll(prefix, ".", "-")
	if limit := maxName - len(hash) - 1; len(prefix) > limit {
		prefix = prefix[:limit]
	}
	return strings.TrimRight(prefix, "-") + "-" + hash
}

// GuestOrigin returns the pod that a guest was made from. ok is false if it does not have the
// name of that pod's guest: then it is none of this program's, whatever its annotations say.
func GuestOrigin(guest *corev1.Pod) (namespace, name string, uid types.UID, ok bool) {
	namespace, name, uid, ok = Origin(guest)
	of := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: uid}}
	ok = ok && len(validation.IsDNS1123Label(namespace)) == 0 && len(validation.IsDNS1123Subdomain(name)) == 0 && guest.Name == GuestName(of)
	return namespace, name, uid, ok
}

// Origin returns the object that a guest or copy was made from. uid is empty for
// copies of ConfigMaps and Secrets.
func Origin(object metav1.Object) (namespace, name string, uid types.UID, ok bool) {
	annotations := object.GetAnnotations()
	namespace, name, uid = annotations[AnnotationNamespace], annotations[AnnotationName], types.UID(object.GetLabels()[LabelUID])
	return namespace, name, uid, namespace != "" && name != ""
}
