package condition

import (
	"fmt"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// Reasons of the condition once a pod is bound. Before that, it has those of events.
const (
	ReasonOverflowed      = "Overflowed"
	ReasonScheduledAtHome = "ScheduledAtHome"
)

// maxMessage is the maximum size of the message, in bytes.
const maxMessage = 1024

// Waits is the condition of a pod that waits: True if its place is granted, and it is about to be bound.
func Waits(granted bool, reason, message string) corev1.PodCondition {
	status := corev1.ConditionFalse
	if granted {
		status = corev1.ConditionTrue
	}
	return corev1.PodCondition{Type: broker.PodOverflow, Status: status, Reason: reason, Message: text.Line(message, maxMessage)}
}

// Bound is the condition of a pod that has waited, on the node of a provider or, if that is
// empty, of this cluster.
func Bound(node, provider string) corev1.PodCondition {
	c := corev1.PodCondition{Type: broker.PodOverflow, Status: corev1.ConditionTrue}
	if provider == "" {
		c.Reason, c.Message = ReasonScheduledAtHome, fmt.Sprintf("The pod is bound to node %s of this cluster.", node)
	} else {
		c.Reason, c.Message = ReasonOverflowed, fmt.Sprintf("The pod is bound to %s, the virtual node of provider %s.", node, provider)
	}
	return c
}

// of is the condition of a pod, or nil.
func of(pod *corev1.Pod) *corev1.PodCondition {
	_, c := podutil.GetPodCondition(&pod.Status, broker.PodOverflow)
	return c
}

// unfinished reports whether a condition is that of a pod that waits.
func unfinished(c *corev1.PodCondition) bool {
	return c != nil && c.Reason != ReasonOverflowed && c.Reason != ReasonScheduledAtHome
}

// figure is a number, an amount or a time within a message, not one within a name.
var figure = regexp.MustCompile(`(^|[\s(])-?[0-9][0-9A-Za-z.:/%]*`)

// meaning is what a condition says but for its figures: one of the same meaning is not written again.
func meaning(c *corev1.PodCondition) string {
	if c == nil {
		return ""
	}
	return strings.Join([]string{string(c.Status), c.Reason, figure.ReplaceAllString(c.Message, "$1#")}, " ")
}

// Unfinished reports whether a pod says that it waits.
func Unfinished(pod *corev1.Pod) bool { return unfinished(of(pod)) }
