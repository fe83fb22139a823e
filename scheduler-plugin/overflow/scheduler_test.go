package overflow_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/kubernetes/cmd/kube-scheduler/app/options"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
)

const schedulerConfig = `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: %q, qps: 500, burst: 1000}
leaderElection: {leaderElect: false}
podInitialBackoffSeconds: 1
podMaxBackoffSeconds: 1
profiles:
- schedulerName: spillway-scheduler
  plugins:
    multiPoint:
      enabled:
      - name: Overflow
        weight: 20
  pluginConfig:
  - name: Overflow
    args:
      apiVersion: broker.fluidos.eu/v1alpha1
      kind: OverflowArgs
      overflow: AfterPreemption
      batchQuiet: 100ms
`

// world is an API server with a real scheduler, where the test plays kubelet,
// controllers and Spillway's agent.
type world struct {
	client.Client
	t      *testing.T
	config *rest.Config
}

func newWorld(t *testing.T) *world {
	config := controlplane.StartBare(t)
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgoscheme.AddToScheme, broker.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return &world{Client: c, t: t, config: config}
}

// startScheduler runs kube-scheduler with the plugin: once in a process.
func (w *world) startScheduler() {
	w.t.Helper()
	w.grantRoles()
	dir := w.t.TempDir()
	kubeconfig, configFile := filepath.Join(dir, "kubeconfig"), filepath.Join(dir, "config.yaml")
	access := clientcmdapi.NewConfig()
	access.Clusters["c"] = &clientcmdapi.Cluster{Server: w.config.Host, CertificateAuthorityData: w.config.CAData}
	access.AuthInfos["u"] = &clientcmdapi.AuthInfo{ClientCertificateData: w.config.CertData, ClientKeyData: w.config.KeyData,
		Impersonate: broker.SchedulerName, ImpersonateGroups: []string{"system:authenticated"}}
	access.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	access.CurrentContext = "x"
	if err := clientcmd.WriteToFile(*access, kubeconfig); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(configFile, fmt.Appendf(nil, schedulerConfig, kubeconfig), 0o600); err != nil {
		w.t.Fatal(err)
	}
	opts := options.NewOptions()
	opts.ConfigFile = configFile
	opts.SecureServing.BindPort = 0
	ctx, cancel := context.WithCancel(context.Background())
	completed, sched, err := app.Setup(ctx, opts, app.WithPlugin(overflow.Name, overflow.New))
	if err != nil {
		w.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = app.Run(ctx, completed, sched) // always ends with an error
	}()
	w.t.Cleanup(func() {
		cancel()
		<-ended
	})
}

// grantRoles gives the scheduler no more than the chart does: kube-scheduler's
// own roles, and what the plugin writes.
func (w *world) grantRoles() {
	w.t.Helper()
	w.create(&rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: broker.SchedulerName},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{broker.Group}, Resources: []string{"reservations"}, Verbs: []string{"list", "watch", "create", "patch"}},
			{APIGroups: []string{broker.Group}, Resources: []string{"overflowpolicies"}, Verbs: []string{"list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"patch"}},
		},
	})
	for _, role := range []string{"system:kube-scheduler", "system:volume-scheduler", broker.SchedulerName} {
		w.create(&rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: "spillway:" + role},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
			Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: broker.SchedulerName}},
		})
	}
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) create(obj client.Object) {
	w.t.Helper()
	w.must(w.Create(w.t.Context(), obj))
}

// eventually polls until check returns "", and fails with what it says.
func (w *world) eventually(what string, check func() string) {
	w.t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		said := check()
		if said == "" {
			return
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: %s", what, said)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func (w *world) namespace(name string, labels map[string]string) {
	w.t.Helper()
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}})
}

var optIn = map[string]string{broker.LabelOverflow: broker.OverflowEnabled}

