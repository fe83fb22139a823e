// Package scale runs Spillway on a playground with a thousand nodes and many more
// pods than fit at home, and measures how long it takes until all run, and what
// Spillway's programs need for it.
package scale

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/bench/figures"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// Names of the bench: with what providers do by default to hold capacity, with
// accounting only, and, as what the machine itself needs, the same pods on the same
// clusters without overflow: each cluster's scheduler binds as many pods of its own.
const (
	Name                    = "playground_scale"
	NameWithoutPlaceholders = "playground_scale_without_placeholders"
	NameWithoutOverflow     = "playground_scale_without_overflow"
)

// Names lists them.
var Names = []string{Name, NameWithoutPlaceholders, NameWithoutOverflow}

// Options of a run.
type Options struct {
	// Name is one of the names above.
	Name string
	// Out takes the figures, Log progress.
	Out io.Writer
	Log environment.Log
	// Providers in all, of which Real have a control plane and nodes; the others
	// are simulated agents.
	Providers, Real int
	// Nodes in the home cluster and with the real providers together. Each runs
	// ten of the pods.
	Nodes int
	// Pods that are created at home.
	Pods int
	// Deadline for all of them to run.
	Deadline time.Duration
}

// Defaults are the bench's figures, as far as the memory of a small machine goes.
func Defaults() Options {
	return Options{Name: Name, Providers: 20, Real: 2, Nodes: 1000, Pods: 10000, Deadline: 30 * time.Minute}
}

// written are the resources that are written for overflowing pods, those of a peering included.
// Nodes have heartbeats besides.
var written = []string{"pods", "events", "reservations", "reservationinstructions", "providerinstructions", "resourcequotas",
	"nodes", "namespaces", "secrets", "rolebindings", "serviceaccounts"}

const (
	consumer = "home"
	crowd    = "crowd"
	// podsEach is how many pods a node has capacity for, spare how many more, so that
	// the last free slot need not be found.
	podsEach, spare = 10, 1
	// writesAtHome are those that a pod at home needs at least: it is created and bound, has
	// event Scheduled, and runs. If it needs more, they count as those of overflowed pods.
	writesAtHome = 4
	// deployments that the pods are spread over.
	deployments = 10
	// requestEach is how many pods each simulated agent requests of the others.
	requestEach = 50
)

// Run measures, and prints the figures. More writes than the aim are an error.
func Run(ctx context.Context, o Options) (err error) {
	if o.Real < 1 || o.Providers < o.Real || o.Nodes < 2*(o.Real+1) || o.Pods < deployments || o.Pods > o.Nodes*podsEach {
		return fmt.Errorf("the bench needs at least one real provider, 2 nodes for each cluster, %d pods, and at most %d pods for each node", deployments, podsEach)
	}
	// A fifth of the nodes is at home: most pods overflow.
	atHome := o.Nodes / 5
	members, providers := o.members(atHome)
	p, err := environment.Start(ctx, environment.Options{Members: members, DefaultTimings: true, Log: o.Log})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Stop()) }()
	ctx, cancel := context.WithTimeout(ctx, o.Deadline)
	defer cancel()

	group, simulating := errgroup.WithContext(ctx)
	stopSimulating := func() {}
	simulating, stopSimulating = context.WithCancel(simulating)
	defer func() {
		stopSimulating()
		err = errors.Join(err, group.Wait())
	}()
	others, err := simulate(simulating, group, p, o.Providers-o.Real)
	if err != nil {
		return err
	}
	o.Log("1 consumer and %d providers (%d real control planes, %d simulated agents), %d nodes, %d pods", o.Providers, o.Real, len(others), o.Nodes, o.Pods)

	before, cpu := usages(p, providers[0]), cpuTimes(p)
	writes, err := p.Cluster(consumer).Writes(ctx, written...)
	if err != nil {
		return err
	}
	lent, err := p.Cluster(providers[0]).Writes(ctx, written...)
	if err != nil {
		return err
	}
	crowds := o.crowds(atHome, providers)
	pods := counters{}
	for name := range crowds {
		if pods[name], err = startCounter(ctx, p.Cluster(name).Admin); err != nil {
			return err
		}
	}
	start := time.Now()
	for name, size := range crowds {
		if err := create(ctx, p.Cluster(name).Client, size, o.Name != NameWithoutOverflow); err != nil {
			return err
		}
	}
	settled, err := settle(ctx, o, p, pods)
	took := time.Since(start)
	if err != nil {
		return fmt.Errorf("%w\n%s", err, p.Logs(8))
	}
	var accepted int64
	for _, s := range others {
		accepted += s.accepted.Load()
	}
	away := settled.away
	o.Log("%d pods run at home and %d with providers; the simulated agents have agreed to %d holds", settled.home, away, accepted)

	for _, used := range cpuTimes(p).minus(cpu) {
		o.Log("%8.1f s of CPU for %s", used.cpu, used.name)
	}
	writes, err = o.logWrites(ctx, p.Cluster(consumer), writes, away, "pod that overflowed")
	if err != nil {
		return err
	}
	if _, err = o.logWrites(ctx, p.Cluster(providers[0]), lent, away/o.Real, "guest, about,"); err != nil {
		return err
	}
	aim := "<= 200"
	if o.Name == NameWithoutOverflow {
		aim = "none"
	}
	print := figures.New(o.Out)
	print.Time(o.Name, took.Seconds(), "s", aim)
	print.Time(o.Name+"_pods_per_second", float64(o.Pods)/took.Seconds(), "pods/s", "none")
	if o.Name == NameWithoutOverflow {
		return nil
	}
	print.CountEach(o.Name+"_writes_per_overflow_pod", (writes.Sum()-float64(writesAtHome*settled.home))/float64(away), "writes", 10)
	print.Time(o.Name+"_pods_overflowed", float64(away), "pods", fmt.Sprint(o.Pods-atHome*(podsEach+spare)))
	for i, now := range usages(p, providers[0]) {
		print.Time(fmt.Sprintf("%s_memory_%s", o.Name, now.name), now.peakMiB, "MiB", fmt.Sprintf("<= %d", now.aimMiB))
		print.Time(fmt.Sprintf("%s_cpu_%s", o.Name, now.name), now.cpu-before[i].cpu, "s", "none")
	}
	return print.Err()
}

