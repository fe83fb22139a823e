package inventory

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/charge"
)

// Cluster is nodes and pods, of which everything is counted again: what a Tracker must equal.
type Cluster struct {
	Nodes []*corev1.Node
	Pods  []*corev1.Pod
	// NamespaceLabels by the namespace's name.
	NamespaceLabels map[string]map[string]string
	Recognizer      Recognizer
}

// GuestOf returns the consumer that a pod runs for.
func (c *Cluster) GuestOf(pod *corev1.Pod) (consumer string, ok bool) {
	return c.Recognizer.Guest(pod, func(namespace string) map[string]string { return c.NamespaceLabels[namespace] })
}

// usage returns the eligible nodes and what pods use of them.
func (c *Cluster) usage() (eligible []*corev1.Node, used map[string]*usage) {
	byNode := map[string]*usage{}
	for _, n := range c.Nodes {
		if c.Recognizer.Eligible(n) {
			eligible, byNode[n.Name] = append(eligible, n), &usage{}
		}
	}
	for _, pod := range c.Pods {
		if _, placeholder := c.Recognizer.PlaceholderFor(pod); placeholder {
			continue
		}
		consumer, _ := c.GuestOf(pod)
		if u := byNode[nodeOf(pod, consumer)]; u != nil && !Finished(pod) {
			u.add(consumer, Requests(pod), 1)
		}
	}
	return eligible, byNode
}

// Slots are the eligible nodes, sorted by name, each a slot of its own with the
// name of the node class that it is advertised in.
func (c *Cluster) Slots(headroom corev1.ResourceList) []capacity.Slot {
	eligible, used := c.usage()
	return slots(freeNodes(eligible, used, headroom))
}

// Measure computes the cluster's advertisement.
func Measure(cluster *Cluster, terms Terms, now time.Time, sequence int64) broker.ClusterAdvertisementSpec {
	eligible, used := cluster.usage()
	return measure(eligible, used, !cluster.Recognizer.DropsSelection, terms, now, sequence)
}

// Guests returns the guests of each consumer. Those on a node that is gone, not Ready or
// cordoned have no place: they do not run there, or are to leave it.
func (c *Cluster) Guests() map[string]Guests {
	offered := map[string]bool{}
	for _, n := range c.Nodes {
		offered[n.Name] = c.Recognizer.Eligible(n)
	}
	out := map[string]Guests{}
	for _, pod := range c.Pods {
		if _, placeholder := c.Recognizer.PlaceholderFor(pod); placeholder {
			continue
		}
		consumer, ok := c.GuestOf(pod)
		if !ok || Finished(pod) {
			continue
		}
		guests, requests := out[consumer], Requests(pod)
		guests.Active = append(guests.Active, requests)
		if offered[pod.Spec.NodeName] {
			guests.Placed = append(guests.Placed, charge.Guest{Requests: requests, Label: pod.Labels[broker.LabelHold]})
		}
		out[consumer] = guests
	}
	return out
}

// Places returns those of a consumer.
func (c *Cluster) Places(consumer string) Places {
	var out Places
	for _, pod := range c.Pods {
		if of, placeholder := c.Recognizer.PlaceholderFor(pod); placeholder {
			if of == consumer {
				out.Placeholders = append(out.Placeholders, pod)
			}
		} else if of, guest := c.GuestOf(pod); guest && of == consumer && !Finished(pod) {
			out.Guests, out.Requests = append(out.Guests, pod), append(out.Requests, Requests(pod))
		}
	}
	return out
}

// Node returns a node, nil if it does not exist.
func (c *Cluster) Node(name string) *corev1.Node {
	for _, n := range c.Nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// Pending returns the cluster's own pods with at least a priority that wait for a
// node, as the capacity that they need.
func (c *Cluster) Pending(priority int32) []broker.PodSet {
	var out []broker.PodSet
	for _, pod := range c.Pods {
		if _, placeholder := c.Recognizer.PlaceholderFor(pod); placeholder {
			continue
		}
		if _, guest := c.GuestOf(pod); !guest && waits(pod) && nodeOf(pod, "") == "" && ptr.Deref(pod.Spec.Priority, 0) >= priority {
			out = append(out, claimOf(pod))
		}
	}
	return out
}
