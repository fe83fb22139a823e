// Package contract holds every driver to what the port promises: one test that
// links two clusters, sizes a virtual node, and takes all of it away again, with
// messages lost and both sides cut off and started anew at any point.
package contract

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// World is two clusters with a driver between them, whatever that stands on
// played.
type World interface {
	// Consumer and Provider are the clusters' IDs.
	Consumer() string
	Provider() peering.Peer
	// Driver and ProviderSide are the two sides as they run now.
	Driver() peering.Driver
	ProviderSide() peering.Provider
	// Restart replaces both sides by new ones that remember nothing.
	Restart()
	// Lossy has every other message lost, Cut all of them.
	Lossy(bool)
	Cut(bool)
	// Home is a client of the consumer's cluster.
	Home() client.Client
	// Namespaces are two of the consumer's that exist.
	Namespaces() [2]string
	// NothingIsLeft fails the test if either cluster holds anything of a link.
	NothingIsLeft()
}

// patience ends every wait; it is for slow machines.
const patience = 60 * time.Second

// Test runs the contract in a world.
func Test(t *testing.T, w World) {
	ctx := t.Context()
	consumer, provider := w.Consumer(), w.Provider()
	half, full := amounts("cpu", "500m", "memory", "512Mi"), amounts("cpu", "2", "memory", "1Gi", "nvidia.com/gpu", "1")
	namespaces := w.Namespaces()

	grant := func(total corev1.ResourceList, pods int32) {
		t.Helper()
		until(t, "the grant", func() (peering.Progress, error) { return w.ProviderSide().EnsureGrant(ctx, consumer, total, pods) })
	}
	peered := func() {
		t.Helper()
		until(t, "the link", func() (peering.Progress, error) { return w.Driver().EnsurePeering(ctx, provider) })
	}
	carries := func(capacity peering.Capacity) *corev1.Node {
		t.Helper()
		until(t, fmt.Sprintf("a node with %s", broker.FromList(capacity.Resources)), func() (peering.Progress, error) {
			return w.Driver().EnsureCapacity(ctx, provider, capacity)
		})
		var node corev1.Node
		if err := w.Home().Get(ctx, client.ObjectKey{Name: broker.VirtualNodeName(provider.ClusterID)}, &node); err != nil {
			t.Fatalf("the driver says done: %v", err)
		}
		shown := node.Status.Allocatable
		for name, amount := range capacity.Resources {
			if is := shown[name]; is.Cmp(amount) != 0 {
				t.Errorf("the node shows %s of %s, not %s", is.String(), name, amount.String())
			}
		}
		for name, is := range shown {
			least := amounts("cpu", "1m", "memory", "1Mi")[name] // what a parked node carries
			if _, asked := capacity.Resources[name]; !asked && name != corev1.ResourcePods && is.Cmp(least) > 0 {
				t.Errorf("the node shows %s of %s, which nobody asked for", is.String(), name)
			}
		}
		if pods := shown.Pods().Value(); pods != int64(capacity.Pods) {
			t.Errorf("the node takes %d pods, not %d", pods, capacity.Pods)
		}
		if node.Spec.Unschedulable != capacity.Parked() {
			t.Errorf("parked is %t and the node's unschedulable %t", capacity.Parked(), node.Spec.Unschedulable)
		}
		return &node
	}
	gone := func() {
		t.Helper()
		until(t, "the link's end", func() (peering.Progress, error) { return w.Driver().Teardown(ctx, provider) })
	}
	links := func() []string {
		t.Helper()
		observed, err := w.Driver().Observe(ctx)
		if err != nil {
			t.Fatalf("observing links: %v", err)
		}
		var ids []string
		for _, o := range observed {
			ids = append(ids, o.ClusterID)
		}
		return ids
	}

	if left := links(); len(left) > 0 {
		t.Fatalf("links before the first: %v", left)
	}
	gone() // of nothing
	if progress, err := w.Driver().EnsurePeering(ctx, peering.Peer{ClusterID: "../kube-system"}); err == nil {
		t.Errorf("a cluster ID that is a path: %+v", progress)
	}

	// The link comes up although every other message is lost.
	grant(half, 2)
	w.Lossy(true)
	peered()
	w.Lossy(false)
	peered()
	if ids := links(); !slices.Equal(ids, []string{provider.ClusterID}) {
		t.Errorf("links: %v", ids)
	}
	if borrowers, err := w.ProviderSide().Consumers(ctx); err != nil || !slices.Equal(borrowers, []string{consumer}) {
		t.Errorf("borrowers: %v, %v", borrowers, err)
	}

	// The node follows its capacity, in place: the same node throughout.
	node := carries(peering.Capacity{Resources: half, Pods: 2, Namespaces: namespaces[:1]})
	if node.Labels[broker.LabelProvider] != provider.ClusterID || node.Labels[broker.LabelNodeType] != broker.NodeTypeVirtual {
		t.Errorf("the node's labels: %v", node.Labels)
	}
	for _, taint := range node.Spec.Taints {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule {
			continue
		}
		if !slices.ContainsFunc(w.Driver().Tolerations(provider.ClusterID), func(toleration corev1.Toleration) bool {
			return toleration.Key == taint.Key && toleration.Operator == corev1.TolerationOpEqual && toleration.Value == taint.Value && toleration.Effect == taint.Effect
		}) {
			t.Errorf("no toleration for taint %v", taint)
		}
	}
	same := func(what string, now *corev1.Node) {
		t.Helper()
		if now.UID != node.UID {
			t.Errorf("%s made another node", what)
		}
	}
	grant(full, 3)
	same("growing", carries(peering.Capacity{Resources: full, Pods: 3, Namespaces: namespaces[:]}))
	w.Restart()
	grant(full, 3)
	same("a restart", carries(peering.Capacity{Resources: full, Pods: 3, Namespaces: namespaces[:]}))
	same("shrinking", carries(peering.Capacity{Resources: half, Pods: 1, Namespaces: namespaces[:1]}))
	same("parking", carries(peering.Capacity{}))
	grant(nil, 0)
	same("parking without a grant", carries(peering.Capacity{}))
	grant(half, 2)
	same("use after parking", carries(peering.Capacity{Resources: half, Pods: 2, Namespaces: namespaces[1:]}))

	// Everything goes, though both sides are started anew after each step.
	for step := 0; ; step++ {
		progress, err := w.Driver().Teardown(ctx, provider)
		if err == nil && progress.Done {
			break
		}
		if step == 3 {
			gone()
			break
		}
		w.Restart()
		grant(nil, 0)
	}
	gone()
	grant(nil, 0)
	w.NothingIsLeft()
	if left := links(); len(left) > 0 {
		t.Errorf("links after the last: %v", left)
	}

	// And again: what was there before is in nobody's way. This time it is torn
	// down before anything came of it, and the third time by the lender alone.
	grant(half, 2)
	if _, err := w.Driver().EnsurePeering(ctx, provider); err != nil {
		t.Logf("the first step of a link: %v", err)
	}
	gone()
	grant(nil, 0)
	until(t, "the lender's teardown", func() (peering.Progress, error) { return w.ProviderSide().Teardown(ctx, consumer) })
	w.NothingIsLeft()
	grant(half, 2)
	peered()
	carries(peering.Capacity{Resources: half, Pods: 2, Namespaces: namespaces[:1]})

	// A provider that is not to be heard of keeps nobody from ending a link.
	w.Cut(true)
	gone()
	w.Cut(false)
	grant(nil, 0)
	until(t, "the lender's teardown", func() (peering.Progress, error) { return w.ProviderSide().Teardown(ctx, consumer) })
	w.NothingIsLeft()
}

// until repeats a step, as the agent does, until it is done.
func until(t *testing.T, what string, step func() (peering.Progress, error)) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		progress, err := step()
		if err == nil && progress.Done {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("waiting for %s: %+v, %v", what, progress, err)
		}
	}
}

// amounts makes a list of names and quantities in turn.
func amounts(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}
