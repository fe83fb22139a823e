package overflow_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/discovery"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/component-base/configz"
	framework "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const schedulerConfig = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: 500, burst: 1000}
leaderElection: {leaderElect: false}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 1
profiles:
- schedulerName: spillway-scheduler
  plugins: &plugins
    multiPoint:
      enabled:
      - name: Overflow
        weight: 20
    filter:
      enabled:
      - name: Overflow
    bind:
      enabled:
      - name: Overflow
  pluginConfig:
  - name: Overflow
    args:
      apiVersion: broker.fluidos.eu/v1alpha1
      kind: OverflowArgs
      overflow: AfterPreemption
      gangTimeout: 6s
      refusePodResources: true
      ownerKinds:
      - {group: batch.example.com, kind: Run, resource: runs}
      - {group: batch.example.com, kind: Hidden, resource: hiddens}
- schedulerName: spillway-before
  plugins:
    <<: *plugins
    postFilter:
      enabled:
      - name: Overflow
  pluginConfig:
  - name: Overflow
    args:
      apiVersion: broker.fluidos.eu/v1alpha1
      kind: OverflowArgs
      overflow: BeforePreemption
      decisionTimeout: 15s
- schedulerName: spillway-patient
  plugins:
    <<: *plugins
    postFilter:
      enabled:
      - name: Overflow
  pluginConfig:
  - name: Overflow
    args:
      apiVersion: broker.fluidos.eu/v1alpha1
      kind: OverflowArgs
      overflow: BeforePreemption
      decisionTimeout: 10m
- schedulerName: spillway-later
  plugins:
    <<: *plugins
  pluginConfig:
  - name: Overflow
    args:
      apiVersion: broker.fluidos.eu/v1alpha1
      kind: OverflowArgs
      askAfter: 5s
