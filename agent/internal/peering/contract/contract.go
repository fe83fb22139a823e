// Package contract has the tests that every driver must pass: Test peers two
// clusters, resizes a virtual node and removes everything again, with messages
// lost and both agents restarted at any point; Messages and FuzzMessages check a
// driver's messages.
package contract

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Environment is two clusters with a driver between them. What the driver relies on
// may be simulated.
type Environment interface {
	// Consumer is the consumer's cluster ID, Provider the provider.
	Consumer() string
	Provider() peering.Peer
	// Driver and ProviderSide are the two sides as they run now.
	Driver() peering.Driver
	ProviderSide() peering.Provider
	// Restart replaces both sides by new ones without their memory.
	Restart()
	// DropEverySecond drops every second message, Disconnect all of them.
	DropEverySecond(bool)
	Disconnect(bool)
	// ConsumerClient is a client of the consumer's cluster.
	ConsumerClient() client.Client
	// Namespaces are two existing ones of the consumer.
	Namespaces() [2]string
	// Refused is another one, whose pods cannot use a virtual node.
	Refused() string
	// PassTime lets time pass for both sides.
	PassTime(d time.Duration)
	// ExpectNothingLeft fails the test if either cluster has anything of a peering.
	ExpectNothingLeft()
}

// suite is the environment with the steps of the test.
type suite struct {
	Environment
	t          *testing.T
	half, full corev1.ResourceList
	// cordoned is set while an administrator has cordoned the node.
	cordoned bool
}

// Test runs the contract in an environment without a peering.
func Test(t *testing.T, environment Environment) {
	s := &suite{
		Environment: environment, t: t,
		half: expect.Resources("cpu", "500m", "memory", "512Mi"), full: expect.Resources("cpu", "2", "memory", "1Gi", "nvidia.com/gpu", "1"),
	}
	s.expectPeerings()
	s.teardown() // of nothing
	if progress, err := s.Driver().EnsurePeering(t.Context(), peering.Peer{ClusterID: "../kube-system"}); err == nil {
		t.Errorf("a cluster ID that is a path: %+v", progress)
	}
	s.peerWithLostMessages()
	s.refuseOneNamespace()
	s.breakOneNamespace()
	s.resizeInPlace()
	s.teardownWithRestarts()
	s.teardownBeforePeered()
	s.teardownWithABrokenNamespace()
	s.teardownUnreachable()
}

// step repeats a step, as the agent does, until it is done.
func (s *suite) step(what string, step func() (peering.Progress, error)) {
	s.t.Helper()
	expect.Eventually(s.t, what, func() (bool, string) {
		progress, err := step()
		return err == nil && progress.Done, fmt.Sprintf("%+v, %v", progress, err)
	})
}

func (s *suite) grant(total corev1.ResourceList, pods int32) {
	s.t.Helper()
	s.step("the grant", func() (peering.Progress, error) {
		return s.ProviderSide().EnsureGrant(s.t.Context(), s.Consumer(), total, pods)
	})
}

func (s *suite) peer() {
	s.t.Helper()
	s.step("the peering", func() (peering.Progress, error) { return s.Driver().EnsurePeering(s.t.Context(), s.Provider()) })
}

func (s *suite) teardown() {
	s.t.Helper()
	s.step("the teardown", func() (peering.Progress, error) { return s.Driver().Teardown(s.t.Context(), s.Provider()) })
}

func (s *suite) providerTeardown() {
	s.t.Helper()
	s.step("the provider's teardown", func() (peering.Progress, error) {
		return s.ProviderSide().Teardown(s.t.Context(), s.Consumer())
	})
}

