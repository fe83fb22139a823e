package overflow_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionreviewv1 "k8s.io/api/admission/v1"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/component-base/metrics/legacyregistry"
	podutil "k8s.io/kubernetes/pkg/api/v1/pod"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

// TestRules runs one rule of the plugin after another against a real scheduler. Each has
// nodes that only its pods select.
func TestRules(t *testing.T) {
	c := startTestCluster(t, "feature-gates=GenericWorkload=true")
	controlplane.InstallCRDs(t, c.config)
	c.create(&schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "high"}, Value: 1000})
	c.installPodGroups()
	c.installKind("batch.example.com", "v1", "Run", "runs")
	c.installKind("batch.example.com", "v1", "Hidden", "hiddens")
	c.startScheduler()
	c.expectSynced(broker.SchedulerName, "spillway-before", patient, "spillway-later")
	c.runRules(slices.Concat(gangRules, []rule{
		{"guests are never preemption victims", guestsAreNoVictims},
		{"a pod of another scheduler that tolerates everything stays off virtual nodes", toleratesEverything},
		{"a namespace that opts out requests no more", optOut},
		{"a pod that did not fit overflows once its namespace opts in", optInLater},
		{"a cap is first come, first served", firstCome},
		{"a cap of zero permits preemption", cappedPreempts},
		{"a cap for some pods permits preemption for the others", partlyCappedPreempts},
		{"a silent broker permits preemption", silentPreempts},
		{"a refusal permits preemption", refusedPreempts},
		{"a request that the API server rejects permits preemption", rejectedPreempts},
		{"a request that a quota forbids permits preemption", forbiddenPreempts},
		{"a pod that was not steered gets an event", notSteered},
		{"pods are retried only for capacity of their own", noFutileAttempts},
		{"pods that follow one that has not fit say so", heldUntried},
		{"a resized guest keeps its grant", resizedGuest},
		{"each of two Reservations is charged", twoReservations},
		{"a pod is tried with its new spec", toleratedLater},
		{"a failed binding leaves nothing on the pod", failedBinding},
		{"bare pods and Jobs of one shape share a Reservation", sharedReservation},
		{"a grant is not for pods of its shape that cannot overflow", sharedByAdmissible},
		{"a grant is not for pods of a namespace that has opted out", optOutOfGrant},
		{"a gang whose PodGroup requires fewer pods is requested as that", requiresFewer},
		{"a Reservation has the priority of the pods that wait", priorityReplaced},
		{"the runs of a CronJob share a Reservation", cronJob},
		{"the runs of a controller that a CRD defines share a Reservation", customChain},
		{"an owner that must not be read is the root owner", unreadableOwner},
		{"no pod of a group is bound alone while the API server serves no groups", groupsNotServed},
		{"a victim of preemption overflows", victimOverflows},
		{"a Deployment keeps its Reservation", rolloutAndScale},
		{"every overflowed pod has one event of what was granted", grantedOnce},
		{"of a crowd, one pod says at once what was requested, and those that wait for long", requestedOnce},
		{"an autoscaler can add a node first", autoscalerFirst},
		{"a pod that is steered stays off the virtual nodes of others", othersNodes},
		{"an OverflowPolicy is validated", policyRules},
		{"overflowed pods return home", returnsHome},
		{"a pod whose replacement overflows again rests", overflowsAgain},
		{"a real node may be called as a virtual one", realNodeNamedVirtual},
		{"each metric is documented and counts", documentedMetrics},
		{"a pod takes no room of a nominated pod of another scheduler", staysBesideNominees},
		{"what is counted of pods and nodes is what the API server has", countedRight},
	}))
}

// expectSynced waits until the schedulers know the Reservations. Until then, pods are
// preempted, and tried again with each event, as without the plugin.
func (c *testCluster) expectSynced(schedulers ...string) {
	c.t.Helper()
	const ns = "probes"
	c.namespace(ns, optIn)
	c.poolNode(ns, "1")
	made := 0
	for _, scheduler := range schedulers {
		expect.Eventually(c.t, scheduler+" to know the Reservations", func() (bool, string) {
			probe := schedulerPod(ns, fmt.Sprint("probe-", made), "2", inPool(ns), func(p *corev1.Pod) { p.Spec.SchedulerName = scheduler })
			made++
			c.create(probe)
			c.expectMessage(ns, probe.Name, "Insufficient cpu")
			_, tried := podutil.GetPodCondition(&c.getPod(ns, probe.Name).Status, corev1.PodScheduled)
			expect.NoError(c.t, c.Delete(c.t.Context(), probe))
			return !strings.Contains(tried.Message, "Reservations are not synced"), tried.Message
		})
	}
}

