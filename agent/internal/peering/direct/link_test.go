package direct

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// adjusted is a clock that can be put forward.
type adjusted struct {
	mu    sync.Mutex
	ahead time.Duration
}

func (a *adjusted) Now() time.Time {
	a.mu.Lock()
	defer a.mu.Unlock()
	return time.Now().Add(a.ahead)
}

func (a *adjusted) Since(t time.Time) time.Duration { return a.Now().Sub(t) }

func (a *adjusted) forward(by time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ahead += by
}

// until repeats a step until its progress has the reason.
func (w *world) until(reason string, step func() (peering.Progress, error)) peering.Progress {
	w.t.Helper()
	var progress peering.Progress
	w.eventually("waiting for "+reason, func() string {
		var err error
		if progress, err = step(); err != nil {
			return err.Error()
		}
		if progress.Reason != reason {
			return progress.Reason + ": " + progress.Message
		}
		return ""
	})
	return progress
}

func (w *world) peering() (peering.Progress, error) {
	return w.Driver().EnsurePeering(w.t.Context(), paris)
}

func (w *world) capacity(capacity peering.Capacity) func() (peering.Progress, error) {
	return func() (peering.Progress, error) { return w.Driver().EnsureCapacity(w.t.Context(), paris, capacity) }
}

func (w *world) teardown() (peering.Progress, error) {
	return w.Driver().Teardown(w.t.Context(), paris)
}

func (w *world) grant(total corev1.ResourceList, pods int32) {
	w.t.Helper()
	w.eventually("the grant", func() string {
		progress, err := w.ProviderSide().EnsureGrant(w.t.Context(), "rome", total, pods)
		if err != nil {
			return err.Error()
		}
		if !progress.Done {
			return progress.Message
		}
		return ""
	})
}

// stored is the link as virtual-node reads it.
func (w *world) stored() nodeconfig.Config {
	w.t.Helper()
	var secret corev1.Secret
	if err := w.home.Get(w.t.Context(), client.ObjectKey{Namespace: linkNamespace, Name: nodeconfig.SecretName("paris")}, &secret); err != nil {
		w.t.Fatal(err)
	}
	l, err := nodeconfig.FromSecret(&secret)
	if err != nil {
		w.t.Fatal(err)
	}
	return l
}

// as is a client of the provider with a link's token.
func (w *world) as(connection nodeconfig.Connection) client.Client {
	w.t.Helper()
	return newClient(w.t, &rest.Config{Host: connection.Endpoint, BearerToken: connection.Token, TLSClientConfig: rest.TLSClientConfig{CAData: connection.CA}})
}