// resize waits until the node has a capacity, and checks that it shows exactly that.
func (s *suite) resize(capacity peering.Capacity) *corev1.Node {
	s.t.Helper()
	s.step(fmt.Sprintf("a node with %s", broker.FromList(capacity.Resources)), func() (peering.Progress, error) {
		return s.Driver().EnsureCapacity(s.t.Context(), s.Provider(), capacity)
	})
	node, err := session.Node(s.t.Context(), s.ConsumerClient(), s.Provider().ClusterID)
	if err != nil || node == nil {
		s.t.Fatalf("the driver is done, but the node does not exist: %v", err)
	}
	if value, domain := node.Labels[corev1.LabelHostname]; domain {
		s.t.Errorf("pods of this cluster spread over the node: it has label %s=%s", corev1.LabelHostname, value)
	}
	expect.Eventually(s.t, fmt.Sprintf("a node in zone %q", capacity.Labels[corev1.LabelTopologyZone]), func() (bool, string) {
		node, err := session.Node(s.t.Context(), s.ConsumerClient(), s.Provider().ClusterID)
		if err != nil {
			return false, err.Error()
		}
		zone, has := node.Labels[corev1.LabelTopologyZone]
		want, wanted := capacity.Labels[corev1.LabelTopologyZone]
		return zone == want && has == wanted, fmt.Sprint(node.Labels)
	})
	shown := node.Status.Allocatable
	for name, amount := range capacity.Resources {
		if is := shown[name]; is.Cmp(amount) != 0 {
			s.t.Errorf("the node has %s of %s, want %s", is.String(), name, amount.String())
		}
	}
	for name, is := range shown {
		least := session.ParkedResources()[name]
		if _, requested := capacity.Resources[name]; !requested && name != corev1.ResourcePods && is.Cmp(least) > 0 {
			s.t.Errorf("the node has %s of %s, which was not requested", is.String(), name)
		}
	}
	if pods := shown.Pods().Value(); pods != int64(capacity.Pods) {
		s.t.Errorf("the node takes %d pods, want %d", pods, capacity.Pods)
	}
	if node.Labels[corev1.LabelNodeExcludeBalancers] == "" {
		s.t.Error("the node is a target of load balancers")
	}
	if node.Spec.Unschedulable != s.cordoned {
		s.t.Errorf("the administrator's cordon is %t, the node's unschedulable %t", s.cordoned, node.Spec.Unschedulable)
	}
	return node
}

// cordon cordons the node, as an administrator does, or uncordons it.
func (s *suite) cordon(unschedulable bool) {
	s.t.Helper()
	node, err := session.Node(s.t.Context(), s.ConsumerClient(), s.Provider().ClusterID)
	expect.NoError(s.t, err)
	before := node.DeepCopy()
	node.Spec.Unschedulable = unschedulable
	expect.NoError(s.t, s.ConsumerClient().Patch(s.t.Context(), node, client.MergeFrom(before)))
	s.cordoned = unschedulable
}

// expectPeerings compares what the driver observes.
func (s *suite) expectPeerings(want ...string) {
	s.t.Helper()
	got, err := s.Driver().Observe(s.t.Context())
	expect.NoError(s.t, err)
	if !slices.Equal(got, want) {
		s.t.Errorf("observed peerings: got %v, want %v", got, want)
	}
}

// peerWithLostMessages peers the clusters although every second message is lost.
func (s *suite) peerWithLostMessages() {
	s.t.Helper()
	s.grant(s.half, 2)
	s.DropEverySecond(true)
	s.peer()
	s.DropEverySecond(false)
	s.peer()
	s.expectPeerings(s.Provider().ClusterID)
	if consumers, err := s.ProviderSide().Consumers(s.t.Context()); err != nil || !slices.Equal(consumers, []string{s.Consumer()}) {
		s.t.Errorf("consumers: %v, %v", consumers, err)
	}
}

// refuseOneNamespace checks that a namespace whose pods cannot use the node, and one that does
// not exist, concern no other: the node provides its capacity to the pods of the rest.
func (s *suite) refuseOneNamespace() {
	s.t.Helper()
	capacity := peering.Capacity{Resources: s.half, Pods: 2, Namespaces: []string{s.Refused(), "gone", s.Namespaces()[0]}}
	s.resize(capacity)
	expect.Eventually(s.t, "only namespace "+s.Refused()+" to be refused", func() (bool, string) {
		progress, err := s.Driver().EnsureCapacity(s.t.Context(), s.Provider(), capacity)
		why, refused := progress.Namespaces[s.Refused()]
		return err == nil && progress.Done && len(progress.Namespaces) == 1 && refused && why.Final && why.Reason != "" && strings.Contains(why.Message, s.Refused()), fmt.Sprintf("%+v, %v", progress, err)
	})
	if why, err := s.Driver().Unmappable(s.t.Context(), s.Namespaces()[0]); err != nil || why != "" {
		s.t.Errorf("pods of namespace %s can run at no provider: %q, %v", s.Namespaces()[0], why, err)
	}
}

