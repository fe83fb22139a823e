package direct

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const guestNamespace = "spillway-guests-rome"

func inGuestNamespace(name string) client.ObjectKey {
	return client.ObjectKey{Namespace: guestNamespace, Name: name}
}

// grantTest is an environment with a granted peering and a consumer's client.
type grantTest struct {
	*environment
	half     peering.Capacity
	consumer client.Client
}

func guest(name, cpu string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guestNamespace, Name: name}, Spec: corev1.PodSpec{
		AutomountServiceAccountToken: ptr.To(false),
		SecurityContext:              &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
		Containers: []corev1.Container{{
			Name: "c", Image: "pause",
			Resources:       corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu, "memory", "0"), Limits: expect.Resources("memory", "64Mi")},
			SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
		}},
	}}
}

// TestGrant checks everything that a consumer is granted at the provider, that it is
// enforced, and how it is revoked.
func TestGrant(t *testing.T) {
	e := newEnvironment(t)
	// A role of the chart.
	e.create(e.paris, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: guestRole}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods", "secrets", "configmaps"}, Verbs: []string{"get", "list", "create"}},
	}})
	g := &grantTest{environment: e, half: peering.Capacity{Resources: expect.Resources("cpu", "500m", "memory", "512Mi", "example.com/fpga", "1"), Pods: 2, Namespaces: []string{"shop"}}}
	e.grant(g.half.Resources, 2)
	e.until("Peered", e.peering)
	e.until("Ready", e.capacity(g.half))
	g.expectConnection()
	g.expectGuestNamespace()
	g.expectHandOver()
	g.expectPodSecurity()
	g.expectSecretsBounded()
	g.expectTokenBounded()
	g.expectQuotaRestored()
	g.revoke()
	g.expectNewToken()
}

func (g *grantTest) expectConnection() {
	g.t.Helper()
	connection := g.stored().Connection
	if connection.Endpoint != g.parisConfig.Host || connection.Namespace != guestNamespace || string(connection.CA) != string(g.parisConfig.CAData) {
		g.t.Errorf("the connection is to %s, namespace %s", connection.Endpoint, connection.Namespace)
	}
	if left := time.Until(connection.Expires); left < 50*time.Minute || left > 61*time.Minute {
		g.t.Errorf("the token is valid for %s", left)
	}
	g.consumer = g.as(connection)
}

// hard are the limits for the capacity of the test.
func (g *grantTest) hard() corev1.ResourceList {
	return expect.Resources("requests.cpu", "500m", "requests.memory", "512Mi", "requests.ephemeral-storage", "0", "requests.example.com/fpga", "1", "pods", "2",
		"count/configmaps", "60", "count/secrets", "60", "limits.memory", "1536Mi", "count/services", "0", "services.nodeports", "0", "services.loadbalancers", "0",
		"count/persistentvolumeclaims", "0")
}

// expectHandOver: consumers learn whether their guests are to wait for a place, also if
// that changes while the peering stands.
func (g *grantTest) expectHandOver() {
	g.t.Helper()
	for _, want := range []string{broker.HandOverEnabled, ""} {
		g.options.HandOver = want != ""
		g.Restart()
		g.grant(g.half.Resources, g.half.Pods)
		var namespace corev1.Namespace
		expect.NoError(g.t, g.paris.Get(g.t.Context(), client.ObjectKey{Name: guestNamespace}, &namespace))
		if got := namespace.Annotations[broker.AnnotationHandOver]; got != want {
			g.t.Errorf("annotation %s is %q, want %q", broker.AnnotationHandOver, got, want)
		}
	}
}

