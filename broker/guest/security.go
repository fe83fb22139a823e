package guest

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// maxGracePeriod is the longest termination grace period of a guest in seconds.
const maxGracePeriod = 3600

// standards are the Pod Security Standards, and standardsOf the oldest Kubernetes of a provider:
// what that admits, every provider does.
var (
	standards   = newStandards()
	standardsOf = api.MajorMinorVersion(1, 35)
)

func newStandards() policy.Evaluator {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		panic(err) // the checks of Kubernetes are valid
	}
	return evaluator
}

// Refused returns why every provider refuses a pod as a guest, whatever Pod Security
// Standard it applies, as a clause that completes "the pod cannot overflow: …"; empty if
// a provider may admit it.
func Refused(spec *corev1.PodSpec) string {
	if class := spec.RuntimeClassName; class != nil && *class != "" {
		return fmt.Sprintf("its runtimeClassName %q is one of this cluster; guests run with the provider's default runtime", *class)
	}
	if grace := spec.TerminationGracePeriodSeconds; grace != nil && *grace > maxGracePeriod {
		return fmt.Sprintf("its terminationGracePeriodSeconds is %d, and guests must terminate within %d", *grace, maxGracePeriod)
	}
	if reason := beyondMemory(spec); reason != "" {
		return reason
	}
	if violated := violations(api.LevelBaseline, spec); !violated.Allowed {
		return "it violates the Pod Security Standard baseline, which every provider applies: " + violated.ForbiddenDetail()
	}
	return ""
}

// PodSecurity returns the strictest Pod Security Standard that a pod complies with:
// restricted or baseline. The pod is one that may overflow, so that it complies with baseline.
func PodSecurity(spec *corev1.PodSpec) string {
	if violations(api.LevelRestricted, spec).Allowed {
		return broker.PodSecurityRestricted
	}
	return broker.PodSecurityBaseline
}

// violations are those of the guest of a pod. It does not have the pod's ephemeral containers, and not
// with every driver its user namespace, with which the standards allow more.
func violations(level api.Level, spec *corev1.PodSpec) policy.AggregateCheckResult {
	carried := *spec
	carried.EphemeralContainers, carried.HostUsers = nil, nil
	return policy.AggregateCheckResults(standards.EvaluatePod(api.LevelVersion{Level: level, Version: standardsOf}, &metav1.ObjectMeta{}, &carried))
}
