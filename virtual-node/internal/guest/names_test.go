package guest

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"pgregory.net/rapid"
)

func named(namespace, name, uid string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(uid)}}
}

func TestEachIncarnationHasANameOfItsOwn(t *testing.T) {
	names := map[string]string{}
	for what, pod := range map[string]*corev1.Pod{
		"one":                  named("shop", "web-0", "1"),
		"its next incarnation": named("shop", "web-0", "2"),
		"another namespace":    named("shed", "web-0", "1"),
		"a dot for a dash":     named("shop", "web.0", "1"),
	} {
		name := Name(pod)
		if other, taken := names[name]; taken {
			t.Errorf("%s and %s are both called %s", what, other, name)
		}
		names[name] = what
		if again := Name(pod); again != name {
			t.Errorf("%s: called %s, and then %s", what, name, again)
		}
		if !strings.HasPrefix(name, "web-0-") {
			t.Errorf("%s: called %s, by which nobody knows it", what, name)
		}
	}
}

func TestCopiesOfNamespacesDoNotMeet(t *testing.T) {
	for _, pair := range [][4]string{
		{"a", "key", "b", "key"},
		{"a", "b-key", "a-b", "key"},
		{"a", "b.key", "a", "b-key"},
		{"a", strings.Repeat("long", 30) + "x", "a", strings.Repeat("long", 30) + "y"},
	} {
		if one, other := CopyName(pair[0], pair[1]), CopyName(pair[2], pair[3]); one == other {
			t.Errorf("%s/%s and %s/%s are both copied to %s", pair[0], pair[1], pair[2], pair[3], one)
		}
	}
}

// anyName draws what the API server takes as the name of a pod or Secret.
func anyName() *rapid.Generator[string] {
	return rapid.StringMatching(`[a-z0-9]([-a-z0-9]{0,70}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?){0,2}`)
}

func TestNamesAreValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := anyName().Draw(t, "name")
		pod := named("shop", name, rapid.StringMatching(`[0-9a-f-]{1,36}`).Draw(t, "uid"))
		for what, made := range map[string]string{
			"guest": Name(pod), "copy": CopyName("shop", name), "files": filesName(pod), "host": hostname(pod),
		} {
			if problems := validation.IsDNS1123Label(made); len(problems) > 0 {
				t.Errorf("%s of %q is called %q: %v", what, name, made, problems)
			}
		}
	})
}

func TestFileKeysAreValidAndDiffer(t *testing.T) {
	keys := map[string]string{}
	for _, path := range []string{
		"metadata.labels", "metadata.annotations", "metadata.labels['a']", "metadata.annotations['a']",
		"metadata.labels['example.com/a']", "metadata.labels['example.com/b']", "metadata.name",
	} {
		key := fileKey(path)
		if problems := validation.IsConfigMapKey(key); len(problems) > 0 {
			t.Errorf("the key of %s is %q: %v", path, key, problems)
		}
		if other, taken := keys[key]; taken {
			t.Errorf("%s and %s have the key %s", path, other, key)
		}
		keys[key] = path
	}
}

func TestOrigin(t *testing.T) {
	home := named("shop", "web-0", "7f0c")
	made, _, _ := Translate(home, "guests", Options{})
	if namespace, name, uid, ok := Origin(made); !ok || namespace != "shop" || name != "web-0" || uid != "7f0c" {
		t.Errorf("the guest is of %s/%s %s, %v", namespace, name, uid, ok)
	}
	for what, annotations := range map[string]map[string]string{
		"none":           nil,
		"name only":      {AnnotationName: "web-0"},
		"namespace only": {AnnotationNamespace: "shop"},
	} {
		if namespace, name, _, ok := Origin(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}); ok {
			t.Errorf("%s: it is said to be of %s/%s", what, namespace, name)
		}
	}
}
