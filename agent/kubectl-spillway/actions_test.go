package main

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestReserve: capacity in advance and its end; what cannot be meant is refused in a line.
func TestReserve(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.run(0, "reserve", "warm", "--cpu=8", "--memory=16Gi", "--duration=24h", "--cluster=paris")
	c.run(0, "reserve", "batch", "--pods=10", "--cpu=500m", "--selector=tier=batch", "--max-price=1.50 EUR", "--region=eu", "--deadline=10m")
	if out, errors := c.run(0, "reserve", "pool", "--cpu=1"); strings.Contains(out, "opted in") || errors != "" {
		t.Errorf("in an opted-in namespace, reserve prints\n%s%s", out, errors)
	}
	c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "blog"}})
	const optIn = "Namespace blog is not opted in, so that its pods do not use the Reservation. Opt in, and create the pods again: kubectl label namespace blog broker.fluidos.eu/overflow=enabled\n"
	if out, _ := c.run(0, "reserve", "warm", "--cpu=1", "-n=blog"); !strings.HasSuffix(out, optIn) {
		t.Errorf("in another namespace, reserve prints\n%s", out)
	}
	if out, errors := c.run(0, "reserve", "dry", "--cpu=1", "-n=blog", "--dry-run", "-o=json"); errors != optIn || !strings.HasSuffix(out, "}\n") {
		t.Errorf("in another namespace, reserve -o json prints\n%s%s", out, errors)
	}
	if out, _ := c.run(0, "reserve", "dry", "--gpu=1", "--dry-run", "-o=yaml"); !strings.Contains(out, `gpu: "1"`) || !strings.Contains(out, "kind: Reservation") {
		t.Errorf("reserve --dry-run prints\n%s", out)
	}
	var r broker.Reservation
	if err := c.Get(t.Context(), nameOf("shop", "dry"), &r); !apierrors.IsNotFound(err) {
		t.Errorf("after --dry-run, getting the Reservation returned %v", err)
	}
	expect.NoError(t, c.Get(t.Context(), nameOf("shop", "warm"), &r))
	if got := r.Spec.RequestedResources.String(); got != "cpu 8, memory 16Gi" || r.Spec.TargetClusterID != "paris" || r.Spec.Duration.Hours() != 24 {
		t.Errorf("warm is %s %+v", got, r.Spec)
	}
	if out, _ := c.run(exitNo, "reserve", "waits", "--cpu=1", "--wait=1ms"); !strings.Contains(out, "kubectl spillway explain -n shop reservation/waits\n") {
		t.Errorf("reserve --wait prints\n%s", out)
	}
	expect.NoError(t, c.Get(t.Context(), nameOf("shop", "batch"), &r))
	if r.Spec.PodSets[0].Count != 10 || r.Spec.Budget.MaxPricePerHour != "1.50" || r.Spec.PodSelector.MatchLabels["tier"] != "batch" {
		t.Errorf("batch is %+v", r.Spec)
	}
	c.run(0, "release", "warm", "--wait")
	if err := c.Get(t.Context(), nameOf("shop", "warm"), &r); !apierrors.IsNotFound(err) {
		t.Errorf("after release, getting the Reservation returned %v", err)
	}
	c.grantAlice()
	for message, arguments := range map[string][]string{
		"set at least one of --cpu, --memory and --gpu":   {"reserve", "none"},
		`--cpu "many" is not an amount`:                   {"reserve", "none", "--cpu=many"},
		"has no currency":                                 {"reserve", "none", "--cpu=1", "--max-price=3"},
		"maxPricePerHour must be a decimal number":        {"reserve", "none", "--cpu=1", "--max-price=cheap EUR"},
		"already exists":                                  {"reserve", "batch", "--cpu=1"},
		"you may not create Reservation shop/none":        {"reserve", "none", "--cpu=1", "--as=alice"},
		`Reservation "none" does not exist`:               {"release", "none"},
		"was made by the scheduler":                       {"release", "web-1a2b3c4d"},
		"you may not delete Reservation shop/batch":       {"release", "batch", "--as=alice"},
		`has no virtual node of cluster "oslo"`:           {"drain", "oslo"},
		"you may not list nodes":                          {"cordon", "paris", "--as=alice"},
		`pods without a controller are not replaced, --f`: {"drain", "paris"},
	} {
		if message == `pods without a controller are not replaced, --f` {
			c.create(&corev1.Pod{ObjectMeta: named("shop", "alone"), Spec: podSpec("spillway-paris")})
		}
		if _, errors := c.run(exitNoAnswer, arguments...); !strings.Contains(errors, message) {
			t.Errorf("%v fails with %q, want %q", arguments, errors, message)
		}
	}
	c.run(0, "release", "web-1a2b3c4d", "--force")
}

