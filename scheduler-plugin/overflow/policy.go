package overflow

import (
	"fmt"
	"math"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// policyFor is the policy of a namespace: the first by name that selects it, or
// nil.
func policyFor(namespace *corev1.Namespace, all []*broker.OverflowPolicy) (*broker.OverflowPolicy, error) {
	var first *broker.OverflowPolicy
	for _, policy := range all {
		selector, err := metav1.LabelSelectorAsSelector(&policy.Spec.NamespaceSelector)
		if err != nil {
			// Nobody may overflow past a policy that might have been meant for them.
			return nil, fmt.Errorf("OverflowPolicy %s: reading its namespaceSelector: %w", policy.Name, err)
		}
		if selector.Matches(labels.Set(namespace.Labels)) && (first == nil || policy.Name < first.Name) {
			first = policy
		}
	}
	return first, nil
}

// affordable is how many pods of a set a namespace may ask for within a ceiling,
// given what else it asks for; short names the resource that allows no more.
func affordable(set broker.PodSet, ceiling broker.ResourceQuantities, others corev1.ResourceList) (n int32, short corev1.ResourceName) {
	n = math.MaxInt32
	each := set.Requests.List()
	for name, most := range ceilingList(ceiling) {
		one, needed := each[name]
		if !needed {
			continue
		}
		left := most.DeepCopy()
		left.Sub(others[name])
		if fits := quotient(left, one); fits < n {
			n, short = fits, name
		}
	}
	return n, short
}

// quotient is how often one goes into left.
func quotient(left, one resource.Quantity) int32 {
	if left.Sign() <= 0 {
		return 0
	}
	// Cores are counted in thousandths; sizes too large for that, in whole units.
	a, b := left.Value(), one.Value()
	if a < math.MaxInt64/1000 {
		a, b = left.MilliValue(), one.MilliValue()
	}
	return int32(min(a/b, math.MaxInt32))
}

// ceilingList is a ceiling as a list. Unlike an amount, a ceiling of zero says
// something.
func ceilingList(q broker.ResourceQuantities) corev1.ResourceList {
	list := corev1.ResourceList{}
	for name, amount := range map[corev1.ResourceName]*resource.Quantity{
		corev1.ResourceCPU:              q.CPU,
		corev1.ResourceMemory:           q.Memory,
		broker.ResourceGPU:              q.GPU,
		corev1.ResourceEphemeralStorage: q.Storage,
	} {
		if amount != nil {
			list[name] = *amount
		}
	}
	for name, amount := range q.Extended {
		list[name] = amount
	}
	return list
}

// askedBy sums up what Reservations ask for.
func askedBy(all []*broker.Reservation, except string) corev1.ResourceList {
	sum := corev1.ResourceList{}
	for _, r := range all {
		if r.Name == except {
			continue
		}
		if r.Spec.RequestedResources != nil {
			broker.AddTo(sum, r.Spec.RequestedResources.List())
		}
		for _, set := range r.Spec.PodSets {
			broker.AddTo(sum, broker.Times(set.Requests.List(), set.Count))
		}
	}
	return sum
}

// noteLength is what an event's note may hold.
const noteLength = 1000

// shorten cuts a text to a note's length, between words.
func shorten(text string) string {
	if len(text) <= noteLength {
		return text
	}
	text = text[:noteLength-len(" …")]
	if i := strings.LastIndexByte(text, ' '); i > 0 {
		text = text[:i]
	}
	return text + " …"
}
