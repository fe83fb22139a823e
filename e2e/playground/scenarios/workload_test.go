package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// full is a home without room for the pods of a test.
var full = []environment.NodeGroup{group("rome", 1, "cpu", "10m", "memory", "1Gi")}

// specOf is an ordinary pod that requests cpu.
func specOf(cpu string, change func(*corev1.PodSpec)) corev1.PodSpec {
	spec := corev1.PodSpec{TerminationGracePeriodSeconds: ptr.To(int64(1)), Containers: []corev1.Container{{
		Name: "main", Image: "app", Args: []string{"serve"},
		Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu, "memory", "16Mi")},
	}}}
	if change != nil {
		change(&spec)
	}
	return spec
}

// namespaceIn creates a namespace in a cluster until the test ends.
func (s *playgroundTest) namespaceIn(c client.Client, name string, labels map[string]string) {
	s.t.Helper()
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{labelScenario: ""}}}
	for key, value := range labels {
		ns.Labels[key] = value
	}
	expect.NoError(s.t, c.Create(s.t.Context(), ns))
	s.eventually("namespace "+name+" has what controllers put into each", func() error {
		return errors.Join(
			c.Get(s.t.Context(), client.ObjectKey{Namespace: name, Name: "default"}, &corev1.ServiceAccount{}),
			c.Get(s.t.Context(), client.ObjectKey{Namespace: name, Name: "kube-root-ca.crt"}, &corev1.ConfigMap{}))
	})
}

// optedIn creates a namespace in rome whose pods overflow, and waits until they are steered:
// those that are created while no scheduler leads stay in their cluster.
func (s *playgroundTest) optedIn(name string) string {
	s.t.Helper()
	s.namespaceIn(s.rome, name, map[string]string{broker.LabelOverflow: broker.OverflowEnabled})
	s.eventually("pods of namespace "+name+" are steered", func() error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: name, Name: "steered"}, Spec: specOf("1m", nil)}
		err := s.rome.Create(s.t.Context(), pod, client.DryRunAll)
		if err == nil && !slices.ContainsFunc(pod.Spec.Tolerations, func(t corev1.Toleration) bool { return t.Key == broker.TaintOverflow }) {
			err = fmt.Errorf("tolerations %v", pod.Spec.Tolerations)
		}
		return err
	})
	return name
}

// deploymentOf is a Deployment of pods that request cpu.
func deploymentOf(ns, name string, replicas int32, cpu string, change func(*corev1.PodSpec)) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: specOf(cpu, change)},
		},
	}
}

// scale sets a Deployment's replicas.
func (s *playgroundTest) scale(ns, name string, replicas int32) {
	s.t.Helper()
	patch := client.RawPatch(types.MergePatchType, fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	expect.NoError(s.t, s.rome.Patch(s.t.Context(), &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}, patch))
}

// createIn creates a pod in rome that has its name as label app.
func (s *playgroundTest) createIn(ns, name, cpu string, change func(*corev1.PodSpec)) *corev1.Pod {
	s.t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Labels: map[string]string{"app": name}}, Spec: specOf(cpu, change)}
	expect.NoError(s.t, s.rome.Create(s.t.Context(), pod))
	return pod
}

// podsOf lists the pods of an app in rome that are not being deleted.
func (s *playgroundTest) podsOf(ns, app string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := s.rome.List(s.t.Context(), &list, client.InNamespace(ns), client.MatchingLabels{"app": app})
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }), err
}

func overflowed(p corev1.Pod) bool {
	return strings.HasPrefix(p.Spec.NodeName, broker.VirtualNodePrefix)
}

func has(p corev1.Pod, kind corev1.PodConditionType) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind && c.Status == corev1.ConditionTrue })
}

// uids are the UIDs of pods, in order.
func uids(pods []corev1.Pod) (all []types.UID) {
	for _, p := range pods {
		all = append(all, p.UID)
	}
	slices.Sort(all)
	return all
}

