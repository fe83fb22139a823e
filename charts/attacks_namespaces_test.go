package charts_test

import (
	"maps"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// ownNamespaces are those that the agent makes with driver liqo, and those that only have such
// a name: liqo-tenant-oslo and spillway-trial-oslo.
type ownNamespaces struct {
	t            *testing.T
	admin, agent client.Client
}

// trialLabels and tenantLabels are those of the agent's namespaces for a peer.
func trialLabels(peer string) map[string]string {
	return map[string]string{"liqo.io/remote-cluster-id": peer, "app.kubernetes.io/managed-by": "spillway"}
}

func tenantLabels(peer string) map[string]string {
	labels := trialLabels(peer)
	labels["liqo.io/tenant-namespace"] = "true"
	return labels
}

func (o ownNamespaces) create(name string, labels map[string]string, options ...client.CreateOption) func() error {
	return func() error {
		return o.agent.Create(o.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, options...)
	}
}

func (o ownNamespaces) patch(name, text string) func() error {
	return func() error {
		return o.agent.Patch(o.t.Context(), &corev1.Namespace{ObjectMeta: named(name)}, client.RawPatch(types.MergePatchType, []byte(text)), client.DryRunAll)
	}
}

func (o ownNamespaces) delete(object client.Object) func() error {
	return func() error {
		return o.agent.Delete(o.t.Context(), object.DeepCopyObject().(client.Object), client.DryRunAll)
	}
}

// bind binds the agent's role for peers to accounts in the namespace of the charts.
func (o ownNamespaces) bind(namespace string, accounts ...string) func() error {
	return o.bindRole(namespace, "spillway-agent", "spillway-agent-tenant", accounts...)
}

func (o ownNamespaces) bindRole(namespace, name, role string, accounts ...string) func() error {
	return func() error {
		binding := roleBinding(namespace, name, role, "spillway-system", accounts[0])
		for _, account := range accounts[1:] {
			binding.Subjects = append(binding.Subjects, rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: "spillway-system", Name: account})
		}
		return o.agent.Create(o.t.Context(), binding, client.DryRunAll)
	}
}

// allowed makes the namespaces for rome, and checks all that the agent does with them.
func (o ownNamespaces) allowed() {
	t, labels := o.t, tenantLabels("rome")
	maps.Copy(labels, map[string]string{"pod-security.kubernetes.io/enforce": "privileged"})
	expect.NoError(t, o.create("liqo-tenant-rome", labels)())
	expect.NoError(t, o.create("spillway-trial-rome", trialLabels("rome"))())
	for _, object := range []client.Object{
		// As liqoctl makes it with another name.
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "peers", Labels: map[string]string{"liqo.io/remote-cluster-id": "bergen", "liqo.io/tenant-namespace": "true"}}},
		roleBinding("liqo-tenant-oslo", "liqo", "liqo-remote-controlplane", "liqo", "liqo-controller-manager"),
		roleBinding("liqo-tenant-rome", "liqo", "liqo-remote-controlplane", "liqo", "liqo-controller-manager"),
	} {
		expect.NoError(t, o.admin.Create(t.Context(), object))
	}
	const note = `{"metadata":{"annotations":{"broker.fluidos.eu/liqo-session":"1"}}}`
	for what, do := range map[string]func() error{
		"storing the session in a peer's namespace":           o.patch("liqo-tenant-rome", note),
		"binding its role in a peer's namespace":              o.bind("liqo-tenant-rome", "spillway-agent"),
		"deleting a peer's namespace":                         o.delete(&corev1.Namespace{ObjectMeta: named("liqo-tenant-rome")}),
		"limiting a namespace to try guests in":               o.patch("spillway-trial-rome", `{"metadata":{"labels":{"broker.fluidos.eu/limited":"true"}}}`),
		"deleting a namespace to try guests in":               o.delete(&corev1.Namespace{ObjectMeta: named("spillway-trial-rome")}),
		"limiting a namespace of guests of a peering by hand": o.patch("shop-oslo", `{"metadata":{"labels":{"broker.fluidos.eu/limited":"true","pod-security.kubernetes.io/enforce":"restricted"}}}`),
	} {
		eventually(t, what, do)
	}
}