// node creates a Ready node. The API server's own not-ready taint goes, as the
// node lifecycle controller would see to.
func (w *world) node(name, cpu string, labels map[string]string, taints ...corev1.Taint) {
	w.t.Helper()
	size := corev1.ResourceList{
		corev1.ResourceCPU:    resource.MustParse(cpu),
		corev1.ResourceMemory: resource.MustParse("16Gi"),
		corev1.ResourcePods:   resource.MustParse("110"),
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}
	w.create(node)
	node.Status = corev1.NodeStatus{Capacity: size, Allocatable: size, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	w.must(w.Status().Update(w.t.Context(), node))
	node.Spec.Taints = taints
	w.must(w.Update(w.t.Context(), node))
}

func (w *world) virtualNode(cluster string) {
	w.t.Helper()
	w.node(broker.VirtualNodeName(cluster), "100",
		map[string]string{broker.LabelProvider: cluster, broker.LabelNodeType: broker.NodeTypeVirtual},
		corev1.Taint{Key: broker.TaintOverflow, Value: cluster, Effect: corev1.TaintEffectNoSchedule})
}

func schedulerPod(namespace, name, cpu string, change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{
			SchedulerName:                 broker.SchedulerName,
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			Containers: []corev1.Container{{Name: "main", Image: "none", Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu)},
			}}},
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

// deployment creates a Deployment and its ReplicaSet, and returns what makes a
// pod theirs.
func (w *world) deployment(namespace, name string) (*appsv1.Deployment, func(*corev1.Pod)) {
	w.t.Helper()
	labels := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: schedulerPod(namespace, name, "1").Spec}
	template.Spec.TerminationGracePeriodSeconds = nil
	selector := &metav1.LabelSelector{MatchLabels: labels}
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: appsv1.DeploymentSpec{Selector: selector, Template: template}}
	w.create(d)
	rs := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name + "-1", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "Deployment", Name: d.Name, UID: d.UID, Controller: ptr.To(true)},
		}},
		Spec: appsv1.ReplicaSetSpec{Selector: selector, Template: template},
	}
	w.create(rs)
	return d, func(p *corev1.Pod) {
		p.Labels = labels
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: rs.Name, UID: rs.UID, Controller: ptr.To(true)}}
	}
}

// pods counts the pods of a namespace by node; "" are those that wait.
func (w *world) pods(namespace, prefix string) map[string][]*corev1.Pod {
	w.t.Helper()
	var list corev1.PodList
	w.must(w.List(w.t.Context(), &list, client.InNamespace(namespace)))
	by := map[string][]*corev1.Pod{}
	for i := range list.Items {
		if p := &list.Items[i]; strings.HasPrefix(p.Name, prefix) {
			by[p.Spec.NodeName] = append(by[p.Spec.NodeName], p)
		}
	}
	return by
}

func (w *world) expectPlaces(namespace, prefix string, want map[string]int) {
	w.t.Helper()
	w.eventually("places of "+prefix, func() string {
		by := w.pods(namespace, prefix)
		got := map[string]int{}
		for node, pods := range by {
			got[node] = len(pods)
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			return fmt.Sprintf("got %v, want %v", got, want)
		}
		return ""
	})
}

// expectReservation waits for the one Reservation of an owner to ask for count
// pods.
func (w *world) expectReservation(namespace, owner string, count int32) *broker.Reservation {
	w.t.Helper()
	var found *broker.Reservation
	w.eventually("the Reservation of "+owner, func() string {
		var list broker.ReservationList
		if err := w.List(w.t.Context(), &list, client.InNamespace(namespace)); err != nil {
			return err.Error()
		}
		found = nil
		for i := range list.Items {
			if strings.HasPrefix(list.Items[i].Name, owner+"-") && list.Items[i].DeletionTimestamp == nil {
				if found != nil {
					w.t.Fatalf("%s has several Reservations: %s and %s", owner, found.Name, list.Items[i].Name)
				}
				found = &list.Items[i]
			}
		}
		if found == nil {
			return "there is none"
		}
		if got := found.Spec.PodSets[0].Count; got != count {
			return fmt.Sprintf("it asks for %d pods, want %d", got, count)
		}
		return ""
	})
	return found
}

// expectEvent waits for an event of a reason on a pod whose text has all words.
func (w *world) expectEvent(namespace, pod, reason string, words ...string) {
	w.t.Helper()
	w.eventually("event "+reason+" on "+pod, func() string {
		var list eventsv1.EventList
		w.must(w.List(w.t.Context(), &list, client.InNamespace(namespace)))
		var notes []string
		for _, e := range list.Items {
			if e.Regarding.Name != pod || e.Reason != reason {
				continue
			}
			missing := false
			for _, word := range words {
				missing = missing || !strings.Contains(e.Note, word)
			}
			if !missing {
				return ""
			}
			notes = append(notes, e.Note)
		}
		return fmt.Sprintf("want %q, got %q", words, notes)
	})
}

