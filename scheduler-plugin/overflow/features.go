package overflow

import (
	"fmt"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/features"
)

// OverrideFeatures changes the defaults of kube-scheduler's feature gates. It is called
// once, before the flags of the scheduler are added.
//
// With NominatedNodeNameForExpectation, a pod that waits in Permit nominates its node, and
// keeps the nomination when it is rejected: no other pod could use the place that a gang
// has given up.
func OverrideFeatures() error {
	if err := utilfeature.DefaultMutableFeatureGate.OverrideDefault(features.NominatedNodeNameForExpectation, false); err != nil {
		return fmt.Errorf("changing the default of a feature gate: %w", err)
	}
	return nil
}
