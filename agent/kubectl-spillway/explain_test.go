package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

var update = flag.Bool("update", false, "Write the golden files.")

func TestMain(m *testing.M) {
	quiet()
	controlplane.Main(m)
}

// testCluster is an API server, and how the program reaches it.
type testCluster struct {
	client.Client
	t    *testing.T
	args []string
}

// clusterOf gives the program a kubeconfig with context rome.
func clusterOf(t *testing.T, config *rest.Config) *testCluster {
	t.Helper()
	t.Setenv("LC_ALL", "C.UTF-8")
	path := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": {ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}},
		Contexts:       map[string]*clientcmdapi.Context{"rome": {Cluster: "c", AuthInfo: "u", Namespace: "shop"}},
		CurrentContext: "rome",
	}, path))
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	return &testCluster{c, t, []string{"--kubeconfig", path, "--cache-dir", t.TempDir()}}
}

// run runs the program, and expects an exit code.
func (c *testCluster) run(code int, arguments ...string) (out, errors string) {
	c.t.Helper()
	var stdout, stderr bytes.Buffer
	streams := genericclioptions.IOStreams{Out: &stdout, ErrOut: &stderr}
	if got := run(c.t.Context(), append(append([]string{}, c.args...), arguments...), streams); got != code {
		c.t.Errorf("%v exits with %d, want %d\n%s%s", arguments, got, code, stdout.String(), stderr.String())
	}
	if n := strings.Count(stderr.String(), "\n"); n > 1 {
		c.t.Errorf("%v prints %d lines of errors: %s", arguments, n, stderr.String())
	}
	return stdout.String(), stderr.String()
}

// golden expects an output.
func (c *testCluster) golden(name, got string) {
	c.t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		expect.NoError(c.t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	expect.NoError(c.t, err)
	if got != string(want) {
		c.t.Errorf("%s differs; -update writes it. Now:\n%s", path, got)
	}
}

// create creates an object with its status.
func (c *testCluster) create(objects ...client.Object) {
	c.t.Helper()
	for _, object := range objects {
		status := object.DeepCopyObject().(client.Object)
		expect.NoError(c.t, c.Create(c.t.Context(), object))
		status.SetResourceVersion(object.GetResourceVersion())
		status.SetUID(object.GetUID())
		switch object.(type) {
		case *corev1.Pod, *corev1.Node, *broker.Reservation, *broker.ReservationInstruction, *broker.ClusterAdvertisement, *appsv1.Deployment:
			expect.NoError(c.t, c.Status().Update(c.t.Context(), status))
		}
	}
}

func named(namespace, name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{"app": "web"}}
}

func nameOf(namespace, name string) client.ObjectKey {
	return client.ObjectKey{Namespace: namespace, Name: name}
}

func controller(owner client.Object, apiVersion, kind string) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: apiVersion, Kind: kind, Name: owner.GetName(), UID: owner.GetUID(), Controller: ptr.To(true)}}
}

func podSpec(node string) corev1.PodSpec {
	return corev1.PodSpec{SchedulerName: broker.SchedulerName, NodeName: node, Containers: []corev1.Container{{
		Name: "web", Image: "registry.example.com/web", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "2", "memory", "1Gi")}}}}
}