// inPool makes a pod select the nodes of a pool.
func inPool(pool string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"pool": pool} }
}

func high(p *corev1.Pod) { p.Spec.PriorityClassName = "high" }

// poolNode creates a node of this cluster in a pool, and virtualPoolNode one of a
// provider.
func (c *testCluster) poolNode(pool, cpu string) string {
	c.t.Helper()
	c.node("home-"+pool, cpu, map[string]string{"pool": pool})
	return "home-" + pool
}

func (c *testCluster) virtualPoolNode(pool, cpu string) string {
	c.t.Helper()
	c.node(broker.VirtualNodeName(pool), cpu, map[string]string{broker.LabelProvider: pool, broker.LabelNodeType: broker.NodeTypeVirtual, "pool": pool},
		corev1.Taint{Key: broker.TaintOverflow, Value: pool, Effect: corev1.TaintEffectNoSchedule})
	return broker.VirtualNodeName(pool)
}

// app creates pods of a Deployment of its own that select and tolerate a pool.
func (c *testCluster) app(namespace, name, cpu string, pods int, change ...func(*corev1.Pod)) func(pods int) {
	c.t.Helper()
	_, of := c.deployment(namespace, name)
	made := 0
	more := func(pods int) {
		for range pods {
			c.create(schedulerPod(namespace, fmt.Sprint(name, "-", made), cpu, append(change, of, inPool(namespace), tolerating(namespace))...))
			made++
		}
	}
	more(pods)
	return more
}

func (c *testCluster) getPod(namespace, name string) *corev1.Pod {
	c.t.Helper()
	pod := &corev1.Pod{}
	expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKey{Namespace: namespace, Name: name}, pod))
	return pod
}

func guestsAreNoVictims(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "1")
	c.app(ns, "guest", "1", 1)
	r := c.expectReservation(ns, "guest", 1)
	c.setStatus(r, grantedIn(r, ns, 1))
	c.expectPods(ns, "guest", map[string]int{node: 1})
	// Its grant exceeds what the node has, as after a grant that is not lowered yet.
	c.app(ns, "important", "1", 1, high)
	r = c.expectReservation(ns, "important", 1)
	if r.Spec.Priority != 1000 {
		c.t.Errorf("the Reservation has priority %d, want that of its pods", r.Spec.Priority)
	}
	c.setStatus(r, grantedIn(r, ns, 1))
	c.expectMessage(ns, "important-0", "Insufficient cpu")
	expect.Consistently(c.t, 2*time.Second, "the guest to stay", func() (bool, string) {
		pods := c.pods(ns, "guest")[node]
		return len(pods) == 1 && pods[0].DeletionTimestamp == nil, fmt.Sprint(pods)
	})
	if nominated := c.getPod(ns, "important-0").Status.NominatedNodeName; nominated != "" {
		c.t.Errorf("nominated to %s", nominated)
	}
}

// toleratesEverything: an operator's pod of the default scheduler, of high priority. As its
// author wrote it, it evicts a guest, and in a cluster with the chart cannot be bound
// nevertheless; as the webhook changes it, it leaves virtual nodes alone.
func toleratesEverything(c *testCluster, ns string) {
	c.create(schedulerPod(ns, "busy", "1", inPool(ns), high))
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "1")
	c.expectPods(ns, "busy", map[string]int{home: 1})
	c.guests(ns, "guest", virtual, 1)
	operator := func(name string) *corev1.Pod {
		return schedulerPod(ns, name, "1", inPool(ns), high, func(p *corev1.Pod) {
			p.Spec.SchedulerName, p.Spec.Tolerations = corev1.DefaultSchedulerName, []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		})
	}
	changed := operator("changed")
	avoidVirtualNodes(c.t, changed)
	c.create(changed)
	c.expectMessage(ns, "changed", "Insufficient cpu")
	c.expectNoMove(ns, "guest", "the guest stays", map[string]int{virtual: 1})
	if pod := c.getPod(ns, "changed"); pod.Spec.NodeName != "" || pod.Status.NominatedNodeName != "" {
		c.t.Errorf("bound to %q, nominated to %q", pod.Spec.NodeName, pod.Status.NominatedNodeName)
	}
	c.create(operator("unchanged"))
	c.expectPods(ns, "unchanged", map[string]int{virtual: 1})
	c.expectPods(ns, "guest", map[string]int{})
}

