package program

import (
	"errors"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// counted answers with an error first, and counts the calls.
type counted struct {
	meta.RESTMapper
	calls int
}

func (c *counted) RESTMapping(schema.GroupKind, ...string) (*meta.RESTMapping, error) {
	if c.calls++; c.calls == 1 {
		return nil, errors.New("the CRD is not there yet")
	}
	return &meta.RESTMapping{Scope: meta.RESTScopeNamespace}, nil
}

// TestMapper: a mapping is asked for until it is there, once for each version of a kind.
func TestMapper(t *testing.T) {
	asked := &counted{}
	m := &mapper{RESTMapper: asked}
	kind := schema.GroupKind{Group: "g", Kind: "K"}
	if _, err := m.RESTMapping(kind, "v1"); err == nil {
		t.Error("a failure is a mapping")
	}
	for _, version := range []string{"v1", "v1", "v2", "v2"} {
		if mapping, err := m.RESTMapping(kind, version); err != nil || mapping.Scope != meta.RESTScopeNamespace {
			t.Errorf("%v, %v", mapping, err)
		}
	}
	if asked.calls != 3 {
		t.Errorf("%d calls, want 3", asked.calls)
	}
}
