package pods_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/virtualnode/virtualnodetest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// daemonPods are the pods that a DaemonSet has for a node.
func daemonPods(c *virtualnodetest.Cluster, set *appsv1.DaemonSet, node string) (pods []corev1.Pod) {
	c.Helper()
	var all corev1.PodList
	expect.NoError(c, c.List(c.Context(), &all, client.InNamespace(set.Namespace), client.MatchingLabels(set.Spec.Selector.MatchLabels)))
	for _, pod := range all.Items {
		term := pod.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms[0]
		if slices.Contains(term.MatchFields[0].Values, node) {
			pods = append(pods, pod)
		}
	}
	return pods
}

// denyPodsOfDaemonSets is what the chart's policy does for pods of DaemonSets on a virtual node.
func denyPodsOfDaemonSets(c *virtualnodetest.Cluster, node string) {
	c.Helper()
	name := metav1.ObjectMeta{Name: "no-daemons"}
	c.Make(&admissionv1.ValidatingAdmissionPolicy{ObjectMeta: name, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"pods"}},
		}}}},
		Validations: []admissionv1.Validation{{Expression: fmt.Sprintf(`!object.spec.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms.orValue([]).exists(t,
			t.?matchFields.orValue([]).exists(f, '%s' in f.?values.orValue([])))`, node)}},
	}})
	c.Make(&admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: name, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: name.Name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}})
}

// TestDaemonSetPodForVirtualNode: pods that Kubernetes' own controller has created for a
// virtual node are deleted, ever more seldom, until the API server denies their creation. Those
// for nodes of this cluster remain.
func TestDaemonSetPodForVirtualNode(t *testing.T) {
	c := start(t)
	controlplane.StartControllers(t, c.Config, "daemonset-controller")
	real, virtual := broker.VirtualNodeName("worker"), broker.VirtualNodeName("paris")
	c.Make(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: real}})
	labels := map[string]string{"app": "proxy"}
	set := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Namespace: virtualnodetest.Namespace, Name: "proxy"}, Spec: appsv1.DaemonSetSpec{
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "c", Image: "i"}}, Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			AutomountServiceAccountToken: ptr.To(false),
		}},
	}}
	c.Make(set)
	eventually := func(what string, check func() (bool, string)) {
		t.Helper()
		expect.EventuallyWithin(t, 3*time.Minute, what, check)
	}
	var local []corev1.Pod
	eventually("a pod for the node of this cluster", func() (bool, string) {
		local = daemonPods(c, set, real)
		return len(local) == 1, ""
	})

	r := c.Reservation(c.Pod("w"), 1)
	began := time.Now()
	c.Instruct(r, "paris", 1, 1)
	seen := map[string]bool{}
	eventually("two deletions", func() (bool, string) {
		for _, pod := range daemonPods(c, set, virtual) {
			seen[pod.Name] = true
		}
		return len(seen) > 2, fmt.Sprint(seen)
	})
	if took := time.Since(began); took < 6*time.Second {
		t.Errorf("two pods were deleted within %s", took)
	}
	denyPodsOfDaemonSets(c, virtual)
	c.Refresh(set)
	eventually("the creation of another one to be denied", func() (bool, string) {
		var all corev1.EventList
		expect.NoError(t, c.List(t.Context(), &all, client.InNamespace(set.Namespace)))
		return slices.ContainsFunc(all.Items, func(e corev1.Event) bool { return e.Reason == "FailedCreate" && e.InvolvedObject.UID == set.UID }), fmt.Sprint(len(all.Items))
	})
	eventually("the last one to be deleted", func() (bool, string) {
		pods := daemonPods(c, set, virtual)
		return len(pods) == 0, fmt.Sprint(pods)
	})
	c.ExpectCapacity("paris", "cpu 300m, memory 64Mi, 1 pods, [shop]")
	if now := daemonPods(c, set, real); len(now) != 1 || now[0].UID != local[0].UID {
		t.Errorf("the node of this cluster has %v, it had %s", now, local[0].Name)
	}
}
