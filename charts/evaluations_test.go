package charts_test

import (
	"bufio"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// evaluation is a line of the API server's metrics: how often it has evaluated the match
// conditions of a policy or webhook that did not hold, or has denied a request by a policy.
var evaluation = regexp.MustCompile(`^apiserver_(?:admission_match_condition_evaluation|validating_admission_policy_check_duration)_seconds_count\{.*(?:name|policy)="(spillway-[a-z-]+|[a-z]+\.broker\.fluidos\.eu)".*\} ([0-9]+)$`)

// evaluations are the numbers so far, by policy or webhook.
func evaluations(t *testing.T, config *rest.Config) map[string]int {
	t.Helper()
	transport, err := rest.HTTPClientFor(config)
	expect.NoError(t, err)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, strings.TrimSuffix(config.Host, "/")+"/metrics", nil)
	expect.NoError(t, err)
	response, err := transport.Do(request)
	expect.NoError(t, err)
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		t.Fatalf("reading the metrics: %s", response.Status)
	}
	counts, lines := map[string]int{}, bufio.NewReader(response.Body)
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF {
			return counts
		}
		expect.NoError(t, err)
		if match := evaluation.FindStringSubmatch(line[:len(line)-1]); match != nil {
			count, err := strconv.Atoi(match[2])
			expect.NoError(t, err)
			counts[match[1]] += count
		}
	}
}

// expectEvaluations expects that a request is admitted with these evaluations.
func expectEvaluations(t *testing.T, config *rest.Config, do func() error, want map[string]int) {
	t.Helper()
	before := evaluations(t, config)
	expect.NoError(t, do())
	got := evaluations(t, config)
	maps.DeleteFunc(got, func(policy string, count int) bool { return count == before[policy] })
	for policy := range got {
		got[policy] -= before[policy]
	}
	if !maps.Equal(got, want) {
		t.Errorf("evaluates %v, want %v", got, want)
	}
}