// expectPodSecurity: the Pod Security Standard of guests applies at once, also if it changes
// while the peering stands.
func (g *grantTest) expectPodSecurity() {
	g.t.Helper()
	for _, want := range []string{broker.PodSecurityBaseline, broker.PodSecurityRestricted} {
		g.options.PodSecurity = want
		g.Restart()
		g.grant(g.half.Resources, g.half.Pods)
		var namespace corev1.Namespace
		expect.NoError(g.t, g.paris.Get(g.t.Context(), client.ObjectKey{Name: guestNamespace}, &namespace))
		if got := namespace.Labels["pod-security.kubernetes.io/enforce"]; got != want {
			g.t.Errorf("the Pod Security Standard is %q, want %q", got, want)
		}
	}
}

func (g *grantTest) expectGuestNamespace() {
	g.t.Helper()
	ctx := g.t.Context()
	var namespace corev1.Namespace
	var quota corev1.ResourceQuota
	var deny, allow networkingv1.NetworkPolicy
	var account corev1.ServiceAccount
	expect.NoError(g.t, errors.Join(g.paris.Get(ctx, client.ObjectKey{Name: guestNamespace}, &namespace), g.paris.Get(ctx, inGuestNamespace("spillway-guests"), &quota),
		g.paris.Get(ctx, inGuestNamespace("spillway-deny"), &deny), g.paris.Get(ctx, inGuestNamespace("spillway-allow"), &allow), g.paris.Get(ctx, inGuestNamespace("spillway-virtual-node"), &account)))
	for key, want := range map[string]string{
		broker.LabelManagedBy: "spillway", broker.LabelGuestsOf: "rome",
		"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/audit": "restricted", "pod-security.kubernetes.io/warn": "restricted",
	} {
		if namespace.Labels[key] != want {
			g.t.Errorf("label %s is %q", key, namespace.Labels[key])
		}
	}
	if !identical(quota.Spec.Hard, g.hard()) || !identical(quota.Status.Hard, g.hard()) {
		g.t.Errorf("the quota is %v, in the status %v", quota.Spec.Hard, quota.Status.Hard)
	}
	var limits corev1.LimitRange
	expect.NoError(g.t, g.paris.Get(ctx, inGuestNamespace("spillway-guests"), &limits))
	zero := expect.Resources("cpu", "0", "memory", "0", "ephemeral-storage", "0")
	if items := limits.Spec.Limits; len(items) != 1 || items[0].Type != corev1.LimitTypeContainer || !identical(items[0].DefaultRequest, zero) || !identical(items[0].Default, expect.Resources("memory", "256Mi")) {
		g.t.Errorf("the limits of containers without their own are %+v", items)
	}
	if len(deny.Spec.PolicyTypes) != 2 || len(deny.Spec.Ingress)+len(deny.Spec.Egress)+len(deny.Spec.PodSelector.MatchLabels) > 0 {
		g.t.Errorf("the default policy does not deny everything: %+v", deny.Spec)
	}
	if len(allow.Spec.Ingress) != 0 || len(allow.Spec.Egress) != 1 || allow.Spec.Egress[0].To[0].IPBlock.CIDR != "10.0.0.0/8" || !slices.Equal(allow.Spec.PolicyTypes, []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}) {
		g.t.Errorf("the provider's networks: %+v", allow.Spec)
	}
	var bindings rbacv1.RoleBindingList
	expect.NoError(g.t, g.paris.List(ctx, &bindings, client.InNamespace(namespace.Name)))
	roles := map[string]string{}
	for _, b := range bindings.Items {
		roles[b.RoleRef.Name] = b.Subjects[0].Namespace + "/" + b.Subjects[0].Name
		if b.RoleRef.Name == guestRole && b.CreationTimestamp.Before(&quota.CreationTimestamp) {
			g.t.Error("the consumer had permissions before the quota existed")
		}
	}
	if want := map[string]string{guestRole: guestNamespace + "/spillway-virtual-node", "spillway-agent-guests": "spillway-system/spillway-agent"}; !maps.Equal(roles, want) {
		g.t.Errorf("roles in the namespace: %v", roles)
	}
}

