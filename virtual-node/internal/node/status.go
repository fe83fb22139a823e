package node

import (
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// Component is the value of label app.kubernetes.io/component on the Nodes that
// this program manages.
const Component = "virtual-node"

// kubeletVersion is the version that the Node reports: the oldest that is supported, since a
// kubelet must not be newer than its API server.
var kubeletVersion = "v" + compatibility.Oldest.String() + ".0-spillway"

// Reasons of the Node's conditions.
const (
	// ReasonConnecting is the reason of condition Ready before the first probe.
	ReasonConnecting          = "Connecting"
	reasonProviderReachable   = "ProviderReachable"
	reasonAccessDenied        = "ProviderAccessDenied"
	reasonProviderUnreachable = "ProviderUnreachable"
	reasonLimitedByQuota      = "LimitedByResourceQuota"
	reasonProviderNetwork     = "ProviderNetwork"
)

// Health is the observed state of the provider. It becomes the Node's condition
// Ready.
type Health struct {
	// Ready is whether the provider is reachable and authorizes this cluster.
	Ready bool
	// Reason is a CamelCase word, Message a sentence.
	Reason, Message string
	// Since is when Ready last changed.
	Since time.Time
}

// Address is where the API server reaches the node's kubelet API.
type Address struct {
	IP   string
	Port int32
}

// Desired returns the Node for a provider.
func Desired(c nodeconfig.Config, health Health, address Address) *corev1.Node {
	name := broker.VirtualNodeName(c.Provider)
	labels := maps.Clone(c.Capacity.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, map[string]string{
		broker.LabelProvider:      c.Provider,
		broker.LabelNodeType:      broker.NodeTypeVirtual,
		broker.LabelManagedBy:     broker.ManagedBySpillway,
		nodeconfig.LabelComponent: Component,
		corev1.LabelOSStable:      "linux",
		corev1.LabelArchStable:    "amd64",
		// The node is no target of load balancers. Without a hostname it is no domain in which
		// the pods of this cluster spread.
		corev1.LabelNodeExcludeBalancers: "true",
	})
	resources := c.Capacity.Resources.DeepCopy()
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
	const quotaMessage = "The resources of guests are limited by the ResourceQuota of their namespace at the provider."
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: map[string]string{}},
		Spec: corev1.NodeSpec{
			Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: c.Provider, Effect: corev1.TaintEffectNoSchedule}},
		},
		Status: corev1.NodeStatus{
			Capacity:    resources,
			Allocatable: resources.DeepCopy(),
			Conditions: []corev1.NodeCondition{
				condition(corev1.NodeReady, ready, health.Reason, health.Message),
				condition(corev1.NodeMemoryPressure, corev1.ConditionFalse, reasonLimitedByQuota, quotaMessage),
				condition(corev1.NodeDiskPressure, corev1.ConditionFalse, reasonLimitedByQuota, quotaMessage),
				condition(corev1.NodePIDPressure, corev1.ConditionFalse, reasonLimitedByQuota, quotaMessage),
				condition(corev1.NodeNetworkUnavailable, corev1.ConditionFalse, reasonProviderNetwork, "Guests use the provider's network."),
			},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: address.IP},
				{Type: corev1.NodeHostName, Address: name},
			},
			DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: address.Port}},
			NodeInfo: corev1.NodeSystemInfo{
				Architecture: "amd64", OperatingSystem: "linux",
				KubeletVersion: kubeletVersion, ContainerRuntimeVersion: "spillway://direct", OSImage: "provider " + c.Provider,
			},
		},
	}
}

// IsManaged reports whether this program manages the Node.
func IsManaged(node *corev1.Node) bool {
	return node.Labels[broker.LabelManagedBy] == broker.ManagedBySpillway && node.Labels[nodeconfig.LabelComponent] == Component
}
