package overflow_test

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// installPodGroups installs the PodGroups of the coscheduling plugins, without their
// validation.
func (c *testCluster) installPodGroups() {
	c.t.Helper()
	c.installKind("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups")
}

// installKind installs a kind without validation.
func (c *testCluster) installKind(group, version, kind, plural string) {
	c.t.Helper()
	_, err := envtest.InstallCRDs(c.config, envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{kindOf(group, version, kind, plural)}})
	expect.NoError(c.t, err)
}

func kindOf(group, version, kind, plural string) *apiextensionsv1.CustomResourceDefinition {
	return &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + group, Annotations: map[string]string{"api-approved.kubernetes.io": "unapproved, for tests"}},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Kind: kind},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: version, Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{
				OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: ptr.To(true)}}}},
		},
	}
}

// gang creates a PodGroup or a Workload, and as many pods as it requires.
func (c *testCluster) gang(ns string, pods int) {
	c.t.Helper()
	c.expectNodes(ns)
	c.gangPods(ns, pods)
	c.describeGang(ns, pods)
}

// expectNodes waits until the scheduler has seen the nodes, which it watches separately.
func (c *testCluster) expectNodes(ns string) {
	c.t.Helper()
	probe := schedulerPod(ns, "first", "100", inPool(ns))
	c.create(probe)
	c.expectMessage(ns, probe.Name, "Insufficient cpu")
	expect.NoError(c.t, c.Delete(c.t.Context(), probe))
}

// podGroup creates a PodGroup that requires a number of pods.
func (c *testCluster) podGroup(ns, name string, pods int) {
	c.t.Helper()
	c.create(&unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": ns, "name": name}, "spec": map[string]any{"minMember": int64(pods)},
	}})
}

func (c *testCluster) describeGang(ns string, pods int) {
	c.t.Helper()
	basic, gang := map[string]any{"basic": map[string]any{}}, map[string]any{"gang": map[string]any{"minCount": int64(pods)}}
	switch {
	case !c.native:
		c.podGroup(ns, "ring", pods)
	case c.minor == 35:
		c.describe(ns, "Workload", "ring", map[string]any{"podGroups": []any{
			map[string]any{"name": "leaders", "policy": basic},
			map[string]any{"name": "workers", "policy": gang},
		}})
	default:
		c.describe(ns, "PodGroup", "leaders", map[string]any{"schedulingPolicy": basic})
		c.describe(ns, "PodGroup", "ring", map[string]any{"schedulingPolicy": gang})
	}
}

// groupVersion is that of Kubernetes' own kinds of groups.
func groupVersion(minor string) string {
	return "scheduling.k8s.io/" + cmp.Or(map[string]string{"1.35": "v1alpha1", "1.36": "v1alpha2"}[minor], "v1beta1")
}

// describe creates an object of Kubernetes' own kinds of groups.
func (c *testCluster) describe(ns, kind, name string, spec map[string]any) {
	c.t.Helper()
	c.create(&unstructured.Unstructured{Object: map[string]any{
		"apiVersion": groupVersion(c.minor.String()), "kind": kind,
		"metadata": map[string]any{"namespace": ns, "name": name}, "spec": spec,
	}})
}

// inGroup makes a pod one of the group ring, or leaders, of Kubernetes' own: with 1.35 as the
// steering webhook leaves it.
func (c *testCluster) inGroup(group string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		if c.minor > 35 {
			p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: &group}
			return
		}
		if group == "ring" {
			group = "workers"
		}
		p.Annotations = map[string]string{broker.AnnotationWorkload: "ring/" + group + "/"}
	}
}

func (c *testCluster) gangPods(ns string, pods int) {
	c.t.Helper()
	for i := range pods {
		c.gangPod(ns, fmt.Sprint("ring-", i), "1")
	}
}