// members are the clusters with nodes: the consumer, and the real providers.
func (o Options) members(atHome int) (members []environment.Member, providers []string) {
	var flags map[string]string
	if o.Name == NameWithoutPlaceholders {
		flags = map[string]string{"placeholders-namespace": ""}
	}
	members = []environment.Member{{Name: consumer, Overflows: true, Nodes: nodes("home", atHome), Values: []string{"lend.enabled=false"}}}
	for i, rest := 0, o.Nodes-atHome; i < o.Real; i++ {
		name := fmt.Sprintf("provider-%d", i+1)
		share := rest / (o.Real - i)
		rest -= share
		providers = append(providers, name)
		members = append(members, environment.Member{Name: name, Nodes: nodes("node", share), AgentFlags: flags})
	}
	return members, providers
}

// crowds are how many pods are created in which cluster: all at home, or, without
// overflow, in each cluster as many as run there otherwise.
func (o Options) crowds(atHome int, providers []string) map[string]int {
	if o.Name != NameWithoutOverflow {
		return map[string]int{consumer: o.Pods}
	}
	crowds := map[string]int{consumer: min(o.Pods, atHome*(podsEach+spare))}
	rest := o.Pods - crowds[consumer]
	for i, name := range providers {
		crowds[name] = rest / (len(providers) - i)
		rest -= crowds[name]
	}
	return crowds
}

// logWrites logs the writes since before that a cluster's API server has counted for
// each of pods, and returns them.
func (o Options) logWrites(ctx context.Context, c *cluster.Cluster, before cluster.Counts, pods int, each string) (cluster.Counts, error) {
	now, err := c.Writes(ctx, written...)
	if err != nil {
		return nil, err
	}
	writes := now.Minus(before)
	for _, name := range slices.Sorted(maps.Keys(writes)) {
		if per := writes[name] / float64(pods); per >= 0.01 {
			o.Log("%8.2f %s in %s for each %s", per, name, c.Name, each)
		}
	}
	return writes, nil
}

func nodes(prefix string, count int) []environment.NodeGroup {
	return []environment.NodeGroup{{Prefix: prefix, Count: count, Resources: cores(podsEach + spare)}}
}

// simulate starts the agents without a cluster.
func simulate(ctx context.Context, group *errgroup.Group, p *environment.Playground, count int) ([]*simulated, error) {
	url, caHash, token := p.Broker()
	var names []string
	for i := range count {
		names = append(names, fmt.Sprintf("simulated-%d", i+1))
	}
	var all []*simulated
	for _, name := range names {
		var s *simulated
		// The broker lets so many join from one address in a second.
		err := wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (done bool, err error) {
			s, err = joinSimulated(ctx, url, caHash, token, name, names)
			if refused := (*protocol.Error)(nil); errors.As(err, &refused) && refused.Code == protocol.CodeTooMany {
				return false, nil
			}
			return err == nil, err
		})
		if err != nil {
			return nil, err
		}
		all = append(all, s)
		count := int32(requestEach)
		if count < 2 {
			count = 0
		}
		group.Go(func() error { return s.run(ctx, count) })
	}
	return all, nil
}

// create makes Deployments of pods in all, which may overflow or not.
func create(ctx context.Context, api client.Client, pods int, overflow bool) error {
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: crowd}}
	if overflow {
		namespace.Labels = map[string]string{broker.LabelOverflow: broker.OverflowEnabled}
	}
	if err := api.Create(ctx, namespace); err != nil {
		return err
	}
	for i := range deployments {
		replicas := pods / (deployments - i)
		pods -= replicas
		labels := map[string]string{"app": fmt.Sprintf("crowd-%d", i+1)}
		err := api.Create(ctx, &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Namespace: crowd, Name: labels["app"]},
			Spec: appsv1.DeploymentSpec{
				Replicas: ptr.To(int32(replicas)), Selector: &metav1.LabelSelector{MatchLabels: labels},
				Template: corev1.PodTemplateSpec{
					ObjectMeta: metav1.ObjectMeta{Labels: labels},
					Spec: corev1.PodSpec{Containers: []corev1.Container{{
						Name: "main", Image: "registry.example.org/app:1", Args: []string{"serve"},
						Resources: corev1.ResourceRequirements{Requests: cores(1)},
					}}},
				},
			},
		})
		if err != nil {
			return fmt.Errorf("creating Deployment %s: %w", labels["app"], err)
		}
	}
	return nil
}

// settle waits until all pods run, and returns where they run.
func settle(ctx context.Context, o Options, p *environment.Playground, pods counters) (counts, error) {
	logged := time.Now()
	for {
		now := pods.now()
		if now.home+now.away == o.Pods {
			return now, nil
		}
		if time.Since(logged) > 15*time.Second {
			logged = time.Now()
			o.Log("%d pods are bound, %d run at home, %d with providers", now.bound, now.home, now.away)
		}
		if err := p.Err(); err != nil {
			return now, err
		}
		select {
		case <-ctx.Done():
			return now, fmt.Errorf("only %d of %d pods run, %d of them with providers: %w", now.home+now.away, o.Pods, now.away, ctx.Err())
		case <-time.After(200 * time.Millisecond):
		}
	}
}
