package main

import (
	"cmp"
	"context"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	agent "github.com/spillway-dev/spillway/agent/simulated"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/e2e/simulation/memory"
	"github.com/spillway-dev/spillway/e2e/simulation/stepwise"
)

const (
	namespace = "spillway-system"
	// workloads is the namespace of the consumers' Reservations.
	workloads = "default"
	// beat is the interval of the advertisements.
	beat = 60 * time.Second
	// secondLeaderFor is how long two brokers lead at most: far longer than a leader without a
	// lease takes to end.
	secondLeaderFor = time.Minute
	// cpuPerNode is what one node has.
	cpuPerNode = 2
)

// scheme has the kinds of all programs.
var scheme = func() *runtime.Scheme {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, broker.AddToScheme} {
		if err := add(s); err != nil {
			panic(err)
		}
	}
	return s
}()

// brokerProcess is one of the two brokers.
type brokerProcess struct {
	name    string
	clock   *stepwise.Clock
	program *stepwise.Program
	handler http.Handler
}

// cluster is a member: its API server, its agent, and its nodes.
type cluster struct {
	id     string
	server *memory.Server
	client client.Client
	grants *agent.Grants
	clock  *stepwise.Clock
	// program is the agent, nil while it is down.
	program *stepwise.Program
	// cut is set while the cluster cannot reach the hub; deaf while its agent does not
	// decide on holds.
	cut, deaf bool
	// gone is set once the cluster's agent has ended for good, forgotten while the cluster's
	// registration is deleted: its agent goes on.
	gone, forgotten bool
	capacity        int64
	// restored is what its ledger in the restored hub charges: it may have ended since.
	restored pledges
	pods     int
	model    modelCache
}

// world is everything that one schedule runs.
type world struct {
	rng      *rand.Rand
	gate     *stepwise.Gate
	hub      *memory.Server
	client   client.Client
	brokers  []*brokerProcess
	clusters []*cluster
	plant    plant
	started  time.Time
	// flip selects among several leaders. former is the one that led before the other, since
	// secondAt; nil if it has ended.
	flip     int
	former   *brokerProcess
	secondAt time.Time
	// restored is set once the hub was restored from a backup.
	restored bool
	backup   *memory.Backup
	names    int
	// cordoned is set once a node was cordoned.
	cordoned bool
	// clocksSet is set once an agent's clock was set.
	clocksSet bool
	// frozen are the steps that do not happen for now, by the beginning of their name.
	frozen map[string]int
	armed  []armed
	// late is a write of a ledger that is to be delayed, nil if none.
	late *lateWrite
	// losesAck is the provider whose next answer is lost, "" if none.
	losesAck string
	// heard is what consumers have heard of their Reservations, for a planted fault.
	heard map[types.UID]broker.ReservationStatus
	// refuses is the provider whose answers are all refusals, "" if none.
	refuses string

	mu      sync.Mutex
	streams []*stream
	sent    []message

	checks invariants
	budget budget
	steps  int
	// acts are the steps but for those in which only time passes.
	acts int
	// useless are the grants that no pod could use: to the programs, that is an event.
	useless int
	digest  uint64
	verbose func(string)
	// resting is set when all programs have had time to answer after the last fault.
	resting bool
}

// armed is a fault that waits for the next call of a program.
type armed struct {
	program string
	writes  bool
	action  callFault
}

func newWorld(seed uint64, p plant, lending []int64) *world {
	w := &world{
		rng: rand.New(rand.NewPCG(seed, 1)), gate: &stepwise.Gate{}, plant: p, started: time.Now(), frozen: map[string]int{}, heard: map[types.UID]broker.ReservationStatus{},
		checks: invariants{only: p.by, made: map[string]time.Time{}, reserved: map[types.UID]time.Time{}, homes: map[types.UID]map[string]bool{}, returns: map[types.UID]int{}, gaveUp: map[givenUp]time.Time{}, grants: map[types.UID]grantSeen{}, ledgers: map[holdKey]ledgerSeen{},
			holdings: &holdings{}, passed: map[holdKey][]types.UID{}, overtaken: map[types.UID]int{}, grew: map[types.UID]time.Time{}, requested: map[types.UID]int64{}, complete: map[types.UID]bool{}},
	}
	w.hub = newServer("hub", &broker.Reservation{}, &broker.ClusterAdvertisement{}, &broker.BrokerConfig{}, &broker.ClusterRegistration{})
	w.client = w.hub.Client()
	for i, id := range []string{"rome", "paris", "berlin"} {
		c := &cluster{
			id: id, grants: agent.NewGrants(), clock: &stepwise.Clock{}, capacity: lending[i],
			server: newServer(id, &broker.Reservation{}, &broker.ReservationInstruction{}, &broker.ProviderInstruction{}, &broker.ClusterAdvertisement{},
				&broker.OverflowPolicy{}, &corev1.Node{}, &corev1.Pod{}, &corev1.Namespace{}),
		}
		c.client = c.server.Client()
		for n := range lending[i] / cpuPerNode {
			c.addNode(fmt.Sprintf("%s-%d", id, n))
		}
		w.clusters = append(w.clusters, c)
		must(w.client.Create(context.Background(), &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: id}, Spec: broker.ClusterRegistrationSpec{ClusterID: id}}))
	}
	for _, name := range []string{"broker-a", "broker-b"} {
		w.brokers = append(w.brokers, &brokerProcess{name: name, clock: &stepwise.Clock{}})
	}
	if p.setUp != nil {
		p.setUp(w)
	}
	return w
}

