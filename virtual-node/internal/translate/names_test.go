package translate

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

func TestGuestNamesAreUnique(t *testing.T) {
	names := map[string]string{}
	for what, pod := range map[string]*corev1.Pod{
		"a pod":             named("shop", "web-0", "1"),
		"its successor":     named("shop", "web-0", "2"),
		"another namespace": named("test", "web-0", "1"),
		"a dot for a dash":  named("shop", "web.0", "1"),
	} {
		name := GuestName(pod)
		if other, taken := names[name]; taken {
			t.Errorf("%s and %s: both guests are named %s", what, other, name)
		}
		names[name] = what
		if second := GuestName(pod); second != name {
			t.Errorf("%s: the name changed from %s to %s", what, name, second)
		}
		if !strings.HasPrefix(name, "web-0-") {
			t.Errorf("%s: %s does not begin with the name of the pod", what, name)
		}
	}
}

func TestCopyNamesAreUnique(t *testing.T) {
	for _, pair := range [][4]string{
		{"a", "key", "b", "key"},
		{"a", "b-key", "a-b", "key"},
		{"a", "b.key", "a", "b-key"},
		{"a", strings.Repeat("long", 30) + "x", "a", strings.Repeat("long", 30) + "y"},
	} {
		if one, other := CopyName(pair[0], pair[1]), CopyName(pair[2], pair[3]); one == other {
			t.Errorf("the copies of %s/%s and %s/%s are both named %s", pair[0], pair[1], pair[2], pair[3], one)
		}
	}
}

// anyName draws a valid name of a pod or Secret.
func anyName() *rapid.Generator[string] {
	return rapid.StringMatching(`[a-z0-9]([-a-z0-9]{0,70}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?){0,2}`)
}

func TestNamesAreValid(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := anyName().Draw(t, "name")
		pod := named("shop", name, rapid.StringMatching(`[0-9a-f-]{1,36}`).Draw(t, "uid"))
		for what, label := range map[string]string{
			"guest": GuestName(pod), "copy": CopyName("shop", name), "files": filesName(pod), "host": hostname(pod),
		} {
			if problems := validation.IsDNS1123Label(label); len(problems) > 0 {
				t.Errorf("the %s name of %q is %q: %v", what, name, label, problems)
			}
		}
	})
}

func TestFileKeysAreValidAndUnique(t *testing.T) {
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
	pod := named("shop", "web-0", "7f0c")
	guest, _, _ := Pod(pod, "guests", Options{})
	if namespace, name, uid, ok := Origin(guest); !ok || namespace != "shop" || name != "web-0" || uid != "7f0c" {
		t.Errorf("got %s/%s %s, %t", namespace, name, uid, ok)
	}
	if namespace, name, uid, ok := GuestOrigin(guest); !ok || namespace != "shop" || name != "web-0" || uid != "7f0c" {
		t.Errorf("the guest is of %s/%s %s, %t", namespace, name, uid, ok)
	}
	for what, forge := range map[string]func(*corev1.Pod){
		"another name":      func(p *corev1.Pod) { p.Name += "0" },
		"another pod":       func(p *corev1.Pod) { p.Annotations[AnnotationName] = "web-1" },
		"another namespace": func(p *corev1.Pod) { p.Annotations[AnnotationNamespace] = "kube-system" },
		"another UID":       func(p *corev1.Pod) { p.Labels[LabelUID] = "7f0d" },
		"no name of a pod": func(p *corev1.Pod) {
			p.Annotations[AnnotationName] = ".."
			p.Name = GuestName(named("shop", "..", "7f0c"))
		},
		"a long name": func(p *corev1.Pod) {
			long := strings.Repeat("x", 1<<20)
			p.Annotations[AnnotationName] = long
			p.Name = GuestName(named("shop", long, "7f0c"))
		},
	} {
		forged := guest.DeepCopy()
		if forge(forged); forged.Name == "" {
			t.Fatal(what)
		}
		if namespace, name, uid, ok := GuestOrigin(forged); ok {
			t.Errorf("with %s, it is taken for the guest of %.80s/%.80s %s", what, namespace, name, uid)
		}
	}
	for what, annotations := range map[string]map[string]string{
		"none":           nil,
		"name only":      {AnnotationName: "web-0"},
		"namespace only": {AnnotationNamespace: "shop"},
	} {
		if namespace, name, _, ok := Origin(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}); ok {
			t.Errorf("annotations %s: got %s/%s, want none", what, namespace, name)
		}
	}
}
