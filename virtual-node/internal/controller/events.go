package controller

// Reasons of Events.
const (
	// reasonFailed is on the Secret of a virtual node that cannot run.
	reasonFailed = "VirtualNodeFailed"
	// reasonTerminating is on the pods that a terminating virtual node deletes.
	reasonTerminating = "VirtualNodeTerminating"
)
