package instruction

import (
	"cmp"
	"context"
	"fmt"

	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// ConsumerPeerKey returns a function that reports whether a consumer has a hold at
// this cluster and, if so, its public key according to the broker. It reads the
// ProviderInstructions in namespace.
func ConsumerPeerKey(reader client.Reader, namespace string) func(ctx context.Context, clusterID string) (peerKey string, holds bool, err error) {
	return func(ctx context.Context, clusterID string) (peerKey string, holds bool, err error) {
		var list broker.ProviderInstructionList
		if err := reader.List(ctx, &list, client.InNamespace(namespace)); err != nil {
			return "", false, fmt.Errorf("listing ProviderInstructions: %w", err)
		}
		for i := range list.Items {
			if spec := &list.Items[i].Spec; spec.RequesterClusterID == clusterID {
				peerKey, holds = cmp.Or(peerKey, spec.RequesterPeerKey), true
			}
		}
		return peerKey, holds, nil
	}
}
