package capacity

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Reasons of rejections that the broker and a provider share.
const (
	ReasonLendingDisabled      = "LendingDisabled"
	ReasonConsumerNotAdmitted  = "ConsumerNotAdmitted"
	ReasonPodSecurityViolated  = "PodSecurityViolated"
	ReasonNoMatchingNodes      = "NoMatchingNodes"
	ReasonInsufficientCapacity = "InsufficientCapacity"
	ReasonPartialCapacity      = "PartialCapacity"
)

// Rejection is why a provider cannot take a request: a CamelCase reason, and a
// message of full sentences with the figures.
type Rejection struct{ Reason, Message string }

// Admit checks a consumer and its pods against a provider's terms. It returns nil if they
// admit both. The rejection does not disclose whom else they admit.
func Admit(terms broker.Lending, consumer string, pods []broker.PodSet) *Rejection {
	switch reason := AdmitReason(terms, consumer, pods); reason {
	case ReasonLendingDisabled:
		return &Rejection{reason, "The cluster offers no capacity (lend.enabled is false)."}
	case ReasonConsumerNotAdmitted:
		return &Rejection{reason, fmt.Sprintf("The cluster does not offer capacity to %s (lend.consumers does not list it).", consumer)}
	case ReasonPodSecurityViolated:
		return &Rejection{reason, "Its guests must comply with the Pod Security Standard restricted, and these pods do not: set runAsNonRoot to true, " +
			"allowPrivilegeEscalation to false, capabilities.drop to [ALL] and seccompProfile.type to RuntimeDefault in their securityContext, " +
			"without runAsUser 0 and without added capabilities. For images that run as root, its administrator may set guests.podSecurity to baseline."}
	}
	return nil
}

// NotAdmitted is the message for a number of clusters whose terms do not admit a consumer,
// which must not learn which ones.
func NotAdmitted(clusters int32, consumer string) string {
	if clusters == 1 {
		return fmt.Sprintf("1 cluster does not offer capacity to %s (its values lend.enabled and lend.consumers).", consumer)
	}
	return fmt.Sprintf("%d clusters do not offer capacity to %s (their values lend.enabled and lend.consumers).", clusters, consumer)
}

// AdmitReason is the reason of Admit, "" if the terms admit the consumer and its pods.
func AdmitReason(terms broker.Lending, consumer string, pods []broker.PodSet) string {
	switch {
	case !terms.Enabled:
		return ReasonLendingDisabled
	case len(terms.Consumers) > 0 && !slices.Contains(terms.Consumers, consumer):
		return ReasonConsumerNotAdmitted
	case terms.PodSecurity == broker.PodSecurityRestricted && slices.ContainsFunc(pods, violatesRestricted):
		return ReasonPodSecurityViolated
	}
	return ""
}

func violatesRestricted(set broker.PodSet) bool {
	return set.PodSecurity == broker.PodSecurityBaseline && set.Count > 0
}

// Account is the ledger's account of a cluster. Of it, consumers to which the cluster lends
// know what is free.
type Account struct {
	// Free is what is not allocated of what is allocatable, Available the part of it that is not
	// kept for requests that come first.
	Allocatable, Allocated, Free, Available Vector
}

func (a *Account) less(amount Vector, n int64) *Account {
	out := *a
	out.Free, out.Available = a.Free.Minus(amount, n), a.Available.Minus(amount, n)
	return &out
}

// Insufficient words the lack of one resource.
func Insufficient(name corev1.ResourceName, requested, available string) string {
	return fmt.Sprintf("Insufficient %s: requested %s, available %s", name, requested, available)
}

// insufficient words the lack of each resource that is requested and not available in the
// account. How much is kept for others is not for consumers to know.
func (a *Account) insufficient(request Vector) string {
	return lacks(request, a.Available, func(name corev1.ResourceName) string {
		if request[name] <= a.Free[name] {
			return fmt.Sprintf("Insufficient %s: requested %s, and what is free is kept for requests before it", name, request.format(name))
		}
		return Insufficient(name, request.format(name), a.Free.format(name))
	})
}