// TestDrain: pods leave within their PodDisruptionBudgets, and none comes.
func TestDrain(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	unschedulable := func() bool {
		var node corev1.Node
		expect.NoError(t, c.Get(t.Context(), nameOf("", "spillway-paris"), &node))
		return node.Spec.Unschedulable
	}
	c.run(0, "cordon", "paris")
	if out, _ := c.run(0, "cordon", "spillway-paris"); !unschedulable() || !strings.Contains(out, "already cordoned") {
		t.Errorf("cordon prints %s", out)
	}
	c.run(0, "uncordon", "paris")
	if unschedulable() {
		t.Error("the node is cordoned after uncordon")
	}
	var pod corev1.Pod
	expect.NoError(t, c.Get(t.Context(), nameOf("shop", "web-6d5f-a"), &pod))
	pod.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	expect.NoError(t, c.Status().Update(t.Context(), &pod))
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: named("shop", "web"), Spec: policyv1.PodDisruptionBudgetSpec{
		MinAvailable: ptr.To(intstr.FromInt32(2)), Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}
	expect.NoError(t, c.Create(t.Context(), budget))
	budget.Status = policyv1.PodDisruptionBudgetStatus{ObservedGeneration: budget.Generation, ExpectedPods: 2, CurrentHealthy: 1, DesiredHealthy: 2}
	expect.NoError(t, c.Status().Update(t.Context(), budget))
	out, _ := c.run(exitNo, "drain", "paris", "--timeout=1ms")
	if !strings.Contains(out, "pod/shop/web-6d5f-a waits: Cannot evict pod") || !strings.Contains(out, "1 of 1 pods have not left") {
		t.Errorf("drain within a budget prints\n%s", out)
	}
	expect.NoError(t, c.Delete(t.Context(), budget))
	gone := make(chan struct{})
	go func() { // as a kubelet
		defer close(gone)
		expect.Eventually(t, "the pod is evicted", func() (bool, string) {
			var pod corev1.Pod
			err := c.Get(t.Context(), nameOf("shop", "web-6d5f-a"), &pod)
			if err == nil && pod.DeletionTimestamp != nil {
				err = c.Delete(t.Context(), &pod, client.GracePeriodSeconds(0))
			}
			return apierrors.IsNotFound(err), pod.Name
		})
	}()
	out, _ = c.run(0, "drain", "paris", "--timeout=1m")
	<-gone
	if !strings.Contains(out, "evicted") || !strings.Contains(out, "drained: 1 pods have left") || !unschedulable() {
		t.Errorf("drain prints\n%s", out)
	}
}

// TestNodesOf: a cluster is named by its ID, also where that is the name of another one's node.
func TestNodesOf(t *testing.T) {
	var nodes []corev1.Node
	for _, cluster := range []string{"rome", "spillway-rome", ""} {
		nodes = append(nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-" + cluster, Labels: map[string]string{broker.LabelProvider: cluster}}})
	}
	for name, want := range map[string]string{"rome": "spillway-rome", "spillway-rome": "spillway-spillway-rome", "node/spillway-rome": "spillway-rome", "oslo": "", "": ""} {
		got := ""
		for _, node := range nodesOf(name, nodes) {
			got += node.Name
		}
		if got != want {
			t.Errorf("%q is %q, want %q", name, got, want)
		}
	}
}