func newServer(name string, kinds ...client.Object) *memory.Server {
	s, err := memory.NewServer(name, scheme, time.Now, kinds...)
	must(err)
	return s
}

// must panics on errors that the simulation itself must not make.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

func (c *cluster) addNode(name string) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}}}
	must(c.client.Create(context.Background(), node))
	node.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: *resource.NewQuantity(cpuPerNode, resource.DecimalSI), corev1.ResourcePods: resource.MustParse("110")}
	node.Status.Capacity = node.Status.Allocatable
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	must(c.client.Status().Update(context.Background(), node))
}

func (c *cluster) nodes() []corev1.Node {
	var list corev1.NodeList
	must(c.client.List(context.Background(), &list))
	return list.Items
}

// cordon makes the first nodes run no more pods, or lets them run pods again.
func (c *cluster) cordon(count int, unschedulable bool) {
	for _, node := range c.nodes()[:count] {
		if node.Spec.Unschedulable != unschedulable {
			node.Spec.Unschedulable = unschedulable
			must(c.client.Update(context.Background(), &node))
		}
	}
}

// offered is the capacity of the nodes that are not cordoned.
func (c *cluster) offered() (cpus int64) {
	for _, node := range c.nodes() {
		if !node.Spec.Unschedulable {
			cpus += cpuPerNode
		}
	}
	return cpus
}

// startBroker starts a broker as a standby.
func (w *world) startBroker(b *brokerProcess) {
	w.allow()
	b.program = stepwise.NewProgram(stepwise.Options{
		Name: b.name, Server: w.hub, Scheme: scheme, Gate: w.gate, Writes: wrap(w, w.plant.brokerWrites), Live: w.plant.brokerLive,
	})
	callers := &identity{cached: b.program.GetClient(), live: b.program.GetAPIReader(), missed: map[string]time.Time{}}
	rest, err := program.Add(b.program, program.Parts{
		Namespace: namespace, Identity: callers, Clock: b.clock, CatchUp: program.DefaultCatchUp, AnyLeader: w.plant.anyLeader,
		// As many as a simulation has objects, since each is a goroutine.
		Workers: 8, Log: logr.Discard(),
	})
	must(err)
	rest.Synced()
	b.handler = rest.Handler()
	b.program.Run()
}

func wrap(w *world, plant func(*world, client.Client) client.Client) func(client.Client) client.Client {
	if plant == nil {
		return nil
	}
	return func(c client.Client) client.Client { return plant(w, c) }
}

func (w *world) stopBroker(b *brokerProcess) {
	if w.late != nil && w.late.broker == b {
		w.late = nil
	}
	w.former = nil
	if b.program != nil {
		b.program.Kill()
		b.program, b.handler = nil, nil
	}
}

func (w *world) startAgent(c *cluster) {
	if c.gone {
		return
	}
	w.allow()
	c.program = stepwise.NewProgram(stepwise.Options{
		Name: "agent-" + c.id, Server: c.server, Scheme: scheme, Gate: w.gate, Writes: wrap(w, w.plant.agentWrites), Live: w.plant.agentLive,
	})
	must(agent.Add(context.Background(), c.program, agent.Options{
		ClusterID: c.id, Namespace: namespace, Broker: &connection{world: w, cluster: c, program: c.program}, Grants: c.grants,
		Clock: c.clock, Interval: beat, Lending: c.capacity > 0, Deaf: c.deaf, IgnoreGuests: w.plant.ignoreGuests,
	}))
	c.program.Run()
	c.program.Lead()
}

func (w *world) stopAgent(c *cluster) {
	if c.program != nil {
		c.program.Kill()
		c.program = nil
	}
}

// leaders are the brokers that lead and can be reached: two while a former leader has not
// noticed yet.
func (w *world) leaders() (out []*brokerProcess) {
	for _, b := range w.brokers {
		if b.program != nil && b.program.Leads() && (w.late == nil || w.late.call == nil || w.late.broker != b) {
			out = append(out, b)
		}
	}
	return out
}

