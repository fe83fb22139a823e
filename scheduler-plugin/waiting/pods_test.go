package waiting

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	framework "k8s.io/kube-scheduler/framework"
	scheduler "k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// jobPod returns a pod of a Job that requests CPU.
func jobPod(job, name, cpu string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "example.com/v1", Kind: "Batch", Name: job, UID: types.UID(job), Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}}},
	}
}

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