// insufficientOn words the lack of each resource that is requested and not free on nodes. How
// much is free there is the provider's own affair.
func insufficientOn(where string, request, free Vector) string {
	return lacks(request, free, func(name corev1.ResourceName) string {
		return fmt.Sprintf("Insufficient %s on %s: requested %s", name, where, request.format(name))
	})
}

// lacks words the lack of each resource of which less is there than requested.
func lacks(request, there Vector, word func(corev1.ResourceName) string) string {
	var words []string
	for _, name := range request.Kinds() {
		if request[name] > there[name] {
			words = append(words, word(name))
		}
	}
	return strings.Join(words, "; ") + "."
}

func (p *Packer) rejectTotal(total Vector, account *Account) *Rejection {
	if account != nil && total.FitsIn(account.Available) == 0 {
		return &Rejection{ReasonInsufficientCapacity, account.insufficient(total)}
	}
	if free := p.divisible(); total.FitsIn(free) == 0 {
		return &Rejection{ReasonInsufficientCapacity, insufficientOn("the nodes without taints", total, free)}
	}
	return nil
}

// maxMismatches is how many reasons why nodes do not match a message lists: there may
// be as many as nodes.
const maxMismatches = 3

// shortage explains why not all pods of a set fit.
type shortage struct{ reason, message string }

// shortage explains why not one more pod of a set fits.
func (p *Packer) shortage(set broker.PodSet, fit int64, account *Account) shortage {
	reason, why := ReasonInsufficientCapacity, "No node is available."
	shape := newShape(p.catalog, &set)
	request := shape.request
	// kinds are the columns of the requested resources, the scarcest first.
	var kinds []int
	for i, name := range p.layout.kinds {
		if _, ok := request[name]; ok {
			kinds = append(kinds, i)
		}
	}
	figures := len(p.layout.kinds)
	var largest []int64
	for at := 0; at < len(p.slots); at += p.width() {
		slot := p.slots[at : at+p.width()]
		if slot[figures+rowNodes] > 0 && shape.fits(p.classes, slot[figures+rowClass]) && (largest == nil || larger(slot, largest, kinds)) {
			largest = slot
		}
	}
	var mismatches []string
	if largest == nil {
		for _, class := range p.classes {
			if m := shape.mismatch(class); m != "" && !slices.Contains(mismatches, m) {
				mismatches = append(mismatches, m)
			}
		}
	}
	switch {
	case largest == nil && len(mismatches) > 0:
		slices.Sort(mismatches)
		if more := len(mismatches) - maxMismatches; more > 0 {
			mismatches = append(mismatches[:maxMismatches], fmt.Sprintf("and %d other reasons", more))
		}
		reason, why = ReasonNoMatchingNodes, "No node matches: "+strings.Join(mismatches, ", ")+"."
	case account != nil && request.FitsIn(account.Available) == 0:
		why = account.insufficient(request)
	case largest != nil && largest[figures+rowPods] == 0:
		why = "Too many pods: every matching node runs its maximum number of pods."
	case largest != nil:
		why = insufficientOn("one node", request, p.layout.vector(largest))
	}
	return shortage{reason, fmt.Sprintf("%d of %d pods of pod set %q fit. %s", fit, set.Count, set.Name, why)}
}

// larger reports whether slot a has more free than b in some columns. A node that may
// run no more pods is smaller than any other.
func larger(a, b []int64, columns []int) bool {
	pods := len(a) - rowFigures + rowPods
	if (a[pods] > 0) != (b[pods] > 0) {
		return a[pods] > 0
	}
	for _, i := range columns {
		if a[i] != b[i] {
			return a[i] > b[i]
		}
	}
	return false
}

// rejectPods sums up shortages, nil if there are none.
func rejectPods(placed broker.HeldCapacity, shortages []shortage) *Rejection {
	if len(shortages) == 0 {
		return nil
	}
	reason := ReasonInsufficientCapacity
	switch {
	case !placed.Empty():
		reason = ReasonPartialCapacity
	case slices.ContainsFunc(shortages, func(s shortage) bool { return s.reason == ReasonNoMatchingNodes }):
		reason = ReasonNoMatchingNodes
	}
	var messages []string
	for _, s := range shortages {
		messages = append(messages, s.message)
	}
	slices.Sort(messages)
	return &Rejection{reason, strings.Join(messages, " ")}
}