// avoidVirtualNodes changes a pod as the webhook does.
func avoidVirtualNodes(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	raw, err := json.Marshal(pod)
	expect.NoError(t, err)
	review, err := json.Marshal(admissionreviewv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: admissionreviewv1.SchemeGroupVersion.String(), Kind: "AdmissionReview"},
		Request: &admissionreviewv1.AdmissionRequest{UID: "1", Operation: admissionreviewv1.Create,
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: raw}},
	})
	expect.NoError(t, err)
	request := httptest.NewRequest(http.MethodPost, steering.AvoidPath, bytes.NewReader(review))
	request.Header.Set("Content-Type", "application/json")
	answer := httptest.NewRecorder()
	steering.AvoidHandler(steering.Options{}).ServeHTTP(answer, request)
	var reviewed admissionreviewv1.AdmissionReview
	expect.NoError(t, json.Unmarshal(answer.Body.Bytes(), &reviewed))
	var operations []struct {
		Path  string           `json:"path"`
		Value *corev1.Affinity `json:"value"`
	}
	expect.NoError(t, json.Unmarshal(reviewed.Response.Patch, &operations))
	if len(operations) != 1 || operations[0].Path != "/spec/affinity" {
		t.Fatalf("operations %+v", operations)
	}
	pod.Spec.Affinity = operations[0].Value
}

// setOverflow opts a namespace in or out.
func (c *testCluster) setOverflow(ns, value string) {
	c.t.Helper()
	var namespace corev1.Namespace
	expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKey{Name: ns}, &namespace))
	namespace.Labels[broker.LabelOverflow] = value
	expect.NoError(c.t, c.Update(c.t.Context(), &namespace))
}

func optOut(c *testCluster, ns string) {
	c.app(ns, "web", "1", 2)
	r := c.expectReservation(ns, "web", 2)
	const waits = "waiting for capacity in another cluster"
	for i := range 2 {
		c.expectMessage(ns, fmt.Sprint("web-", i), waits)
	}
	c.setOverflow(ns, broker.OverflowDisabled)
	// The scheduler watches Reservations and namespaces separately: it has seen this change
	// before the next one.
	for i := range 2 {
		c.expectOtherMessage(ns, fmt.Sprint("web-", i), waits)
	}
	expect.NoError(c.t, c.Delete(c.t.Context(), r)) // as the agent does after its grace period
	expect.Consistently(c.t, 3*time.Second, "no Reservation", func() (bool, string) {
		var list broker.ReservationList
		expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
		return len(list.Items) == 0, fmt.Sprint(list.Items)
	})
	c.setOverflow(ns, broker.OverflowEnabled)
	c.expectReservation(ns, "web", 2)
}

// optInLater: the pods were tried before, and nothing else makes the scheduler try them again.
func optInLater(c *testCluster, ns string) {
	late := ns + "-late"
	c.namespace(late, nil)
	c.app(late, "web", "1", 2)
	for i := range 2 {
		c.expectMessage(late, fmt.Sprint("web-", i), "nodes are available")
	}
	c.setOverflow(late, broker.OverflowEnabled)
	c.expectReservation(late, "web", 2)
	expect.NoError(c.t, c.DeleteAllOf(c.t.Context(), &corev1.Pod{}, client.InNamespace(late), client.GracePeriodSeconds(0)))
}

// cap creates an OverflowPolicy that limits the CPU of a namespace, and waits until a
// scheduler knows it.
func (c *testCluster) cap(ns, cpu, scheduler string) *broker.OverflowPolicy {
	c.t.Helper()
	probes := c.probes(ns, nil)
	policy := &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: ns}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{
			{Key: corev1.LabelMetadataName, Operator: metav1.LabelSelectorOpIn, Values: []string{ns, probes}}}},
		MaxResources: &broker.ResourceQuantities{CPU: ptr.To(resource.MustParse(cpu))},
	}}
	c.create(policy)
	c.expectLimited(probes, scheduler)
	return policy
}

// probes creates a namespace for expectLimited.
func (c *testCluster) probes(ns string, labels map[string]string) string {
	c.t.Helper()
	all := maps.Clone(optIn)
	maps.Copy(all, labels)
	c.namespace(ns+"-probes", all)
	return ns + "-probes"
}

// expectLimited waits until a scheduler knows the OverflowPolicy of a namespace: what it
// requests before that is not limited, and it watches policies and pods separately. The
// limits of each namespace are its own, so that the probes are charged to no other.
func (c *testCluster) expectLimited(probes, scheduler string) {
	c.t.Helper()
	made := 0
	expect.Eventually(c.t, "the policy to be known", func() (bool, string) {
		made++
		// Each has a request of its own, and fits no node.
		probe := schedulerPod(probes, fmt.Sprint("probe-", made), fmt.Sprint(1000+made), func(p *corev1.Pod) { p.Spec.SchedulerName = scheduler })
		c.create(probe)
		result := ""
		expect.Eventually(c.t, "a request for "+probe.Name, func() (bool, string) {
			var list eventsv1.EventList
			expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(probes)))
			for _, e := range list.Items {
				if e.Regarding.Name == probe.Name && (e.Reason == "OverflowCapped" || e.Reason == "OverflowRequested") {
					result = e.Reason
				}
			}
			return result != "", "neither made nor limited"
		})
		expect.NoError(c.t, c.Delete(c.t.Context(), probe))
		return result == "OverflowCapped", result
	})
	expect.NoError(c.t, c.DeleteAllOf(c.t.Context(), &broker.Reservation{}, client.InNamespace(probes)))
}

