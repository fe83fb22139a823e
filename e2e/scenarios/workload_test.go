//go:build e2e

package scenarios

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/remotecommand"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// requests makes a resource list of "cpu", "300m", "memory", "32Mi", …
func requests(pairs ...string) corev1.ResourceList {
	list := corev1.ResourceList{}
	for i := 0; i+1 < len(pairs); i += 2 {
		list[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return list
}

// podSpec is an ordinary pod: nothing in it knows of Spillway.
func podSpec(want corev1.ResourceList, args ...string) corev1.PodSpec {
	limits := corev1.ResourceList{}
	for name, amount := range want {
		if strings.Contains(string(name), "/") { // extended resources want equal limits
			limits[name] = amount
		}
	}
	zero := int64(1)
	return corev1.PodSpec{
		TerminationGracePeriodSeconds: &zero,
		Containers: []corev1.Container{{
			Name: "main", Image: workloadImage, Args: args,
			Resources: corev1.ResourceRequirements{Requests: want, Limits: limits},
			Ports:     []corev1.ContainerPort{{ContainerPort: 8080}},
		}},
	}
}

func deployment(ns, name string, replicas int32, want corev1.ResourceList) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: podSpec(want, "serve")},
		},
	}
}

func job(ns, name string, pods int32, want corev1.ResourceList, work string) *batchv1.Job {
	spec := podSpec(want, "work", work)
	spec.RestartPolicy = corev1.RestartPolicyNever
	none := int32(0)
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name},
		Spec: batchv1.JobSpec{
			Parallelism: &pods, Completions: &pods, BackoffLimit: &none,
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": name}}, Spec: spec},
		},
	}
}

// scale sets a Deployment's replicas.
func scale(ctx context.Context, t *testing.T, ns, name string, replicas int32) {
	t.Helper()
	patch := client.RawPatch("application/merge-patch+json", fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas))
	if err := rome.Patch(ctx, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}, patch); err != nil {
		t.Fatal(err)
	}
}

// podsOf lists a workload's pods in rome that are not going.
func podsOf(ctx context.Context, ns, app string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := rome.List(ctx, &list, client.InNamespace(ns), client.MatchingLabels{"app": app})
	return slices.DeleteFunc(list.Items, func(p corev1.Pod) bool { return p.DeletionTimestamp != nil }), err
}

// overflowed reports whether a pod is bound to a virtual node.
func overflowed(p corev1.Pod) bool {
	return strings.HasPrefix(p.Spec.NodeName, broker.VirtualNodePrefix)
}

func ready(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// allReady waits until a workload has exactly count pods and all are Ready.
func allReady(ctx context.Context, t *testing.T, ns, app string, count int, timeout time.Duration) (home, away []corev1.Pod) {
	t.Helper()
	eventually(ctx, t, fmt.Sprintf("%d pods of %s/%s are ready", count, ns, app), timeout, func(ctx context.Context) (bool, string) {
		pods, err := podsOf(ctx, ns, app)
		if err != nil {
			return false, err.Error()
		}
		home, away = nil, nil
		n := 0
		var states []string
		for _, p := range pods {
			states = append(states, fmt.Sprintf("%s %s on %q", p.Name, p.Status.Phase, p.Spec.NodeName))
			if !ready(p) {
				continue
			}
			n++
			if overflowed(p) {
				away = append(away, p)
			} else {
				home = append(home, p)
			}
		}
		return n == count && len(pods) == count, strings.Join(states, "; ")
	})
	return home, away
}

// execIn runs a command in a pod, through rome's API server.
func execIn(ctx context.Context, pod corev1.Pod, command ...string) (string, error) {
	return execAs(ctx, rome.set, rome.config, pod, command...)
}

// execAs runs a command in a pod with an identity of its cluster.
func execAs(ctx context.Context, set kubernetes.Interface, config *rest.Config, pod corev1.Pod, command ...string) (string, error) {
	request := set.CoreV1().RESTClient().Post().Resource("pods").Namespace(pod.Namespace).Name(pod.Name).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: "main", Command: command, Stdout: true, Stderr: true}, clientgoscheme.ParameterCodec)
	executor, err := remotecommand.NewSPDYExecutor(config, "POST", request.URL())
	if err != nil {
		return "", err
	}
	var stdout, stderr bytes.Buffer
	if err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdout: &stdout, Stderr: &stderr}); err != nil {
		return "", fmt.Errorf("%w: %s", err, stderr.String())
	}
	return strings.TrimSpace(stdout.String()), nil
}

// logs reads a pod's logs, through rome's API server.
func logs(ctx context.Context, pod corev1.Pod) (string, error) {
	stream, err := rome.set.CoreV1().Pods(pod.Namespace).GetLogs(pod.Name, &corev1.PodLogOptions{Container: "main"}).Stream(ctx)
	if err != nil {
		return "", err
	}
	defer stream.Close()
	text, err := io.ReadAll(stream)
	return string(text), err
}

// events are the messages of a pod's events.
func events(ctx context.Context, pod corev1.Pod) string {
	list, err := rome.set.CoreV1().Events(pod.Namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID)})
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, e := range list.Items {
		fmt.Fprintf(&b, "%s: %s\n", e.Reason, e.Message)
	}
	return b.String()
}
