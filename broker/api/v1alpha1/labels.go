package v1alpha1

// Names that users and other programs rely on.
const (
	// LabelOverflow opts a namespace in (value "enabled") or a pod out (value "disabled"). Users set it.
	LabelOverflow = Group + "/overflow"
	// OverflowEnabled is the value of LabelOverflow that opts a namespace in.
	OverflowEnabled = "enabled"
	// OverflowDisabled is the value of LabelOverflow that opts a pod out.
	OverflowDisabled = "disabled"

	// LabelPodGroup of a pod names the PodGroup of the coscheduling plugins that it belongs to.
	LabelPodGroup = "scheduling.x-k8s.io/pod-group"
	// AnnotationWorkload of a pod has the workloadRef of Kubernetes 1.35, which clients of later
	// versions do not decode, as name/podGroup/podGroupReplicaKey. The steering webhook sets it.
	AnnotationWorkload = Group + "/workload-ref"

	// LabelProvider of a virtual node is the cluster ID of its provider.
	LabelProvider = Group + "/provider"
	// TaintOverflow is the key of a virtual node's taint. The value is the provider's cluster ID, the effect NoSchedule.
	TaintOverflow = Group + "/overflow"
	// LabelNodeType with value NodeTypeVirtual marks virtual nodes: the cluster autoscaler and the inventory ignore them.
	LabelNodeType = "type"
	// NodeTypeVirtual is the value of LabelNodeType of a virtual node.
	NodeTypeVirtual = "virtual-kubelet"

	// LabelHold of an overflowed pod is the name of the broker's Reservation whose hold the pod uses. The scheduler
	// sets it before binding. The provider must not trust it, because the consumer wrote it.
	LabelHold = Group + "/hold"
	// OverflowedDeletionCost is the pod deletion cost of an overflowed pod that has none
	// of its own: a ReplicaSet that scales down deletes it before pods at home.
	OverflowedDeletionCost = "-100"

	// LabelRequester of a broker's Reservation is the cluster ID of the consumer.
	LabelRequester = Group + "/requester"
	// LabelSourceNamespace of a broker's Reservation is the namespace of the Reservation in the consumer's cluster.
	LabelSourceNamespace = Group + "/source-namespace"
	// LabelSourceName of a broker's Reservation is the name of the Reservation in the consumer's cluster.
	LabelSourceName = Group + "/source-name"

	// AnnotationSourceOwner of a broker's Reservation is whose pods it is for, as kind/name.
	AnnotationSourceOwner = Group + "/source-owner"

	// LabelByHand with value "true" marks a broker's Reservation of which the one in the
	// consumer's cluster was made by hand, and not by the scheduler plugin.
	LabelByHand = Group + "/by-hand"

	// AnnotationFirstAttempt of a broker's Reservation lists the clusters of its first
	// attempt, separated by commas, until status.attempt does. The broker sets it.
	AnnotationFirstAttempt = Group + "/first-attempt"

	// LabelManagedBy with value ManagedBySpillway marks the objects that Spillway creates.
	LabelManagedBy = "app.kubernetes.io/managed-by"
	// ManagedBySpillway is the value of LabelManagedBy.
	ManagedBySpillway = "spillway"

	// LabelOwnerUID of a Reservation that the scheduler plugin created is the UID of the pods' root owner.
	LabelOwnerUID = Group + "/owner-uid"
	// LabelShape of a Reservation that the scheduler plugin created is the hash of the
	// pods' shape, or the same word for every gang, which may have several.
	LabelShape = Group + "/shape"

	// FinalizerRequest keeps a Reservation in the consumer's cluster until the broker
	// has released its own.
	FinalizerRequest = Group + "/request"
	// FinalizerLedger keeps the broker's Reservation until all providers have confirmed
	// the release of their holds.
	FinalizerLedger = Group + "/ledger"
	// FinalizerCluster keeps a ClusterRegistration until the broker has forgotten the
	// cluster.
	FinalizerCluster = Group + "/cluster"

	// LabelGuestsOf of a namespace is the cluster ID of the consumer whose guests run
	// there, with the direct driver. The provider's agent sets it; consumers cannot.
	LabelGuestsOf = Group + "/guests-of"

	// GateHandOver is the scheduling gate of a guest that waits for the place that a
	// placeholder holds for it. The provider's agent removes it.
	GateHandOver = Group + "/hand-over"
	// AnnotationHandOver with value "enabled" of a namespace of guests asks the consumer to
	// create guests with GateHandOver. The provider's agent sets it.
	AnnotationHandOver = Group + "/hand-over"
	// HandOverEnabled is the value of AnnotationHandOver.
	HandOverEnabled = "enabled"

	// AnnotationReturnHome of a pod decides whether it may be evicted from a virtual node
	// when this cluster has room for it, where the namespace's OverflowPolicy has
	// returnHome: "enabled" or "disabled". Users set it. If unset, pods of ReplicaSets and
	// StatefulSets may, and others may not.
	AnnotationReturnHome = Group + "/return-home"
	// ReturnHomeEnabled and ReturnHomeDisabled are the values of AnnotationReturnHome.
	ReturnHomeEnabled, ReturnHomeDisabled = "enabled", "disabled"

	// VirtualNodePrefix is the prefix of the names of virtual nodes.
	VirtualNodePrefix = "spillway-"
	// SystemNamespace is the namespace that the charts are installed in by default.
	SystemNamespace = "spillway-system"
	// SchedulerName is the scheduler of pods in opted-in namespaces if the chart's
	// scheduler.mode is beside.
	SchedulerName = "spillway-scheduler"
)

// VirtualNodeName is the name of the virtual node for a provider.
func VirtualNodeName(clusterID string) string { return VirtualNodePrefix + clusterID }

// GuestNamespace is the namespace of a consumer's guests at a provider with driver direct.
func GuestNamespace(consumer string) string { return "spillway-guests-" + consumer }