// firstCome: two Deployments wait for what a policy allows, which is less than both need. The
// first takes what it needs, and the other one hears of the rest.
func firstCome(c *testCluster, ns string) {
	policy := c.cap(ns, "0", broker.SchedulerName)
	c.app(ns, "first", "1", 4)
	for i := range 4 {
		c.expectEvent(ns, fmt.Sprint("first-", i), "OverflowCapped", "0 of ")
	}
	former := policy.DeepCopy() // without what its status says meanwhile
	policy.Spec.MaxResources.CPU = ptr.To(resource.MustParse("5"))
	expect.NoError(c.t, c.Patch(c.t.Context(), policy, client.MergeFrom(former)))
	// It is requested again 15 s later.
	first := c.expectReservation(ns, "first", 4)
	c.app(ns, "second", "1", 4)
	second := c.expectReservation(ns, "second", 1)
	// Its pods have not changed since, and yet have another event.
	c.expectEvent(ns, "second-0", "OverflowCapped", "1 of ")
	for i := range 4 {
		expect.NoError(c.t, c.Delete(c.t.Context(), c.getPod(ns, fmt.Sprint("first-", i))))
	}
	expect.Eventually(c.t, "the second one to have what the first had", func() (bool, string) {
		// As the agent does, again if it was requested before the pods had gone.
		expect.NoError(c.t, client.IgnoreNotFound(c.Delete(c.t.Context(), first)))
		expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKeyFromObject(second), second))
		return second.Spec.PodSets[0].Count == 4, fmt.Sprint(second.Spec.PodSets)
	})
}

// fullOfLow fills the one node of a pool with a pod of low priority, and creates one
// of high priority for a scheduler that requests overflow before preemption.
func (c *testCluster) fullOfLow(ns, scheduler string) {
	c.t.Helper()
	node := c.poolNode(ns, "1")
	c.create(schedulerPod(ns, "low", "1", inPool(ns)))
	c.expectPods(ns, "low", map[string]int{node: 1})
	c.app(ns, "important", "1", 1, high, func(p *corev1.Pod) { p.Spec.SchedulerName = scheduler })
}

func cappedPreempts(c *testCluster, ns string) {
	c.cap(ns, "0", patient)
	c.fullOfLow(ns, patient)
	c.expectPods(ns, "important", map[string]int{"home-" + ns: 1})
}

// partlyCappedPreempts: preemption is for the pod for which no capacity is requested. The
// other one waits.
func partlyCappedPreempts(c *testCluster, ns string) {
	c.cap(ns, "1", patient)
	node, away := c.poolNode(ns, "2"), c.virtualPoolNode(ns, "10")
	c.app(ns, "low", "1", 2)
	c.expectPods(ns, "low", map[string]int{node: 2})
	c.app(ns, "important", "1", 2, high, func(p *corev1.Pod) { p.Spec.SchedulerName = patient })
	r := c.expectReservation(ns, "important", 1)
	c.expectPods(ns, "important", map[string]int{node: 1, "": 1})
	expect.Consistently(c.t, 2*time.Second, "no preemption for the pod that capacity is requested for", func() (bool, string) {
		low := len(c.pods(ns, "low")[node])
		return low == 1, fmt.Sprintf("%d pods of low priority", low)
	})
	c.setStatus(r, grantedIn(r, ns, 1))
	c.expectPods(ns, "important", map[string]int{node: 1, away: 1})
	c.expectPods(ns, "low", map[string]int{node: 1})
}

func silentPreempts(c *testCluster, ns string) {
	watching, err := client.NewWithWatch(c.config, client.Options{Scheme: c.Scheme()})
	expect.NoError(c.t, err)
	pods, err := watching.Watch(c.t.Context(), &corev1.PodList{}, client.InNamespace(ns))
	expect.NoError(c.t, err)
	defer pods.Stop()
	c.fullOfLow(ns, "spillway-before")
	c.expectPods(ns, "important", map[string]int{"home-" + ns: 1})
	// The revisions of the API server order the request and the preemption.
	requestedAt := c.expectReservation(ns, "important", 1).ResourceVersion
	ctx, cancel := context.WithTimeout(c.t.Context(), time.Minute)
	defer cancel()
	defer context.AfterFunc(ctx, pods.Stop)()
	for e := range pods.ResultChan() {
		if pod, ok := e.Object.(*corev1.Pod); !ok || e.Type != watch.Deleted || pod.Name != "low" {
			continue
		} else if order, err := resourceversion.CompareResourceVersion(requestedAt, pod.ResourceVersion); err != nil || order >= 0 {
			c.t.Errorf("preempted at %s before another cluster was asked at %s (%v)", pod.ResourceVersion, requestedAt, err)
		}
		return
	}
	c.t.Error("no pod was preempted within a minute")
}