// gangPod creates a pod of a gang, that requests CPU.
func (c *testCluster) gangPod(ns, name, cpu string) {
	c.t.Helper()
	c.create(schedulerPod(ns, name, cpu, inPool(ns), tolerating(ns), func(p *corev1.Pod) {
		if c.native {
			c.inGroup("ring")(p)
		} else {
			p.Labels = map[string]string{broker.LabelPodGroup: "ring"}
		}
	}))
}

// gangOfShapes creates a gang of a leader and four workers.
func (c *testCluster) gangOfShapes(ns string) {
	c.t.Helper()
	c.expectNodes(ns)
	c.describeGang(ns, 5)
	c.gangPod(ns, "ring-leader", "500m")
	for i := range 4 {
		c.gangPod(ns, fmt.Sprint("ring-", i), "200m")
	}
}

// expectUnbound watches the pods with a prefix stay without a node.
func (c *testCluster) expectUnbound(ns, prefix string, pods int, why string) {
	c.t.Helper()
	expect.Consistently(c.t, 2*time.Second, why, func() (bool, string) {
		byNode := c.pods(ns, prefix)
		return len(byNode[""]) == pods && len(byNode) == 1, fmt.Sprintf("%d of %d pods wait", len(byNode[""]), pods)
	})
}

// expectGang waits for a Reservation for a whole gang.
func (c *testCluster) expectGang(ns string, pods int32) *broker.Reservation {
	c.t.Helper()
	r := c.expectReservation(ns, "ring", pods)
	if r.Spec.MinAvailable != pods {
		c.t.Errorf("minAvailable is %d, want %d", r.Spec.MinAvailable, pods)
	}
	kind := "PodGroup"
	if c.native && c.minor == 35 {
		kind = "Workload"
	}
	if ref := r.OwnerReferences[0]; ref.Kind != kind || ref.Name != "ring" || strings.HasPrefix(string(ref.UID), "gang-") {
		c.t.Errorf("owned by %+v, want the %s", ref, kind)
	}
	return r
}

// gangRules are those of all kinds of gangs.
var gangRules = []rule{
	{"a pod waits for what describes its gang", waitsForDescription},
	{"a gang of which only part fits leaves nothing", gangTooLarge},
	{"a gang is bound when all have places", gangInBoth},
	{"a gang gives up its places in time", gangTimesOut},
	{"a gang gives up its places in another cluster in time", gangTimesOutAway},
	{"a gang of two shapes is requested as a whole, and bound as a whole", shapesFit},
	{"a gang of two shapes of which only part fits binds nothing and leaves nothing", shapesPart},
	{"a gang is requested once it is complete, and grows", shapesGrow},
	{"a policy counts what a gang has requested for pods of other shapes", shapesCapped},
	{"a gang whose pods come back with other requests is requested again", shapesReplaced},
	{"a gang of more shapes than a Reservation has gets an event", shapesTooMany},
	{"a gang of which a Reservation has too many former shapes gets an event", shapesFormer},
}

// TestKubernetesGroups runs the rules of gangs on an API server that has the groups of Kubernetes
// itself: Workloads with 1.35, PodGroups later.
func TestKubernetesGroups(t *testing.T) {
	minors, err := binaries.WantedMinors()
	expect.NoError(t, err)
	c := startTestCluster(t, "feature-gates=GenericWorkload=true", "runtime-config="+groupVersion(minors.Consumers)+"=true")
	c.native = true
	controlplane.InstallCRDs(t, c.config)
	c.startScheduler()
	var upgraded []rule
	if c.minor > 35 {
		upgraded = []rule{{"a pod of a Workload of 1.35 is not bound alone", workloadGone}}
	}
	c.runRules(slices.Concat(upgraded, []rule{
		{"where no PodGroups are served, the label that names one means nothing", labelOnly},
		{"PodGroups that are installed later are known after a while", podGroupsLater},
		{"pods of a group without a gang are bound alone", basicGroup},
	}, gangRules))
}

