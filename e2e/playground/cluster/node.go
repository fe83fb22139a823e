package cluster

import (
	"context"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/e2e/playground/kubelet"
)

// maxPods is how many pods a node takes, as kubelets do by default.
var maxPods = resource.MustParse("110")

// AddNodes adds nodes <prefix>-1 to <prefix>-<count> that carry resources, which
// are given maxPods unless they say otherwise, and waits for nothing: the
// cluster's own controllers make them Ready.
func (c *Cluster) AddNodes(ctx context.Context, prefix string, count int, resources corev1.ResourceList, labels map[string]string) error {
	resources = maps.Clone(resources)
	if _, ok := resources[corev1.ResourcePods]; !ok {
		resources[corev1.ResourcePods] = maxPods
	}
	for i := 1; i <= count; i++ {
		name := fmt.Sprintf("%s-%d", prefix, i)
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{
			Name: name,
			Labels: map[string]string{
				corev1.LabelHostname: name, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
			},
			Annotations: map[string]string{kubelet.Simulated: "true"},
		}, Status: corev1.NodeStatus{Capacity: resources, Allocatable: resources}}
		maps.Copy(node.Labels, labels)
		if err := c.Client.Create(ctx, node); err != nil {
			return fmt.Errorf("adding node %s to %s: %w", name, c.Name, err)
		}
	}
	return nil
}
