package v1alpha1

// Names that users and other programs rely on.
const (
	// LabelOverflow opts a namespace in (value "enabled") and a pod out (value
	// "disabled").
	LabelOverflow = Group + "/overflow"
	// OverflowEnabled is the value of LabelOverflow that opts a namespace in.
	OverflowEnabled = "enabled"
	// OverflowDisabled is the value of LabelOverflow that opts a pod out.
	OverflowDisabled = "disabled"

	// LabelProvider on a virtual node names the cluster whose capacity it carries.
	LabelProvider = Group + "/provider"
	// TaintOverflow is the key of a virtual node's taint; its value is the
	// provider's cluster ID and its effect NoSchedule.
	TaintOverflow = Group + "/overflow"
	// LabelNodeType and NodeTypeVirtual mark virtual nodes for the cluster
	// autoscaler and for our own measuring.
	LabelNodeType   = "type"
	NodeTypeVirtual = "virtual-kubelet"

	// LabelHold on an overflowed pod names the reservation (its ID at the
	// broker) whose hold it uses. Written by the scheduler before binding. At
	// the provider it is advice only, because the consumer wrote it.
	LabelHold = Group + "/hold"
	// OverflowedDeletionCost is an overflowed pod's "pod deletion cost", unless it
	// has one of its own: it is among the first to go when its owner shrinks.
	OverflowedDeletionCost = "-100"
	// LabelRequester, LabelSourceNamespace and LabelSourceName on the broker's
	// copy of a Reservation say where it came from.
	LabelRequester       = Group + "/requester"
	LabelSourceNamespace = Group + "/source-namespace"
	LabelSourceName      = Group + "/source-name"
	// LabelManagedBy marks every object that Spillway made; its value names the
	// part that owns it.
	LabelManagedBy = "app.kubernetes.io/managed-by"
	// ManagedBySpillway is the value of LabelManagedBy.
	ManagedBySpillway = "spillway"

	// LabelOwnerUID and LabelShape on a Reservation that the scheduler plugin
	// wrote say whose pods it is for: the UID of their root owner, and the hash
	// of their shape.
	LabelOwnerUID = Group + "/owner-uid"
	LabelShape    = Group + "/shape"

	// FinalizerRequest keeps a local Reservation until the broker has released
	// its copy.
	FinalizerRequest = Group + "/request"

	// FinalizerLedger keeps the broker's Reservation until every provider has
	// confirmed that its hold is gone.
	FinalizerLedger = Group + "/ledger"

	// LabelGuestsOf on a namespace says whose guests run there, with the direct
	// driver: the consumer's cluster ID. The provider's agent writes it, and no
	// consumer can.
	LabelGuestsOf = Group + "/guests-of"

	// VirtualNodePrefix begins the name of every virtual node.
	VirtualNodePrefix = "spillway-"
	// SystemNamespace is where the charts install by default.
	SystemNamespace = "spillway-system"
	// SchedulerName is the scheduler that pods of opted-in namespaces are
	// steered to in mode beside.
	SchedulerName = "spillway-scheduler"
	// SliceClass is the class of the Liqo ResourceSlices that Spillway's
	// provider side answers.
	SliceClass = "spillway"
)

// VirtualNodeName is the name of the node that carries a provider's capacity.
func VirtualNodeName(clusterID string) string { return VirtualNodePrefix + clusterID }

// GuestNamespace is the namespace in which a consumer's guests run at a
// provider, with the direct driver.
func GuestNamespace(consumer string) string { return "spillway-guests-" + consumer }
