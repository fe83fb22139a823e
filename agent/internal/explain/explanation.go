package explain

import (
	"fmt"

	"github.com/spillway-dev/spillway/broker/text"
)

// State is the state of a step.
type State string

// States of steps.
const (
	// OK: it is as it has to be.
	OK State = "ok"
	// Failed: something has to change before the pod runs in another cluster.
	Failed State = "failed"
	// Waiting: it is in progress, or waits for others.
	Waiting State = "waiting"
	// Unknown: it could not be read.
	Unknown State = "unknown"
	// Skipped: an earlier step decides.
	Skipped State = "skipped"
)

// Outcome sums up an explanation.
type Outcome string

// Outcomes.
const (
	OutcomeHome     Outcome = "AtHome"
	OutcomeOverflow Outcome = "InOtherCluster"
	OutcomeGranted  Outcome = "Granted"
	OutcomeWaiting  Outcome = "Waiting"
	OutcomeBlocked  Outcome = "Blocked"
	OutcomeEnded    Outcome = "Ended"
)

// Object names what is explained.
type Object struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
}

func (o Object) String() string { return fmt.Sprintf("%s %s/%s", o.Kind, o.Namespace, o.Name) }

// Step is one condition for a pod to run in another cluster.
type Step struct {
	Name    string   `json:"name"`
	State   State    `json:"state"`
	Message string   `json:"message"`
	Details []Detail `json:"details,omitempty"`
	// See is where the documentation has more, as FILE#ANCHOR; empty for none.
	See string `json:"see,omitempty"`
}

// Detail is a part of a step: a cluster, a resource or a pod.
type Detail struct {
	State   State  `json:"state"`
	Subject string `json:"subject"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// Fix is what to do, with the commands if there are any.
type Fix struct {
	Message  string   `json:"message"`
	Commands []string `json:"commands,omitempty"`
	// Manual commands are to be decided on first, or open an editor: --fix prints them as comments.
	Manual bool `json:"manual,omitempty"`
}

// Unreadable is what could not be read.
type Unreadable struct {
	// What is the plural of a kind.
	What string `json:"what"`
	// Permission that is missing, as "list nodes"; empty if that is not why. Namespace is where, empty for all.
	Permission string `json:"permission,omitempty"`
	Namespace  string `json:"namespace,omitempty"`
	// Reason why it could not be read, if not for a missing permission.
	Reason string `json:"reason,omitempty"`
}

// Explanation is the answer. No text of it has a character that changes how others are shown.
type Explanation struct {
	Object
	// Workload is the object that the pod belongs to, and where its pods are, if the question was
	// about one.
	Workload   string       `json:"workload,omitempty"`
	Outcome    Outcome      `json:"outcome"`
	Summary    string       `json:"summary"`
	Steps      []Step       `json:"steps"`
	Fix        *Fix         `json:"fix,omitempty"`
	Unreadable []Unreadable `json:"unreadable,omitempty"`
}

// Sizes of what other clusters have written, in bytes.
const (
	maxMessage = 600
	maxName    = 120
	maxDetails = 64
)

// printable bounds what is shown, and makes it one line each.
func (e *Explanation) printable() {
	e.Name, e.Namespace = text.Line(e.Name, maxName*2), text.Line(e.Namespace, maxName)
	e.Workload, e.Summary = text.Line(e.Workload, maxMessage), text.Line(e.Summary, maxMessage)
	var fixes []Fix
	if e.Fix != nil {
		fixes = []Fix{*e.Fix}
		e.Fix = &fixes[0]
	}
	Printable(e.Steps, fixes, e.Unreadable)
}

// Printable bounds texts that other clusters may have written, and makes them one line each.
func Printable(steps []Step, fixes []Fix, unreadable []Unreadable) {
	for i := range steps {
		step := &steps[i]
		step.Message = text.Line(step.Message, maxMessage)
		if more := len(step.Details) - maxDetails; more > 0 {
			step.Details = append(step.Details[:maxDetails:maxDetails], Detail{State: Unknown, Subject: fmt.Sprintf("(%d more)", more)})
		}
		for j := range step.Details {
			detail := &step.Details[j]
			detail.Subject, detail.Reason, detail.Message = text.Line(detail.Subject, maxName), text.Line(detail.Reason, maxName), text.Line(detail.Message, maxMessage)
		}
	}
	for i := range fixes {
		fixes[i].Message = text.Line(fixes[i].Message, maxMessage)
		for j := range fixes[i].Commands {
			fixes[i].Commands[j] = text.Line(fixes[i].Commands[j], 4*maxMessage)
		}
	}
	for i := range unreadable {
		unreadable[i].Reason = text.Line(unreadable[i].Reason, maxMessage)
	}
}