// shop creates Deployment web, of which a pod runs in paris and one waits, in an opted-in namespace.
func (c *testCluster) shop() {
	c.t.Helper()
	c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}},
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}},
		&broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "all"}, Spec: broker.OverflowPolicySpec{MaxResources: ptr.To(broker.FromList(expect.Resources("cpu", "16")))}},
		&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris", Labels: map[string]string{broker.LabelProvider: "paris"}}, Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}, Allocatable: expect.Resources("cpu", "2", "memory", "1Gi"), Capacity: expect.Resources("cpu", "2", "memory", "1Gi")}})
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": "web"}}, Spec: podSpec("")}
	selector := &metav1.LabelSelector{MatchLabels: template.Labels}
	deployment := &appsv1.Deployment{ObjectMeta: named("shop", "web"), Spec: appsv1.DeploymentSpec{Selector: selector, Template: template}}
	c.create(deployment)
	replicas := &appsv1.ReplicaSet{ObjectMeta: named("shop", "web-6d5f"), Spec: appsv1.ReplicaSetSpec{Selector: selector, Template: template}}
	replicas.OwnerReferences = controller(deployment, "apps/v1", "Deployment")
	expect.NoError(c.t, c.Create(c.t.Context(), replicas))

	waiting := &corev1.Pod{ObjectMeta: named("shop", "web-6d5f-b"), Spec: podSpec(""), Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
		{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/1 nodes are available: 1 Insufficient cpu."}}}}
	running := &corev1.Pod{ObjectMeta: named("shop", "web-6d5f-a"), Spec: podSpec("spillway-paris"), Status: corev1.PodStatus{Phase: corev1.PodRunning}}
	for _, pod := range []*corev1.Pod{waiting, running} {
		pod.OwnerReferences = controller(replicas, "apps/v1", "ReplicaSet")
	}
	running.Labels[broker.LabelHold] = "rome-7f3a"
	c.create(running, waiting)

	shape, set := demand.ShapeOf(waiting)
	set.Count = 2
	held := set
	held.Count = 1
	r := &broker.Reservation{ObjectMeta: named("shop", "web-1a2b3c4d"), Spec: broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{set}}}
	r.Labels = map[string]string{broker.LabelOwnerUID: string(deployment.UID), broker.LabelShape: shape}
	r.Status = broker.ReservationStatus{ID: "rome-7f3a", Phase: broker.ReservationActive, QueuePosition: 2, Summary: "1 of 2 pods in paris",
		Allocations: []broker.Allocation{{Cluster: "paris", Accepted: true, VirtualNodeReady: true, PricePerHour: "0.08 EUR", Resources: held.Requests, PodSets: []broker.PodSet{held}}},
		Decision: &broker.Decision{Rejections: []broker.ClusterRejection{{Cluster: "berlin", Reason: capacity.ReasonInsufficientCapacity,
			Message: capacity.Insufficient(corev1.ResourceCPU, "2", "500m") + "."}}},
		Conditions: []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: capacity.ReasonInsufficientCapacity, Message: "1 pod is waiting.", LastTransitionTime: metav1.Now()},
			{Type: broker.ConditionReported, Status: metav1.ConditionTrue, Reason: "Reported", Message: "The broker has a copy of this Reservation.", LastTransitionTime: metav1.Now()}}}
	in := &broker.ReservationInstruction{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "rome-7f3a-paris"}, Spec: broker.ReservationInstructionSpec{
		ReservationName: "rome-7f3a", ReservationUID: "7f3a", SourceNamespace: "shop", SourceName: r.Name, TargetClusterID: "paris",
		RequestedCPU: *set.Requests.CPU, RequestedMemory: *set.Requests.Memory, RequestedResources: set.Requests, Attempt: 1, PricePerHour: "0.08 EUR"}}
	in.Status.Conditions = []metav1.Condition{{Type: broker.ConditionPeered, Status: metav1.ConditionTrue, Reason: "Done", LastTransitionTime: metav1.Now()},
		{Type: broker.ConditionVirtualNodeReady, Status: metav1.ConditionTrue, Reason: "Done", LastTransitionTime: metav1.Now()}}
	c.create(r, in)
}

// grantAlice lets user alice read what the owner of an application may.
func (c *testCluster) grantAlice() {
	c.t.Helper()
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "app"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"", "apps"}, Resources: []string{"pods", "deployments", "replicasets"}, Verbs: []string{"get", "list"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"reservations"}, Verbs: []string{"get", "list"}}}}
	c.create(role, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "app"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: "app"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "User", Name: "alice"}}})
	expect.Eventually(c.t, "alice may read", func() (bool, string) {
		var stdout, stderr bytes.Buffer
		code := run(c.t.Context(), append(append([]string{}, c.args...), "--as=alice", "explain", "deployment/web"), genericclioptions.IOStreams{Out: &stdout, ErrOut: &stderr})
		return code == 0, stderr.String()
	})
}

