package plan

import (
	"reflect"
	"testing"
)

// TestInputIsAValue: a plan cannot read anything that is not in its input already.
func TestInputIsAValue(t *testing.T) {
	seen := map[reflect.Type]bool{}
	var visit func(path string, of reflect.Type)
	visit = func(path string, of reflect.Type) {
		if seen[of] {
			return
		}
		seen[of] = true
		switch of.Kind() {
		case reflect.Func, reflect.Chan, reflect.Interface:
			t.Errorf("%s is a %s: read what it gives before", path, of)
		case reflect.Struct:
			for i := range of.NumField() {
				visit(path+"."+of.Field(i).Name, of.Field(i).Type)
			}
		case reflect.Map:
			visit(path, of.Key())
			visit(path, of.Elem())
		case reflect.Pointer, reflect.Slice, reflect.Array:
			visit(path, of.Elem())
		}
	}
	visit("Input", reflect.TypeFor[Input]())
}