// expectMessage waits for the pod to be unschedulable with a message.
func (w *world) expectMessage(namespace, pod, want string) {
	w.t.Helper()
	w.eventually("message of "+pod, func() string {
		var p corev1.Pod
		w.must(w.Get(w.t.Context(), client.ObjectKey{Namespace: namespace, Name: pod}, &p))
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, want) {
				return ""
			}
		}
		return fmt.Sprintf("want %q, got %+v", want, p.Status.Conditions)
	})
}

// setStatus plays the agent.
func (w *world) setStatus(r *broker.Reservation, status broker.ReservationStatus) {
	w.t.Helper()
	w.eventually("writing a status", func() string {
		if err := w.Get(w.t.Context(), client.ObjectKeyFromObject(r), r); err != nil {
			return err.Error()
		}
		r.Status = status
		r.Status.ID = "rome-" + string(r.UID)
		if err := w.Status().Update(w.t.Context(), r); err != nil {
			return err.Error()
		}
		return ""
	})
}

func granted(r *broker.Reservation, cluster string, count int32) broker.ReservationStatus {
	set := r.Spec.PodSets[0]
	set.Count = count
	return broker.ReservationStatus{Phase: broker.ReservationActive, Allocations: []broker.Allocation{
		{Cluster: cluster, PodSets: []broker.PodSet{set}, Accepted: true, VirtualNodeReady: true}}}
}

func refused(clusters ...string) broker.ReservationStatus {
	s := broker.ReservationStatus{Phase: broker.ReservationPending, Decision: &broker.Decision{}, Conditions: []metav1.Condition{{
		Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: "NoRoom", Message: "nobody has room", LastTransitionTime: metav1.Now()}}}
	for _, c := range clusters {
		s.Decision.Rejections = append(s.Decision.Rejections, broker.ClusterRejection{Cluster: c, Reason: "NoFit", Message: "no node of " + c + " has 300m free."})
	}
	return s
}