// TestAGrant looks at all that a consumer is given at the provider, and at what
// becomes of it.
func TestAGrant(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	// What the chart brings.
	w.create(w.away, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: GuestRole}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "create"}},
	}})
	half := list("cpu", "500m", "memory", "512Mi", "example.com/fpga", "1")
	w.grant(half, 2)
	w.until("Peered", w.peering)
	w.until("Ready", w.capacity(peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop"}}))
	connection := w.stored().Connection
	if connection.Endpoint != w.awayConfig.Host || connection.Namespace != "spillway-guests-rome" || string(connection.CA) != string(w.awayConfig.CAData) {
		t.Errorf("the connection leads to %s, namespace %s", connection.Endpoint, connection.Namespace)
	}
	if left := time.Until(connection.Expires); left < 50*time.Minute || left > 61*time.Minute {
		t.Errorf("the token is good for %s", left)
	}

	var namespace corev1.Namespace
	var quota corev1.ResourceQuota
	var deny, allow networkingv1.NetworkPolicy
	var account corev1.ServiceAccount
	in := func(name string) client.ObjectKey {
		return client.ObjectKey{Namespace: "spillway-guests-rome", Name: name}
	}
	if err := errors.Join(w.away.Get(ctx, client.ObjectKey{Name: "spillway-guests-rome"}, &namespace), w.away.Get(ctx, in("spillway-guests"), &quota),
		w.away.Get(ctx, in("spillway-deny"), &deny), w.away.Get(ctx, in("spillway-allow"), &allow), w.away.Get(ctx, in("spillway-virtual-node"), &account)); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{
		broker.LabelManagedBy: "spillway", broker.LabelGuestsOf: "rome",
		"pod-security.kubernetes.io/enforce": "baseline", "pod-security.kubernetes.io/audit": "baseline", "pod-security.kubernetes.io/warn": "baseline",
	} {
		if namespace.Labels[key] != want {
			t.Errorf("label %s is %q", key, namespace.Labels[key])
		}
	}
	hard := list("requests.cpu", "500m", "requests.memory", "512Mi", "requests.ephemeral-storage", "0", "requests.example.com/fpga", "1", "pods", "2",
		"count/configmaps", "60", "count/secrets", "60")
	if !exactly(quota.Spec.Hard, hard) || !exactly(quota.Status.Hard, hard) {
		t.Errorf("the quota is %v, counted %v", quota.Spec.Hard, quota.Status.Hard)
	}
	if len(deny.Spec.PolicyTypes) != 2 || len(deny.Spec.Ingress)+len(deny.Spec.Egress)+len(deny.Spec.PodSelector.MatchLabels) > 0 {
		t.Errorf("the wall has holes: %+v", deny.Spec)
	}
	if len(allow.Spec.Ingress) != 0 || len(allow.Spec.Egress) != 1 || allow.Spec.Egress[0].To[0].IPBlock.CIDR != "10.0.0.0/8" || !slices.Equal(allow.Spec.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}) {
		t.Errorf("what the lender allows: %+v", allow.Spec)
	}
	var bindings rbacv1.RoleBindingList
	if err := w.away.List(ctx, &bindings, client.InNamespace(namespace.Name)); err != nil {
		t.Fatal(err)
	}
	roles := map[string]string{}
	for _, b := range bindings.Items {
		roles[b.RoleRef.Name] = b.Subjects[0].Namespace + "/" + b.Subjects[0].Name
		// The quota was there, and counted, before anybody had a right.
		if b.RoleRef.Name == GuestRole && b.CreationTimestamp.Before(&quota.CreationTimestamp) {
			t.Error("the consumer had rights before it had a bound")
		}
	}
	if want := map[string]string{GuestRole: "spillway-guests-rome/spillway-virtual-node", "spillway-agent-guests": "spillway-system/spillway-agent"}; !maps.Equal(roles, want) {
		t.Errorf("roles in the namespace: %v", roles)
	}

	// The token works there, within the quota, and nowhere else.
	w.create(w.away, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: "default"}})
	consumer := w.as(connection)
	guest := func(name, cpu string) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: name}, Spec: corev1.PodSpec{
			AutomountServiceAccountToken: ptr.To(false),
			Containers:                   []corev1.Container{{Name: "c", Image: "pause", Resources: corev1.ResourceRequirements{Requests: list("cpu", cpu, "memory", "0")}}},
		}}
	}
	if err := consumer.Create(ctx, guest("first", "400m")); err != nil {
		t.Fatalf("a guest within the quota: %v", err)
	}
	if err := consumer.Create(ctx, guest("second", "200m")); !apierrors.IsForbidden(err) {
		t.Errorf("a guest beyond the quota: %v", err)
	}
	if err := consumer.List(ctx, &corev1.PodList{}, client.InNamespace("default")); !apierrors.IsForbidden(err) {
		t.Errorf("a look elsewhere: %v", err)
	}

	// Without a grant no guest starts any more, and the one that runs stays.
	w.grant(nil, 0)
	if err := consumer.Create(ctx, guest("third", "1m")); !apierrors.IsForbidden(err) {
		t.Errorf("a guest without a grant: %v", err)
	}
	if err := w.away.Get(ctx, in("first"), &corev1.Pod{}); err != nil {
		t.Errorf("the guest that ran: %v", err)
	}

	// What others change is mended by the next grant or renewal.
	quota.ResourceVersion = ""
	quota.Spec.Hard = list("pods", "1000")
	if err := errors.Join(w.away.Update(ctx, &quota), w.away.Delete(ctx, &deny)); err != nil {
		t.Fatal(err)
	}
	w.grant(half, 2)
	if err := w.away.Get(ctx, in("spillway-guests"), &quota); err != nil || !exactly(quota.Spec.Hard, hard) {
		t.Errorf("the quota is %v, %v", quota.Spec.Hard, err)
	}

	// Revoking takes the rights at once, whatever the token says.
	w.eventually("the lender's teardown", func() string {
		progress, err := w.ProviderSide().Teardown(ctx, "rome")
		if err != nil {
			return err.Error()
		}
		if err := consumer.Create(ctx, guest("late", "1m")); !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
			return "the consumer is not kept out: " + err.Error()
		}
		if !progress.Done {
			return progress.Message
		}
		return ""
	})
	if borrowers, err := w.ProviderSide().Consumers(ctx); err != nil || len(borrowers) > 0 {
		t.Errorf("borrowers: %v, %v", borrowers, err)
	}

	// The consumer's node says that it is refused, and the link is made anew.
	w.played.set(func(p *played) { p.unreachable = reasonProviderRefused })
	clock := w.clock
	w.eventually("the node says so", func() string {
		var node corev1.Node
		if err := w.home.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &node); err != nil {
			return err.Error()
		}
		return map[bool]string{false: "it does not"}[readiness(&node).Reason == reasonProviderRefused]
	})
	clock.forward(believeAfter)
	before := w.stored().Connection.Token
	w.eventually("another token", func() string {
		if progress, err := w.peering(); err != nil {
			return err.Error()
		} else if w.stored().Connection.Token == before {
			return progress.Message
		}
		return ""
	})
	w.played.set(func(p *played) { p.unreachable = "" })
	w.until("Ready", w.capacity(peering.Capacity{Resources: half, Pods: 2, Namespaces: []string{"shop"}}))
	if w.as(w.stored().Connection).List(ctx, &corev1.PodList{}, client.InNamespace(namespace.Name)) != nil {
		t.Error("the new token is not good")
	}
}

