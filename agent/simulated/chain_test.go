package simulated_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crconfig "sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/fake"
	agent "github.com/spillway-dev/spillway/agent/simulated"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/charge"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	controlplane.Main(m)
}

// TestReservationsByHand follows Reservations that are made by hand through the broker, the
// provider's agent and the consumer's agent, each with a real API server: in the hub, for
// another cluster and for the hub's own, and in the consumer. Only the driver is in memory.
func TestReservationsByHand(t *testing.T) {
	home := startCluster(t, "home")
	url := home.startBroker()
	rome := startCluster(t, "rome")
	for _, c := range []*cluster{home, rome} {
		// What a cluster without a registration creates is deleted.
		expect.NoError(t, home.Create(t.Context(), &broker.ClusterRegistration{
			ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: c.id}, Spec: broker.ClusterRegistrationSpec{ClusterID: c.id},
		}))
		c.startAgent(url)
	}
	for name, c := range map[string]chain{
		"in the hub, for another cluster": {author: home, consumer: rome, provider: home, namespace: broker.SystemNamespace, name: "for-rome"},
		"in the hub, for its own":         {author: home, consumer: home, provider: rome, namespace: broker.SystemNamespace, name: "for-home"},
		"in the consumer":                 {author: rome, consumer: rome, provider: home, namespace: "shop", name: "warm"},
	} {
		t.Run(name, func(t *testing.T) {
			c.T, c.hub = t, home
			c.growsAndShrinks()
			c.isDeletedInUse()
			c.expires()
			if !c.ofHub() {
				c.becomesPossible()
			}
		})
	}
}

// chain is one Reservation on its way.
type chain struct {
	*testing.T
	hub, author, consumer, provider *cluster
	namespace, name                 string
	// id at the broker.
	id string
}

func (c *chain) ofHub() bool { return c.namespace == broker.SystemNamespace }

func (c *chain) instruction() *broker.ReservationInstruction {
	return &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: c.id + "-" + c.provider.id}}
}

func (c *chain) reservation() *broker.Reservation {
	return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: c.namespace, Name: c.name}}
}

func (c *chain) create(spec broker.ReservationSpec) {
	c.Helper()
	r := c.reservation()
	r.Spec, c.id = spec, c.name
	if c.ofHub() {
		r.Spec.RequesterID = c.consumer.id
	}
	expect.NoError(c, c.author.Create(c.Context(), r))
	if !c.ofHub() {
		c.id = protocol.ReservationID(c.consumer.id, r.UID)
	}
}

func total(cpu string) broker.ReservationSpec {
	total := broker.FromList(expect.Resources("cpu", cpu, "memory", "1Gi"))
	return broker.ReservationSpec{RequestedResources: &total}
}

// expectAmount waits until all of the chain has an amount of CPU: the ledger, the provider's
// grant, the consumer's instruction and its virtual node.
func (c *chain) expectAmount(cpu string) {
	c.Helper()
	r, in, ad := c.reservation(), c.instruction(), &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: c.provider.id}}
	expect.EventuallyWithin(c, patience, "cpu "+cpu+" to be usable", func() (bool, string) {
		err := errors.Join(c.author.read(r), c.hub.read(ad), c.consumer.read(in))
		granted, _ := c.provider.grants.Of(c.consumer.id)
		var held, promised, carried string
		if a := r.Status.Allocations; len(a) == 1 && a[0].Cluster == c.provider.id && a[0].VirtualNodeReady {
			held = a[0].Resources.CPU.String()
		}
		if h := ad.Status.Holds; len(h) == 1 {
			promised = h[0].Promised.Totals.CPU.String()
		}
		if in.Status.Carried != nil {
			carried = in.Status.Carried.Totals.CPU.String()
		}
		ok := err == nil && r.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionReady) &&
			granted.Cpu().String() == cpu && c.consumer.carries(c.provider.id) == cpu
		for _, amount := range []string{held, promised, carried} {
			ok = ok && amount == cpu
		}
		return ok, fmt.Sprintf("%s: held %s, promised %s, granted %s, carried %s, node %s (%v) %+v", r.Status.Phase, held, promised, granted.Cpu(), carried, c.consumer.carries(c.provider.id), err, r.Status.Conditions)
	})
}

