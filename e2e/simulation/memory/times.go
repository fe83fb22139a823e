package memory

import (
	"reflect"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

var (
	timeType = reflect.TypeFor[metav1.Time]()
	// hasTimes caches which types contain a metav1.Time.
	hasTimes sync.Map
)

// truncateTimes does to the times of an object what their encoding does: they have
// whole seconds, and no monotonic reading.
func truncateTimes(v reflect.Value) {
	if !containsTime(v.Type()) {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			truncateTimes(v.Elem())
		}
	case reflect.Struct:
		if v.Type() == timeType {
			at := v.Addr().Interface().(*metav1.Time)
			// A time that is whole already may be that of an object which others read.
			if whole := metav1.Unix(at.Unix(), 0); !at.IsZero() && *at != whole {
				*at = whole
			}
			return
		}
		for i := range v.NumField() {
			truncateTimes(v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			truncateTimes(v.Index(i))
		}
	}
}

func containsTime(t reflect.Type) bool {
	if known, ok := hasTimes.Load(t); ok {
		return known.(bool)
	}
	found := false
	switch {
	case t == timeType:
		found = true
	case t.Kind() == reflect.Pointer, t.Kind() == reflect.Slice:
		found = containsTime(t.Elem())
	case t.Kind() == reflect.Struct:
		for i := range t.NumField() {
			found = found || t.Field(i).IsExported() && containsTime(t.Field(i).Type)
		}
	}
	hasTimes.Store(t, found)
	return found
}