func waitsForDescription(c *testCluster, ns string) {
	home, what := c.poolNode(ns, "2"), "PodGroup ring"
	if c.native && c.minor == 35 {
		what = "pod group workers of Workload ring"
	}
	c.gangPods(ns, 2)
	for i := range 2 {
		c.expectMessage(ns, fmt.Sprint("ring-", i), "waiting for "+what+" to be created")
	}
	c.describeGang(ns, 2)
	c.expectPods(ns, "ring", map[string]int{home: 2})
}

// ofPodGroups makes the gangs of a test those of PodGroups.
func (c *testCluster) ofPodGroups() *testCluster {
	of := *c
	of.native = false
	return &of
}

func labelOnly(c *testCluster, ns string) {
	c = c.ofPodGroups()
	home := c.poolNode(ns, "1")
	c.gangPods(ns, 1)
	c.expectPods(ns, "ring", map[string]int{home: 1})
}

// podGroupsLater: the scheduler has found that there are no PodGroups, and they are installed
// together with a gang. None of its pods is bound alone.
func podGroupsLater(c *testCluster, ns string) {
	c = c.ofPodGroups()
	home := c.poolNode(ns, "3")
	c.expectNodes(ns)
	c.installPodGroups()
	c.gangPods(ns, 2)
	c.describeGang(ns, 3)
	c.expectOtherMessage(ns, "ring-0", "to be created") // the PodGroup is known
	c.expectUnbound(ns, "ring", 2, "the gang to wait for its third pod")
	c.gangPod(ns, "ring-2", "1")
	c.expectPods(ns, "ring", map[string]int{home: 3})
}

func basicGroup(c *testCluster, ns string) {
	home := c.poolNode(ns, "1")
	c.describeGang(ns, 2)
	leader := func(i int) {
		c.create(schedulerPod(ns, fmt.Sprint("leader-", i), "1", inPool(ns), func(p *corev1.Pod) {
			c.inGroup("leaders")(p)
		}))
	}
	// One after the other: the pods of a group that have no node yet are requested together.
	leader(0)
	c.expectPods(ns, "leader", map[string]int{home: 1})
	leader(1)
	c.expectPods(ns, "leader", map[string]int{home: 1, "": 1})
	owner := "leaders"
	if c.minor == 35 {
		owner = "ring"
	}
	if r := c.expectReservation(ns, owner, 1); r.Spec.MinAvailable != 0 {
		c.t.Errorf("minAvailable is %d, want none", r.Spec.MinAvailable)
	}
}

// groupsNotServed: the API server keeps what names a pod's group, and serves no groups, as while it
// is upgraded to a version with another one of their API. No pod of a group is bound alone.
func groupsNotServed(c *testCluster, ns string) {
	home, ofGroup := c.poolNode(ns, "2"), c.inGroup("ring")
	c.create(schedulerPod(ns, "ring-0", "1", inPool(ns), ofGroup))
	c.expectMessage(ns, "ring-0", "serves no such groups")
	c.create(schedulerPod(ns, "alone", "1", inPool(ns)))
	c.expectPods(ns, "alone", map[string]int{home: 1})
	c.expectUnbound(ns, "ring", 1, "the pod of a group to wait")
	var list broker.ReservationList
	expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
	if len(list.Items) > 0 {
		c.t.Errorf("capacity was requested: %v", list.Items[0].Spec)
	}
}

// workloadGone: a pod of a Workload of 1.35, in a cluster that was upgraded since.
func workloadGone(c *testCluster, ns string) {
	home := c.poolNode(ns, "2")
	c.create(schedulerPod(ns, "ring-0", "1", inPool(ns), func(p *corev1.Pod) {
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, broker.AnnotationWorkload, "ring/workers/")
	}))
	c.expectMessage(ns, "ring-0", "create the pod again with a PodGroup")
	c.create(schedulerPod(ns, "alone", "1", inPool(ns)))
	c.expectPods(ns, "alone", map[string]int{home: 1})
	c.expectUnbound(ns, "ring", 1, "the pod of a former Workload to wait")
}