// TestRenewal renews a token in time, without disturbing the link, and asks for
// another where that was not possible.
func TestRenewal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.grant(list("cpu", "1"), 1)
	w.until("Peered", w.peering)
	parked := w.capacity(peering.Capacity{})
	w.until("Ready", parked)
	token := func() string { return w.stored().Connection.Token }
	secrets := func() []corev1.Secret {
		var found corev1.SecretList
		if err := w.home.List(t.Context(), &found, client.InNamespace(linkNamespace)); err != nil {
			t.Fatal(err)
		}
		return found.Items
	}
	first, sent := token(), w.sent.Load()
	w.clock.forward(29 * time.Minute)
	w.until("Ready", parked)
	if w.sent.Load() != sent || len(due(secrets(), w.clock.Now())) > 0 {
		t.Error("a token was renewed before half of its life was over")
	}

	// The parked link is woken, asks, and stays as it is meanwhile.
	w.clock.forward(2 * time.Minute)
	if woken := due(secrets(), w.clock.Now()); !slices.Equal(woken, []string{"paris"}) {
		t.Errorf("woken: %v", woken)
	}
	w.cut.Store(true)
	for range 3 {
		if progress, err := parked(); err != nil || !progress.Done {
			t.Fatalf("while the renewal is on its way: %+v, %v", progress, err)
		}
		w.clock.forward(w.options.ResendAfter)
	}
	w.cut.Store(false)
	w.eventually("the renewal", func() string {
		if progress, err := parked(); err != nil || !progress.Done {
			t.Fatalf("renewing disturbed the link: %+v, %v", progress, err)
		}
		return map[bool]string{true: "the token is the old one"}[token() == first]
	})

	// A refusal disturbs nothing while the token is good, and is told after.
	w.holdsNot.Store(true)
	w.clock.forward(31 * time.Minute)
	w.eventually("the refusal is told", func() string {
		progress, err := w.peering()
		if err != nil || !progress.Done {
			t.Fatalf("a refused renewal disturbed the link: %+v, %v", progress, err)
		}
		return map[bool]string{false: progress.Message}[strings.Contains(progress.Message, "holds nothing here")]
	})
	w.clock.forward(30 * time.Minute)
	if progress := w.until("Refused", w.peering); !strings.Contains(progress.Message, "paris refused the link: NoHold: rome holds nothing here") {
		t.Errorf("the consumer is told %q", progress.Message)
	}
	if links, err := w.Driver().Observe(t.Context()); err != nil || len(links) != 1 || links[0].Peered {
		t.Errorf("links: %+v, %v", links, err)
	}
	w.holdsNot.Store(false)
	w.until("Peered", w.peering)
}