// patient is a scheduler that does not preempt while the broker is silent, in the time of a test.
const patient = "spillway-patient"

// refusedPreempts: pods are preempted at home once the broker has refused.
func refusedPreempts(c *testCluster, ns string) {
	c.fullOfLow(ns, patient)
	r := c.expectReservation(ns, "important", 1)
	expect.Consistently(c.t, 2*time.Second, "no preemption before the decision", func() (bool, string) {
		low := c.getPod(ns, "low")
		return low.DeletionTimestamp == nil, fmt.Sprint(low.Status)
	})
	c.setStatus(r, refused("oslo"))
	c.expectPods(ns, "important", map[string]int{"home-" + ns: 1})
	c.expectPods(ns, "low", map[string]int{})
}

// rejectedPreempts: the request is invalid, so that there will be no decision.
func rejectedPreempts(c *testCluster, ns string) {
	rule := admissionv1.RuleWithOperations{Operations: []admissionv1.OperationType{admissionv1.Create},
		Rule: admissionv1.Rule{APIGroups: []string{broker.Group}, APIVersions: []string{"*"}, Resources: []string{"reservations"}}}
	c.deny(ns, rule, "object.metadata.namespace != '"+ns+"'", "not this one")
	expect.Eventually(c.t, "the policy to be in force", func() (bool, string) {
		probe := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "probe"}, Spec: broker.ReservationSpec{
			RequestedResources: ptr.To(broker.FromList(expect.Resources("cpu", "1")))}}
		err := c.Create(c.t.Context(), probe)
		if err == nil {
			expect.NoError(c.t, c.Delete(c.t.Context(), probe))
		}
		return apierrors.IsInvalid(err), fmt.Sprint(err)
	})
	c.fullOfLow(ns, patient)
	c.expectPods(ns, "important", map[string]int{"home-" + ns: 1})
	c.expectEvent(ns, "important-0", "OverflowFailed", "not this one")
}

// forbiddenPreempts: a quota of the namespace allows no Reservation. The API server refuses all
// sorts of requests while it starts, so that only several refusals in a row count.
func forbiddenPreempts(c *testCluster, ns string) {
	none := corev1.ResourceList{"count/reservations." + broker.Group: resource.MustParse("0")}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: none}}
	c.create(quota)
	quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none} // as the quota controller does
	expect.NoError(c.t, c.Status().Update(c.t.Context(), quota))
	expect.Eventually(c.t, "the quota to be in force", func() (bool, string) {
		probe := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "probe"}, Spec: broker.ReservationSpec{
			RequestedResources: ptr.To(broker.FromList(expect.Resources("cpu", "1")))}}
		err := c.Create(c.t.Context(), probe)
		if err == nil {
			expect.NoError(c.t, c.Delete(c.t.Context(), probe))
		}
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"), fmt.Sprint(err)
	})
	c.fullOfLow(ns, patient)
	c.expectPods(ns, "important", map[string]int{"home-" + ns: 1})
	c.expectEvent(ns, "important-0", "OverflowFailed", "exceeded quota", "It is requested again")
}

// notSteered: the pod was created while the webhook was away.
func notSteered(c *testCluster, ns string) {
	c.create(schedulerPod(ns, "early", "1", inPool(ns), func(p *corev1.Pod) { p.Spec.SchedulerName = corev1.DefaultSchedulerName }))
	c.expectEvent(ns, "early", "OverflowNotPossible", "its scheduler is default-scheduler", "Delete it")
}

// attempts is how often the scheduler of this process tried a pod.
func attempts(t *testing.T) int {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	expect.NoError(t, err)
	n := 0
	for _, family := range families {
		if family.GetName() == "scheduler_schedule_attempts_total" {
			for _, m := range family.Metric {
				n += int(m.GetCounter().GetValue())
			}
		}
	}
	return n
}

// resize gives a node another amount of CPU.
func (c *testCluster) resize(name, cpu string) {
	c.t.Helper()
	var node corev1.Node
	expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKey{Name: name}, &node))
	node.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse(cpu)
	expect.NoError(c.t, c.Status().Update(c.t.Context(), &node))
}