func gangTooLarge(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "10")
	c.gang(ns, 3)
	r := c.expectGang(ns, 3)
	c.setStatus(r, refused("oslo"))
	// The pod that fits loses its place.
	c.create(schedulerPod(ns, "other", "1", inPool(ns)))
	c.expectPods(ns, "other", map[string]int{home: 1})
	c.expectUnbound(ns, "ring", 3, "the gang to wait")
	c.setStatus(r, grantedIn(r, ns, 3))
	c.expectPods(ns, "ring", map[string]int{virtual: 3})
}

func gangInBoth(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "10")
	c.gang(ns, 3)
	r := c.expectGang(ns, 3)
	if n := len(c.pods(ns, "ring")[home]); n != 0 {
		c.t.Errorf("%d pods were bound before all had places", n)
	}
	c.setStatus(r, grantedIn(r, ns, 2))
	c.expectPods(ns, "ring", map[string]int{home: 1, virtual: 2})
}

// gangTimesOut: while there is no decision about the rest, a gang keeps its place at home
// for gangTimeout.
func gangTimesOut(c *testCluster, ns string) {
	home := c.poolNode(ns, "1")
	c.gang(ns, 2)
	c.expectGang(ns, 2)
	c.create(schedulerPod(ns, "other", "1", inPool(ns)))
	c.expectPods(ns, "other", map[string]int{home: 1})
	c.expectPods(ns, "ring", map[string]int{"": 2})
}

// gangTimesOutAway: the workers of a gang have places on a virtual node, and while there is no
// decision about the leader, they keep them for gangTimeout. Then others get these.
func gangTimesOutAway(c *testCluster, ns string) {
	c.poolNode(ns, "100m")
	virtual := c.virtualPoolNode(ns, "10")
	c.namespace(broker.SystemNamespace, nil)
	places := capacity.OfPodSets([]broker.PodSet{{
		Name: "pods", Count: 4, Requests: broker.FromList(expect.Resources("cpu", "200m")), NodeSelector: map[string]string{"pool": ns}}})
	in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: ns}, Spec: broker.ReservationInstructionSpec{
		ReservationName: ns, ReservationUID: "hub", TargetClusterID: ns, Namespaces: []string{ns}, RequestedResources: places.Totals, PodSets: places.PodSets}}
	c.create(in)
	in.Status = broker.ReservationInstructionStatus{Delivered: true, Carried: &places}
	expect.NoError(c.t, c.Status().Update(c.t.Context(), in))
	c.gangOfShapes(ns)
	expect.Eventually(c.t, "workers to have places", func() (bool, string) {
		n := c.reserved(ns)
		return n > 0, fmt.Sprint(n, " pods wait in Permit")
	})
	c.app(ns, "other", "200m", 4)
	c.expectPods(ns, "other", map[string]int{virtual: 4})
	c.expectPods(ns, "ring", map[string]int{"": 5})
}

// expectShapes waits for the one Reservation of a gang of two shapes.
func (c *testCluster) expectShapes(ns string, want map[string]int32) *broker.Reservation {
	c.t.Helper()
	var pods int32
	for _, n := range want {
		pods += n
	}
	r := c.expectReservation(ns, "ring", pods)
	if r.Spec.MinAvailable != 5 {
		c.t.Errorf("minAvailable is %d, want 5", r.Spec.MinAvailable)
	}
	got := map[string]int32{}
	for _, set := range r.Spec.PodSets {
		got[set.Requests.CPU.String()] = set.Count
	}
	if !maps.Equal(got, want) {
		c.t.Errorf("pod sets %v, want %v", got, want)
	}
	return r
}

