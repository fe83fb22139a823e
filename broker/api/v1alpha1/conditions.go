package v1alpha1

import corev1 "k8s.io/api/core/v1"

// Condition types. All have positive polarity, that is, True is the desired state,
// except Queued, which is True while a Reservation waits for capacity. A queued
// Reservation is not Ready, so `kubectl wait --for=condition=Ready` and tools that
// compute a status from Ready need to know nothing else.
const (
	// ConditionReady summarizes the other conditions of an object.
	ConditionReady = "Ready"
	// ConditionQueued of a Reservation: some of the requested capacity is not
	// available at any provider. The broker retries when capacity appears.
	ConditionQueued = "Queued"
	// ConditionLocked of a Reservation: the ledger holds all requested capacity.
	ConditionLocked = "Locked"
	// ConditionProviderAccepted of a Reservation: the providers have accepted their
	// holds.
	ConditionProviderAccepted = "ProviderAccepted"
	// ConditionPeered of a ReservationInstruction, and of a Reservation in the
	// consumer: the peering with the provider is established.
	ConditionPeered = "Peered"
	// ConditionVirtualNodeReady: the virtual node is Ready and provides the granted
	// capacity.
	ConditionVirtualNodeReady = "VirtualNodeReady"
	// ConditionUnusable of a ReservationInstruction: no pod can use the grant at this
	// provider, and another one is to be asked. It has negative polarity, and is only there
	// while it is true.
	ConditionUnusable = "Unusable"
	// ConditionRequesterReleased of a ReservationInstruction: the consumer no longer
	// uses the capacity, so the hold may be released.
	ConditionRequesterReleased = "RequesterReleased"
	// ConditionProviderReleased of a Reservation: all providers have confirmed that
	// they hold nothing for it any more.
	ConditionProviderReleased = "ProviderReleased"
	// ConditionEnforced of a ProviderInstruction: the provider holds the capacity.
	ConditionEnforced = "Enforced"
	// ConditionProven of a ProviderInstruction: the provider's scheduler has found a place
	// for each pod of what is held, and placeholders keep it.
	ConditionProven = "Proven"
	// ConditionWithinGrant of a ReservationInstruction, once the provider has lowered the
	// grant: no more pods use it than the provider still holds.
	ConditionWithinGrant = "WithinGrant"
	// ConditionReported of a Reservation in the consumer: the broker has received it.
	ConditionReported = "Reported"
	// ConditionAccepted of an OverflowPolicy: it applies to a namespace; of a BrokerConfig: the
	// broker uses it.
	ConditionAccepted = "Accepted"
)

// PodMustLeave is the condition of a guest, and of its overflowed pod, that is True if the
// provider has withdrawn its capacity and its node is to run no more pods. The provider's
// agent sets it, and removes it when the guest may stay. It has negative polarity as
// DisruptionTarget has.
const PodMustLeave corev1.PodConditionType = Group + "/MustLeave"

// PodOverflow is the condition of a pod of an opted-in namespace that has waited for a node for some
// time: False with what it waits for, and True once it has a place, with where that is. The scheduler
// plugin sets it, and removes it from a pod that is not to overflow any more.
const PodOverflow corev1.PodConditionType = Group + "/Overflow"

// ReasonReleased is the reason of condition Enforced of a ProviderInstruction once
// the provider holds nothing for it any more, and of the conditions of a Reservation that
// has been deleted.
const ReasonReleased = "Released"
