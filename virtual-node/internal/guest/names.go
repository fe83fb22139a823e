// Package guest says what a pod of this cluster looks like as a guest of another
// one, and what becomes of the guest looks like at home. It is pure: it knows no
// API server and no clock.
package guest

import (
	"crypto/sha256"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"

	corev1 "k8s.io/api/core/v1"
)

// Keys on what this program makes at the provider: where it comes from.
const (
	AnnotationNamespace = broker.Group + "/origin-namespace"
	AnnotationName      = broker.Group + "/origin-name"
	LabelUID            = broker.Group + "/origin-uid"
	// LabelCopy marks copies of ConfigMaps and Secrets; its value is the kind, in
	// lower case.
	LabelCopy = broker.Group + "/copy-of"
)

// maxName is the most that a label, and with it a pod's host name, may have.
const maxName = 63

// Name of a pod's guest: another for each incarnation, so that none is taken for
// the one before.
func Name(home *corev1.Pod) string {
	return shortened(home.Name, home.Namespace, home.Name, string(home.UID))
}

// CopyName of a ConfigMap or Secret: another for each namespace.
func CopyName(namespace, name string) string { return shortened(name, namespace, name) }

// fileKey is where Files keeps the value of a field. One field has one key, so
// that a ConfigMap cannot outgrow what the API server takes by repetition.
func fileKey(path string) string {
	plain, subscript, found := strings.Cut(path, "[")
	if !found {
		return plain
	}
	return shortened(plain, subscript)
}

// filesName of what Files makes.
func filesName(home *corev1.Pod) string {
	return shortened(home.Name+"-downward", home.Namespace, home.Name, string(home.UID), "downward")
}

// shortened is readable's beginning with a hash of all parts, none but the last of
// which can hold a slash.
func shortened(readable string, parts ...string) string {
	sum := sha256.Sum256([]byte(strings.Join(parts, "/")))
	// Long enough that nobody finds the name of another namespace's Secret.
	hash := fmt.Sprintf("%x", sum[:10])
	readable = strings.ReplaceAll(readable, ".", "-")
	if most := maxName - len(hash) - 1; len(readable) > most {
		readable = readable[:most]
	}
	return strings.TrimRight(readable, "-") + "-" + hash
}

// Origin reads whose guest a pod is, or what a copy was made of: for a copy the
// UID is empty.
func Origin(object metav1.Object) (namespace, name string, uid types.UID, ok bool) {
	annotations := object.GetAnnotations()
	namespace, name, uid = annotations[AnnotationNamespace], annotations[AnnotationName], types.UID(object.GetLabels()[LabelUID])
	return namespace, name, uid, namespace != "" && name != ""
}