func shapesFit(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "600m"), c.virtualPoolNode(ns, "10")
	c.gangOfShapes(ns)
	r := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	if n := len(c.pods(ns, "ring")[home]); n != 0 {
		c.t.Errorf("%d pods were bound before all had places", n)
	}
	c.create(schedulerPod(ns, "other", "500m", inPool(ns)))
	c.expectPods(ns, "other", map[string]int{home: 1})
	c.setStatus(r, allGrantedIn(ns, r.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 5})
}

func shapesPart(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "600m"), c.virtualPoolNode(ns, "10")
	c.gangOfShapes(ns)
	r := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	c.setStatus(r, refused("oslo"))
	// What has fit at home, the leader or workers, loses its place.
	c.create(schedulerPod(ns, "other", "600m", inPool(ns)))
	c.expectPods(ns, "other", map[string]int{home: 1})
	c.expectUnbound(ns, "ring", 5, "nothing to be bound")
	// All workers have places, and the leader has none.
	for _, set := range r.Spec.PodSets {
		if set.Count == 4 {
			c.setStatus(r, allGrantedIn(ns, set))
		}
	}
	c.expectUnbound(ns, "ring", 5, "nothing to be bound without the leader")
	c.setStatus(r, refused("oslo"))
	for i := range 4 {
		expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, fmt.Sprint("ring-", i), "200m")))
	}
	c.expectUnbound(ns, "ring", 1, "the leader not to be bound alone")
	for i := range 4 {
		c.gangPod(ns, fmt.Sprint("ring-new-", i), "200m")
	}
	c.setStatus(r, allGrantedIn(ns, r.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 5})
}

// shapesCapped: the workers of a gang that runs come back with other requests. What was
// requested for the former ones stays, and the limit allows not both.
func shapesCapped(c *testCluster, ns string) {
	c.cap(ns, "1400m", broker.SchedulerName)
	c.poolNode(ns, "100m")
	virtual := c.virtualPoolNode(ns, "10")
	c.gangOfShapes(ns)
	r := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	c.setStatus(r, allGrantedIn(ns, r.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 5})
	c.replaceWorkers(ns, "190m")
	c.expectEvent(ns, "ring-new-0", "OverflowCapped", "limits cpu")
	c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
}

// replaceWorkers replaces the workers of gangOfShapes by others, that request CPU.
func (c *testCluster) replaceWorkers(ns, cpu string) {
	c.t.Helper()
	for i := range 4 {
		expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, fmt.Sprint("ring-", i), "200m")))
		c.gangPod(ns, fmt.Sprint("ring-new-", i), cpu)
	}
}

// shapesReplaced: no pod runs with what was requested for the former workers.
func shapesReplaced(c *testCluster, ns string) {
	c.poolNode(ns, "100m")
	virtual := c.virtualPoolNode(ns, "10")
	c.gangOfShapes(ns)
	former := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	c.replaceWorkers(ns, "190m")
	c.expectEvent(ns, "ring-new-0", "OverflowOutdated", former.Name+" requests capacity for 5 pods")
	c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	expect.NoError(c.t, c.Delete(c.t.Context(), former)) // as the agent does
	var r *broker.Reservation
	expect.Eventually(c.t, "another Reservation", func() (bool, string) {
		r = c.expectReservation(ns, "ring", 5)
		return r.UID != former.UID, r.Name
	})
	c.expectShapes(ns, map[string]int32{"500m": 1, "190m": 4})
	c.setStatus(r, allGrantedIn(ns, r.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 5})
}

func shapesTooMany(c *testCluster, ns string) {
	c.poolNode(ns, "100m")
	c.describeGang(ns, 9)
	c.expectNodes(ns)
	for i := range 9 {
		c.gangPod(ns, fmt.Sprint("ring-", i), fmt.Sprint(101+i, "m"))
	}
	c.expectEvent(ns, "ring-0", "OverflowFailed", "its pods have 9 shapes", "at most 8")
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "ring-8", "109m")))
	c.gangPod(ns, "ring-again", "108m")
	c.expectReservation(ns, "ring", 9)
}

