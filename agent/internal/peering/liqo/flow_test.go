package liqo

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// liqoCRDs is where Liqo's CRDs stand in the module cache.
func liqoCRDs(t testing.TB) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/liqotech/liqo").Output()
	if err != nil {
		t.Fatalf("looking for Liqo's module: %v", err)
	}
	return filepath.Join(strings.TrimSpace(string(out)), "deployments/liqo/charts/liqo-crds/crds")
}

func newClient(t testing.TB, config *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// relay hands messages over at once, or loses them.
type relay struct {
	t      *testing.T
	lender *Provider
	driver *Driver
	wait   sync.WaitGroup
	// cut loses everything; flaky every other message.
	cut, flaky atomic.Bool
	sent       atomic.Int64
}

func (r *relay) Send(ctx context.Context, peer peering.Peer, raw []byte) error {
	n := r.sent.Add(1)
	if r.cut.Load() || r.flaky.Load() && n%2 == 1 {
		return nil
	}
	r.wait.Go(func() {
		reply, err := r.lender.Handle(context.WithoutCancel(ctx), peering.Peer{ClusterID: "rome", Holds: true}, raw)
		if err != nil {
			r.t.Logf("handling a message: %v", err)
		}
		if reply != nil {
			r.driver.Receive(peer.ClusterID, reply)
		}
	})
	return nil
}

// world is two clusters with API servers of their own, and Liqo played.
type world struct {
	t           *testing.T
	rome, paris client.Client
	driver      *Driver
	lender      *Provider
	relay       *relay
	played      *played
}

var paris = peering.Peer{ClusterID: "paris"}

func newWorld(t *testing.T) *world {
	crds := liqoCRDs(t)
	w := &world{t: t, rome: newClient(t, controlplane.Start(t, crds)), paris: newClient(t, controlplane.Start(t, crds))}
	w.relay = &relay{t: t}
	options := Options{
		Messenger: w.relay, Log: testr.New(t), PodCIDRs: []string{"10.0.0.0/16", "fd00::/64"},
		TenantRole: "spillway-liqo-tenant", ResendAfter: 100 * time.Millisecond, StuckAfter: time.Second, UnreachableAfter: 5 * time.Second,
	}
	options.ServiceAccount.Namespace, options.ServiceAccount.Name = "spillway-system", "spillway-agent"
	var err error
	options.Client, options.ClusterID = w.rome, "rome"
	if w.driver, err = NewDriver(options); err != nil {
		t.Fatal(err)
	}
	options.Client, options.ClusterID = w.paris, "paris"
	if w.lender, err = NewProvider(options); err != nil {
		t.Fatal(err)
	}
	w.relay.driver, w.relay.lender = w.driver, w.lender

	for _, name := range []string{"liqo", "shop", "tools", "own"} {
		w.create(w.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	w.create(w.rome, keySecret(t, newEd25519(t)))

	w.played = &played{t: t, rome: w.rome, paris: w.paris}
	ctx, stop := context.WithCancel(context.Background())
	var playing sync.WaitGroup
	playing.Go(func() { w.played.run(ctx) })
	t.Cleanup(func() { stop(); playing.Wait(); w.relay.wait.Wait() })
	return w
}

func (w *world) create(c client.Client, object client.Object) {
	w.t.Helper()
	if err := c.Create(w.t.Context(), object); err != nil {
		w.t.Fatal(err)
	}
}

// until repeats a step, as the agent does, until its progress has the reason.
func (w *world) until(reason string, step func() (peering.Progress, error)) peering.Progress {
	w.t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		progress, err := step()
		if err == nil && progress.Reason == reason {
			return progress
		}
		if time.Now().After(deadline) {
			w.t.Fatalf("waiting for %s: %+v, %v", reason, progress, err)
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-w.t.Context().Done():
			w.t.Fatal(w.t.Context().Err())
		}
	}
}

func (w *world) capacity(reason string, capacity peering.Capacity) peering.Progress {
	w.t.Helper()
	return w.until(reason, func() (peering.Progress, error) { return w.driver.EnsureCapacity(w.t.Context(), paris, capacity) })
}

func (w *world) grant(pods int32, total corev1.ResourceList) {
	w.t.Helper()
	for {
		progress, err := w.lender.EnsureGrant(w.t.Context(), "rome", total, pods)
		if err != nil {
			w.t.Fatal(err)
		}
		if progress.Done {
			return
		}
	}
}

// answering is what SetupWithManager's watch does: the slice's changes are
// answered without anybody asking.
func (w *world) answering() {
	ctx, stop := context.WithCancel(context.Background())
	var answering sync.WaitGroup
	answering.Go(func() {
		for ctx.Err() == nil {
			if _, err := w.lender.answer(ctx, "rome"); err != nil && ctx.Err() == nil {
				w.t.Logf("answering: %v", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	w.t.Cleanup(func() { stop(); answering.Wait() })
}

func (w *world) teardown() {
	w.t.Helper()
	w.until("Gone", func() (peering.Progress, error) { return w.driver.Teardown(w.t.Context(), paris) })
}

// nothingIsLeft fails if a cluster holds anything of a link.
func (w *world) nothingIsLeft(c client.Client, where string) {
	w.t.Helper()
	ctx := w.t.Context()
	var left []string
	for name, list := range map[string]client.ObjectList{
		"identities": &authv1beta1.IdentityList{}, "slices": &authv1beta1.ResourceSliceList{}, "tenants": &authv1beta1.TenantList{}, "renews": &authv1beta1.RenewList{},
		"virtual nodes": &offloadingv1beta1.VirtualNodeList{}, "maps": &offloadingv1beta1.NamespaceMapList{}, "quotas": &offloadingv1beta1.QuotaList{},
		"foreign clusters": &liqov1beta1.ForeignClusterList{}, "nodes": &corev1.NodeList{},
	} {
		if err := c.List(ctx, list); err != nil {
			w.t.Fatal(err)
		}
		if n := lengthOf(list); n > 0 {
			left = append(left, fmt.Sprintf("%d %s", n, name))
		}
	}
	var namespaces corev1.NamespaceList
	if err := c.List(ctx, &namespaces, client.HasLabels{consts.RemoteClusterID}); err != nil {
		w.t.Fatal(err)
	}
	for i := range namespaces.Items {
		left = append(left, "namespace "+namespaces.Items[i].Name)
	}
	var offloadings offloadingv1beta1.NamespaceOffloadingList
	if err := c.List(ctx, &offloadings, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
		w.t.Fatal(err)
	}
	if n := len(offloadings.Items); n > 0 {
		left = append(left, fmt.Sprintf("%d offloadings", n))
	}
	var secrets corev1.SecretList
	if err := c.List(ctx, &secrets, client.HasLabels{consts.RemoteClusterID}); err != nil {
		w.t.Fatal(err)
	}
	if n := len(secrets.Items); n > 0 {
		left = append(left, fmt.Sprintf("%d secrets", n))
	}
	if len(left) > 0 {
		slices.Sort(left)
		w.t.Errorf("left in %s: %s", where, strings.Join(left, ", "))
	}
}

func lengthOf(list client.ObjectList) int {
	switch list := list.(type) {
	case *authv1beta1.IdentityList:
		return len(list.Items)
	case *authv1beta1.ResourceSliceList:
		return len(list.Items)
	case *authv1beta1.TenantList:
		return len(list.Items)
	case *authv1beta1.RenewList:
		return len(list.Items)
	case *offloadingv1beta1.VirtualNodeList:
		return len(list.Items)
	case *offloadingv1beta1.NamespaceMapList:
		return len(list.Items)
	case *offloadingv1beta1.QuotaList:
		return len(list.Items)
	case *liqov1beta1.ForeignClusterList:
		return len(list.Items)
	case *corev1.NodeList:
		return len(list.Items)
	}
	return 0
}

func read[T client.Object](w *world, c client.Client, namespace, name string, into T) T {
	w.t.Helper()
	object, found, err := get(w.t.Context(), c, namespace, name, into)
	if err != nil || !found {
		w.t.Fatalf("%T %s/%s: found %v, %v", into, namespace, name, found, err)
	}
	return object
}

// TestTheLifeOfALink goes from nothing to a virtual node and back, on the
// objects of two real API servers, with Liqo played.
func TestTheLifeOfALink(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	user := userOf("spillway-paris", "rome")
	half := list("cpu", "500m", "memory", "512Mi")
	full := list("cpu", "1333m", "memory", "1234567891", "nvidia.com/gpu", "1")

	// Every other message is lost, and the link comes up all the same.
	w.relay.flaky.Store(true)
	w.grant(2, half)
	w.until("Peered", func() (peering.Progress, error) { return w.driver.EnsurePeering(ctx, paris) })
	w.relay.flaky.Store(false)
	if sent := w.relay.sent.Load(); sent < 3 {
		t.Errorf("%d messages were enough with every other lost", sent)
	}
	first := sessionOf(read(w, w.rome, "", "liqo-tenant-paris", &corev1.Namespace{}), annotationSession)
	if lent := sessionOf(read(w, w.paris, "", "liqo-tenant-rome", &corev1.Namespace{}), annotationLentSession); lent != first {
		t.Errorf("rome is in session %d, paris in %d", first, lent)
	}

	// A node with exactly what is granted.
	w.answering()
	w.capacity("Ready", peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop", "tools"}})
	node := read(w, w.rome, "", "spillway-paris", &corev1.Node{})
	if !same(node.Status.Allocatable, list("cpu", "500m", "memory", "512Mi", "pods", "2")) || node.Labels["type"] != "virtual-kubelet" || node.Spec.Unschedulable {
		t.Errorf("the node is not as asked for: %v %v", node.Status.Allocatable, node.Labels)
	}
	for _, toleration := range w.driver.Tolerations("paris") {
		if !slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return toleration.ToleratesTaint(testr.New(t), &taint, false) }) {
			t.Errorf("nothing to tolerate by %v", toleration)
		}
	}
	quota := read(w, w.paris, "liqo-tenant-rome", user, &offloadingv1beta1.Quota{})
	if !same(quota.Spec.Resources, list("cpu", "500m", "memory", "512Mi", "pods", "2")) {
		t.Errorf("the quota is %v", quota.Spec.Resources)
	}
	read(w, w.paris, "", "shop-rome", &corev1.Namespace{})

	// More than is held: the node stays as it is until the hold has grown.
	w.capacity("GrantTooSmall", peering.Capacity{Resources: full, Pods: 3, Namespaces: []string{"shop", "tools"}})
	if node := read(w, w.rome, "", "spillway-paris", &corev1.Node{}); node.Status.Allocatable.Cpu().String() != "500m" {
		t.Errorf("the node outgrew its grant: %v", node.Status.Allocatable)
	}
	w.grant(3, full)
	w.capacity("Ready", peering.Capacity{Resources: full, Pods: 3, Namespaces: []string{"shop", "tools"}})

	// Finished guests hold quota; what they hold is granted on top.
	guest := &offloadingv1beta1.ShadowPod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop-rome", Name: "done", Labels: map[string]string{consts.CreatorLabelKey: user, labelOrigin: "rome"}},
		Spec:       offloadingv1beta1.ShadowPodSpec{Pod: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: list("cpu", "100m")}}}}},
	}
	w.create(w.paris, guest)
	guest.Status.Phase = corev1.PodSucceeded
	if err := w.paris.Status().Update(ctx, guest); err != nil {
		t.Fatal(err)
	}
	quotaIs := func(want corev1.ResourceList, cordoned bool) {
		t.Helper()
		w.until("Yes", func() (peering.Progress, error) {
			quota := read(w, w.paris, "liqo-tenant-rome", user, &offloadingv1beta1.Quota{})
			if same(quota.Spec.Resources, want) && ptr.Deref(quota.Spec.Cordoned, false) == cordoned {
				return peering.Done("Yes", ""), nil
			}
			return peering.Waiting("No", fmt.Sprint(quota.Spec)), nil
		})
	}
	quotaIs(list("cpu", "1433m", "memory", "1234567891", "nvidia.com/gpu", "1", "pods", "3"), false)
	if err := w.paris.Delete(ctx, guest); err != nil {
		t.Fatal(err)
	}
	quotaIs(list("cpu", "1333m", "memory", "1234567891", "nvidia.com/gpu", "1", "pods", "3"), false)

	// A namespace that its owner offloads in another way is reported, not changed.
	own := &offloadingv1beta1.NamespaceOffloading{
		ObjectMeta: metav1.ObjectMeta{Namespace: "own", Name: consts.DefaultNamespaceOffloadingName},
		Spec: offloadingv1beta1.NamespaceOffloadingSpec{
			NamespaceMappingStrategy: offloadingv1beta1.DefaultNameMappingStrategyType,
			PodOffloadingStrategy:    offloadingv1beta1.RemotePodOffloadingStrategyType,
			ClusterSelector: corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "elsewhere", Operator: corev1.NodeSelectorOpExists}},
			}}},
		},
	}
	w.create(w.rome, own)
	w.capacity("NamespaceOffloadedByOthers", peering.Capacity{Resources: full, Pods: 3, Namespaces: []string{"shop", "own"}})
	long := strings.Repeat("n", 60)
	w.create(w.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: long}})
	w.capacity("NamespaceNameTooLong", peering.Capacity{Resources: full, Pods: 3, Namespaces: []string{"shop", long}})

	// What is needed no more goes, in place; a resource that was is zero now.
	w.capacity("Ready", peering.Capacity{Resources: half, Pods: 1, Namespaces: []string{"shop"}})
	node = read(w, w.rome, "", "spillway-paris", &corev1.Node{})
	if gpu := node.Status.Allocatable["nvidia.com/gpu"]; !gpu.IsZero() || node.Status.Allocatable.Pods().Value() != 1 {
		t.Errorf("the node shows %v", node.Status.Allocatable)
	}
	w.until("Yes", func() (peering.Progress, error) {
		_, found, err := get(ctx, w.paris, "", "tools-rome", &corev1.Namespace{})
		if _, offloaded, _ := get(ctx, w.rome, "tools", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{}); !found && !offloaded {
			return peering.Done("Yes", ""), err
		}
		return peering.Waiting("No", ""), err
	})

	// Parked, and without any hold: no guest may start.
	w.capacity("Ready", peering.Capacity{})
	w.grant(0, nil)
	node = read(w, w.rome, "", "spillway-paris", &corev1.Node{})
	if !node.Spec.Unschedulable || !same(node.Status.Allocatable, list("cpu", "1m", "memory", "1Mi")) {
		t.Errorf("the node is not parked: %v %v", node.Spec.Unschedulable, node.Status.Allocatable)
	}
	quotaIs(list("cpu", "1m", "memory", "1Mi"), true)
	links, err := w.driver.Observe(ctx)
	if err != nil || len(links) != 1 || links[0].ClusterID != "paris" || !links[0].Peered || links[0].Node == nil {
		t.Errorf("links: %+v, %v", links, err)
	}
	if borrowers, err := w.lender.Consumers(ctx); err != nil || !slices.Equal(borrowers, []string{"rome"}) {
		t.Errorf("borrowers: %v, %v", borrowers, err)
	}

	// Warm again, then everything goes, on both sides, and what is not ours stays.
	w.grant(2, half)
	w.capacity("Ready", peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop"}})
	w.teardown()
	w.nothingIsLeft(w.rome, "rome")
	w.nothingIsLeft(w.paris, "paris")
	read(w, w.rome, "own", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})

	// A second peering: a later session, which messages of the first do not touch.
	w.until("Peered", func() (peering.Progress, error) { return w.driver.EnsurePeering(ctx, paris) })
	w.capacity("Ready", peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop"}})
	second := sessionOf(read(w, w.rome, "", "liqo-tenant-paris", &corev1.Namespace{}), annotationSession)
	if second <= first {
		t.Errorf("session %d follows %d", second, first)
	}
	for kind, want := range map[kind]kind{kindTeardown: kindGone, kindHello: kindRefusal} {
		late, err := encode(message{Kind: kind, Session: first})
		if err != nil {
			t.Fatal(err)
		}
		reply, err := w.lender.Handle(ctx, peering.Peer{ClusterID: "rome", Holds: true}, late)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := decode(reply, kindGone, kindRefusal); err != nil || m.Kind != want || m.Session != first {
			t.Errorf("a late %s was answered with %+v, %v", kind, m, err)
		}
	}
	if tenant := read(w, w.paris, "liqo-tenant-rome", "rome", &authv1beta1.Tenant{}); !tenant.DeletionTimestamp.IsZero() {
		t.Error("a late message ended a later session")
	}

	// A consumer that forgot everything begins anew, and so does the provider.
	if err := change(ctx, w.rome, read(w, w.rome, "", "liqo-tenant-paris", &corev1.Namespace{}), func(n *corev1.Namespace) { n.Annotations[annotationSession] = "1" }); err != nil {
		t.Fatal(err)
	}
	if err := w.rome.Delete(ctx, read(w, w.rome, "liqo-tenant-paris", "controlplane-paris", &authv1beta1.Identity{})); err != nil {
		t.Fatal(err)
	}
	w.driver.forget("paris")
	w.until("Peered", func() (peering.Progress, error) { return w.driver.EnsurePeering(ctx, paris) })
	if third := sessionOf(read(w, w.rome, "", "liqo-tenant-paris", &corev1.Namespace{}), annotationSession); third <= second {
		t.Errorf("session %d follows %d", third, second)
	}
	w.teardown()
	w.nothingIsLeft(w.rome, "rome")
	w.nothingIsLeft(w.paris, "paris")
}

