// Package reachability finds out which providers this cluster cannot connect to, so that
// its advertisement says so and the broker chooses others, also in place of the grants there.
// It probes only providers that capacity was granted in and whose virtual node is not ready:
// one that is ready is reachable.
package reachability

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// interval between two probes of a provider, timeout of one.
	interval, timeout = 15 * time.Second, 5 * time.Second
	// threshold is how many probes in sequence must fail.
	threshold = 2
	// remembered is how long a provider that nothing is granted in any more stays
	// unreachable, unless a probe finds otherwise. After that the broker may try it again.
	remembered = 10 * time.Minute
	// parallel is how many providers are probed at the same time, maxReported how many are
	// reported.
	parallel, maxReported = 8, 64
)

// target is a provider to probe.
type target struct {
	address string
	// failures in sequence, and when capacity was last granted there.
	failures int
	wanted   time.Time
}

// Prober probes providers as long as it is the leader.
type Prober struct {
	instructions func(ctx context.Context) ([]broker.ReservationInstruction, error)
	clock        clock.Clock
	changed      func()

	mu      sync.Mutex
	targets map[string]target
}

// New returns a Prober of the ReservationInstructions in a namespace. changed is called
// when Unreachable has changed; it must not block.
func New(c client.Client, namespace string, clock clock.Clock, changed func()) *Prober {
	instructions := func(ctx context.Context) ([]broker.ReservationInstruction, error) {
		var list broker.ReservationInstructionList
		err := c.List(ctx, &list, client.InNamespace(namespace))
		return list.Items, err
	}
	return &Prober{instructions: instructions, clock: clock, changed: changed, targets: map[string]target{}}
}

// SetupWithManager adds the Prober to the manager.
func (p *Prober) SetupWithManager(mgr ctrl.Manager) error { return mgr.Add(p) }

// NeedLeaderElection makes only the leader of several replicas probe.
func (p *Prober) NeedLeaderElection() bool { return true }

// Start probes until ctx ends.
func (p *Prober) Start(ctx context.Context) error {
	for {
		if err := p.probe(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).WithName("reachability").Error(err, "Failed to probe providers")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-p.clock.After(interval):
		}
	}
}

// Unreachable are the providers that cannot be connected to, sorted.
func (p *Prober) Unreachable() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var found []string
	for cluster, t := range p.targets {
		if t.failures >= threshold {
			found = append(found, cluster)
		}
	}
	slices.Sort(found)
	return found[:min(len(found), maxReported)]
}

// probe probes each provider once.
func (p *Prober) probe(ctx context.Context) error {
	instructions, err := p.instructions(ctx)
	if err != nil {
		return fmt.Errorf("listing ReservationInstructions: %w", err)
	}
	before := p.Unreachable()
	targets := next(p.targets, instructions, p.clock.Now())
	reached := reach(ctx, targets)
	if ctx.Err() != nil {
		return nil
	}
	for cluster, ok := range reached {
		t := targets[cluster]
		t.failures++
		if ok {
			t.failures = 0
		}
		targets[cluster] = t
	}
	p.mu.Lock()
	p.targets = targets
	p.mu.Unlock()
	if after := p.Unreachable(); !slices.Equal(before, after) {
		log.FromContext(ctx).WithName("reachability").Info("The providers that this cluster cannot connect to have changed", "unreachable", after)
		p.changed()
	}
	return nil
}

// next are the targets to probe, from those of the last time and what is granted now.
func next(last map[string]target, instructions []broker.ReservationInstruction, now time.Time) map[string]target {
	targets := map[string]target{}
	ready := map[string]bool{}
	for i := range instructions {
		cluster := instructions[i].Spec.TargetClusterID
		if meta.IsStatusConditionTrue(instructions[i].Status.Conditions, broker.ConditionVirtualNodeReady) {
			ready[cluster] = true
		}
		if address := addressOf(instructions[i].Spec.Endpoint); address != "" {
			targets[cluster] = target{address: address, failures: last[cluster].failures, wanted: now}
		}
	}
	for cluster, t := range last {
		if _, known := targets[cluster]; !known && t.failures > 0 && now.Sub(t.wanted) < remembered {
			targets[cluster] = t
		}
	}
	maps.DeleteFunc(targets, func(cluster string, _ target) bool { return ready[cluster] })
	return targets
}

// addressOf is the host and port of an endpoint, "" if it has none.
func addressOf(endpoint string) string {
	u, err := url.Parse(endpoint)
	if err != nil || u.Hostname() == "" {
		return ""
	}
	port := cmp.Or(u.Port(), "443")
	return net.JoinHostPort(u.Hostname(), port)
}

// reach connects to each target, and reports which accept it.
func reach(ctx context.Context, targets map[string]target) map[string]bool {
	var mu sync.Mutex
	reached := map[string]bool{}
	var all errgroup.Group
	all.SetLimit(parallel)
	for cluster, t := range targets {
		all.Go(func() error {
			dialer := net.Dialer{Timeout: timeout}
			connection, err := dialer.DialContext(ctx, "tcp", t.address)
			if err == nil {
				connection.Close()
			}
			mu.Lock()
			defer mu.Unlock()
			reached[cluster] = err == nil
			return nil
		})
	}
	_ = all.Wait()
	return reached
}