// expectSecretsBounded checks that the API server refuses one Secret more than the grant
// allows, and nothing else of the consumer; with a larger grant it takes it.
func (g *grantTest) expectSecretsBounded() {
	g.t.Helper()
	ctx := g.t.Context()
	create := func(object client.Object, name string) error {
		object.SetNamespace(guestNamespace)
		object.SetName(name)
		return g.consumer.Create(ctx, object)
	}
	limit := g.hard()["count/secrets"]
	for i := range limit.Value() {
		expect.NoError(g.t, create(&corev1.Secret{}, fmt.Sprint("copy-", i)))
	}
	if err := create(&corev1.Secret{}, "one-more"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "exceeded quota: spillway-guests, requested: count/secrets=1, used: count/secrets=60, limited: count/secrets=60") {
		g.t.Errorf("a Secret beyond the quota: %v", err)
	}
	expect.NoError(g.t, create(&corev1.ConfigMap{}, "words"))
	g.grant(g.half.Resources, g.half.Pods+1)
	expect.Eventually(g.t, "the API server to know the larger grant", func() (bool, string) {
		err := create(&corev1.Secret{}, "one-more")
		return err == nil, fmt.Sprint(err)
	})
	g.grant(g.half.Resources, g.half.Pods)
}

// expectTokenBounded checks that the token works within the quota, and nowhere else.
func (g *grantTest) expectTokenBounded() {
	g.t.Helper()
	ctx := g.t.Context()
	g.create(g.paris, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: guestNamespace, Name: "default"}})
	if err := g.consumer.Create(ctx, guest("first", "400m")); err != nil {
		g.t.Fatalf("a guest within the quota: %v", err)
	}
	if err := g.consumer.Create(ctx, guest("second", "200m")); !apierrors.IsForbidden(err) {
		g.t.Errorf("a guest beyond the quota: %v", err)
	}
	if err := g.consumer.List(ctx, &corev1.PodList{}, client.InNamespace("default")); !apierrors.IsForbidden(err) {
		g.t.Errorf("pods of another namespace: %v", err)
	}
	g.grant(nil, 0)
	expect.Eventually(g.t, "a guest without a grant to be refused", func() (bool, string) {
		// With the former quota, the API server does not succeed in charging it.
		err := g.consumer.Create(ctx, guest("third", "1m"))
		if err == nil {
			g.t.Fatal("a guest without a grant was created")
		}
		return apierrors.IsForbidden(err), err.Error()
	})
	if err := g.paris.Get(ctx, inGuestNamespace("first"), &corev1.Pod{}); err != nil {
		g.t.Errorf("the running guest: %v", err)
	}
}

