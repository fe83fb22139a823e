package pods

import (
	"fmt"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// Kept returns the number of pods and of guests in the caches, and where the caches or what
// else the handler keeps have a pod that is not encoded, or a part of one.
func (h *Handler) Kept() (pods, guests int, decoded []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := [][]any{h.pods.List(), h.guests.List()}
	seen := map[pointer]bool{}
	for _, kept := range append(slices.Concat(all...), h.states, h.uids, h.differences) {
		decoded = append(decoded, decodedIn(fmt.Sprintf("%T", kept), reflect.ValueOf(kept), seen)...)
	}
	return len(all[0]), len(all[1]), decoded
}

// partsOfPod are the types of which a decoded pod has at least one.
var partsOfPod = []reflect.Type{reflect.TypeFor[corev1.Pod](), reflect.TypeFor[corev1.PodSpec](), reflect.TypeFor[corev1.PodStatus](), reflect.TypeFor[corev1.Container](), reflect.TypeFor[corev1.ContainerStatus]()}

// pointer identifies what a pointer points to.
type pointer struct {
	kind    reflect.Type
	address uintptr
}

// decodedIn returns the paths to parts of pods in a value.
func decodedIn(path string, v reflect.Value, seen map[pointer]bool) (paths []string) {
	if !v.IsValid() {
		return nil
	}
	if slices.Contains(partsOfPod, v.Type()) {
		return []string{path}
	}
	switch v.Kind() {
	case reflect.Pointer:
		to := pointer{v.Type(), v.Pointer()}
		if seen[to] {
			return nil
		}
		seen[to] = true
		return decodedIn(path, v.Elem(), seen)
	case reflect.Interface:
		return decodedIn(path, v.Elem(), seen)
	case reflect.Struct:
		for i := range v.NumField() {
			paths = append(paths, decodedIn(path+"."+v.Type().Field(i).Name, v.Field(i), seen)...)
		}
	case reflect.Slice, reflect.Array:
		if v.Type().Elem().Kind() == reflect.Uint8 {
			return nil
		}
		for i := range v.Len() {
			paths = append(paths, decodedIn(path, v.Index(i), seen)...)
		}
	case reflect.Map:
		for key, value := range v.Seq2() {
			paths = append(paths, decodedIn(path, key, seen)...)
			paths = append(paths, decodedIn(path, value, seen)...)
		}
	}
	return paths
}