// shapesFormer: the leader runs in another cluster, so that what was requested for the
// former workers stays, and the shapes of the others are too many with theirs.
func shapesFormer(c *testCluster, ns string) {
	c.poolNode(ns, "100m")
	virtual := c.virtualPoolNode(ns, "10")
	c.gangOfShapes(ns)
	r := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	c.setStatus(r, allGrantedIn(ns, r.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 5})
	for i := range 4 {
		expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, fmt.Sprint("ring-", i), "200m")))
	}
	for i := range 7 {
		c.gangPod(ns, fmt.Sprint("ring-new-", i), fmt.Sprint(101+i, "m"))
	}
	c.expectEvent(ns, "ring-new-0", "OverflowFailed", "its pods have 8 shapes", "Reservation "+r.Name+" still requests 1 of former pods", "at most 8", "Delete the pods of the group that run in other clusters")
	expect.NoError(c.t, c.Delete(c.t.Context(), schedulerPod(ns, "ring-leader", "500m")))
	c.expectEvent(ns, "ring-new-0", "OverflowOutdated", r.Name)
}

// requiresFewer: the PodGroup of a gang is edited while its Reservation is queued, and no
// capacity is requested for more pods.
func requiresFewer(c *testCluster, ns string) {
	c.poolNode(ns, "100m")
	c.gang(ns, 3)
	r := c.expectGang(ns, 3)
	c.setStatus(r, refused("oslo"))
	c.expectEvent(ns, "ring-0", "OverflowQueued", "oslo")
	group := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup"}}
	expect.NoError(c.t, c.Get(c.t.Context(), client.ObjectKey{Namespace: ns, Name: "ring"}, group))
	expect.NoError(c.t, unstructured.SetNestedField(group.Object, int64(2), "spec", "minMember"))
	expect.NoError(c.t, c.Update(c.t.Context(), group))
	expect.Eventually(c.t, "the Reservation to require fewer pods", func() (bool, string) {
		living := c.expectReservation(ns, "ring", 3)
		return living.Spec.MinAvailable == 2 && living.UID == r.UID, fmt.Sprintf("minAvailable is %d", living.Spec.MinAvailable)
	})
}

// shapesGrow: while pods are missing that the gang requires, capacity for the others would
// be of no use. Later ones are added to the Reservation, also of another shape.
func shapesGrow(c *testCluster, ns string) {
	c.poolNode(ns, "100m")
	virtual := c.virtualPoolNode(ns, "10")
	c.expectNodes(ns)
	c.describeGang(ns, 5)
	for i := range 4 {
		c.gangPod(ns, fmt.Sprint("ring-", i), "200m")
	}
	expect.Consistently(c.t, 2*time.Second, "no request for a part", func() (bool, string) {
		var list broker.ReservationList
		expect.NoError(c.t, c.List(c.t.Context(), &list, client.InNamespace(ns)))
		return !slices.ContainsFunc(list.Items, func(r broker.Reservation) bool { return strings.HasPrefix(r.Name, "ring-") }), "requested"
	})
	c.expectEvent(ns, "ring-0", "OverflowIncomplete", "ring requires 5 pods, of which")
	c.gangPod(ns, "ring-leader", "500m")
	first := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4})
	c.setStatus(first, allGrantedIn(ns, first.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 5})
	c.gangPod(ns, "ring-sixth", "300m")
	r := c.expectShapes(ns, map[string]int32{"500m": 1, "200m": 4, "300m": 1})
	if r.UID != first.UID {
		c.t.Error("the gang has got another Reservation")
	}
	c.setStatus(r, allGrantedIn(ns, r.Spec.PodSets...))
	c.expectPods(ns, "ring", map[string]int{virtual: 6})
}