// TestReplayedMessages has old messages come again.
func TestReplayedMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	handle := func(m message) message {
		t.Helper()
		raw, err := encode(m)
		if err != nil {
			t.Fatal(err)
		}
		reply, err := w.ProviderSide().Handle(ctx, peering.Peer{ClusterID: "rome", Holds: true}, raw)
		if err != nil || reply == nil {
			t.Fatalf("answering %+v: %q, %v", m, reply, err)
		}
		answer, err := decode(reply, kindGrant, kindGone, kindRefusal)
		if err != nil {
			t.Fatal(err)
		}
		return answer
	}
	w.grant(list("cpu", "1"), 1)
	w.until("Peered", w.peering)
	w.until("Ready", w.capacity(peering.Capacity{}))
	r, _, err := w.sideDriver().load(ctx, "paris")
	if err != nil {
		t.Fatal(err)
	}
	session, token := r.session, r.Connection.Token

	// At the provider: an end or a beginning of an earlier session.
	if answer := handle(message{Kind: kindTeardown, Session: session - 1}); answer.Kind != kindGone || answer.Session != session-1 {
		t.Errorf("an old Teardown: %+v", answer)
	}
	if answer := handle(message{Kind: kindHello, Session: session - 1, Ask: 1}); answer.Reason != reasonStale || answer.Current != session {
		t.Errorf("an old Hello: %+v", answer)
	}
	var namespace corev1.Namespace
	if err := w.away.Get(ctx, client.ObjectKey{Name: "spillway-guests-rome"}, &namespace); err != nil || !namespace.DeletionTimestamp.IsZero() {
		t.Errorf("the namespace suffered: %v", err)
	}

	// At the consumer: a grant that nobody waits for, and one to an old question.
	old := handle(message{Kind: kindHello, Session: session, Ask: 1})
	raw, err := encode(old)
	if err != nil {
		t.Fatal(err)
	}
	w.sideDriver().Receive("paris", raw)
	w.cut.Store(true)
	w.clock.forward(31 * time.Minute)
	w.until("Peered", w.peering) // asks
	w.sideDriver().Receive("paris", raw)
	w.sideDriver().Receive("paris", []byte(`{"driver":"direct","kind":"Grant"`))
	w.until("Peered", w.peering)
	if w.stored().Connection.Token != token {
		t.Error("an old grant took the place of a newer one")
	}

	// A clock that was set back: the provider says from where to go on.
	w.cut.Store(false)
	if err := w.home.Delete(ctx, r.secret); err != nil {
		t.Fatal(err)
	}
	w.clock.forward(-2 * time.Hour)
	w.until("Peered", w.peering)
	if r, _, err = w.sideDriver().load(ctx, "paris"); err != nil || r.session <= session {
		t.Errorf("the session is %d, after %d: %v", r.session, session, err)
	}
}

