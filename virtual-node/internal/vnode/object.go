// Package vnode keeps one virtual node: its Node object, whose conditions follow
// the provider's reachability, and its lease.
package vnode

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// Component is the value of label app.kubernetes.io/component on the Nodes that
// this program made, by which it knows them again.
const Component = "virtual-node"

// kubeletVersion is what the Node says of itself: the Kubernetes whose types
// this program is built from.
const kubeletVersion = "v1.35.4-spillway"

// Health is what is known of the provider.
type Health struct {
	// Ready is whether guests can be looked after.
	Ready bool
	// Reason is one CamelCase word, Message a sentence.
	Reason, Message string
	// Since is when Ready last changed.
	Since time.Time
}

// Address is where the API server reaches this node's kubelet API.
type Address struct {
	IP   string
	Port int32
}

// Object is the Node as it is to be. It depends on its arguments only.
func Object(l nodeconfig.Config, health Health, at Address) *corev1.Node {
	name := broker.VirtualNodeName(l.Provider)
	labels := maps.Clone(l.Capacity.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, map[string]string{
		broker.LabelProvider:      l.Provider,
		broker.LabelNodeType:      broker.NodeTypeVirtual,
		broker.LabelManagedBy:     broker.ManagedBySpillway,
		nodeconfig.LabelComponent: Component,
		corev1.LabelHostname:      name,
		corev1.LabelOSStable:      "linux",
		corev1.LabelArchStable:    "amd64",
	})
	resources := l.Capacity.Resources.DeepCopy()
	if resources == nil {
		resources = corev1.ResourceList{}
	}
	if _, ok := resources[corev1.ResourcePods]; !ok {
		resources[corev1.ResourcePods] = resource.Quantity{Format: resource.DecimalSI}
	}
	ready := corev1.ConditionFalse
	if health.Ready {
		ready = corev1.ConditionTrue
	}
	condition := func(kind corev1.NodeConditionType, status corev1.ConditionStatus, reason, message string) corev1.NodeCondition {
		return corev1.NodeCondition{Type: kind, Status: status, Reason: reason, Message: message, LastTransitionTime: metav1.Time{Time: health.Since}}
	}
	const fine = "what guests may use is bounded at the provider"
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: map[string]string{}},
		Spec: corev1.NodeSpec{
			Unschedulable: l.Capacity.Parked || l.Terminating,
			Taints:        []corev1.Taint{{Key: broker.TaintOverflow, Value: l.Provider, Effect: corev1.TaintEffectNoSchedule}},
		},
		Status: corev1.NodeStatus{
			Capacity:    resources,
			Allocatable: resources.DeepCopy(),
			Conditions: []corev1.NodeCondition{
				condition(corev1.NodeReady, ready, health.Reason, health.Message),
				condition(corev1.NodeMemoryPressure, corev1.ConditionFalse, "BoundedByQuota", fine),
				condition(corev1.NodeDiskPressure, corev1.ConditionFalse, "BoundedByQuota", fine),
				condition(corev1.NodePIDPressure, corev1.ConditionFalse, "BoundedByQuota", fine),
				condition(corev1.NodeNetworkUnavailable, corev1.ConditionFalse, "NoNetworkOfItsOwn", "guests use the provider's network"),
			},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: at.IP},
				{Type: corev1.NodeHostName, Address: name},
			},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: at.Port}},
			NodeInfo: corev1.NodeSystemInfo{
				Architecture: "amd64", OperatingSystem: "linux",
				KubeletVersion: kubeletVersion, ContainerRuntimeVersion: "spillway://direct", OSImage: "provider " + l.Provider,
			},
		},
	}
}

// IsOurs reports whether a Node was made by this program.
func IsOurs(node *corev1.Node) bool {
	return node.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway && node.Labels[nodeconfig.LabelComponent] == Component
}