// expectQuotaRestored checks that a grant corrects what others changed.
func (g *grantTest) expectQuotaRestored() {
	g.t.Helper()
	ctx := g.t.Context()
	quota := &corev1.ResourceQuota{}
	expect.NoError(g.t, g.paris.Get(ctx, inGuestNamespace("spillway-guests"), quota))
	quota.ResourceVersion = ""
	quota.Spec.Hard = expect.Resources("pods", "1000")
	overflowing := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"`+broker.LabelOverflow+`":"enabled"}}}`))
	expect.NoError(g.t, errors.Join(g.paris.Update(ctx, quota),
		g.paris.Patch(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guestNamespace}}, overflowing),
		g.paris.Delete(ctx, &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: guestNamespace, Name: "spillway-deny"}})))
	g.grant(g.half.Resources, 2)
	if err := g.paris.Get(ctx, inGuestNamespace("spillway-guests"), quota); err != nil || !identical(quota.Spec.Hard, g.hard()) {
		g.t.Errorf("the quota is %v, %v", quota.Spec.Hard, err)
	}
	var namespace corev1.Namespace
	if err := g.paris.Get(ctx, client.ObjectKey{Name: guestNamespace}, &namespace); err != nil || namespace.Labels[broker.LabelOverflow] != "" {
		g.t.Errorf("guests overflow to a third cluster: their namespace has labels %v, %v", namespace.Labels, err)
	}
}

// revoke checks that the provider's teardown revokes the permissions at once,
// although the token has not expired.
func (g *grantTest) revoke() {
	g.t.Helper()
	ctx := g.t.Context()
	expect.Eventually(g.t, "the provider's teardown", func() (bool, string) {
		progress, err := g.ProviderSide().Teardown(ctx, "rome")
		if err != nil {
			return false, err.Error()
		}
		if err := g.consumer.Create(ctx, guest("late", "1m")); !apierrors.IsForbidden(err) && !apierrors.IsUnauthorized(err) {
			return false, fmt.Sprint("the consumer still has access: ", err)
		}
		return progress.Done, progress.Message
	})
	if consumers, err := g.ProviderSide().Consumers(ctx); err != nil || len(consumers) > 0 {
		g.t.Errorf("consumers: %v, %v", consumers, err)
	}
}

// expectNewToken checks that a token that the node reports as refused is replaced.
func (g *grantTest) expectNewToken() {
	g.t.Helper()
	g.simulated.set(func(s *simulation) { s.unreachable = reasonAccessDenied })
	expect.Eventually(g.t, "the node reports the refusal", func() (bool, string) {
		node, err := session.Node(g.t.Context(), g.rome, "paris")
		expect.NoError(g.t, err)
		reason := session.Ready(node).Reason
		return reason == reasonAccessDenied, reason
	})
	g.Clock.Advance(tokenGrace)
	before := g.stored().Connection.Token
	expect.Eventually(g.t, "another token", func() (bool, string) {
		progress, err := g.peering()
		if err != nil {
			return false, err.Error()
		}
		return g.stored().Connection.Token != before, progress.Message
	})
	g.simulated.set(func(s *simulation) { s.unreachable = "" })
	g.until("Ready", g.capacity(g.half))
	if g.as(g.stored().Connection).List(g.t.Context(), &corev1.PodList{}, client.InNamespace(guestNamespace)) != nil {
		g.t.Error("the new token is not valid")
	}
}

// TestRefusals checks what the provider replies where it cannot grant, and that
// objects of others are not changed.
func TestRefusals(t *testing.T) {
	e := newEnvironment(t)
	e.grant(expect.Resources("cpu", "1"), 1)
	taken := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guestNamespace}}
	e.create(e.paris, taken)
	for _, tc := range []struct {
		change func(*Options)
		want   string
	}{
		{func(o *Options) { o.Endpoint = "" }, "NoEndpoint: paris has no API server endpoint for consumers"},
		{func(o *Options) { o.CA = func() ([]byte, error) { return nil, errors.New("lost") } }, "NoCA"},
		{func(o *Options) { o.CA = func() ([]byte, error) { return e.romeConfig.CAData, nil } }, "CertificateInvalid"},
		{func(*Options) {}, "NamespaceTaken: namespace spillway-guests-rome already exists at the provider and is not managed by Spillway; rename or delete it there"},
	} {
		kept := e.options
		tc.change(&e.options)
		e.Restart()
		e.grant(expect.Resources("cpu", "1"), 1)
		if progress := e.until("PeeringRefused", e.peering); !strings.Contains(progress.Message, tc.want) {
			t.Errorf("want %q, got %q", tc.want, progress.Message)
		}
		e.options = kept
		e.Restart()
	}
	if err := e.paris.Get(t.Context(), client.ObjectKeyFromObject(taken), taken); err != nil || taken.Labels[broker.LabelGuestsOf] != "" {
		t.Errorf("the namespace of somebody else: %v, %v", taken.Labels, err)
	}
	e.until("Removed", e.teardown)
	e.create(e.rome, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: virtualNodeNamespace, Name: nodeconfig.SecretName("paris")}})
	e.until("SecretNameTaken", e.peering)
}
