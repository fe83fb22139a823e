package instruction

import (
	"cmp"
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Holder tells whether a cluster holds something here, and its public key as the
// broker says, from the ProviderInstructions in a namespace.
func Holder(reader client.Reader, namespace string) func(ctx context.Context, clusterID string) (peerKey string, holds bool, err error) {
	return func(ctx context.Context, clusterID string) (peerKey string, holds bool, err error) {
		var all broker.ProviderInstructionList
		if err := reader.List(ctx, &all, client.InNamespace(namespace)); err != nil {
			return "", false, fmt.Errorf("listing ProviderInstructions: %w", err)
		}
		for i := range all.Items {
			if spec := &all.Items[i].Spec; spec.RequesterClusterID == clusterID {
				peerKey, holds = cmp.Or(peerKey, spec.RequesterPeerKey), true
			}
		}
		return peerKey, holds, nil
	}
}
