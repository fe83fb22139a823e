package v1alpha1

// Condition types. All are positive: True is good.
const (
	// ConditionReady sums up an object's other conditions.
	ConditionReady = "Ready"
	// ConditionQueued on a Reservation: nobody has room now; it is tried again
	// when capacity appears.
	ConditionQueued = "Queued"
	// ConditionLocked on a Reservation: the ledger carries its hold.
	ConditionLocked = "Locked"
	// ConditionProviderAccepted on a Reservation: the provider's agent has set
	// the hold aside.
	ConditionProviderAccepted = "ProviderAccepted"
	// ConditionPeered: the consumer and the provider have a standing link.
	ConditionPeered = "Peered"
	// ConditionVirtualNodeReady: the virtual node is Ready and carries the grant.
	ConditionVirtualNodeReady = "VirtualNodeReady"
	// ConditionRequesterReleased on a Reservation: the requester has let go of
	// every unit of the grant; the hold may be freed.
	ConditionRequesterReleased = "RequesterReleased"
	// ConditionProviderReleased on a Reservation: the provider reports the hold
	// gone.
	ConditionProviderReleased = "ProviderReleased"
	// ConditionEnforced on a ProviderInstruction: the capacity is set aside.
	ConditionEnforced = "Enforced"
	// ConditionReported on a Reservation: the broker has it.
	ConditionReported = "Reported"
)

// ReasonReleased is the reason of a ProviderInstruction's condition Enforced once
// nothing is set aside for it any more.
const ReasonReleased = "Released"
