// Package reachability finds out which providers this cluster cannot connect to, so that
// its advertisement says so and the broker chooses others, also in place of the grants there.
// It probes only providers that capacity was granted in and whose virtual node is not ready:
// one that is ready is reachable. Of all that capacity was granted in, it measures now and then
// how long a connection takes.
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
	// measuredEvery is the time between two measurements of a provider's latency, measuredFor how
	// long one is reported.
	measuredEvery, measuredFor = 10 * time.Minute, 24 * time.Hour
)

// target is a provider to probe.
type target struct {
	address string
	// failures in sequence, and when capacity was last granted there.
	failures int
	wanted   time.Time
}

// latency is how long a connection to a provider took at that time, rounded; 0 if it failed.
type latency struct {
	rounded time.Duration
	at      time.Time
}

// Prober probes providers as long as it is the leader.
type Prober struct {
	instructions func(ctx context.Context) ([]broker.ReservationInstruction, error)
	clock        clock.Clock
	changed      func()

	mu        sync.Mutex
	targets   map[string]target
	latencies map[string]latency
}

// New returns a Prober of the ReservationInstructions in a namespace. changed is called
// when Unreachable has changed; it must not block.
func New(c client.Client, namespace string, clock clock.Clock, changed func()) *Prober {
	instructions := func(ctx context.Context) ([]broker.ReservationInstruction, error) {
		var list broker.ReservationInstructionList
		err := c.List(ctx, &list, client.InNamespace(namespace))
		return list.Items, err
	}
	return &Prober{instructions: instructions, clock: clock, changed: changed, targets: map[string]target{}, latencies: map[string]latency{}}
}

// SetupWithManager adds the Prober to the manager.
func (p *Prober) SetupWithManager(mgr ctrl.Manager) error { return mgr.Add(p) }

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

// Latencies are those that were measured, of at most maxReported providers, sorted.
func (p *Prober) Latencies() []broker.ProviderLatency {
	p.mu.Lock()
	defer p.mu.Unlock()
	var measured []broker.ProviderLatency
	for _, cluster := range slices.Sorted(maps.Keys(p.latencies)) {
		if took := p.latencies[cluster].rounded; took > 0 {
			measured = append(measured, broker.ProviderLatency{Cluster: cluster, Milliseconds: int32(took.Milliseconds())})
		}
	}
	return measured[:min(len(measured), maxReported)]
}

// probe probes each provider once.
func (p *Prober) probe(ctx context.Context) error {
	instructions, err := p.instructions(ctx)
	if err != nil {
		return fmt.Errorf("listing ReservationInstructions: %w", err)
	}
	before := p.Unreachable()
	now := p.clock.Now()
	targets := next(p.targets, instructions, now)
	addresses := unmeasured(p.latencies, instructions, now)
	for cluster, t := range targets {
		addresses[cluster] = t.address
	}
	took := reach(ctx, addresses)
	if ctx.Err() != nil {
		return nil
	}
	for cluster, t := range targets {
		t.failures++
		if _, reached := took[cluster]; reached {
			t.failures = 0
		}
		targets[cluster] = t
	}
	p.mu.Lock()
	p.targets, p.latencies = targets, measured(p.latencies, addresses, took, now)
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

// unmeasured are the addresses of the providers that capacity is granted in, and whose latency is
// due.
func unmeasured(known map[string]latency, instructions []broker.ReservationInstruction, now time.Time) map[string]string {
	addresses := map[string]string{}
	for i := range instructions {
		cluster, address := instructions[i].Spec.TargetClusterID, addressOf(instructions[i].Spec.Endpoint)
		if l, measured := known[cluster]; address != "" && (!measured || now.Sub(l.at) >= measuredEvery) {
			addresses[cluster] = address
		}
	}
	return addresses
}

// measured are the latencies after a round of connections. One changes only if it is less than half
// as long, or more than twice: each change is another advertisement.
func measured(known map[string]latency, tried map[string]string, took map[string]time.Duration, now time.Time) map[string]latency {
	after := maps.Clone(known)
	for cluster := range tried {
		l := after[cluster]
		if each, reached := took[cluster]; !reached {
			l.rounded = 0
		} else if l.rounded == 0 || each < l.rounded/2 || each > 2*l.rounded {
			l.rounded = max(each.Round(time.Millisecond), time.Millisecond)
		}
		l.at = now
		after[cluster] = l
	}
	maps.DeleteFunc(after, func(_ string, l latency) bool { return now.Sub(l.at) >= measuredFor })
	return after
}

// reach connects to each address, and reports how long it took where it succeeded.
func reach(ctx context.Context, addresses map[string]string) map[string]time.Duration {
	var mu sync.Mutex
	took := map[string]time.Duration{}
	var all errgroup.Group
	all.SetLimit(parallel)
	for cluster, address := range addresses {
		all.Go(func() error {
			dialer := net.Dialer{Timeout: timeout}
			began := time.Now()
			connection, err := dialer.DialContext(ctx, "tcp", address)
			if err != nil {
				return nil
			}
			each := time.Since(began)
			connection.Close()
			mu.Lock()
			defer mu.Unlock()
			took[cluster] = each
			return nil
		})
	}
	_ = all.Wait()
	return took
}