// TestOverflow tells the plugin's story to a real scheduler, from a cluster where
// Spillway is not installed to one that has no node.
func TestOverflow(t *testing.T) {
	w := newWorld(t)
	step := func(name string, f func(w *world)) {
		if !t.Run(name, func(t *testing.T) { f(&world{Client: w.Client, t: t, config: w.config}) }) {
			t.FailNow()
		}
	}
	paris := broker.VirtualNodeName("paris")

	w.namespace("shop", optIn)
	w.node("home", "1", nil)
	w.startScheduler()

	step("a missing CRD does not stop scheduling", func(w *world) {
		w.create(schedulerPod("shop", "fits", "100m"))
		w.expectPlaces("shop", "fits", map[string]int{"home": 1})
		w.create(schedulerPod("shop", "early", "5"))
		w.expectMessage("shop", "early", "Insufficient cpu")
		controlplane.InstallCRDs(w.t, w.config)
		r := w.expectReservation("shop", "early", 1)
		if ref := r.OwnerReferences[0]; ref.Kind != "Pod" || ref.Name != "early" {
			w.t.Errorf("owned by %+v, want the bare pod", ref)
		}
	})

	var web *broker.Reservation
	var ofWeb func(*corev1.Pod)
	step("what does not fit is asked for, once for each owner and shape", func(w *world) {
		var d *appsv1.Deployment
		d, ofWeb = w.deployment("shop", "web")
		for i := range 6 {
			w.create(schedulerPod("shop", fmt.Sprint("web-", i), "300m", ofWeb))
		}
		w.expectPlaces("shop", "web", map[string]int{"home": 3, "": 3})
		web = w.expectReservation("shop", "web", 3)
		if ref := web.OwnerReferences[0]; ref.Kind != "Deployment" || ref.UID != d.UID || ptr.Deref(ref.Controller, true) || ptr.Deref(ref.BlockOwnerDeletion, true) {
			w.t.Errorf("owned by %+v, want Deployment web, not controlling", ref)
		}
		key, ok := demand.KeyOfReservation(web)
		if !ok || key.OwnerUID != d.UID || web.Labels[broker.LabelManagedBy] != broker.ManagedBySpillway {
			w.t.Errorf("labels %v", web.Labels)
		}
		if set := web.Spec.PodSets[0]; set.Name != demand.PodSetName || set.Requests.String() != "cpu 300m" {
			w.t.Errorf("pod set %+v", set)
		}
		for _, p := range w.pods("shop", "web")[""] {
			w.expectEvent("shop", p.Name, "OverflowRequested", "3 pods of Deployment web", web.Name)
		}
	})

	step("a refusal is told with each provider's reason", func(w *world) {
		w.setStatus(web, refused("berlin", "paris"))
		for _, p := range w.pods("shop", "web")[""] {
			w.expectEvent("shop", p.Name, "OverflowQueued", "berlin: no node of berlin", "paris: no node of paris", web.Name)
			w.expectMessage("shop", p.Name, "no other cluster has room now")
		}
		w.setStatus(web, refused("berlin", "oslo", "paris"))
		w.expectEvent("shop", w.pods("shop", "web")[""][0].Name, "OverflowQueued", "oslo: no node of oslo")
	})

	step("a grant lets in as many as it says, and nobody else", func(w *world) {
		w.virtualNode("paris")
		w.create(schedulerPod("shop", "stranger", "300m", func(p *corev1.Pod) {
			p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
		}))
		for _, p := range w.pods("shop", "web")[""] {
			before := p.DeepCopy()
			tolerating("paris")(p)
			w.must(w.Patch(w.t.Context(), p, client.StrategicMergeFrom(before)))
		}
		for _, name := range []string{"stranger", w.pods("shop", "web")[""][0].Name} {
			w.expectMessage("shop", name, "capacity of paris that is not reserved for this pod")
		}
		w.setStatus(web, granted(web, "paris", 2))
		w.expectPlaces("shop", "web", map[string]int{"home": 3, paris: 2, "": 1})
		last := w.pods("shop", "web")[""][0]
		w.expectMessage("shop", last.Name, "no place left of those reserved in paris")
		w.expectEvent("shop", last.Name, "OverflowGranted", "2 in paris")
		for _, p := range w.pods("shop", "web")[paris] {
			if p.Labels[broker.LabelHold] != web.Status.ID {
				w.t.Errorf("%s: hold label %q, want %q", p.Name, p.Labels[broker.LabelHold], web.Status.ID)
			}
			if cost := p.Annotations[corev1.PodDeletionCost]; cost != broker.OverflowedDeletionCost {
				w.t.Errorf("%s: deletion cost %q, want %q", p.Name, cost, broker.OverflowedDeletionCost)
			}
		}
		w.expectPlaces("shop", "stranger", map[string]int{"": 1})
		web = w.expectReservation("shop", "web", 3)
		w.setStatus(web, granted(web, "paris", 3))
		w.expectPlaces("shop", "web", map[string]int{"home": 3, paris: 3})
	})

	step("a place that falls free is used again without asking", func(w *world) {
		w.must(w.Delete(w.t.Context(), w.pods("shop", "web")[paris][0]))
		w.create(schedulerPod("shop", "web-again", "300m", ofWeb, tolerating("paris")))
		w.expectPlaces("shop", "web", map[string]int{"home": 3, paris: 3})
		if got := w.expectReservation("shop", "web", 3); got.Generation != web.Generation {
			w.t.Errorf("the Reservation was changed")
		}
	})

	step("more need raises the count, and home comes first", func(w *world) {
		w.node("home-2", "300m", nil)
		// The stranger and one of the new ones would both like the new room; one of
		// them has to stay out.
		w.must(w.Delete(w.t.Context(), schedulerPod("shop", "stranger", "1")))
		for i := range 3 {
			w.create(schedulerPod("shop", fmt.Sprint("web-more-", i), "300m", ofWeb))
		}
		w.expectPlaces("shop", "web-more", map[string]int{"home-2": 1, "": 2})
		web = w.expectReservation("shop", "web", 5)
		w.setStatus(web, granted(web, "paris", 5))
		// The agent opens the node to as many as there are places.
		for _, p := range w.pods("shop", "web-more")[""] {
			before := p.DeepCopy()
			tolerating("paris")(p)
			w.must(w.Patch(w.t.Context(), p, client.StrategicMergeFrom(before)))
		}
		w.expectPlaces("shop", "web", map[string]int{"home": 3, "home-2": 1, paris: 5})
	})

	step("a Reservation that is being given back is asked for anew when it is gone", func(w *world) {
		_, ofJob := w.deployment("shop", "batch")
		w.create(schedulerPod("shop", "batch-0", "400m", ofJob))
		first := w.expectReservation("shop", "batch", 1)
		first.Finalizers = []string{broker.FinalizerRequest}
		w.must(w.Update(w.t.Context(), first))
		w.must(w.Delete(w.t.Context(), first))
		w.create(schedulerPod("shop", "batch-1", "400m", ofJob))
		w.expectMessage("shop", "batch-1", "Insufficient cpu")
		w.must(w.Get(w.t.Context(), client.ObjectKeyFromObject(first), first))
		if first.Spec.PodSets[0].Count != 1 {
			w.t.Error("a Reservation was changed while it was being deleted")
		}
		first.Finalizers = nil
		w.must(w.Update(w.t.Context(), first))
		if second := w.expectReservation("shop", "batch", 2); second.UID == first.UID {
			w.t.Error("it is still the same one")
		}
	})

	step("what cannot go is told once, and not asked for", func(w *world) {
		w.create(schedulerPod("shop", "local", "300m", func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}}}}
		}))
		w.expectEvent("shop", "local", "OverflowNotPossible", `volume "data"`)
		w.expectMessage("shop", "local", "cannot overflow")
		w.namespace("private", nil)
		w.create(schedulerPod("private", "shy", "300m"))
		w.create(schedulerPod("shop", "shy", "300m", func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }))
		w.expectMessage("private", "shy", "Insufficient cpu")
		w.expectMessage("shop", "shy", "Insufficient cpu")
	})

	step("a policy's limits hold", func(w *world) {
		w.namespace("capped", map[string]string{broker.LabelOverflow: broker.OverflowEnabled, "team": "a"})
		w.create(&broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "team-a"}, Spec: broker.OverflowPolicySpec{
			NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"team": "a"}},
			MaxResources:      &broker.ResourceQuantities{CPU: ptr.To(resource.MustParse("700m"))},
			Placement:         &broker.Placement{Regions: []string{"eu"}},
			Budget:            &broker.Budget{MaxPricePerHour: "2", Currency: "EUR"},
			Duration:          &metav1.Duration{Duration: time.Hour},
		}})
		_, ofApp := w.deployment("capped", "app")
		for i := range 4 {
			w.create(schedulerPod("capped", fmt.Sprint("app-", i), "300m", ofApp))
		}
		r := w.expectReservation("capped", "app", 2)
		if r.Spec.Placement == nil || r.Spec.Placement.Regions[0] != "eu" || r.Spec.Budget == nil || r.Spec.Duration == nil {
			w.t.Errorf("the policy's terms are missing: %+v", r.Spec)
		}
		w.expectEvent("capped", "app-0", "OverflowCapped", "team-a", "2 pods", "4 are needed")
	})

	step("nothing was asked for that should not be", func(w *world) {
		var list broker.ReservationList
		w.must(w.List(w.t.Context(), &list))
		for _, r := range list.Items {
			if owner, _, _ := strings.Cut(r.Name, "-"); owner != "early" && owner != "web" && owner != "batch" && owner != "app" {
				// The stranger found no room at home either, so it was asked for.
				if owner != "stranger" {
					w.t.Errorf("unexpected Reservation %s/%s", r.Namespace, r.Name)
				}
			}
		}
	})

	step("a cluster without nodes overflows too", func(w *world) {
		w.must(w.DeleteAllOf(w.t.Context(), &corev1.Node{}))
		w.eventually("nodes", func() string {
			var nodes corev1.NodeList
			w.must(w.List(w.t.Context(), &nodes))
			if len(nodes.Items) > 0 {
				return "are still there"
			}
			return ""
		})
		w.create(schedulerPod("shop", "lonely", "1"))
		w.expectReservation("shop", "lonely", 1)
	})
}
