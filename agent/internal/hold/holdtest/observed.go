// Package holdtest observes clusters for tests.
package holdtest

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
)

// Observed lists nodes, pods and namespaces, for tests without a manager.
func Observed(ctx context.Context, c client.Client, recognizer inventory.Recognizer) (*inventory.Tracker, error) {
	tracker := inventory.NewTracker(recognizer)
	var nodes corev1.NodeList
	var pods corev1.PodList
	var namespaces corev1.NamespaceList
	err := errors.Join(c.List(ctx, &namespaces), c.List(ctx, &nodes), c.List(ctx, &pods))
	for i := range namespaces.Items {
		tracker.Set(&namespaces.Items[i])
	}
	for i := range nodes.Items {
		tracker.Set(&nodes.Items[i])
	}
	for i := range pods.Items {
		tracker.Set(&pods.Items[i])
	}
	return tracker, err
}
