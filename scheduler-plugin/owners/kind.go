package owners

import (
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Kind is a namespaced kind of objects whose controllers are looked up. Its version is that
// of the owner reference.
type Kind struct {
	Group    string `json:"group"`
	Kind     string `json:"kind"`
	Resource string `json:"resource"`
}

// ParseKind parses what String returns.
func ParseKind(text string) (Kind, error) {
	name, resource, ok := strings.Cut(text, "=")
	plural, group, grouped := strings.Cut(resource, ".")
	k := Kind{Group: group, Kind: name, Resource: plural}
	if !ok || !grouped {
		return k, fmt.Errorf("want <kind>=<resource>.<group>, got %q", text)
	}
	return k, k.Validate()
}

// String returns the kind as <kind>=<resource>.<group>.
func (k Kind) String() string { return k.Kind + "=" + k.Resource + "." + k.Group }

// Validate returns an error unless group, kind and resource are valid names.
func (k Kind) Validate() error {
	switch {
	case len(validation.IsDNS1123Subdomain(k.Group)) > 0:
		return fmt.Errorf("group %q is not a DNS subdomain", k.Group)
	case len(validation.IsDNS1035Label(strings.ToLower(k.Kind))) > 0:
		return fmt.Errorf("kind %q is invalid", k.Kind)
	case len(validation.IsDNS1035Label(k.Resource)) > 0:
		return fmt.Errorf("resource %q is invalid: want the plural in lower case", k.Resource)
	}
	return nil
}

// resourceOf returns the resource that an owner reference is looked up at; ok is false if
// its kind is none of these.
func resourceOf(kinds map[schema.GroupKind]string, ref metav1.OwnerReference) (resource schema.GroupVersionResource, ok bool) {
	kind := schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind)
	name, ok := kinds[kind.GroupKind()]
	return kind.GroupVersion().WithResource(name), ok
}