- schedulerName: default-scheduler
`

// testCluster is an API server with a real scheduler; the test acts as kubelet,
// controllers and agent.
type testCluster struct {
	client.Client
	t      *testing.T
	config *rest.Config
	// web is the Reservation of Deployment web, and ofWeb makes a pod its.
	web   *broker.Reservation
	ofWeb func(*corev1.Pod)
	// minor of the API server. native: gangs are those of Kubernetes itself, instead of the
	// coscheduling plugins'.
	minor  compatibility.Minor
	native bool
	// stopScheduler ends the scheduler that was started last. reserved is the number of pods of
	// a namespace that have a place there and wait in Permit.
	stopScheduler func()
	reserved      func(namespace string) int
	// plugin is that of the profile spillway-scheduler.
	plugin framework.Plugin
	// schedulerHost is where the scheduler reaches the API server, if that is not config.Host.
	schedulerHost string
	// leads is what the schedulers that are started from now on know of the Lease; nil means that
	// they know none.
	leads func() bool
}

func startTestCluster(t *testing.T, apiServerFlags ...string) *testCluster {
	config := controlplane.StartBare(t, apiServerFlags...)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	server, err := discovery.NewDiscoveryClientForConfig(config)
	expect.NoError(t, err)
	minor, err := compatibility.Of(server)
	expect.NoError(t, err)
	return &testCluster{Client: c, t: t, config: config, minor: minor}
}

// overrideFeatures is what main does before it adds flags.
var overrideFeatures = sync.OnceValue(overflow.OverrideFeatures)

// startScheduler runs kube-scheduler with the plugin, and with what the chart allows it.
func (c *testCluster) startScheduler() {
	c.t.Helper()
	c.grantRoles()
	c.runScheduler()
}

// runScheduler runs kube-scheduler with the plugin: one at a time in a process.
func (c *testCluster) runScheduler() {
	c.t.Helper()
	dir := c.t.TempDir()
	kubeconfig, configFile := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "config.yaml")
	access := clientcmdapi.NewConfig()
	access.Clusters["c"] = &clientcmdapi.Cluster{Server: cmp.Or(c.schedulerHost, c.config.Host), CertificateAuthorityData: c.config.CAData}
	access.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: c.config.CertData, ClientKeyData: c.config.KeyData,
		Impersonate: broker.SchedulerName, ImpersonateGroups: []string{"system:authenticated"}}
	access.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	access.CurrentContext = "x"
	expect.NoError(c.t, clientcmd.WriteToFile(*access, kubeconfig))
	expect.NoError(c.t, os.WriteFile(configFile, fmt.Appendf(nil, schedulerConfig, kubeconfig), 0o600))
	expect.NoError(c.t, overrideFeatures())
	opts := options.NewOptions()
	opts.ConfigFile = configFile
	opts.SecureServing.BindPort = 0
	expect.NoError(c.t, opts.Flags.FlagSet("feature gate").Set("emulated-version", c.minor.String()))
	expect.NoError(c.t, opts.ComponentGlobalsRegistry.Set())
	ctx, cancel := context.WithCancel(context.Background())
	leads := c.leads
	if leads == nil {
		leads = func() bool { return false }
	}
	completed, sched, err := app.Setup(ctx, opts, app.WithPlugin(overflow.Name,
		func(ctx context.Context, args runtime.Object, handle framework.Handle) (framework.Plugin, error) {
			plugin, err := overflow.New(ctx, args, handle, c.minor, leads)
			if handle.ProfileName() == broker.SchedulerName {
				c.plugin = plugin
			}
			return plugin, err
		}))
	expect.NoError(c.t, err)
	c.reserved = func(namespace string) (n int) {
		sched.Profiles[broker.SchedulerName].IterateOverWaitingPods(func(w framework.WaitingPod) {
			if w.GetPod().Namespace == namespace {
				n++
			}
		})
		return n
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = app.Run(ctx, completed, sched) // always ends with an error
	}()
	c.stopScheduler = sync.OnceFunc(func() {
		cancel()
		<-ended
		configz.Delete("componentconfig") // the scheduler registers it once
	})
	c.t.Cleanup(c.stopScheduler)
}

// grantRoles grants the scheduler what the chart does: the roles of kube-scheduler,
// and what the plugin reads and writes.
func (c *testCluster) grantRoles() {
	c.t.Helper()
	c.create(&rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: broker.SchedulerName},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{broker.Group}, Resources: []string{"reservations"}, Verbs: []string{"list", "watch", "create", "patch"}},
			{APIGroups: []string{broker.Group}, Resources: []string{"overflowpolicies", "reservationinstructions"}, Verbs: []string{"list", "watch"}},
			{APIGroups: []string{broker.Group}, Resources: []string{"overflowpolicies/status"}, Verbs: []string{"patch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"patch"}},
			{APIGroups: []string{""}, Resources: []string{"pods/eviction"}, Verbs: []string{"create"}},
			{APIGroups: []string{"scheduling.x-k8s.io"}, Resources: []string{"podgroups"}, Verbs: []string{"list", "watch"}},
			{APIGroups: []string{"scheduling.k8s.io"}, Resources: []string{"podgroups", "workloads"}, Verbs: []string{"list", "watch"}},
			{APIGroups: []string{"batch"}, Resources: []string{"jobs"}, Verbs: []string{"list", "watch"}},
			{APIGroups: []string{"batch.example.com"}, Resources: []string{"runs"}, Verbs: []string{"get"}},
		},
	})
	for _, role := range []string{"system:kube-scheduler", "system:volume-scheduler", broker.SchedulerName} {
		c.create(&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "spillway:" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: broker.SchedulerName}},
		})
	}
}

// rule is a test with an opted-in namespace of its own.
type rule struct {
	name string
	run  func(c *testCluster, namespace string)
}

// runRules runs one rule after another: a node that one adds would wake the pods of others. None
// leaves a pod that the scheduler would try again while another counts attempts.
func (c *testCluster) runRules(rules []rule) {
	for i, rule := range rules {
		c.t.Run(rule.name, func(t *testing.T) {
			of := *c
			of.t = t
			namespace := fmt.Sprint("rule-", i)
			of.namespace(namespace, optIn)
			defer func() {
				expect.NoError(t, c.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace(namespace), client.MatchingFields{"spec.nodeName": ""}, client.GracePeriodSeconds(0)))
			}()
			rule.run(&of, namespace)
		})
	}
}

func (c *testCluster) create(obj client.Object) {
	c.t.Helper()
	expect.NoError(c.t, c.Create(c.t.Context(), obj))
}

func (c *testCluster) namespace(name string, labels map[string]string) {
	c.t.Helper()
	c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}})
}

var optIn = map[string]string{broker.LabelOverflow: broker.OverflowEnabled}

// node creates a Ready node without the not-ready taint of the API server, which
// the node lifecycle controller would remove.
func (c *testCluster) node(name, cpu string, labels map[string]string, taints ...corev1.Taint) {
	c.t.Helper()
	size := expect.Resources("cpu", cpu, "memory", "16Gi", "pods", "110")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	c.create(node)
	node.Status = corev1.NodeStatus{Capacity: size, Allocatable: size, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	expect.NoError(c.t, c.Status().Update(c.t.Context(), node))
	node.Spec.Taints = taints
	expect.NoError(c.t, c.Update(c.t.Context(), node))
}

func (c *testCluster) virtualNode(cluster string) {
	c.t.Helper()
	c.node(broker.VirtualNodeName(cluster), "100",
		map[string]string{broker.LabelProvider: cluster, broker.LabelNodeType: broker.NodeTypeVirtual},
		corev1.Taint{Key: broker.TaintOverflow, Value: cluster, Effect: corev1.TaintEffectNoSchedule})
}

func schedulerPod(namespace, name, cpu string, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 broker.SchedulerName,
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers:                    []corev1.Container{{Name: "main", Image: "none", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}},
		},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

func tolerating(cluster string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{
			Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: cluster, Effect: corev1.TaintEffectNoSchedule})
	}
}

// deployment creates a Deployment and its ReplicaSet, and returns a function that
// makes a pod theirs.
func (c *testCluster) deployment(namespace, name string) (*appsv1.Deployment, func(*corev1.Pod)) {
	c.t.Helper()
	labels := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: schedulerPod(namespace, name, "1").Spec}
	template.Spec.TerminationGracePeriodSeconds = nil
	selector := &metav1.LabelSelector{MatchLabels: labels}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: appsv1.DeploymentSpec{Selector: selector, Template: template}}
	c.create(d)
	rs := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-1", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "Deployment", Name: d.Name, UID: d.UID, Controller: ptr.To(true)},
		}},
		Spec: appsv1.ReplicaSetSpec{Selector: selector, Template: template},
	}
	c.create(rs)
	return d, func(p *corev1.Pod) {
		p.Labels = labels
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: rs.Name, UID: rs.UID, Controller: ptr.To(true)}}
	}
}

// pods returns the pods of a namespace by node; "" are the pending ones.
func (c *testCluster) pods(namespace, prefix string) map[string][]*corev1.Pod {
	c.t.Helper()
	var list corev1.PodList
	expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(namespace)))
	byNode := map[string][]*corev1.Pod{}
	for i := range list.Items {
		if p := &list.Items[i]; strings.HasPrefix(p.Name, prefix) {
			byNode[p.Spec.NodeName] = append(byNode[p.Spec.NodeName], p)
		}
	}
	return byNode
}

// expectPods waits for the pods with a prefix to be on these nodes.
func (c *testCluster) expectPods(namespace, prefix string, want map[string]int) {
	c.t.Helper()
	expect.Eventually(c.t, "the nodes of "+prefix, func() (bool, string) {
		got := map[string]int{}
		for node, pods := range c.pods(namespace, prefix) {
			got[node] = len(pods)
		}
		return maps.Equal(got, want), fmt.Sprintf("got %v, want %v", got, want)
	})
}

// expectReservation waits for the one Reservation of an owner to request count
// pods.
func (c *testCluster) expectReservation(namespace, owner string, count int32) *broker.Reservation {
	c.t.Helper()
	var found *broker.Reservation
	expect.Eventually(c.t, "the Reservation of "+owner, func() (bool, string) {
		var list broker.ReservationList
		if err := c.List(c.t.Context(), &list, client.InNamespace(namespace)); err != nil {
			return false, err.Error()
		}
		found = nil
		for i := range list.Items {
			if strings.HasPrefix(list.Items[i].Name, owner+"-") && list.Items[i].DeletionTimestamp == nil {
				if found != nil {
					c.t.Fatalf("%s has several Reservations: %s and %s", owner, found.Name, list.Items[i].Name)
				}
				found = &list.Items[i]
			}
		}
		if found == nil {
			return false, "not found"
		}
		var got int32
		for _, set := range found.Spec.PodSets {
			got += set.Count
		}
		return got == count, fmt.Sprintf("requests %d pods, want %d", got, count)
	})
	return found
}

// expectEvent waits for an event of a reason on a pod (any, if pod is "") whose message
// has all parts.
func (c *testCluster) expectEvent(namespace, pod, reason string, parts ...string) {
	c.t.Helper()
	expect.Eventually(c.t, "event "+reason+" on "+pod, func() (bool, string) {
		var list eventsv1.EventList
		expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(namespace)))
		var messages []string
		for _, e := range list.Items {
			if pod != "" && e.Regarding.Name != pod || e.Reason != reason {
				continue
			}
			if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(e.Note, part) }) {
				return true, ""
			}
			messages = append(messages, e.Note)
		}
		return false, fmt.Sprintf("want %q, got %q", parts, messages)
	})
}

// expectCondition waits for a pod to have condition Overflow with a status, a reason and parts of its message.
func (c *testCluster) expectCondition(namespace, pod string, status corev1.ConditionStatus, reason string, parts ...string) {
	c.t.Helper()
	expect.Eventually(c.t, "the condition of "+pod, func() (bool, string) {
		_, got := podutil.GetPodCondition(&c.getPod(namespace, pod).Status, broker.PodOverflow)
		return got != nil && got.Status == status && got.Reason == reason &&
			!slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(got.Message, part) }), fmt.Sprintf("want %s %s %q, got %+v", status, reason, parts, got)
	})
}

// messageDeadline is longer than the gate holds a pod that was tried before the scheduler
// has seen what its message is to be about: it watches each kind of object separately.
const messageDeadline = 3 * time.Minute

// expectMessage waits for the pod to be unschedulable with a message.
func (c *testCluster) expectMessage(namespace, pod, want string) {
	c.t.Helper()
	expect.EventuallyWithin(c.t, messageDeadline, "the message of "+pod, func() (bool, string) {
		message, ok := c.message(namespace, pod)
		return ok && strings.Contains(message, want), fmt.Sprintf("want %q, got %q", want, message)
	})
}

// expectOtherMessage waits for the pod to be unschedulable without a message.
func (c *testCluster) expectOtherMessage(namespace, pod, unwanted string) {
	c.t.Helper()
	expect.EventuallyWithin(c.t, messageDeadline, "another message of "+pod, func() (bool, string) {
		message, ok := c.message(namespace, pod)
		return ok && !strings.Contains(message, unwanted), message
	})
}

// message returns why a pod is unschedulable; ok is false if it is not, or was not tried yet.
func (c *testCluster) message(namespace, pod string) (message string, ok bool) {
	c.t.Helper()
	_, scheduled := podutil.GetPodCondition(&c.getPod(namespace, pod).Status, corev1.PodScheduled)
	if scheduled == nil {
		return "", false
	}
	return scheduled.Message, scheduled.Status == corev1.ConditionFalse
}

// setStatus writes a status as the agent does.
func (c *testCluster) setStatus(r *broker.Reservation, status broker.ReservationStatus) {
	c.t.Helper()
	expect.Eventually(c.t, "the status to be written", func() (bool, string) {
		if err := c.Get(c.t.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			return false, err.Error()
		}
		r.Status = status
		r.Status.ID = "rome-" + string(r.UID)
		err := c.Status().Update(c.t.Context(), r)
		return err == nil, fmt.Sprint(err)
	})
}

// tolerate lets pods tolerate the virtual node of paris as the agent does.
func (c *testCluster) tolerate(pods []*corev1.Pod) {
	c.t.Helper()
	for _, p := range pods {
		before := p.DeepCopy()
		tolerating("paris")(p)
		expect.NoError(c.t, c.Patch(c.t.Context(), p, client.StrategicMergeFrom(before)))
	}
}

// grantedIn returns the status of a Reservation that is granted in a cluster.
func grantedIn(r *broker.Reservation, cluster string, count int32) broker.ReservationStatus {
	set := r.Spec.PodSets[0]
	set.Count = count
	return broker.ReservationStatus{Phase: broker.ReservationActive, Allocations: []broker.Allocation{
		{Cluster: cluster, PodSets: []broker.PodSet{set}, PricePerHour: "0.20 EUR", Accepted: true, VirtualNodeReady: true}}}
}

// allGrantedIn returns the status of a Reservation of which a cluster has granted all pods of
// these sets.
func allGrantedIn(cluster string, sets ...broker.PodSet) broker.ReservationStatus {
	return broker.ReservationStatus{Phase: broker.ReservationActive, Allocations: []broker.Allocation{
		{Cluster: cluster, PodSets: sets, Accepted: true, VirtualNodeReady: true}}}
}

// refused returns the status of a Reservation that these clusters rejected.
func refused(clusters ...string) broker.ReservationStatus {
	s := broker.ReservationStatus{Phase: broker.ReservationPending, Decision: &broker.Decision{}, Conditions: []metav1.Condition{{
		Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: "InsufficientCapacity", Message: "no cluster has enough capacity", LastTransitionTime: metav1.Now()}}}
	for _, c := range clusters {
		s.Decision.Rejections = append(s.Decision.Rejections, broker.ClusterRejection{Cluster: c, Reason: "NoFit", Message: "no node of " + c + " has 300m free."})
	}
	return s
}

var paris = broker.VirtualNodeName("paris")

// TestOverflow runs one scenario against a real scheduler, from a cluster where
// Spillway is not installed to one that has no node. The steps build on each
// other.
func TestOverflow(t *testing.T) {
	c := startTestCluster(t)
	c.namespace("shop", optIn)
	c.node("home", "1", nil)
	c.startScheduler()
	for _, step := range []struct {
		name string
		run  func(*testCluster)
	}{
		{"scheduling works without the CRDs", withoutCRDs},
		{"one Reservation is created per owner and shape", oneReservation},
		{"a refusal is reported with the reason of each provider", refusal},
		{"a grant admits its number of its own pods", grantAdmits},
		{"a released slot is used again without a request", slotReused},
		{"more pods raise the count, and local nodes are preferred", countRaised},
		{"a Reservation that is being deleted is created again", recreated},
		{"a pod that cannot overflow gets an event and no Reservation", cannotOverflow},
		{"an OverflowPolicy limits requests", policyLimits},
		{"there is no other Reservation", noOthers},
		{"a cluster without nodes overflows", withoutNodes},
	} {
		if !t.Run(step.name, func(t *testing.T) { c.t = t; step.run(c) }) {
			t.FailNow()
		}
	}
}

func withoutCRDs(c *testCluster) {
	c.create(schedulerPod("shop", "fits", "100m"))
	c.expectPods("shop", "fits", map[string]int{"home": 1})
	c.create(schedulerPod("shop", "early", "5"))
	c.expectMessage("shop", "early", "Insufficient cpu")
	controlplane.InstallCRDs(c.t, c.config)
	// The scheduler has looked for them with a growing delay.
	expect.EventuallyWithin(c.t, 3*time.Minute, "a Reservation", func() (bool, string) {
		var list broker.ReservationList
		expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace("shop")))
		return len(list.Items) > 0, "none"
	})
	r := c.expectReservation("shop", "shop", 1)
	if ref := r.OwnerReferences[0]; ref.Kind != "Namespace" || ref.Name != "shop" || ref.UID == demand.SharedOwner {
		c.t.Errorf("owned by %+v, want the namespace", ref)
	}
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod("shop", "early", "5")))
	expect.NoError(c.t, c.Delete(c.t.Context(), r)) // as the agent does
}

func oneReservation(c *testCluster) {
	var d *appsv1.Deployment
	d, c.ofWeb = c.deployment("shop", "web")
	create := func(from, to int) {
		for i := from; i < to; i++ {
			c.create(schedulerPod("shop", fmt.Sprint("web-", i), "300m", c.ofWeb))
		}
	}
	// A pod that was counted in the request for another one before it was tried has no event
	// of a request of its own: the count is not raised within 3 s, in which the last two are
	// tried.
	create(0, 3)
	c.expectPods("shop", "web", map[string]int{"home": 3})
	create(3, 4)
	c.expectEvent("shop", "web-3", "OverflowRequested", "Requested capacity for 1 pods of Deployment web")
	create(4, 6)
	c.expectPods("shop", "web", map[string]int{"home": 3, "": 3})
	c.web = c.expectReservation("shop", "web", 3)
	if ref := c.web.OwnerReferences[0]; ref.Kind != "Deployment" || ref.UID != d.UID || ptr.Deref(ref.Controller, true) || ptr.Deref(ref.BlockOwnerDeletion, true) {
		c.t.Errorf("owned by %+v, want Deployment web, not as controller", ref)
	}
	key, ok := demand.KeyOfReservation(c.web)
	if !ok || key.OwnerUID != d.UID || c.web.Labels[broker.LabelManagedBy] != broker.ManagedBySpillway {
		c.t.Errorf("labels %v", c.web.Labels)
	}
	if set := c.web.Spec.PodSets[0]; set.Name != demand.PodSetName || set.Requests.String() != "cpu 300m" {
		c.t.Errorf("pod set %+v", set)
	}
	for _, p := range c.pods("shop", "web")[""] {
		// The number in a pod's event is that of its request.
		c.expectEvent("shop", p.Name, "OverflowRequested", "Requested capacity for ", "pods of Deployment web", c.web.Name)
	}
	c.expectEvent("shop", "", "OverflowRequested", "Requested capacity for 3 pods of Deployment web", c.web.Name)
}

func refusal(c *testCluster) {
	c.setStatus(c.web, refused("berlin", "paris"))
	for _, p := range c.pods("shop", "web")[""] {
		// Preemption had its turn: there is no reason to try the pods again.
		c.expectEvent("shop", p.Name, "OverflowQueued", "berlin: no node of berlin", "paris: no node of paris", c.web.Name)
	}
	for _, p := range c.pods("shop", "web")[""] {
		c.expectCondition("shop", p.Name, corev1.ConditionFalse, "OverflowQueued", "berlin: no node of berlin has 300m free. 1 more")
	}
	c.setStatus(c.web, refused("berlin", "oslo", "paris"))
	c.expectEvent("shop", c.pods("shop", "web")[""][0].Name, "OverflowQueued", "oslo: no node of oslo")
}

func grantAdmits(c *testCluster) {
	c.virtualNode("paris")
	c.create(schedulerPod("shop", "stranger", "300m", func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	}))
	c.tolerate(c.pods("shop", "web")[""])
	for _, name := range []string{"stranger", c.pods("shop", "web")[""][0].Name} {
		c.expectMessage("shop", name, "had no reservation for this pod (provider paris), whose condition broker.fluidos.eu/Overflow says why it waits")
	}
	c.setStatus(c.web, grantedIn(c.web, "paris", 2))
	c.expectPods("shop", "web", map[string]int{"home": 3, paris: 2, "": 1})
	for _, p := range c.pods("shop", "web")[paris] {
		c.expectCondition("shop", p.Name, corev1.ConditionTrue, "Overflowed", paris, "provider paris")
	}
	last := c.pods("shop", "web")[""][0]
	c.expectEvent("shop", last.Name, "OverflowGranted", "2 in paris at 0.20 EUR per hour")
	for _, p := range c.pods("shop", "web")[paris] {
		if p.Labels[broker.LabelHold] != c.web.Status.ID {
			c.t.Errorf("%s: hold label %q, want %q", p.Name, p.Labels[broker.LabelHold], c.web.Status.ID)
		}
		if cost := p.Annotations[corev1.PodDeletionCost]; cost != broker.OverflowedDeletionCost {
			c.t.Errorf("%s: deletion cost %q, want %q", p.Name, cost, broker.OverflowedDeletionCost)
		}
	}
	c.expectPods("shop", "stranger", map[string]int{"": 1})
	c.web = c.expectReservation("shop", "web", 3)
	c.setStatus(c.web, grantedIn(c.web, "paris", 3))
	c.expectPods("shop", "web", map[string]int{"home": 3, paris: 3})
}

func slotReused(c *testCluster) {
	expect.NoError(c.t, c.Delete(c.t.Context(), c.pods("shop", "web")[paris][0]))
	c.create(schedulerPod("shop", "web-again", "300m", c.ofWeb, tolerating("paris")))
	c.expectPods("shop", "web", map[string]int{"home": 3, paris: 3})
	if got := c.expectReservation("shop", "web", 3); got.Generation != c.web.Generation {
		c.t.Errorf("the Reservation was changed")
	}
}

func countRaised(c *testCluster) {
	// The stranger and a new pod both fit on the new node: delete one of them.
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod("shop", "stranger", "1")))
	c.node("home-2", "310m", nil)
	// The scheduler has seen the node before it tries the others.
	c.create(schedulerPod("shop", "seen", "10m"))
	c.expectPods("shop", "seen", map[string]int{"home-2": 1})
	for i := range 3 {
		c.create(schedulerPod("shop", fmt.Sprint("web-more-", i), "300m", c.ofWeb))
	}
	c.expectPods("shop", "web-more", map[string]int{"home-2": 1, "": 2})
	c.web = c.expectReservation("shop", "web", 5)
	c.setStatus(c.web, grantedIn(c.web, "paris", 5))
	c.tolerate(c.pods("shop", "web-more")[""])
	c.expectPods("shop", "web", map[string]int{"home": 3, "home-2": 1, paris: 5})
}

func recreated(c *testCluster) {
	_, ofBatch := c.deployment("shop", "batch")
	c.create(schedulerPod("shop", "batch-0", "400m", ofBatch))
	first := c.expectReservation("shop", "batch", 1)
	first.Finalizers = []string{broker.FinalizerRequest}
	expect.NoError(c.t, c.Update(c.t.Context(), first))
	expect.NoError(c.t, c.Delete(c.t.Context(), first))
	c.create(schedulerPod("shop", "batch-1", "400m", ofBatch))
	c.expectMessage("shop", "batch-1", "Insufficient cpu")
	expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKeyFromObject(first), first))
	if first.Spec.PodSets[0].Count != 1 {
		c.t.Error("a Reservation was changed while it was being deleted")
	}
	first.Finalizers = nil
	expect.NoError(c.t, c.Update(c.t.Context(), first))
	if second := c.expectReservation("shop", "batch", 2); second.UID == first.UID {
		c.t.Error("it is still the same one")
	}
}

func cannotOverflow(c *testCluster) {
	c.create(schedulerPod("shop", "local", "300m", func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}}}
	}))
	c.expectEvent("shop", "local", "OverflowNotPossible", `volume "data"`)
	c.expectMessage("shop", "local", "cannot overflow")
	c.create(schedulerPod("shop", "pod-level", "300m", func(p *corev1.Pod) {
		p.Spec.Resources = &corev1.ResourceRequirements{Requests: expect.Resources("cpu", "400m")}
	}))
	c.expectEvent("shop", "pod-level", "OverflowNotPossible", "spec.resources")
	c.expectMessage("shop", "pod-level", "cannot overflow")
	c.namespace("private", nil)
	c.create(schedulerPod("private", "opted-out", "300m"))
	c.create(schedulerPod("shop", "opted-out", "300m", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }))
	c.expectMessage("private", "opted-out", "Insufficient cpu")
	c.expectMessage("shop", "opted-out", "Insufficient cpu")
}

func policyLimits(c *testCluster) {
	c.namespace("capped", map[string]string{broker.LabelOverflow: broker.OverflowEnabled, "team": "a"})
	probes := c.probes("capped", map[string]string{"team": "a"})
	c.create(&broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}},
		MaxResources:      &broker.ResourceQuantities{CPU: ptr.To(resource.MustParse("700m"))},
		Placement:         &broker.Placement{Regions: []string{"eu"}},
		Budget:            &broker.Budget{MaxPricePerHour: "2", Currency: "EUR"},
		Duration:          &metav1.Duration{Duration: time.Hour},
	}})
	c.expectLimited(probes, broker.SchedulerName)
	_, ofApp := c.deployment("capped", "app")
	for i := range 4 {
		c.create(schedulerPod("capped", fmt.Sprint("app-", i), "300m", ofApp))
	}
	r := c.expectReservation("capped", "app", 2)
	if r.Spec.Placement == nil || r.Spec.Placement.Regions[0] != "eu" || r.Spec.Budget == nil || r.Spec.Duration == nil {
		c.t.Errorf("the policy's terms are missing: %+v", r.Spec)
	}
	c.expectEvent("capped", "app-0", "OverflowCapped", "team-a", "2 of ") // 3 or 4, by how many it had seen
}

func noOthers(c *testCluster) {
	var list broker.ReservationList
	expect.NoError(c.t, c.List(c.t.Context(), &list))
	for _, r := range list.Items {
		// The stranger did not fit either, before it was deleted.
		if owner, _, _ := strings.Cut(r.Name, "-"); !slices.Contains([]string{"shop", "web", "batch", "app"}, owner) {
			c.t.Errorf("unexpected Reservation %s/%s", r.Namespace, r.Name)
		}
	}
}

func withoutNodes(c *testCluster) {
	expect.NoError(c.t, c.DeleteAllOf(c.t.Context(), &corev1.Node{}))
	expect.Eventually(c.t, "the nodes to be deleted", func() (bool, string) {
		var nodes corev1.NodeList
		expect.NoError(c.t, c.List(c.t.Context(), &nodes))
		return len(nodes.Items) == 0, fmt.Sprint(len(nodes.Items), " nodes")
	})
	c.namespace("empty", optIn)
	c.create(schedulerPod("empty", "lonely", "1"))
	c.expectReservation("empty", "empty", 1)
}