func noFutileAttempts(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "1")
	c.create(schedulerPod(ns, "busy", "1", inPool(ns)))
	c.expectPods(ns, "busy", map[string]int{home: 1})
	began := time.Now()
	c.app(ns, "web", "1", 20)
	r := c.expectReservation(ns, "web", 20)
	for i := range 20 { // most are requested before they are tried, and tried for the first time within 2 s
		c.expectMessage(ns, fmt.Sprint("web-", i), "Insufficient cpu")
	}
	before := attempts(c.t)
	for i := range 5 {
		c.resize(virtual, fmt.Sprint(i+2))
	}
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "busy", "1")))
	c.expectPods(ns, "web", map[string]int{home: 1, "": 19})
	c.setStatus(r, grantedIn(r, ns, 3))
	c.expectPods(ns, "web", map[string]int{home: 1, virtual: 3, "": 16})
	// Those that nothing wakes are tried again, not within a minute: on a slow machine, these
	// are more attempts.
	minutes := int(time.Since(began) / time.Minute)
	if n := attempts(c.t) - before; n > 8+20*minutes {
		c.t.Errorf("%d attempts to schedule 4 pods, in %d min", n, minutes)
	}
}

// heldUntried: pods that follow one that has not fit are requested with it, without an
// attempt. While there is no grant, each is tried soon and says that it does not fit. Room
// at home, and a grant, are theirs as if they had been tried.
func heldUntried(c *testCluster, ns string) {
	virtual := c.virtualPoolNode(ns, "50")
	home := c.poolNode(ns, "1")
	c.create(schedulerPod(ns, "busy", "1", inPool(ns)))
	c.expectPods(ns, "busy", map[string]int{home: 1})
	more := c.app(ns, "web", "1", 1)
	c.expectMessage(ns, "web-0", "Insufficient cpu")
	more(5)
	r := c.expectReservation(ns, "web", 6)
	for i := range 6 {
		c.expectMessage(ns, fmt.Sprint("web-", i), "Insufficient cpu")
		c.expectEvent(ns, fmt.Sprint("web-", i), "OverflowRequested", r.Name)
	}
	more(4)
	c.resize(home, "3")
	c.expectPods(ns, "web", map[string]int{home: 2, "": 8})
	c.setStatus(r, grantedIn(r, ns, 8))
	c.expectPods(ns, "web", map[string]int{home: 2, virtual: 8})
	c.expectGranted(ns, r.Name, c.pods(ns, "web")[virtual])
}

func resizedGuest(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "10")
	more := c.app(ns, "web", "1", 1)
	r := c.expectReservation(ns, "web", 1)
	c.setStatus(r, grantedIn(r, ns, 1))
	c.expectPods(ns, "web", map[string]int{node: 1})
	guest := c.getPod(ns, "web-0")
	guest.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("500m")
	expect.NoError(c.t, c.SubResource("resize").Update(c.t.Context(), guest))
	more(1)
	c.expectReservation(ns, "web", 2)
	c.expectMessage(ns, "web-1", "had no reserved capacity left")
}

func twoReservations(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "10")
	more := c.app(ns, "web", "1", 1)
	r := c.expectReservation(ns, "web", 1)
	byHand := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "by-hand", Labels: maps.Clone(r.Labels)}, Spec: *r.Spec.DeepCopy()}
	c.create(byHand)
	c.setStatus(byHand, grantedIn(byHand, ns, 1))
	c.expectPods(ns, "web", map[string]int{node: 1})
	c.setStatus(r, grantedIn(r, ns, 1))
	more(1)
	c.expectPods(ns, "web", map[string]int{node: 2})
	holds := map[string]int{}
	for _, p := range c.pods(ns, "web")[node] {
		holds[p.Labels[broker.LabelHold]]++
	}
	if want := map[string]int{r.Status.ID: 1, byHand.Status.ID: 1}; !maps.Equal(holds, want) {
		c.t.Errorf("pods by hold %v, want %v", holds, want)
	}
}

// sharedByAdmissible: the shape does not tell that a pod needs a volume of this cluster.
func sharedByAdmissible(c *testCluster, ns string) {
	node := c.virtualPoolNode(ns, "10")
	bare := func(name string, change ...func(*corev1.Pod)) {
		c.create(schedulerPod(ns, name, "1", append(change, inPool(ns), tolerating(ns))...))
	}
	bare("first-0")
	bare("first-1")
	r := c.expectReservation(ns, ns, 2)
	c.setStatus(r, grantedIn(r, ns, 2))
	c.expectPods(ns, "first", map[string]int{node: 2})
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "first-1", "1")))
	c.expectPods(ns, "first", map[string]int{node: 1})
	bare("stays-0", func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{{Name: "shared", VolumeSource: corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "nfs.example.com", Path: "/"}}}}
	})
	c.expectEvent(ns, "stays-0", "OverflowNotPossible", `volume "shared"`)
	bare("second-0") // comes later, and uses the grant
	c.expectPods(ns, "second", map[string]int{node: 1})
	c.expectPods(ns, "stays", map[string]int{"": 1})
}