// TestATeardownThatIsInTheWay covers what has been seen to go wrong.
func TestATeardownThatIsInTheWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	run := func(name string, f func(*testing.T)) {
		t.Helper()
		t.Run(name, func(t *testing.T) {
			defer func(outer *testing.T) { w.t = outer }(w.t)
			w.t = t
			f(t)
		})
	}
	ctx := t.Context()
	half := list("cpu", "500m", "memory", "512Mi")
	w.answering()
	up := func() {
		w.t.Helper()
		w.grant(2, half)
		w.capacity("Ready", peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop"}})
	}

	run("crd-replicator has lost hold of its copies", func(t *testing.T) {
		up()
		w.played.lost.Store(true)
		w.teardown()
		w.nothingIsLeft(w.rome, "rome")
		w.nothingIsLeft(w.paris, "paris")
		w.played.lost.Store(false)
	})

	run("pods are still on the node", func(t *testing.T) {
		up()
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
			Spec:       corev1.PodSpec{NodeName: "spillway-paris", TerminationGracePeriodSeconds: new(int64), Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}
		w.create(w.rome, pod)
		// A mapping is kept while a pod of the namespace is on the node.
		w.capacity("Ready", peering.Capacity{Resources: half, Pods: 2})
		read(w, w.rome, "shop", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
		w.teardown()
		if _, found, err := get(ctx, w.rome, "shop", "web", &corev1.Pod{}); found || err != nil {
			t.Errorf("the pod is still there: %v", err)
		}
		w.nothingIsLeft(w.rome, "rome")
	})

	run("a teardown is thought better of", func(t *testing.T) {
		up()
		w.until("KubeletGoing", func() (peering.Progress, error) { return w.driver.Teardown(ctx, paris) })
		up()
		w.teardown()
		w.nothingIsLeft(w.paris, "paris")
	})

	run("the agents have started anew in between", func(t *testing.T) {
		up()
		w.until("IdentityGoing", func() (peering.Progress, error) { return w.driver.Teardown(ctx, paris) })
		w.driver.mu.Lock()
		clear(w.driver.conversations)
		clear(w.driver.wanted)
		w.driver.mu.Unlock()
		w.teardown()
		w.nothingIsLeft(w.rome, "rome")
		w.nothingIsLeft(w.paris, "paris")
	})

	run("the provider also consumes", func(t *testing.T) {
		up()
		namespace := read(w, w.paris, "", "liqo-tenant-rome", &corev1.Namespace{})
		if err := setSession(ctx, w.paris, namespace, annotationSession, 5); err != nil {
			t.Fatal(err)
		}
		w.teardown()
		w.nothingIsLeft(w.rome, "rome")
		namespace = read(w, w.paris, "", "liqo-tenant-rome", &corev1.Namespace{})
		if sessionOf(namespace, annotationLentSession) != 0 || !namespace.DeletionTimestamp.IsZero() {
			t.Errorf("the namespace of the other direction was not left as it was: %v", namespace.Annotations)
		}
		var secrets corev1.SecretList
		if err := w.paris.List(ctx, &secrets, client.InNamespace(namespace.Name)); err != nil || len(secrets.Items) > 0 {
			t.Errorf("secrets are left: %d, %v", len(secrets.Items), err)
		}
		if err := setSession(ctx, w.paris, namespace, annotationSession, 0); err != nil {
			t.Fatal(err)
		}
	})

	run("the provider does not answer", func(t *testing.T) {
		up()
		w.relay.cut.Store(true)
		w.teardown()
		w.nothingIsLeft(w.rome, "rome")
		// It clears up by itself when told that the consumer is not to be heard
		// of any more.
		w.until("Gone", func() (peering.Progress, error) { return w.lender.Teardown(ctx, "rome") })
		w.nothingIsLeft(w.paris, "paris")
	})

	run("somebody peered the clusters by hand", func(t *testing.T) {
		w.relay.cut.Store(false)
		byHand := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "liqo-tenant-paris", Labels: map[string]string{consts.RemoteClusterID: "paris", consts.TenantNamespaceLabel: "true"}}}
		w.create(w.rome, byHand)
		w.until(reasonPeeredByOthers, func() (peering.Progress, error) { return w.driver.EnsurePeering(ctx, paris) })
		w.teardown()
		read(w, w.rome, "", "liqo-tenant-paris", &corev1.Namespace{})
	})
}