// TestOtherDrivers has a cluster meet one whose driver is another.
func TestOtherDrivers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reply, err := w.ProviderSide().Handle(t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, []byte(`{"kind":"Hello","session":7}`))
	if other, ok := peering.ReadsOnly(reply); err != nil || !ok || other != "direct" {
		t.Errorf("the provider answers %q, %v", reply, err)
	}
	w.cut.Store(true)
	if _, err := w.peering(); err != nil {
		t.Fatal(err)
	}
	w.sideDriver().Receive("paris", peering.Unreadable("liqo"))
	progress := w.until("OtherDriver", w.peering)
	if !strings.HasPrefix(progress.Message, "paris uses another driver: liqo") {
		t.Errorf("the consumer is told %q", progress.Message)
	}
	// It keeps nobody from giving the link up.
	w.until("Gone", func() (peering.Progress, error) {
		progress, err := w.teardown()
		w.sideDriver().Receive("paris", peering.Unreadable("liqo"))
		return progress, err
	})
	w.NothingIsLeft()
}

// TestRefusals are what the provider says to what it cannot grant.
func TestRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.grant(list("cpu", "1"), 1)
	taken := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "spillway-guests-rome"}}
	w.create(w.away, taken)
	for _, step := range []struct {
		change func(*Options)
		want   string
	}{
		{func(o *Options) { o.Endpoint = "" }, "NoEndpoint: paris does not say where its API server is reached"},
		{func(o *Options) { o.CA = func() ([]byte, error) { return nil, errors.New("lost") } }, "NoCA"},
		{func(o *Options) { o.CA = func() ([]byte, error) { return w.homeConfig.CAData, nil } }, "CertificateRefused"},
		{func(*Options) {}, "NamespaceTaken: namespace spillway-guests-rome exists there and is not Spillway's"},
	} {
		kept := w.options
		step.change(&w.options)
		w.Restart()
		w.grant(list("cpu", "1"), 1)
		if progress := w.until("Refused", w.peering); !strings.Contains(progress.Message, step.want) {
			t.Errorf("want %q, got %q", step.want, progress.Message)
		}
		w.options = kept
		w.Restart()
	}
	// It was not touched.
	if err := w.away.Get(t.Context(), client.ObjectKeyFromObject(taken), taken); err != nil || taken.Labels[broker.LabelGuestsOf] != "" {
		t.Errorf("somebody else's namespace: %v, %v", taken.Labels, err)
	}
	// So is a Secret of somebody else's.
	w.until("Gone", w.teardown)
	w.create(w.home, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: linkNamespace, Name: nodeconfig.SecretName("paris")}})
	w.until("SecretNameTaken", w.peering)
}

// TestWithoutVirtualNode has the program that keeps the Node be away at the
// beginning, and at the end.
func TestWithoutVirtualNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	w.played.set(func(p *played) { p.off = true })
	half := peering.Capacity{Resources: list("cpu", "500m"), Pods: 1, Namespaces: []string{"shop"}}
	w.grant(half.Resources, 1)
	w.until("Peered", w.peering)
	w.until("NodePending", w.capacity(half))
	w.clock.forward(suspicious)
	if progress := w.until("NodePending", w.capacity(half)); !strings.Contains(progress.Message, "is Deployment spillway-virtual-node running in namespace spillway-system?") {
		t.Errorf("it says %q", progress.Message)
	}
	w.played.set(func(p *played) { p.off = false })
	w.until("Ready", w.capacity(half))
	var binding rbacv1.RoleBinding
	if err := w.home.Get(ctx, client.ObjectKey{Namespace: "shop", Name: VirtualNodeAccount}, &binding); err != nil || binding.RoleRef.Name != VirtualNodeNamespaceRole {
		t.Errorf("virtual-node may not read namespace shop: %+v, %v", binding.RoleRef, err)
	}
	moved := half
	moved.Namespaces = []string{"tools"}
	w.until("Ready", w.capacity(moved))
	if err := w.home.Get(ctx, client.ObjectKeyFromObject(&binding), &binding); !apierrors.IsNotFound(err) {
		t.Errorf("virtual-node may still read namespace shop, which no pod needs any more: %v", err)
	}

	w.played.set(func(p *played) { p.off = true })
	w.until("NodeGoing", w.teardown)
	// As long as the lease moves, the node's keeper is waited for.
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: corev1.NamespaceNodeLease, Name: "spillway-paris"}}
	for range 3 {
		if err := w.home.Get(ctx, client.ObjectKeyFromObject(lease), lease); err != nil {
			t.Fatal(err)
		}
		lease.Spec.RenewTime = ptr.To(metav1.NewMicroTime(lease.Spec.RenewTime.Add(time.Second)))
		if err := w.home.Update(ctx, lease); err != nil {
			t.Fatal(err)
		}
		w.until("NodeGoing", w.teardown)
		w.clock.forward(w.options.StaleAfter - time.Millisecond)
	}
	if err := w.home.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &corev1.Node{}); err != nil {
		t.Fatalf("the node was taken from its keeper: %v", err)
	}
	w.until("NodeGoing", w.teardown)
	w.clock.forward(w.options.StaleAfter)
	w.until("Gone", w.teardown)
	w.NothingIsLeft()
}