// optOutOfGrant: the grant is still used by another pod, and has room.
func optOutOfGrant(c *testCluster, ns string) {
	const waits = "waiting for capacity in another cluster"
	node := c.virtualPoolNode(ns, "10")
	more := c.app(ns, "web", "1", 2)
	r := c.expectReservation(ns, "web", 2)
	c.setStatus(r, grantedIn(r, ns, 2))
	c.expectPods(ns, "web", map[string]int{node: 2})
	more(1)
	c.expectReservation(ns, "web", 3)
	c.expectMessage(ns, "web-2", waits)
	c.setOverflow(ns, broker.OverflowDisabled)
	c.expectOtherMessage(ns, "web-2", waits)
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "web-1", "1")))
	more(1)
	c.expectMessage(ns, "web-3", "no reservation for this pod (provider "+ns+"), whose namespace has not opted in")
	c.expectPods(ns, "web", map[string]int{node: 1, "": 2})
	c.setOverflow(ns, broker.OverflowEnabled)
	c.expectPods(ns, "web", map[string]int{node: 2, "": 1})
}

// toleratedLater: the agent lets pods tolerate a virtual node that were not steered,
// once there is a grant, and possibly before the virtual node exists.
func toleratedLater(c *testCluster, ns string) {
	_, of := c.deployment(ns, "web")
	for i := range 10 {
		c.create(schedulerPod(ns, fmt.Sprint("web-", i), "1", of, inPool(ns)))
	}
	r := c.expectReservation(ns, "web", 10)
	c.setStatus(r, grantedIn(r, ns, 10))
	node := c.virtualPoolNode(ns, "10")
	for _, p := range c.pods(ns, "web")[""] {
		before := p.DeepCopy()
		tolerating(ns)(p)
		expect.NoError(c.t, c.Patch(c.t.Context(), p, client.StrategicMergeFrom(before)))
	}
	// Long before the retries of those that the queue had with their former spec.
	expect.EventuallyWithin(c.t, 45*time.Second, "all pods to be bound", func() (bool, string) {
		bound := len(c.pods(ns, "web")[node])
		return bound == 10, fmt.Sprint(bound, " are")
	})
}

// deny creates an admission policy that denies what does not meet an expression.
func (c *testCluster) deny(name string, rule admissionv1.RuleWithOperations, unless, message string) {
	c.t.Helper()
	c.create(&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: rule}}},
		Validations:      []admissionv1.Validation{{Expression: unless, Message: message}},
	}})
	c.create(&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny}}})
}

func failedBinding(c *testCluster, ns string) {
	c.virtualPoolNode(ns, "10")
	c.deny(ns, admissionv1.RuleWithOperations{Operations: []admissionv1.OperationType{admissionv1.Create},
		Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods/binding"}}},
		"object.target.name != '"+broker.VirtualNodeName(ns)+"'", "not here")
	expect.Eventually(c.t, "the policy to be in force", func() (bool, string) {
		probe := schedulerPod(ns, "probe", "1", func(p *corev1.Pod) { p.Spec.SchedulerName = "none" })
		if err := c.Create(c.t.Context(), probe); err != nil && !apierrors.IsAlreadyExists(err) {
			return false, err.Error()
		}
		err := c.SubResource("binding").Create(c.t.Context(), probe, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: broker.VirtualNodeName(ns)}})
		if err == nil {
			expect.NoError(c.t, c.Delete(c.t.Context(), probe))
		}
		return apierrors.IsInvalid(err) || apierrors.IsForbidden(err), fmt.Sprint(err)
	})
	c.app(ns, "web", "1", 1)
	r := c.expectReservation(ns, "web", 1)
	c.setStatus(r, grantedIn(r, ns, 1))
	c.expectEvent(ns, "web-0", "FailedScheduling", "not here")
	pod := c.getPod(ns, "web-0")
	if pod.Labels[broker.LabelHold] != "" || pod.Annotations[corev1.PodDeletionCost] != "" {
		c.t.Errorf("the pod has labels %v and annotations %v", pod.Labels, pod.Annotations)
	}
}