func (c *chain) growsAndShrinks() {
	c.create(total("1"))
	c.expectAmount("1")
	for _, cpu := range []string{"3", "500m"} {
		expect.EventuallyWithin(c, patience, "the Reservation to be changed", func() (bool, string) {
			r := c.reservation()
			err := c.author.read(r)
			r.Spec.RequestedResources = total(cpu).RequestedResources
			err = errors.Join(err, c.author.Update(c.Context(), r))
			return err == nil, fmt.Sprint(err)
		})
		c.expectAmount(cpu)
	}
	if !c.ofHub() {
		return
	}
	r := c.reservation()
	expect.NoError(c, c.hub.read(r))
	if !slices.Equal(r.Finalizers, []string{broker.FinalizerLedger}) || meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReported) != nil {
		c.Errorf("the agent of the hub's cluster has taken it for its own: %v %+v", r.Finalizers, r.Status.Conditions)
	}
	reported := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: protocol.ReservationID(c.consumer.id, r.UID)}}
	if err := c.hub.read(reported); !apierrors.IsNotFound(err) {
		c.Errorf("the agent of the hub's cluster has reported it to the broker: %v", err)
	}
}

// isDeletedInUse: no new pod may use it, those that remain are counted, and it is gone when
// they have ended, at the consumer and at the provider.
func (c *chain) isDeletedInUse() {
	pod := c.consumer.podOn(broker.VirtualNodeName(c.provider.id), "pooled-"+c.name, map[string]string{broker.LabelHold: charge.Label(c.id)})
	guest := c.provider.podOn("worker", "guest-"+c.name, map[string]string{agent.LabelConsumer: c.consumer.id})
	r := c.reservation()
	expect.EventuallyWithin(c, patience, "its use to be known", func() (bool, string) {
		err := c.author.read(r)
		return err == nil && r.Status.Used != nil && r.Status.Used.Count == 1 && slices.Equal(r.Status.Used.Pods, []string{"shop/" + pod.Name}), fmt.Sprintf("%+v", r.Status.Used)
	})
	expect.NoError(c, c.author.Delete(c.Context(), r))
	in := c.instruction()
	remaining := fmt.Sprintf("pods still running in %s: 1 (shop/%s)", c.provider.id, pod.Name)
	expect.EventuallyWithin(c, patience, "the consumer to close it and to count the pod", func() (bool, string) {
		err := c.consumer.read(in)
		released := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionRequesterReleased)
		return err == nil && in.Spec.Releasing == c.ofHub() && in.Status.Carried == nil && released != nil && released.Message == remaining, fmt.Sprintf("%v %+v", err, in)
	})
	kind, want := broker.ConditionProviderReleased, fmt.Sprintf("Waiting for %s to confirm the release. Pods of %s that still run there: 1.", c.provider.id, c.consumer.id)
	if !c.ofHub() {
		kind, want = broker.ConditionReady, c.provider.id+": "+remaining
	}
	expect.EventuallyWithin(c, patience, "the Reservation to count the pod", func() (bool, string) {
		err := c.author.read(r)
		condition := meta.FindStatusCondition(r.Status.Conditions, kind)
		return err == nil && condition != nil && condition.Message == want, fmt.Sprintf("%v %+v", err, r.Status.Conditions)
	})
	c.consumer.end(pod)
	expect.EventuallyWithin(c, patience, "the consumer to release it", func() (bool, string) {
		err := c.consumer.read(in)
		return apierrors.IsNotFound(err) || meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionRequesterReleased), fmt.Sprintf("%v %+v", err, in.Status)
	})
	c.provider.end(guest)
	c.expectGone()
	c.expectDeleted()
}

func (c *chain) expectDeleted() {
	c.Helper()
	expect.EventuallyWithin(c, patience, "the Reservation to be gone", func() (bool, string) {
		r := c.reservation()
		err := c.author.read(r)
		return apierrors.IsNotFound(err), fmt.Sprintf("%v %+v", err, r.Status)
	})
}

