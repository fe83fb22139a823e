package liqo

import (
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	corev1 "k8s.io/api/core/v1"
)

// SliceClass is the class of the ResourceSlices that Spillway creates at the consumer
// and answers at the provider.
const SliceClass = "spillway"

// AnswerPrefix begins the message of a Provider's answer to a request. Answers are
// replicated asynchronously and may be to an older request; the prefix identifies
// the request. Both sides compute it, so it must not change.
func AnswerPrefix(requested corev1.ResourceList) string {
	hash := sha256.New()
	for _, name := range slices.Sorted(maps.Keys(requested)) {
		if amount := requested[name]; !amount.IsZero() {
			fmt.Fprintf(hash, "%s=%d;", name, amount.MilliValue())
		}
	}
	return fmt.Sprintf("request %x: ", hash.Sum(nil)[:8])
}

// ConditionOf is a ResourceSlice's condition of a type, the zero one if there is none.
func ConditionOf(slice *authv1beta1.ResourceSlice, conditionType authv1beta1.ResourceSliceConditionType) authv1beta1.ResourceSliceCondition {
	for _, condition := range slice.Status.Conditions {
		if condition.Type == conditionType {
			return condition
		}
	}
	return authv1beta1.ResourceSliceCondition{}
}

// AtMost is list with every amount limited to that of limit, where absent is zero.
func AtMost(list, limit corev1.ResourceList) corev1.ResourceList {
	out := corev1.ResourceList{}
	for name, amount := range list {
		if most := limit[name]; most.Cmp(amount) < 0 {
			amount = most
		}
		out[name] = amount.DeepCopy()
	}
	return out
}
