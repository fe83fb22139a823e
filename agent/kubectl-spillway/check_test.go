package main

import (
	"bytes"
	"encoding/json"
	"encoding/pem"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
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
	c.refuses("check")
	c.refuses("check", "-o=yaml")
	c.grantSystem("bob")
	if out, _ = c.run(0, "check", "--as=bob"); !strings.Contains(out, "Note: you may not get secrets in namespace spillway-system.") {
		t.Errorf("check with some permissions says\n%s", out)
	}

	bare := clusterOf(t, controlplane.StartBare(t))
	if out, _ := bare.run(0, "check", "--pre"); !strings.Contains(out, "helm installs them") {
		t.Errorf("check --pre of a new cluster says\n%s", out)
	}
	if out, _ := bare.run(exitNo, "check"); !strings.Contains(out, "does not serve ClusterAdvertisement") {
		t.Errorf("check of a new cluster says\n%s", out)
	}
}

// TestCheckWebhook: a webhook outside of the cluster has no pods in it, and is tried.
func TestCheckWebhook(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	var leads atomic.Bool
	leads.Store(true)
	server := httptest.NewTLSServer(steering.Handler(steering.Options{Leads: leads.Load}))
	defer server.Close()
	c.create(&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: health.Scheduler}, Webhooks: []admissionv1.MutatingWebhook{{
		Name: health.SteeringWebhook, AdmissionReviewVersions: []string{"v1"}, SideEffects: ptr.To(admissionv1.SideEffectClassNone), FailurePolicy: ptr.To(admissionv1.Ignore),
		ClientConfig:      admissionv1.WebhookClientConfig{URL: ptr.To(server.URL + steering.Path), CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})},
		Rules:             []admissionv1.RuleWithOperations{{Operations: []admissionv1.OperationType{admissionv1.Create}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}}}},
		NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}},
	}}})
	for _, want := range []string{"a dry run in namespace shop was steered", "a dry run in namespace shop was not steered"} {
		expect.Eventually(t, want, func() (bool, string) {
			var stdout, stderr bytes.Buffer
			run(t.Context(), append(append([]string{}, c.args...), "check", "-o=json"), genericclioptions.IOStreams{Out: &stdout, ErrOut: &stderr})
			return strings.Contains(stdout.String(), want), stdout.String() + stderr.String()
		})
		leads.Store(false)
	}
	var pods corev1.PodList
	expect.NoError(t, c.List(t.Context(), &pods))
	if len(pods.Items) != 2 {
		t.Errorf("check has created pods: there are %d", len(pods.Items))
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
	for _, want := range []string{"CLUSTER STATE CAPACITY LENT USED FREE PRICE AGE", "paris Ready - 2 1Gi 2 1Gi 0 0.08 EUR/h ", "rome Home 8 16Gi - 0 0 - "} {
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
	c.refuses("clusters")
	c.refuses("clusters", "--hub-context=rome") // which is read as the same user
	c.grantSystem("bob")
	if out, _ = c.run(0, "clusters", "--as=bob"); !strings.Contains(out, "rome") || !strings.Contains(out, "Note: you may not list nodes.") {
		t.Errorf("clusters with some permissions says\n%s", out)
	}
}

// refuses expects that a verb says nothing but which permissions alice lacks, and what gives them.
func (c *testCluster) refuses(arguments ...string) {
	c.t.Helper()
	out, errors := c.run(exitNoAnswer, append(arguments, "--as=alice")...)
	for _, want := range []string{"list clusteradvertisements.broker.fluidos.eu in namespace spillway-system",
		"kubectl -n spillway-system create role spillway-reader --verb=get,list,watch --resource=", "--role=spillway-reader --user=NAME"} {
		if !strings.Contains(errors, want) {
			c.t.Errorf("%v fails with %q, want %q", arguments, errors, want)
		}
	}
	if out != "" {
		c.t.Errorf("%v prints\n%s", arguments, out)
	}
}

// grantSystem lets a user read in the namespace of Spillway what a namespaced role gives.
func (c *testCluster) grantSystem(user string) {
	c.t.Helper()
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "system"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"apps", "coordination.k8s.io", broker.Group}, Resources: []string{"*"}, Verbs: []string{"get", "list"}}}}
	c.create(role, &rbacv1.RoleBinding{ObjectMeta: role.ObjectMeta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "system"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: user}}})
	expect.Eventually(c.t, user+" may read", func() (bool, string) {
		var stdout, stderr bytes.Buffer
		run(c.t.Context(), append(append([]string{}, c.args...), "--as="+user, "clusters"), genericclioptions.IOStreams{Out: &stdout, ErrOut: &stderr})
		return strings.Contains(stdout.String(), "rome"), stderr.String()
	})
}