// breakOneNamespace checks that a namespace whose webhook is down, so that nothing can be created
// or deleted there, concerns no other, and is used again when the webhook is gone.
func (s *suite) breakOneNamespace() {
	s.t.Helper()
	namespaces := s.Namespaces()
	fine, broken := namespaces[0], namespaces[1]
	capacity := peering.Capacity{Resources: s.half, Pods: 2, Namespaces: namespaces[:]}
	repair := s.breakNamespace(broken, "true")
	s.resize(capacity)
	progress, err := s.Driver().EnsureCapacity(s.t.Context(), s.Provider(), capacity)
	if why, out := progress.Namespaces[broken]; err != nil || !out || why.Final || !strings.Contains(why.Message, "webhook") {
		s.t.Errorf("namespace %s has a webhook that is down: %+v, %v", broken, progress, err)
	}
	if why, out := progress.Namespaces[fine]; out {
		s.t.Errorf("namespace %s cannot use the node: %+v", fine, why)
	}
	repair()
	expect.Eventually(s.t, "both namespaces to use the node", func() (bool, string) {
		progress, err := s.Driver().EnsureCapacity(s.t.Context(), s.Provider(), capacity)
		return err == nil && progress.Done && len(progress.Namespaces) == 0, fmt.Sprintf("%+v, %v", progress, err)
	})
	repair = s.breakNamespace(broken, "true")
	s.resize(peering.Capacity{Resources: s.half, Pods: 1, Namespaces: namespaces[:1]})
	repair()
}

// breakNamespace registers a webhook that is down for the objects of a namespace that a condition
// selects. It returns when the API server knows it; so does repair.
func (s *suite) breakNamespace(namespace, condition string) (repair func()) {
	s.t.Helper()
	ctx, c := s.t.Context(), s.ConsumerClient()
	webhook := &admissionv1.ValidatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "down"},
		Webhooks: []admissionv1.ValidatingWebhook{{
			Name: "down.example.com", AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNone),
			ClientConfig:      admissionv1.WebhookClientConfig{URL: ptr.To("https://127.0.0.1:1/")},
			NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: namespace}},
			MatchConditions:   []admissionv1.MatchCondition{{Name: "condition", Expression: condition}},
			Rules: []admissionv1.RuleWithOperations{{
				Operations: []admissionv1.OperationType{admissionv1.Create, admissionv1.Delete},
				Rule:       admissionv1.Rule{APIGroups: []string{"*"}, APIVersions: []string{"*"}, Resources: []string{"*"}, Scope: ptr.To(admissionv1.NamespacedScope)},
			}},
		}},
	}
	expect.NoError(s.t, c.Create(ctx, webhook))
	known := func(down bool) {
		s.t.Helper()
		expect.Eventually(s.t, "the API server to know the webhook", func() (bool, string) {
			err := c.Create(ctx, &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "probe"}}, client.DryRunAll)
			return (err != nil) == down, fmt.Sprint(err)
		})
	}
	known(true)
	return func() {
		s.t.Helper()
		expect.NoError(s.t, c.Delete(ctx, webhook))
		known(false)
	}
}