// reachable is the leading broker that a cluster's next connection reaches, or nil.
func (w *world) reachable(id string) *brokerProcess {
	leaders := w.leaders()
	c := w.cluster(id)
	if len(leaders) == 0 || c.cut {
		return nil
	}
	return leaders[(slices.Index(w.clusters, c)+w.flip)%len(leaders)]
}

func (w *world) cluster(id string) *cluster {
	return w.clusters[slices.IndexFunc(w.clusters, func(c *cluster) bool { return c.id == id })]
}

// remember keeps the last requests, so that they can arrive again.
func (w *world) remember(m message) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sent = append(w.sent, m); len(w.sent) > 64 {
		w.sent = w.sent[1:]
	}
}

func (w *world) openStream(s *stream) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.streams = append(w.streams, s)
}

func (w *world) closeStream(s *stream) {
	s.cancel()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.streams = slices.DeleteFunc(w.streams, func(other *stream) bool { return other == s })
}

// programs lists what runs.
func (w *world) programs() (out []*stepwise.Program) {
	for _, b := range w.brokers {
		if b.program != nil {
			out = append(out, b.program)
		}
	}
	for _, c := range w.clusters {
		if c.program != nil {
			out = append(out, c.program)
		}
	}
	return out
}

// possible lists the steps that may happen next, in an order that depends on them only.
func (w *world) possible() []stepwise.Step {
	var steps []stepwise.Step
	for _, p := range w.programs() {
		if !w.late.stopped(p) {
			steps = append(steps, p.Steps()...)
		}
	}
	for _, call := range w.gate.Waiting() {
		if w.late != nil && w.late.until > 0 && call.Program == w.late.broker.name {
			continue
		}
		steps = append(steps, stepwise.Step{Name: call.Program + " calls " + call.What, Do: func() { w.decide(call) }})
	}
	w.mu.Lock()
	for _, s := range w.streams {
		if step := s.step(); step != nil {
			steps = append(steps, *step)
		}
	}
	w.mu.Unlock()
	for _, c := range w.clusters {
		steps = append(steps, w.modelSteps(c)...)
	}
	if len(w.frozen) > 0 || w.plant.stalls != "" {
		steps = slices.DeleteFunc(steps, func(s stepwise.Step) bool { return w.isFrozen(s.Name) })
	}
	slices.SortStableFunc(steps, func(a, b stepwise.Step) int { return cmp.Compare(a.Name, b.Name) })
	return steps
}

func (w *world) isFrozen(step string) bool {
	for prefix, until := range w.frozen {
		if w.steps < until && strings.HasPrefix(step, prefix) {
			return true
		}
	}
	return w.plant.stalls != "" && strings.HasPrefix(step, w.plant.stalls)
}

// step lets one thing happen, or time pass.
func (w *world) step() {
	synctest.Wait()
	w.steps++
	w.advance()
	steps := w.possible()
	name := ""
	if len(steps) == 0 || w.rng.IntN(16) == 0 {
		seconds := 1
		if len(steps) == 0 {
			seconds = []int{1, 1, 2, 5, 10}[w.rng.IntN(5)]
		}
		name = fmt.Sprintf("%d s pass", seconds)
		w.record(name)
		w.pass(time.Duration(seconds) * time.Second)
	} else {
		chosen := steps[w.rng.IntN(len(steps))]
		w.record(chosen.Name)
		chosen.Do()
		w.acts++
	}
	synctest.Wait()
	for _, b := range w.brokers {
		if b.program != nil && b.program.Failed() != nil {
			w.record(b.name + " ends: " + b.program.Failed().Error())
			w.fail(b)
			synctest.Wait()
		}
	}
	if w.former != nil && time.Since(w.secondAt) > secondLeaderFor {
		w.record(w.former.name + " has lost its lease")
		w.fail(w.former)
		synctest.Wait()
	}
	w.checks.check(w)
}

// pass lets time pass and closes the streams that agents give up.
func (w *world) pass(duration time.Duration) {
	w.allowFor(duration)
	time.Sleep(duration)
	synctest.Wait()
	w.mu.Lock()
	streams := slices.Clone(w.streams)
	w.mu.Unlock()
	for _, s := range streams {
		if s.late() {
			s.cancel()
		}
	}
}

func (w *world) record(what string) {
	h := fnv.New64a()
	h.Write([]byte(what))
	w.digest = w.digest*1099511628211 ^ h.Sum64()
	if w.verbose != nil {
		w.verbose(fmt.Sprintf("%5d %6.0fs %s", w.steps, time.Since(w.started).Seconds(), what))
	}
}

// stop ends all programs, so that the bubble can end.
func (w *world) stop() {
	for _, b := range w.brokers {
		w.stopBroker(b)
	}
	for _, c := range w.clusters {
		w.stopAgent(c)
	}
}
