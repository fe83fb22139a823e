package waiting

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// nodeWith returns the virtual node of a cluster, or a local node if it is empty.
func nodeWith(cluster string) framework.NodeInfo {
	info := scheduler.NewNodeInfo()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "home"}}
	if cluster != "" {
		node.Name, node.Labels = broker.VirtualNodeName(cluster), map[string]string{broker.LabelProvider: cluster}
	}
	info.SetNode(node)
	return info
}