// TestAnUnreachableProvider keeps pods from ending; in time they are given up,
// and the link with them.
func TestAnUnreachableProvider(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	w.options.StaleAfter = time.Hour // virtual-node is well
	w.Restart()
	half := peering.Capacity{Resources: list("cpu", "500m"), Pods: 1, Namespaces: []string{"shop"}}
	w.grant(half.Resources, 1)
	w.until("Peered", w.peering)
	w.until("Ready", w.capacity(half))
	w.create(w.home, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "default"}})
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "away"}, Spec: corev1.PodSpec{
		NodeName: "spillway-paris", Containers: []corev1.Container{{Name: "c", Image: "pause"}},
	}}
	w.create(w.home, pod)
	w.cut.Store(true)
	w.played.set(func(p *played) { p.unreachable = "ProviderUnreachable" })
	if progress := w.until("NodePending", w.capacity(half)); !strings.Contains(progress.Message, "the provider says ProviderUnreachable") {
		t.Errorf("it says %q", progress.Message)
	}
	w.until("NodeGoing", w.teardown)
	if !w.stored().Ending {
		t.Error("virtual-node is not told to let go")
	}
	w.until("NodeGoing", w.teardown)
	if err := w.home.Get(ctx, client.ObjectKeyFromObject(pod), pod); err != nil {
		t.Fatalf("the pod was given up at once: %v", err)
	}
	w.clock.forward(w.options.UnreachableAfter)
	w.until("ProviderGoing", w.teardown)
	if err := w.home.Get(ctx, client.ObjectKeyFromObject(pod), pod); !apierrors.IsNotFound(err) {
		t.Errorf("the pod is still there: %v", err)
	}
	var secret corev1.Secret
	if err := w.home.Get(ctx, client.ObjectKey{Namespace: linkNamespace, Name: nodeconfig.SecretName("paris")}, &secret); err != nil {
		t.Fatal(err)
	}
	for key, value := range secret.Data {
		if strings.Contains(string(value), "eyJ") {
			t.Errorf("the ended link still holds a token at %s", key)
		}
	}

	// What is on its way out is brought to its end before it begins anew.
	if progress, err := w.peering(); err != nil || progress.Reason != "Terminating" {
		t.Errorf("a link that ends: %+v, %v", progress, err)
	}
	w.cut.Store(false)
	w.played.set(func(p *played) { p.unreachable = "" })
	w.until("Peered", w.peering)
	w.until("Ready", w.capacity(half))
}

// Nodes that are not Spillway's are left alone.
func TestANodeOfSomebodyElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris"}}
	w.create(w.home, node)
	w.grant(list("cpu", "1"), 1)
	w.until("Peered", w.peering)
	w.until("NodeNameTaken", w.capacity(peering.Capacity{Resources: list("cpu", "1"), Pods: 1}))
	w.until("Gone", w.teardown)
	if err := w.home.Get(context.WithoutCancel(t.Context()), client.ObjectKeyFromObject(node), node); err != nil {
		t.Errorf("the node: %v", err)
	}
}