// resizeInPlace checks that the same node follows its capacity throughout.
func (s *suite) resizeInPlace() {
	s.t.Helper()
	namespaces, provider := s.Namespaces(), s.Provider().ClusterID
	node := s.resize(peering.Capacity{Resources: s.half, Pods: 2, Namespaces: namespaces[:1]})
	if node.Labels[broker.LabelProvider] != provider || node.Labels[broker.LabelNodeType] != broker.NodeTypeVirtual {
		s.t.Errorf("the node's labels: %v", node.Labels)
	}
	for _, taint := range node.Spec.Taints {
		if taint.Effect == corev1.TaintEffectPreferNoSchedule {
			continue
		}
		if !slices.ContainsFunc(s.Driver().Tolerations(provider), func(toleration corev1.Toleration) bool {
			return toleration.Key == taint.Key && toleration.Operator == corev1.TolerationOpEqual && toleration.Value == taint.Value && toleration.Effect == taint.Effect
		}) {
			s.t.Errorf("no toleration for taint %v", taint)
		}
	}
	same := func(what string, now *corev1.Node) {
		s.t.Helper()
		if now.UID != node.UID {
			s.t.Errorf("%s: the node was replaced", what)
		}
	}
	s.grant(s.full, 3)
	same("growing", s.resize(peering.Capacity{Resources: s.full, Pods: 3, Namespaces: namespaces[:], Labels: map[string]string{corev1.LabelTopologyZone: "paris-1"}}))
	s.cordon(true)
	s.Restart()
	s.grant(s.full, 3)
	same("restarting", s.resize(peering.Capacity{Resources: s.full, Pods: 3, Namespaces: namespaces[:]}))
	same("shrinking", s.resize(peering.Capacity{Resources: s.half, Pods: 1, Namespaces: namespaces[:1]}))
	same("parking", s.resize(peering.Capacity{}))
	s.cordon(false)
	s.grant(nil, 0)
	same("parking without a grant", s.resize(peering.Capacity{}))
	s.grant(s.half, 2)
	same("using a parked node", s.resize(peering.Capacity{Resources: s.half, Pods: 2, Namespaces: namespaces[1:]}))
}

// teardownWithRestarts restarts both sides after each of the first steps.
func (s *suite) teardownWithRestarts() {
	s.t.Helper()
	for range 3 {
		progress, err := s.Driver().Teardown(s.t.Context(), s.Provider())
		if err == nil && progress.Done {
			break
		}
		s.Restart()
		s.grant(nil, 0)
	}
	s.teardown()
	s.grant(nil, 0)
	s.ExpectNothingLeft()
	s.expectPeerings()
}

// teardownBeforePeered ends a second peering before the handshake is complete, and
// the provider's part of it once more.
func (s *suite) teardownBeforePeered() {
	s.t.Helper()
	s.grant(s.half, 2)
	if _, err := s.Driver().EnsurePeering(s.t.Context(), s.Provider()); err != nil {
		s.t.Logf("the first step of a peering: %v", err)
	}
	s.teardown()
	s.grant(nil, 0)
	s.providerTeardown()
	s.ExpectNothingLeft()
}

// teardownWithABrokenNamespace ends a peering while what it has made in one of its namespaces
// cannot be deleted. That is removed with the next peering.
func (s *suite) teardownWithABrokenNamespace() {
	s.t.Helper()
	namespaces := s.Namespaces()
	use := func(namespaces ...string) {
		s.t.Helper()
		s.grant(s.half, 2)
		s.peer()
		s.resize(peering.Capacity{Resources: s.half, Pods: 2, Namespaces: namespaces})
	}
	use(namespaces[:]...)
	repair := s.breakNamespace(namespaces[1], "request.resource.group != ''")
	s.step("the teardown", func() (peering.Progress, error) {
		progress, err := s.Driver().Teardown(s.t.Context(), s.Provider())
		if err != nil && strings.Contains(err.Error(), "webhook") {
			s.PassTime(UnreachableAfter / 4)
		}
		return progress, err
	})
	s.expectPeerings()
	repair()
	use(namespaces[0])
	s.teardown()
	s.grant(nil, 0)
	s.providerTeardown()
	s.ExpectNothingLeft()
}

// teardownUnreachable ends a peering while the provider is unreachable; both
// sides clean up without the other.
func (s *suite) teardownUnreachable() {
	s.t.Helper()
	namespaces := s.Namespaces()
	s.grant(s.half, 2)
	s.peer()
	s.resize(peering.Capacity{Resources: s.half, Pods: 2, Namespaces: namespaces[:1]})
	s.Disconnect(true)
	s.teardown()
	s.Disconnect(false)
	s.grant(nil, 0)
	s.providerTeardown()
	s.ExpectNothingLeft()
}