// TestExplain runs the verb against an API server.
func TestExplain(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	for name, arguments := range map[string][]string{
		"explain-waiting":     {"explain", "deploy/web"},
		"explain-running":     {"explain", "web-6d5f-a"},
		"explain-reservation": {"explain", "resv", "web-1a2b3c4d"},
		"explain-yaml":        {"explain", "web-6d5f-b", "-o", "yaml"},
		"explain-ascii":       {"explain", "pod/web-6d5f-b", "--ascii"},
		"explain-fix":         {"explain", "web", "--fix"},
	} {
		out, _ := c.run(0, arguments...)
		c.golden(name, out)
	}
	out, _ := c.run(0, "explain", "web", "-o", "json")
	var decoded explain.Explanation
	expect.NoError(t, json.Unmarshal([]byte(out), &decoded))
	if decoded.Name != "web-6d5f-b" || decoded.Outcome != explain.OutcomeWaiting || len(decoded.Steps) < 9 {
		t.Errorf("as JSON: %+v", decoded)
	}
	c.grantAlice()
	out, _ = c.run(0, "explain", "deployment/web", "--as=alice")
	c.golden("explain-without-permissions", out)

	for message, arguments := range map[string][]string{
		`no pod, Deployment, StatefulSet, Job or Reservation "wev"`: {"explain", "wev"},
		`deployments "wev" does not exist in namespace shop`:        {"explain", "deployments/wev"},
		`the cluster of context rome has no type "wombats"`:         {"explain", "wombats/web"},
		`neither a name nor TYPE/NAME`:                              {"explain", "/"},
		`a Namespace does not say which pods are its own`:           {"explain", "namespace/shop"},
		`you may not get deployments in namespace default`:          {"explain", "deployments/web", "--as=alice", "-n=default"},
		`-o "xml" is none of wide, json and yaml`:                   {"explain", "web", "-o", "xml"},
		`context "paris" does not exist`:                            {"explain", "web", "--context=paris"},
		`connection refused`:                                        {"explain", "web", "--server=https://127.0.0.1:1"},
	} {
		if _, errors := c.run(exitNoAnswer, arguments...); !strings.Contains(errors, message) {
			t.Errorf("%v fails with %q, want %q", arguments, errors, message)
		}
	}
}

// TestCompletion: kubectl_complete-spillway asks the program.
func TestCompletion(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	for typed, want := range map[string]string{"w": "web-6d5f-b\n", "deploy/": "deploy/web\n", "resv/": "resv/web-1a2b3c4d\n", "wombats/": ":4\n"} {
		out, _ := c.complete(typed)
		if !strings.Contains(out, want) {
			t.Errorf("completion of %q is %q, want %q", typed, out, want)
		}
	}
}

// complete runs a completion, which writes notes to standard error.
func (c *testCluster) complete(typed string) (out string, code int) {
	var stdout, stderr bytes.Buffer
	code = run(c.t.Context(), append(append([]string{"__complete"}, c.args...), "explain", typed), genericclioptions.IOStreams{Out: &stdout, ErrOut: &stderr})
	return stdout.String(), code
}

// TestNotInstalled: without the CRDs, or with older ones, there is a line and no stack.
func TestNotInstalled(t *testing.T) {
	c := clusterOf(t, controlplane.StartBare(t))
	c.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}, &corev1.Pod{ObjectMeta: named("shop", "web"), Spec: podSpec("")})
	for _, arguments := range [][]string{{"explain", "web"}, {"status"}, {"clusters"}, {"reserve", "warm", "--cpu=1"}} {
		if _, errors := c.run(exitNoAnswer, arguments...); !strings.Contains(errors, "the cluster of context rome does not have kind") || !strings.Contains(errors, "Spillway is not installed there") {
			t.Errorf("%v fails with %q", arguments, errors)
		}
	}
}
