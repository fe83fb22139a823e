package environment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// Hub is the name of the cluster that the broker runs in. It has no nodes.
const Hub = "hub"

// Options of a playground.
type Options struct {
	Members []Member
	// DefaultTimings keeps the default timings of Kubernetes and of the charts;
	// otherwise they are shortened to seconds.
	DefaultTimings bool
	// Minors of Kubernetes in clusters that overflow, and in the hub and the others. Default:
	// those of the environment variable KUBERNETES.
	Minors binaries.Minors
	// BrokerValues are further values of the broker's chart, as "key=value".
	BrokerValues []string
	// Dir holds the state. Default: the directory for temporary files.
	Dir string
	// Log receives progress messages; nil discards them.
	Log Log
}

// Member is a cluster that is a provider, a consumer, or both.
type Member struct {
	// Name is its cluster ID.
	Name  string
	Nodes []NodeGroup
	// Overflows runs Spillway's scheduler and virtual nodes, so that the member's pods
	// may overflow. Every member is a provider, unless Values disable it.
	Overflows bool
	// Values are further values of the agent's chart, as "key=value".
	Values []string
	// AgentFlags replace flags of the agent.
	AgentFlags map[string]string
}

// NodeGroup is a number of equal nodes.
type NodeGroup struct {
	Prefix    string
	Count     int
	Resources corev1.ResourceList
	Labels    map[string]string
}

// impatientBroker and impatientAgent are chart values that shorten timeouts and grace periods to
// seconds.
var (
	impatientBroker = []string{"config.staleAfter=15s", "config.freshFor=12s"}
	impatientAgent  = []string{"advertisement.requeueInterval=2s", "release.grace=3s", "peering.idleTime=10s", "peering.finishedPodRetention=5s", "peering.providerLostAfter=15s"}
)

// patientLeader are arguments of the broker. A machine that is busy for seconds must not end
// it: nothing starts it again, and there is no standby.
var patientLeader = map[string]string{
	"leader-elect-lease-duration": "60s", "leader-elect-renew-deadline": "50s", "leader-elect-retry-period": "2s",
}

// Playground is a hub and its members, running.
type Playground struct {
	// Dir is where all state and logs are.
	Dir string

	options  Options
	state    state
	upstream upstream
	own      *promise[map[string]string] // the project's programs
	hub      hubAccess
	mu       sync.Mutex
	clusters map[string]*cluster.Cluster
}