// attacks are those on namespaces that the agent did not make, and to make others take its own
// for such.
func (o ownNamespaces) attacks() []attack {
	const change, bindOnly = "may only change namespaces of peers", "may only bind its roles"
	limits := []string{"spillway-agent-limits"}
	byHand, trial := &corev1.Namespace{ObjectMeta: named("liqo-tenant-oslo")}, &corev1.Namespace{ObjectMeta: named("spillway-trial-oslo")}
	const adopt = `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"spillway","liqo.io/remote-cluster-id":"oslo"}}}`
	return []attack{
		{"its role for peers in the namespace of a peering by hand", o.bind("liqo-tenant-oslo", "spillway-agent"), limits, bindOnly},
		{"its role for peers to another account", o.bind("liqo-tenant-rome", "default"), limits, bindOnly},
		{"its role for peers to another account beside itself", o.bind("liqo-tenant-rome", "spillway-agent", "default"), limits, bindOnly},
		{"its role for guests in the namespace of a peering by hand", o.bindRole("peers", "spillway-agent", "spillway-agent-guests", "spillway-agent"), limits, bindOnly},
		{"its role for marking in the namespace of a peering by hand", o.bindRole("peers", "spillway-agent-reflection", "spillway-agent-namespace", "spillway-agent"), limits, bindOnly},
		{"marking the namespace of a peering by hand as one of guests", o.patch(byHand.Name, `{"metadata":{"labels":{"broker.fluidos.eu/limited":"true"}}}`), limits, change},
		{"deleting Liqo's binding of a peering by hand", o.delete(roleBinding("liqo-tenant-oslo", "liqo", "", "", "")), limits, bindOnly},
		{"deleting the namespace of a peering by hand", o.delete(byHand), limits, change},
		{"taking the namespace of a peering by hand", o.patch(byHand.Name, adopt), limits, change},
		{"removing the labels of a peering by hand", o.patch(byHand.Name, `{"metadata":{"labels":{"liqo.io/remote-cluster-id":null}}}`), limits, change},
		{"annotating the namespace of a peering by hand", o.patch(byHand.Name, `{"metadata":{"annotations":{"x":"y"}}}`), limits, change},
		{"a peer's namespace without labels", o.create("liqo-tenant-bergen", nil, client.DryRunAll), limits, change},
		{"a peer's namespace with the label of another peer", o.create("liqo-tenant-bergen", tenantLabels("rome"), client.DryRunAll), limits, change},
		{"a peer's namespace that its limits take for one of guests", o.create("liqo-tenant-bergen", trialLabels("bergen"), client.DryRunAll), limits, change},
		{"removing the label of a peer's namespace", o.patch("liqo-tenant-rome", `{"metadata":{"labels":{"liqo.io/tenant-namespace":null}}}`), limits, change},
		{"deleting a namespace with the name of one to try guests in", o.delete(trial), limits, change},
		{"taking a namespace with the name of one to try guests in", o.patch(trial.Name, adopt), limits, change},
		{"a namespace to try guests in without the label that its limits go by", o.create("spillway-trial-bergen", map[string]string{"app.kubernetes.io/managed-by": "spillway"}, client.DryRunAll), limits, change},
		{"a namespace to try guests in of another peer", o.create("spillway-trial-bergen", trialLabels("rome"), client.DryRunAll), limits, change},
		{"a namespace to try guests in that its limits take for another one", o.create("spillway-trial-bergen", tenantLabels("bergen"), client.DryRunAll), limits, change},
		{"a label of guests that their limits take for another namespace", o.patch("shop-oslo", `{"metadata":{"labels":{"liqo.io/tenant-namespace":""}}}`), limits, change},
		{"another Pod Security Standard for guests", o.patch("shop-oslo", `{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":"privileged"}}}`), limits, change},
		{"an owner that ends a namespace of guests", o.patch("shop-oslo", `{"metadata":{"ownerReferences":[{"apiVersion":"v1","kind":"Node","name":"gone","uid":"1"}]}}`), limits, change},
	}
}