func (c *chain) expires() {
	spec := total("1")
	spec.Duration = &metav1.Duration{Duration: 5 * time.Second}
	c.create(spec)
	r := c.reservation()
	expect.EventuallyWithin(c, patience, "the lease to end", func() (bool, string) {
		err := c.author.read(r)
		ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady)
		return err == nil && r.Status.Phase == broker.ReservationReleased && ready != nil && ready.Reason == "Expired" && r.Status.ReservedAt != nil, fmt.Sprintf("%v %+v", err, r.Status)
	})
	c.expectGone()
	expect.NoError(c, c.author.Delete(c.Context(), r))
	c.expectDeleted()
}

// becomesPossible: pods that no node of any provider can ever run fail, and are placed once
// there is such a node.
func (c *chain) becomesPossible() {
	c.create(broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "large", Count: 1, Requests: broker.FromList(expect.Resources("cpu", "5"))}}})
	r := c.reservation()
	expect.EventuallyWithin(c, patience, "the Reservation to fail", func() (bool, string) {
		err := c.author.read(r)
		ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady)
		return err == nil && r.Status.Phase == broker.ReservationFailed && ready != nil && strings.Contains(ready.Message, "A pod of set large requests cpu 5, and no provider has as much"), fmt.Sprintf("%v %+v", err, r.Status)
	})
	expect.NoError(c, c.provider.node("larger", worker, expect.Resources("cpu", "8", "memory", "8Gi", "pods", "110")))
	c.expectAmount("5")
	expect.NoError(c, c.author.Delete(c.Context(), r))
	c.expectGone()
	c.expectDeleted()
}

// expectGone waits until nothing is held, granted or carried.
func (c *chain) expectGone() {
	c.Helper()
	in, ad := c.instruction(), &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: c.provider.id}}
	expect.EventuallyWithin(c, patience, "everything to be given back", func() (bool, string) {
		err, gone := c.hub.read(ad), c.consumer.read(in)
		granted, pods := c.provider.grants.Of(c.consumer.id)
		ok := err == nil && apierrors.IsNotFound(gone) && len(ad.Status.Holds) == 0 && granted.Cpu().IsZero() && pods == 0 && c.consumer.carries(c.provider.id) == "0"
		return ok, fmt.Sprintf("holds %+v, granted %v for %d pods, node %s, instruction %v (%v)", ad.Status.Holds, granted, pods, c.consumer.carries(c.provider.id), gone, err)
	})
}

// patience is longer than the time that three agents, the broker and two API servers need on
// a busy machine.
const patience = 3 * time.Minute

// worker are the labels of a node that runs guests.
var worker = map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"}

// cluster is one with an API server, a node and an opted-in namespace.
type cluster struct {
	client.Client
	t      *testing.T
	id     string
	config *rest.Config
	driver *fake.Driver
	grants *agent.Grants
}

func startCluster(t *testing.T, id string) *cluster {
	t.Helper()
	c := &cluster{t: t, id: id, config: controlplane.Start(t), driver: fake.NewDriver(), grants: agent.NewGrants()}
	var err error
	c.Client, err = client.New(c.config, client.Options{Scheme: scheme(t)})
	expect.NoError(t, err)
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "default"}},
	} {
		expect.NoError(t, c.Create(t.Context(), o))
	}
	expect.NoError(t, c.node("worker", worker, expect.Resources("cpu", "4", "memory", "8Gi", "pods", "110")))
	c.driver.Changed = func(provider string, capacity *peering.Capacity) error {
		name := broker.VirtualNodeName(provider)
		if capacity == nil {
			return client.IgnoreNotFound(c.Delete(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}))
		}
		return c.node(name, map[string]string{broker.LabelProvider: provider, broker.LabelNodeType: broker.NodeTypeVirtual}, capacity.Resources)
	}
	return c
}

// node creates or resizes a Ready node.
func (c *cluster) node(name string, labels map[string]string, allocatable corev1.ResourceList) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	if err := c.Create(c.t.Context(), node); client.IgnoreAlreadyExists(err) != nil {
		return err
	}
	if err := c.read(node); err != nil {
		return err
	}
	// Admission taints new nodes, and no node controller runs here.
	node.Spec.Taints = nil
	if err := c.Update(c.t.Context(), node); err != nil {
		return err
	}
	node.Status = corev1.NodeStatus{Capacity: allocatable, Allocatable: allocatable, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	return c.Status().Update(c.t.Context(), node)
}