// Start builds missing programs and starts all clusters. It returns when every member
// has joined and advertises its nodes. The caller calls Stop.
func Start(ctx context.Context, o Options) (_ *Playground, err error) {
	if o.Log == nil {
		o.Log = func(string, ...any) {}
	}
	if o.Minors == (binaries.Minors{}) {
		if o.Minors, err = binaries.WantedMinors(); err != nil {
			return nil, err
		}
	}
	upstream, err := buildUpstream(ctx, o.Log, o.Minors)
	if err != nil {
		return nil, err
	}
	state, err := newState(ctx, o.Dir)
	if err != nil {
		return nil, err
	}
	p := &Playground{Dir: state.dir, options: o, state: state, upstream: upstream, own: newPromise[map[string]string](), clusters: map[string]*cluster.Cluster{}}
	defer func() {
		if err != nil {
			err = errors.Join(err, errors.New(p.Logs(12)), p.Stop())
		}
	}()
	o.Log("starting %d control planes …", len(o.Members)+1)
	group, within := errgroup.WithContext(ctx)
	group.Go(func() error {
		own, err := buildOwn(within, o.Log)
		p.own.keep(own, err)
		return err
	})
	hub := newPromise[hubAccess]()
	group.Go(func() error {
		c, err := p.start(within, Hub, o.Minors.Others)
		if err != nil {
			return err
		}
		if p.hub, err = p.installBroker(within, c); err != nil {
			return err
		}
		hub.keep(p.hub, nil)
		return nil
	})
	for _, m := range o.Members {
		group.Go(func() error { return p.startMember(within, m, hub) })
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	o.Log("waiting for all clusters to join …")
	return p, p.await(ctx, "every member has joined and its nodes are ready", 3*time.Minute, p.joined)
}

// startMember starts as much of a member as is possible without the hub, and then the rest.
func (p *Playground) startMember(ctx context.Context, m Member, hub *promise[hubAccess]) error {
	minor := p.options.Minors.Others
	if m.Overflows {
		minor = p.options.Minors.Consumers
	}
	c, err := p.start(ctx, m.Name, minor)
	if err != nil {
		return err
	}
	if err := c.StartControllers(); err != nil {
		return err
	}
	for _, nodes := range m.Nodes {
		if err := c.AddNodes(ctx, nodes.Prefix, nodes.Count, nodes.Resources, nodes.Labels); err != nil {
			return err
		}
	}
	if err := p.StartScheduler(ctx, m.Name); err != nil {
		return err
	}
	access, err := hub.wait(ctx)
	if err != nil {
		return err
	}
	return p.installAgent(ctx, c, m, access)
}

// StartScheduler starts kube-scheduler in a member. Only a scenario that stops it, as Process
// of that name, calls this again.
func (p *Playground) StartScheduler(ctx context.Context, name string) error {
	own, err := p.own.wait(ctx)
	if err != nil {
		return err
	}
	return p.Cluster(name).StartScheduler(own["spillway-scheduler"])
}

func (p *Playground) start(ctx context.Context, name, minor string) (*cluster.Cluster, error) {
	c, err := cluster.Start(ctx, cluster.Options{Name: name, Dir: filepath.Join(p.Dir, name), Programs: p.upstream[minor], DefaultTimings: p.options.DefaultTimings})
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.clusters[name] = c
	return c, nil
}

// Broker is what another cluster needs to join: the broker's URL, the hash of its
// CA, and the token.
func (p *Playground) Broker() (url, caHash, token string) {
	return p.hub.url, p.hub.caHash, p.hub.token
}

// Cluster returns the hub or a member by its name, and panics if there is none.
func (p *Playground) Cluster(name string) *cluster.Cluster {
	p.mu.Lock()
	defer p.mu.Unlock()
	c := p.clusters[name]
	if c == nil {
		panic("playground: no cluster is called " + name)
	}
	return c
}

// Clusters returns all clusters, the hub first and then by name.
func (p *Playground) Clusters() []*cluster.Cluster {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*cluster.Cluster
	for _, c := range p.clusters {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b *cluster.Cluster) int {
		if (a.Name == Hub) != (b.Name == Hub) {
			if a.Name == Hub {
				return -1
			}
			return 1
		}
		return cmp.Compare(a.Name, b.Name)
	})
	return all
}

// Kill kills every process of a cluster at once, as a power cut would.
func (p *Playground) Kill(name string) { p.Cluster(name).Kill() }

// Err returns an error if a process ended unexpectedly.
func (p *Playground) Err() error {
	var all []error
	for _, c := range p.Clusters() {
		all = append(all, c.Err())
	}
	return errors.Join(all...)
}

// Stop ends every process and removes all state.
func (p *Playground) Stop() error {
	var stopping sync.WaitGroup
	for _, c := range p.Clusters() {
		stopping.Go(func() { c.Stop(2 * time.Second) })
	}
	stopping.Wait()
	return p.state.remove()
}

// Logs returns the last log lines of each of Spillway's programs.
func (p *Playground) Logs(lines int) string {
	var b strings.Builder
	for _, c := range p.Clusters() {
		for _, process := range c.Processes() {
			if strings.HasPrefix(process.Name(), "spillway-") || process.Err() != nil {
				fmt.Fprintf(&b, "%s in %s, %s:\n%s\n", process.Name(), c.Name, process.Log(), process.Tail(lines))
			}
		}
	}
	return b.String()
}

// Process is one of a cluster's programs, or nil.
func (p *Playground) Process(cluster, name string) *process.Process {
	return p.Cluster(cluster).Process(name)
}

// await polls check until it returns nil, and returns its last error after the
// timeout. It returns early when a process ends unexpectedly.
func (p *Playground) await(ctx context.Context, what string, timeout time.Duration, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	var last error
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		if err := p.Err(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("timed out after %s waiting until %s: %w", timeout, what, last)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// promise is a value that becomes available once.
type promise[T any] struct {
	kept  chan struct{}
	value T
	err   error
}

func newPromise[T any]() *promise[T] { return &promise[T]{kept: make(chan struct{})} }

func (p *promise[T]) keep(value T, err error) {
	p.value, p.err = value, err
	close(p.kept)
}

func (p *promise[T]) wait(ctx context.Context) (T, error) {
	select {
	case <-p.kept:
		return p.value, p.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}