func describe(pods []corev1.Pod) error {
	var states []string
	for _, p := range pods {
		states = append(states, fmt.Sprintf("%s %s on %q", p.Name, p.Status.Phase, p.Spec.NodeName))
	}
	return errors.New(strings.Join(states, "; "))
}

// allReady waits until an app has exactly count pods and all are Ready.
func (s *playgroundTest) allReady(ns, app string, count int) (home, away []corev1.Pod) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("%d pods of %s/%s are ready", count, ns, app), func() error {
		pods, err := s.podsOf(ns, app)
		if err != nil {
			return err
		}
		home, away = nil, nil
		for _, p := range pods {
			switch {
			case !has(p, corev1.PodReady):
			case overflowed(p):
				away = append(away, p)
			default:
				home = append(home, p)
			}
		}
		if len(home)+len(away) != count || len(pods) != count {
			return describe(pods)
		}
		return nil
	})
	return home, away
}

// guestsOf lists the guests of an app in a provider.
func (s *playgroundTest) guestsOf(provider, app string) []corev1.Pod {
	s.t.Helper()
	var list corev1.PodList
	expect.NoError(s.t, s.p.Cluster(provider).Client.List(s.t.Context(), &list, client.InNamespace(broker.GuestNamespace("rome")), client.MatchingLabels{"app": app}))
	return list.Items
}

// fill takes CPU of a provider's node, and returns what gives it back.
func (s *playgroundTest) fill(provider, node, cpu string) (empty func()) {
	s.t.Helper()
	c := s.p.Cluster(provider).Client
	s.namespaceIn(c, "fill-"+node, nil)
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "fill-" + node, Name: "filler"}, Spec: specOf(cpu, nil)}
	pod.Spec.NodeName = node
	taken := resource.MustParse(cpu)
	s.advertised(provider, "what it has", func(ad *broker.ClusterAdvertisement) bool {
		taken.Add(*cpuOf(ad.Spec.Resources.Allocated))
		return true
	})
	expect.NoError(s.t, c.Create(s.t.Context(), pod))
	s.advertised(provider, "that "+node+" is full", func(ad *broker.ClusterAdvertisement) bool {
		return cpuOf(ad.Spec.Resources.Allocated).Cmp(taken) >= 0
	})
	return func() { expect.NoError(s.t, c.Delete(s.t.Context(), pod)) }
}

// events are the messages of a pod's events.
func (s *playgroundTest) events(pod *corev1.Pod) string {
	var list corev1.EventList
	if err := s.rome.List(s.t.Context(), &list, client.InNamespace(pod.Namespace), client.MatchingFields{"involvedObject.uid": string(pod.UID)}); err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, e := range list.Items {
		fmt.Fprintf(&b, "%s: %s\n", e.Reason, e.Message)
	}
	return b.String()
}

// expectMessages waits until the events of a pod have all words.
func (s *playgroundTest) expectMessages(pod *corev1.Pod, words ...string) {
	s.t.Helper()
	s.eventually("the events of pod "+pod.Name+" say why it does not overflow", func() error {
		messages := s.events(pod)
		if slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(messages, word) }) {
			return errors.New(messages)
		}
		return nil
	})
}

// line is what kubectl get prints of an object of Spillway, with -o wide or without.
func (s *playgroundTest) line(cluster string, wide bool, kinds, ns, name string) (string, error) {
	return controlplane.Line(context.Background(), s.p.Cluster(cluster).Admin, wide, kinds, ns, name)
}

// cordon makes a node run no more pods, or lets it run pods again.
func (s *playgroundTest) cordon(cluster, node string, unschedulable bool) {
	s.t.Helper()
	patch := fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, unschedulable)
	expect.NoError(s.t, s.p.Cluster(cluster).Client.Patch(s.t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, client.RawPatch(types.MergePatchType, patch)))
}