// attacksOnGuestNamespaces are those of the agent with driver direct on namespaces that have
// only the name of one of guests, spillway-guests-oslo, and on its own, whose name is guests.
func attacksOnGuestNamespaces(t *testing.T, admin, agent client.Client) []attack {
	ctx, own := t.Context(), ownNamespaces{t, admin, agent}
	const foreign = "spillway-guests-oslo"
	for _, object := range []client.Object{
		// As an administrator could make it.
		&corev1.Namespace{ObjectMeta: named(foreign)}, roleBinding(foreign, "mine", "view", "default", "default"),
	} {
		expect.NoError(t, admin.Create(ctx, object))
	}
	bind := func(namespace, role string, subjects ...rbacv1.Subject) func() error {
		return func() error {
			binding := roleBinding(namespace, "x", role, "", "")
			binding.Subjects = subjects
			return agent.Create(ctx, binding, client.DryRunAll)
		}
	}
	account := func(namespace, name string) rbacv1.Subject {
		return rbacv1.Subject{Kind: rbacv1.ServiceAccountKind, Namespace: namespace, Name: name}
	}
	itself, consumer, other := account(namespace, "spillway-agent"), account(guests, "spillway-virtual-node"), account("default", "default")
	for what, do := range map[string]func() error{
		"binding its own role":                   bind(guests, "spillway-agent-guests", itself),
		"binding the consumer's role":            bind(guests, "spillway-direct-guest", consumer),
		"storing the session of a consumer":      own.patch(guests, `{"metadata":{"annotations":{"broker.fluidos.eu/direct-session":"1"}}}`),
		"deleting the namespace of guests":       own.delete(&corev1.Namespace{ObjectMeta: named(guests)}),
		"creating the namespace of other guests": own.create("spillway-guests-bergen", guestLabels("bergen"), client.DryRunAll),
	} {
		eventually(t, what, do)
	}
	const bindOnly, change = "may only bind its roles", "may only change namespaces of guests"
	limits := []string{"spillway-agent-limits"}
	return []attack{
		{"a consumer's role in a namespace without its labels", bind(foreign, "spillway-direct-guest", account(foreign, "spillway-virtual-node")), limits, bindOnly},
		{"a consumer's role for itself", bind(guests, "spillway-direct-guest", itself), limits, bindOnly},
		{"a consumer's role for itself beside the consumer", bind(guests, "spillway-direct-guest", consumer, itself), limits, bindOnly},
		{"a consumer's role to another account", bind(guests, "spillway-direct-guest", other), limits, bindOnly},
		{"the agent's role for guests where nothing limits it", bind(foreign, "spillway-agent-guests", itself), limits, bindOnly},
		{"the agent's role for guests to another account", bind(guests, "spillway-agent-guests", other), limits, bindOnly},
		{"the agent's role for guests to another account beside itself", bind(guests, "spillway-agent-guests", itself, other), limits, bindOnly},
		{"deleting a binding in a namespace with the name of one of guests", own.delete(roleBinding(foreign, "mine", "", "", "")), limits, bindOnly},
		{"deleting a namespace with the name of one of guests", own.delete(&corev1.Namespace{ObjectMeta: named(foreign)}), limits, change},
		{"taking a namespace with the name of one of guests", own.patch(foreign, `{"metadata":{"labels":{"app.kubernetes.io/managed-by":"spillway","broker.fluidos.eu/guests-of":"oslo"}}}`), limits, change},
		{"a namespace of guests without its labels", own.create("spillway-guests-bergen", nil, client.DryRunAll), limits, change},
		{"a namespace of guests with the label of another consumer", own.create("spillway-guests-bergen", guestLabels("rome"), client.DryRunAll), limits, change},
		{"labelling a user's namespace as one of guests", own.patch("default", `{"metadata":{"labels":{"broker.fluidos.eu/guests-of":""}}}`), limits, change},
	}
}

// guestLabels are those of the agent's namespace for the guests of a consumer.
func guestLabels(consumer string) map[string]string {
	return map[string]string{"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": consumer}
}