// Policies cost a cluster next to nothing: the API server converts a pod for each that it
// evaluates, which is the greater part of its work for the status of a pod.
func TestEvaluationsOfOrdinaryRequests(t *testing.T) {
	patch := client.RawPatch(types.MergePatchType, []byte(`{"status":{"message":"x"}}`))
	touch := client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"annotations":{"example.com/x":"y"}}}`))
	for driver, values := range map[string][]string{"liqo": needed, "direct": append(slices.Clone(needed), "driver=direct")} {
		t.Run(driver, func(t *testing.T) {
			objects := render(t, "agent", values)
			for _, policy := range only[admissionv1.ValidatingAdmissionPolicy](t, objects, "ValidatingAdmissionPolicy") {
				if match := policy.Spec.MatchConstraints; match.NamespaceSelector == nil && match.ObjectSelector == nil && len(policy.Spec.MatchConditions) == 0 {
					t.Errorf("policy %s is evaluated in full for each request, and not counted here", policy.Name)
				}
			}
			config := controlplane.Start(t)
			admin, ctx := as(t, config, ""), t.Context()
			expect.NoError(t, admin.Create(ctx, &corev1.Namespace{ObjectMeta: named("liqo")}))
			install(t, "install", "agent", kubeconfig(t, config), values)
			createWorkload(t, admin)
			shop := &corev1.Namespace{ObjectMeta: named("shop")}
			shop.Labels = map[string]string{"broker.fluidos.eu/overflow": "enabled"}
			expect.NoError(t, admin.Create(ctx, shop))
			expect.NoError(t, admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within("shop", "default")}))
			lease := &coordinationv1.Lease{ObjectMeta: within("kube-node-lease", "worker")}
			expect.NoError(t, client.IgnoreAlreadyExists(admin.Create(ctx, &corev1.Namespace{ObjectMeta: named("kube-node-lease")})))
			expect.NoError(t, client.IgnoreAlreadyExists(admin.Create(ctx, &corev1.ServiceAccount{ObjectMeta: within("spillway-holds", "default")})))
			expect.NoError(t, admin.Create(ctx, lease))
			node := map[string]int{}
			if driver == "direct" {
				node = map[string]int{"spillway-virtual-node-limits": 1}
			}
			bind := func() error {
				binding := &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "worker"}}
				return admin.SubResource("binding").Create(ctx, podOn("", "pending"), binding, client.DryRunAll)
			}
			// There is one virtual node.
			cases := map[string]struct {
				do   func() error
				want map[string]int
			}{
				"a pod is created": {func() error { return admin.Create(ctx, podOn("", "new"), client.DryRunAll) }, map[string]int{"avoidance.broker.fluidos.eu": 1, "spillway-virtual-node-pods": 1}},
				"a pod that may overflow is created": {func() error {
					pod := podOn("", "new")
					pod.Namespace = "shop"
					return admin.Create(ctx, pod, client.DryRunAll)
				}, map[string]int{"spillway-virtual-node-pods": 1}},
				"a placeholder is created":   {func() error { return admin.Create(ctx, placeholder("spillway-holds", "p"), client.DryRunAll) }, map[string]int{"spillway-virtual-node-pods": 1}},
				"a pod is bound":             {bind, map[string]int{"spillway-virtual-node-pods": 1}},
				"a kubelet reports a pod":    {func() error { return admin.Status().Patch(ctx, podOn("", "local"), patch) }, nil},
				"a pod is labelled":          {func() error { return admin.Patch(ctx, podOn("", "local"), touch) }, map[string]int{"spillway-agent-pods": 1}},
				"a pod is deleted":           {func() error { return admin.Delete(ctx, podOn("", "second"), client.DryRunAll) }, map[string]int{"spillway-pod-removals": 1}},
				"a kubelet reports its node": {func() error { return admin.Status().Patch(ctx, &corev1.Node{ObjectMeta: named("worker")}, touch) }, node},
				"a kubelet renews its Lease": {func() error { return admin.Patch(ctx, lease.DeepCopy(), touch) }, node},
				"a Secret of the cluster": {func() error {
					return admin.Create(ctx, &corev1.Secret{ObjectMeta: within("kube-system", "new")}, client.DryRunAll)
				}, nil},
			}
			expect.Eventually(t, "webhooks and parameters of policies to be known", func() (bool, string) {
				_ = cases["a pod is created"].do()
				counts := evaluations(t, config)
				return counts["avoidance.broker.fluidos.eu"] > 0 && counts["spillway-virtual-node-pods"] > 0, fmt.Sprint(counts)
			})
			for name, c := range cases {
				t.Run(name, func(t *testing.T) { expectEvaluations(t, config, c.do, c.want) })
			}
		})
	}
}

// What Spillway's own programs do for each pod is not evaluated in full either, unless it is
// denied: a policy that is counted here had one match condition evaluated that did not hold.
func TestEvaluationsOfOwnRequests(t *testing.T) {
	config := controlplane.StartOwn(t)
	ctx, admin := t.Context(), as(t, config, "")
	agent, scheduler, virtualNode := as(t, config, "spillway-agent"), as(t, config, "spillway-scheduler"), as(t, config, "spillway-virtual-node")
	install(t, "install", "agent", kubeconfig(t, config), append([]string{"driver=direct"}, needed...))
	createWorkload(t, admin)
	merge := func(c client.Client, object client.Object, text string) func() error {
		return func() error {
			return c.Patch(ctx, object, client.RawPatch(types.MergePatchType, []byte(text)), client.DryRunAll)
		}
	}
	const note = `{"metadata":{"annotations":{"broker.fluidos.eu/note":"x"}}}`
	expect.NoError(t, agent.Patch(ctx, &corev1.Namespace{ObjectMeta: named("default")}, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"broker.fluidos.eu/virtual-node":"true"}}}`))))
	expect.NoError(t, admin.Create(ctx, roleBinding("default", "spillway-virtual-node", "spillway-virtual-node-namespace", namespace, "spillway-virtual-node")))
	guest := gatedGuest()
	guest.Name = "new"
	guest.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: guests, UID: "1", Controller: ptr.To(true)}}
	for _, object := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guests, Labels: map[string]string{"app.kubernetes.io/managed-by": "spillway", "broker.fluidos.eu/guests-of": "rome"}}},
		&corev1.ServiceAccount{ObjectMeta: within(guests, "default")},
		roleBinding(guests, "spillway-agent", "spillway-agent-guests", namespace, "spillway-agent"),
		roleBinding(guests, "spillway-virtual-node", "spillway-direct-guest", guests, "spillway-virtual-node"),
	} {
		expect.NoError(t, admin.Create(ctx, object))
	}
	quota := &corev1.ResourceQuota{ObjectMeta: within(guests, "spillway-guests"), Spec: corev1.ResourceQuotaSpec{Hard: expect.Resources(
		"requests.cpu", "2", "requests.memory", "1Gi", "requests.ephemeral-storage", "0")}}
	expect.NoError(t, admin.Create(ctx, quota))
	quota.Status.Hard, quota.Status.Used = quota.Spec.Hard, expect.Resources("requests.cpu", "0", "requests.memory", "0", "requests.ephemeral-storage", "0")
	expect.NoError(t, admin.Status().Update(ctx, quota))
	consumer := impersonating(t, config, "system:serviceaccount:"+guests+":spillway-virtual-node", "system:serviceaccounts:"+guests)
	create := func() error { return consumer.Create(ctx, guest.DeepCopy(), client.DryRunAll) }
	denied := func(what string, do func() error) { eventuallyForbidden(t, what, do) }
	denied("labelling a pod", merge(agent, podOn("", "local"), `{"metadata":{"labels":{"x":"y"}}}`))
	denied("binding by another scheduler", bindPod(t, admin, "overflowed", "spillway-paris"))
	eventually(t, "creating a guest", create)
	gated := gatedGuest()
	gated.OwnerReferences = guest.OwnerReferences
	expect.NoError(t, consumer.Create(ctx, gated))
	for _, c := range []struct {
		name string
		do   func() error
		want map[string]int
	}{
		{"a consumer creates a guest", create, map[string]int{"spillway-guests": 1, "spillway-guest-objects": 1, "spillway-agent-pods": 1, "avoidance.broker.fluidos.eu": 1, "spillway-virtual-node-pods": 1}},
		{"the agent nominates it", func() error { return patch(ctx, agent.Status(), guests, `{"status":{"nominatedNodeName":"worker"}}`) }, map[string]int{"spillway-agent-pods": 1}},
		{"the agent removes its gate", func() error {
			return patch(ctx, agent, guests, `{"spec":{"schedulingGates":[{"name":"example.com/other"}]}}`)
		},
			map[string]int{"spillway-agent-pods": 1, "spillway-guests": 1, "spillway-guest-objects": 1}},
		{"the agent annotates a pod", merge(agent, podOn("", "local"), note), map[string]int{"spillway-agent-pods": 1}},
		{"the scheduler binds a pod", bindOverflowed(t, scheduler, "overflowed"), map[string]int{"spillway-virtual-node-pods": 1}},
		{"the agent annotates that", merge(agent, podOn("", "overflowed"), note), map[string]int{"spillway-agent-pods": 1, "spillway-holds": 1}},
		{"virtual-node reports it", func() error {
			pod := &corev1.Pod{}
			if err := virtualNode.Get(ctx, client.ObjectKeyFromObject(podOn("", "overflowed")), pod); err != nil {
				return err
			}
			pod.Status.Message = "x"
			return virtualNode.Status().Update(ctx, pod, client.DryRunAll)
		}, map[string]int{"spillway-virtual-node-limits": 1, "spillway-pod-addresses": 1}},
		{"virtual-node deletes it", func() error { return virtualNode.Delete(ctx, podOn("", "overflowed"), client.DryRunAll) },
			map[string]int{"spillway-pod-removals": 1, "spillway-virtual-node-pods": 1}},
	} {
		t.Run(c.name, func(t *testing.T) { expectEvaluations(t, config, c.do, c.want) })
	}
}
