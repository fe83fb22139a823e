package policies

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// Reasons of condition Accepted.
const (
	ReasonApplies     = "Applies"
	ReasonOverridden  = "Overridden"
	reasonNoNamespace = "NoNamespace"
)

// maxNamed is how many namespaces a message names, and maxMessage its maximum size in bytes.
const maxNamed, maxMessage = 5, 1024

// input is what the statuses are decided on.
type input struct {
	policies demand.Policies
	// namespaces that are opted in, and what their Reservations request.
	namespaces []*corev1.Namespace
	requested  map[string]corev1.ResourceList
	now        metav1.Time
}

// applied is to which namespaces a policy applies, and which other one applies where it is selected, too.
type applied struct {
	to         []broker.PolicyNamespace
	overridden map[string]string
}

// statuses returns the status of each policy that can be decoded, by name: the API server accepts none of
// others, which have events. before has what they are now.
func statuses(in input, before map[string]broker.OverflowPolicyStatus) map[string]broker.OverflowPolicyStatus {
	all := map[string]*applied{}
	for _, policy := range in.policies.Decoded {
		all[policy.Name] = &applied{overridden: map[string]string{}}
	}
	for _, namespace := range in.namespaces {
		first, err := in.policies.Of(namespace)
		if err != nil { // of one that cannot be decoded
			continue
		}
		for _, policy := range in.policies.Decoded {
			switch {
			case policy == first:
				all[policy.Name].to = append(all[policy.Name].to, broker.PolicyNamespace{Name: namespace.Name, Requested: broker.FromList(in.requested[namespace.Name])})
			case first != nil && demand.Selects(policy.Spec.NamespaceSelector, namespace):
				all[policy.Name].overridden[namespace.Name] = first.Name
			}
		}
	}
	result := map[string]broker.OverflowPolicyStatus{}
	for _, policy := range in.policies.Decoded {
		if slices.ContainsFunc(in.policies.Undecoded, func(u broker.Undecoded) bool { return u.Name == policy.Name }) {
			continue // decoded is an earlier version
		}
		result[policy.Name] = statusOf(policy, all[policy.Name], before[policy.Name], in.now)
	}
	return result
}

func statusOf(policy *broker.OverflowPolicy, a *applied, before broker.OverflowPolicyStatus, now metav1.Time) broker.OverflowPolicyStatus {
	status := *before.DeepCopy()
	status.ObservedGeneration, status.NamespaceCount = policy.Generation, int32(len(a.to))
	status.Usage = usage(policy.Spec.MaxResources, a.to)
	slices.SortFunc(a.to, func(x, y broker.PolicyNamespace) int {
		return cmp.Or(cmp.Compare(min(1, len(y.Requested.List())), min(1, len(x.Requested.List()))), cmp.Compare(x.Name, y.Name))
	})
	status.Namespaces = slices.Clone(a.to[:min(len(a.to), broker.MaxPolicyNamespaces)])
	var others []string
	for _, namespace := range slices.Sorted(maps.Keys(a.overridden)) {
		others = append(others, fmt.Sprintf("%s (%s)", namespace, a.overridden[namespace]))
	}
	if more := len(others) - maxNamed; more > 0 {
		others = append(others[:maxNamed], fmt.Sprintf("%d more", more))
	}
	overridden := "In namespaces that it selects, a policy applies whose name comes first: " + strings.Join(others, ", ") + "."
	switch {
	case len(a.to) == 0 && len(others) == 0:
		accept(&status, metav1.ConditionFalse, reasonNoNamespace, fmt.Sprintf("It selects no namespace with label %s=%s: correct its namespaceSelector, or label a namespace.", broker.LabelOverflow, broker.OverflowEnabled), now)
	case len(a.to) == 0:
		accept(&status, metav1.ConditionFalse, ReasonOverridden, overridden+" Rename it, or narrow the other's namespaceSelector.", now)
	case len(others) > 0:
		accept(&status, metav1.ConditionTrue, ReasonApplies, "The policy applies. "+overridden, now)
	default:
		accept(&status, metav1.ConditionTrue, ReasonApplies, "The policy applies to all namespaces that it selects.", now)
	}
	return status
}

func accept(status *broker.OverflowPolicyStatus, accepted metav1.ConditionStatus, reason, message string, now metav1.Time) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: broker.ConditionAccepted, Status: accepted, Reason: reason, Message: text.TruncateTo(message, maxMessage),
		ObservedGeneration: status.ObservedGeneration, LastTransitionTime: now,
	})
}

// usage names the namespace that is closest to a limit: "cpu 3 of 8 (shop)"; "" without a limit.
func usage(limit *broker.ResourceQuantities, namespaces []broker.PolicyNamespace) (closest string) {
	if limit == nil {
		return ""
	}
	highest, limits := -1.0, limit.Limits()
	for _, namespace := range namespaces {
		requested := namespace.Requested.List()
		for _, name := range slices.Sorted(maps.Keys(limits)) {
			most, part := limits[name], requested[name]
			share := 0.0
			if part.Sign() > 0 {
				share = part.AsApproximateFloat64() / max(most.AsApproximateFloat64(), 1e-9)
			}
			if share > highest {
				highest, closest = share, fmt.Sprintf("%s %s of %s (%s)", name, part.String(), most.String(), namespace.Name)
			}
		}
	}
	return closest
}