func (c *cluster) read(o client.Object) error {
	return c.Get(c.t.Context(), client.ObjectKeyFromObject(o), o)
}

// carries is the CPU of a virtual node as its driver was last asked for it.
func (c *cluster) carries(provider string) (cpu string) {
	for _, call := range c.driver.Calls("EnsureCapacity") {
		if call.Cluster == provider {
			cpu = call.Capacity.Resources.Cpu().String()
		}
	}
	return cpu
}

// podOn creates a running pod on a node.
func (c *cluster) podOn(node, name string, labels map[string]string) *corev1.Pod {
	c.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Labels: labels}, Spec: corev1.PodSpec{
		NodeName: node, TerminationGracePeriodSeconds: ptr.To[int64](0), AutomountServiceAccountToken: ptr.To(false),
		Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "300m", "memory", "64Mi")}}},
	}}
	expect.NoError(c.t, c.Create(c.t.Context(), pod))
	pod.Status.Phase = corev1.PodRunning
	expect.NoError(c.t, c.Status().Update(c.t.Context(), pod))
	return pod
}

func (c *cluster) end(pod *corev1.Pod) {
	c.t.Helper()
	expect.NoError(c.t, c.Delete(c.t.Context(), pod))
}

// run runs controllers until the end of the test.
func (c *cluster) run(add func(mgr ctrl.Manager) error) {
	c.t.Helper()
	mgr, err := ctrl.NewManager(c.config, ctrl.Options{
		Scheme: scheme(c.t), Metrics: metricsserver.Options{BindAddress: "0"},
		Controller: crconfig.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(c.t, err)
	expect.NoError(c.t, add(mgr))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	c.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			c.t.Errorf("running the controllers of %s: %v", c.id, err)
		}
	})
}

// startBroker runs the broker in the cluster, and returns its URL.
func (c *cluster) startBroker() (url string) {
	c.t.Helper()
	c.run(func(mgr ctrl.Manager) error {
		rest, err := program.Add(mgr, program.Parts{
			Namespace: broker.SystemNamespace, Identity: identity{}, CatchUp: program.DefaultCatchUp, Clock: clock.RealClock{}, Workers: 8, Log: logr.Discard(),
		})
		if err != nil {
			return err
		}
		rest.Synced()
		server := httptest.NewUnstartedServer(rest.Handler())
		server.StartTLS()
		c.t.Cleanup(func() { server.CloseClientConnections(); server.Close() })
		url = server.URL
		return nil
	})
	return url
}

// startAgent runs the cluster's agent, which consumes and lends.
func (c *cluster) startAgent(url string) {
	c.t.Helper()
	//nolint:gosec // The server of the test has no certificate of its own.
	calls, err := protocol.NewClient(url, &tls.Config{InsecureSkipVerify: true, ServerName: c.id}, logr.Discard())
	expect.NoError(c.t, err)
	c.run(func(mgr manager.Manager) error {
		return agent.Add(c.t.Context(), mgr, agent.Options{
			ClusterID: c.id, Namespace: broker.SystemNamespace, Endpoint: c.config.Host, Broker: connection{calls}, Grants: c.grants, VirtualNodes: c.driver,
			Clock: clock.RealClock{}, Interval: 2 * time.Second, Lending: true,
		})
	})
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	s := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(s), broker.AddToScheme(s)))
	return s
}

// connection is an agent's connection to the broker.
type connection struct{ *protocol.Client }

func (c connection) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	_, err := c.Client.PublishAdvertisement(ctx, spec)
	return err
}

// identity authenticates a call by the server name of its connection.
type identity struct{}

func (identity) TLSConfig() *tls.Config { return nil }

func (identity) Join(context.Context, protocol.JoinRequest) (protocol.JoinResponse, error) {
	return protocol.JoinResponse{}, errors.New("all clusters have joined")
}

func (identity) Authenticate(_ context.Context, state *tls.ConnectionState) (string, error) {
	return state.ServerName, nil
}

func (identity) Certified(_ context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error) {
	return state.ServerName, state.ServerName, nil
}
