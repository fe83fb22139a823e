package inventory

import (
	"cmp"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// Terms is what an advertisement contains besides what is measured.
type Terms struct {
	ClusterID   string
	ClusterName string
	EndpointURL string
	PeerKey     string
	Lending     broker.Lending
	// Headroom is kept for the cluster's own pods: it is never advertised.
	Headroom corev1.ResourceList
	// Cost is nil if it is unknown. ClassCosts are those of nodes with prices of their own: the
	// first one that matches counts.
	Cost       *broker.Cost
	ClassCosts []ClassCost
	// Region and Zone; where empty, those that all nodes have in common.
	Region, Zone string
}

// ClassCost is the price of nodes with some labels.
type ClassCost struct {
	Selector labels.Selector
	Cost     broker.Cost
}

// costOf returns the price of nodes with these labels, nil if it is that of the cluster.
func (t *Terms) costOf(of map[string]string) *broker.Cost {
	at := slices.IndexFunc(t.ClassCosts, func(c ClassCost) bool { return c.Selector.Matches(labels.Set(of)) })
	if at < 0 || t.Cost != nil && *t.Cost == t.ClassCosts[at].Cost {
		return nil
	}
	return &t.ClassCosts[at].Cost
}

// measure computes the advertisement of eligible nodes and what uses them.
// selectionCarried is whether guests keep the node selector of their pods.
func measure(eligible []*corev1.Node, usages map[string]*usage, selectionCarried bool, terms Terms, now time.Time, sequence int64) broker.ClusterAdvertisementSpec {
	nodes := freeNodes(eligible, usages, terms.Headroom)
	total, allocatable, allocated := corev1.ResourceList{}, corev1.ResourceList{}, corev1.ResourceList{}
	used, guests := map[string]corev1.ResourceList{}, map[string]int32{}
	for _, n := range nodes {
		broker.AddTo(total, n.Status.Capacity)
		broker.AddTo(allocatable, n.Status.Allocatable)
		if u := usages[n.Name]; u != nil {
			broker.AddTo(allocated, u.local.requests)
			for consumer, share := range u.guests {
				used[consumer] = broker.AddTo(used[consumer], share.requests)
				guests[consumer] += share.pods
			}
		}
	}
	return broker.ClusterAdvertisementSpec{
		ClusterID:   terms.ClusterID,
		ClusterName: terms.ClusterName,
		EndpointURL: terms.EndpointURL,
		PeerKey:     terms.PeerKey,
		Lending:     terms.Lending,
		Resources: broker.AdvertisedResources{
			Capacity:    broker.FromList(total),
			Allocatable: broker.FromList(capacity.Subtract(allocatable, terms.Headroom)),
			Allocated:   broker.FromList(allocated),
		},
		NodeClasses:   nodeClasses(nodes, selectionCarried, &terms),
		ObservedHolds: observedHolds(used, guests),
		Cost:          terms.Cost,
		Region:        cmp.Or(terms.Region, commonLabel(nodes, corev1.LabelTopologyRegion)),
		Zone:          cmp.Or(terms.Zone, commonLabel(nodes, corev1.LabelTopologyZone)),
		Timestamp:     metav1.NewTime(now),
		Sequence:      sequence,
	}
}

// commonLabel is the value of a label that all nodes have; empty where they
// differ.
func commonLabel(nodes []node, label string) string {
	var value string
	for i, n := range nodes {
		v := n.Labels[label]
		if i > 0 && v != value {
			return ""
		}
		value = v
	}
	return value
}
