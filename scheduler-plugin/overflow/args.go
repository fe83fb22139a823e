package overflow

import (
	"cmp"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// Order is the order of preemption and overflow for a pod that does not fit.
type Order string

const (
	// AfterPreemption: pods of high priority preempt others, which overflow.
	AfterPreemption Order = "AfterPreemption"
	// BeforePreemption: no preemption while other clusters may have capacity.
	BeforePreemption Order = "BeforePreemption"
)

// OverflowArgs are the plugin's arguments in KubeSchedulerConfiguration.
type OverflowArgs struct {
	metav1.TypeMeta `json:",inline"`
	// Overflow is AfterPreemption or BeforePreemption. Default: AfterPreemption.
	Overflow Order `json:"overflow,omitempty"`
	// DecisionTimeout is how long preemption waits at most for a decision about
	// capacity in other clusters, if Overflow is BeforePreemption. Default: 10s.
	DecisionTimeout *metav1.Duration `json:"decisionTimeout,omitempty"`
	// InstructionNamespace is the namespace of the agent's ReservationInstructions, which
	// say what can be used of Reservations made by hand. Default: spillway-system.
	InstructionNamespace string `json:"instructionNamespace,omitempty"`
	// AskAfter is how long a pod must not have fit in this cluster before capacity is
	// requested in others, so that an autoscaler can add a node first. Default: 0s.
	AskAfter *metav1.Duration `json:"askAfter,omitempty"`
	// GangTimeout is how long a pod of a gang keeps its place while others have none.
	// Default: 1m.
	GangTimeout *metav1.Duration `json:"gangTimeout,omitempty"`
	// OwnerKinds are the kinds of objects whose controllers are looked up to find the root
	// owner of a pod, beside ReplicaSets, StatefulSets and Jobs. The agent needs the same.
	OwnerKinds []owners.Kind `json:"ownerKinds,omitempty"`
	// RefusePodResources: pods with pod-level resources (spec.resources) do not overflow,
	// because the driver's guests have none. Default: false.
	RefusePodResources bool `json:"refusePodResources,omitempty"`
}

// ArgsKind is the kind of OverflowArgs; its group and version are
// broker.GroupVersion.
const ArgsKind = "OverflowArgs"

// parseArgs decodes, defaults and validates the arguments, which may be nil. An
// unknown field is an error.
func parseArgs(obj runtime.Object) (*OverflowArgs, error) {
	args := &OverflowArgs{}
	if obj != nil {
		unknown, ok := obj.(*runtime.Unknown)
		if !ok {
			return nil, fmt.Errorf("want arguments of kind %s, got %T", ArgsKind, obj)
		}
		if len(unknown.Raw) > 0 {
			if err := yaml.UnmarshalStrict(unknown.Raw, args); err != nil {
				return nil, fmt.Errorf("decoding arguments: %w", err)
			}
			if want := broker.GroupVersion.WithKind(ArgsKind); args.GroupVersionKind() != want {
				return nil, fmt.Errorf("want arguments with apiVersion %s and kind %s, got %q and %q",
					broker.GroupVersion, ArgsKind, args.APIVersion, args.Kind)
			}
		}
	}
	args.Overflow = cmp.Or(args.Overflow, AfterPreemption)
	args.DecisionTimeout = cmp.Or(args.DecisionTimeout, &metav1.Duration{Duration: 10 * time.Second})
	args.InstructionNamespace = cmp.Or(args.InstructionNamespace, broker.SystemNamespace)
	args.AskAfter = cmp.Or(args.AskAfter, &metav1.Duration{})
	args.GangTimeout = cmp.Or(args.GangTimeout, &metav1.Duration{Duration: time.Minute})
	return args, args.validate()
}

func (a *OverflowArgs) validate() error {
	if a.Overflow != AfterPreemption && a.Overflow != BeforePreemption {
		return fmt.Errorf("overflow: want %s or %s, got %q", AfterPreemption, BeforePreemption, a.Overflow)
	}
	if timeout := a.DecisionTimeout.Duration; timeout < time.Second || timeout > 10*time.Minute {
		return fmt.Errorf("decisionTimeout: want 1s to 10m, got %s", timeout)
	}
	if after := a.AskAfter.Duration; after < 0 || after > time.Hour {
		return fmt.Errorf("askAfter: want 0s to 1h, got %s", after)
	}
	for i, kind := range a.OwnerKinds {
		if err := kind.Validate(); err != nil {
			return fmt.Errorf("ownerKinds[%d]: %w", i, err)
		}
	}
	// The framework limits it to 15 minutes.
	if timeout := a.GangTimeout.Duration; timeout < time.Second || timeout > 15*time.Minute {
		return fmt.Errorf("gangTimeout: want 1s to 15m, got %s", timeout)
	}
	return nil
}