// othersNodes: the webhook adds the tolerations of the driver's virtual nodes. A cluster
// may have nodes with the same taint that are not Spillway's.
func othersNodes(c *testCluster, ns string) {
	driver := corev1.Toleration{Key: "driver.example.com/virtual-node", Operator: corev1.TolerationOpEqual, Value: "true", Effect: corev1.TaintEffectNoExecute}
	c.node("others-"+ns, "10", map[string]string{"pool": ns}, corev1.Taint{Key: driver.Key, Value: driver.Value, Effect: driver.Effect})
	steered := corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	tolerate := func(all ...corev1.Toleration) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, all...) }
	}
	c.create(schedulerPod(ns, "steered", "1", inPool(ns), tolerate(steered, driver)))
	c.expectMessage(ns, "steered", "tolerates only for virtual nodes of Spillway")
	c.create(schedulerPod(ns, "author", "1", inPool(ns), tolerate(driver, steered)))
	c.expectPods(ns, "author", map[string]int{"others-" + ns: 1})
	c.expectPods(ns, "steered", map[string]int{"": 1})
}

func autoscalerFirst(c *testCluster, ns string) {
	c.app(ns, "web", "1", 2, func(p *corev1.Pod) { p.Spec.SchedulerName = "spillway-later" })
	c.expectEvent(ns, "web-0", "OverflowDelayed", "within 5s")
	r := c.expectReservation(ns, "web", 2)
	// Creation times are in whole seconds.
	if after := r.CreationTimestamp.Sub(c.getPod(ns, "web-0").CreationTimestamp.Time); after < 4*time.Second {
		c.t.Errorf("requested after %s", after)
	}
}

// realNodeNamedVirtual: a node is virtual by its label and name. One of this cluster may
// have such a name: it has room for pods, and its pods need no capacity elsewhere.
func realNodeNamedVirtual(c *testCluster, ns string) {
	real := broker.VirtualNodeName("real-" + ns)
	c.node(real, "2100m", map[string]string{"pool": ns})
	virtual := c.virtualPoolNode(ns, "10")
	// The scheduler has seen the node before it tries the others.
	c.create(schedulerPod(ns, "seen", "100m", inPool(ns)))
	c.expectPods(ns, "seen", map[string]int{real: 1})
	c.app(ns, "web", "1", 3)
	c.expectPods(ns, "web", map[string]int{real: 2, "": 1})
	r := c.expectReservation(ns, "web", 1)
	c.setStatus(r, refused("oslo"))
	c.expectEvent(ns, "", "OverflowQueued", "oslo")
	// The gate opens for room on it.
	for _, p := range c.pods(ns, "web")[real] {
		expect.NoError(c.t, c.Delete(c.t.Context(), p))
		break
	}
	c.expectPods(ns, "web", map[string]int{real: 2})
	if living := c.expectReservation(ns, "web", 1); living.UID != r.UID {
		c.t.Error("the pods have got another Reservation")
	}
	// A label alone does not make a node virtual either.
	c.node("labelled-"+ns, "2", map[string]string{"pool": ns + "-2", broker.LabelProvider: ns})
	c.create(schedulerPod(ns, "other", "1", inPool(ns+"-2")))
	c.expectPods(ns, "other", map[string]int{"labelled-" + ns: 1})
	if n := len(c.pods(ns, "")[virtual]); n != 0 {
		c.t.Errorf("%d pods are on the virtual node", n)
	}
}

// countedRight: after all other rules, what the plugin has counted one event after the other is
// what a sum over the pods says.
func countedRight(c *testCluster, _ string) {
	expect.Eventually(c.t, "the counts to be those of the pods", func() (bool, string) {
		var nodes corev1.NodeList
		expect.NoError(c.t, c.List(c.t.Context(), &nodes))
		virtual := map[string]bool{}
		for _, n := range nodes.Items {
			virtual[n.Name] = n.Labels[broker.LabelProvider] != "" && n.Name == broker.VirtualNodeName(n.Labels[broker.LabelProvider])
		}
		var pods corev1.PodList
		expect.NoError(c.t, c.List(c.t.Context(), &pods))
		want := map[string]int64{}
		for i := range pods.Items {
			p := &pods.Items[i]
			node, hold := p.Spec.NodeName, p.Labels[broker.LabelHold]
			if node == "" || podutil.IsPodTerminal(p) {
				continue
			}
			want["pods on "+node]++
			for _, container := range p.Spec.Containers {
				want["CPU on "+node] += container.Resources.Requests.Cpu().MilliValue()
			}
			if !virtual[node] {
				continue
			}
			want[fmt.Sprintf("pods of %s charged to hold %q on %s", p.Namespace, hold, node)]++
			want[fmt.Sprintf("pods that use hold %q on %s", hold, node)]++
			if p.DeletionTimestamp == nil {
				want[fmt.Sprintf("living pods of hold %q", hold)]++
			}
		}
		diff := cmp.Diff(want, overflow.Counted(c.plugin))
		return diff == "" && len(want) > 0, diff
	})
}
