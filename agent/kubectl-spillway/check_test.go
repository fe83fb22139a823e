package main

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// states are those of the steps of a report, by their names.
func states(t *testing.T, out string) map[string]explain.State {
	t.Helper()
	var report health.Report
	expect.NoError(t, json.Unmarshal([]byte(out), &report))
	all := map[string]explain.State{}
	for _, step := range report.Steps {
		all[step.Name] = step.State
	}
	return all
}

// TestCheck: before and after an installation, and with few permissions.
func TestCheck(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	out, _ := c.run(0, "check", "--pre", "-o=json")
	if got := states(t, out); got["Kubernetes"] != explain.OK || got["Permissions"] != explain.OK || got["CRDs"] != explain.Waiting {
		t.Errorf("check --pre is %v", got)
	}
	out, _ = c.run(exitNo, "check", "--pre", "--as=alice")
	if !strings.Contains(out, "you: may not create namespaces") {
		t.Errorf("check --pre without permissions says\n%s", out)
	}
	deployment := &appsv1.Deployment{ObjectMeta: named(broker.SystemNamespace, health.Agent), Spec: appsv1.DeploymentSpec{
		Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}
	deployment.Spec.Template.Labels, deployment.Spec.Template.Spec = deployment.Spec.Selector.MatchLabels, podSpec("")
	deployment.Status.ReadyReplicas, deployment.Status.Replicas = 1, 1
	c.create(deployment)
	out, _ = c.run(exitNo, "check", "-o=json")
	got := states(t, out)
	for name, want := range map[string]explain.State{"Kubernetes": explain.OK, "CRDs": explain.OK, "Programs": explain.OK, "Permissions": explain.Failed, "Webhook": explain.Failed,
		"Hub": explain.OK, "Reach": explain.OK, "Clocks": explain.OK, "Network": explain.Waiting, "Namespaces": explain.OK} {
		if got[name] != want {
			t.Errorf("check: %s is %s, want %s\n%s", name, got[name], want, out)
		}
	}
	out, _ = c.run(0, "check", "--as=alice")
	if !strings.Contains(out, "you may not list secrets") && !strings.Contains(out, "you may not get secrets in namespace spillway-system") {
		t.Errorf("check without permissions says\n%s", out)
	}
	c.run(0, "check", "-o=yaml", "--as=alice")

	bare := clusterOf(t, controlplane.StartBare(t))
	if out, _ := bare.run(0, "check", "--pre"); !strings.Contains(out, "helm installs them") {
		t.Errorf("check --pre of a new cluster says\n%s", out)
	}
	if out, _ := bare.run(exitNo, "check"); !strings.Contains(out, "does not serve ClusterAdvertisement") {
		t.Errorf("check of a new cluster says\n%s", out)
	}
}

// TestClusters: what a consumer sees, and what of the hub.
func TestClusters(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	lines := func(out string) (all []string) {
		for line := range strings.Lines(out) {
			all = append(all, strings.Join(strings.Fields(line), " "))
		}
		return all
	}
	out, _ := c.run(0, "clusters")
	for _, want := range []string{"CLUSTER STATE CAPACITY LENT USED FREE PRICE AGE", "paris Ready - 2 1Gi 2 1Gi 0 0 0.08 EUR/h ", "rome Home 8 16Gi - 0 0 0 0 - "} {
		if !slices.ContainsFunc(lines(out), func(line string) bool { return strings.HasPrefix(line, want) }) {
			t.Errorf("clusters has no line %q:\n%s", want, out)
		}
	}
	amount := broker.FromList(expect.Resources("cpu", "8"))
	c.create(&broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "berlin"}, Spec: broker.ClusterAdvertisementSpec{ClusterID: "berlin", Timestamp: metav1.Now(),
		Lending: broker.Lending{Enabled: true}, Resources: broker.AdvertisedResources{Capacity: amount, Allocatable: amount, Allocated: amount}}, Status: broker.ClusterAdvertisementStatus{Active: true, Available: amount}})
	if out, _ = c.run(0, "clusters", "--hub-context=rome", "-o=wide"); !strings.Contains(out, "berlin") || !strings.Contains(out, "LOCATION") {
		t.Errorf("clusters with the hub says\n%s", out)
	}
	if _, errors := c.run(exitNoAnswer, "clusters", "--hub-context=hub"); !strings.Contains(errors, `context "hub" does not exist`) {
		t.Errorf("clusters with an unknown hub fails with %q", errors)
	}
	if out, _ = c.run(0, "clusters", "--hub-context=rome", "--as=alice"); strings.Contains(out, "berlin") {
		t.Errorf("clusters reads the hub as another user than --as:\n%s", out)
	}
	if out, _ = c.run(0, "clusters", "--as=alice"); !strings.Contains(out, "you may not list nodes") {
		t.Errorf("clusters without permissions says\n%s", out)
	}
}
