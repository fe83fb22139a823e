//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	gangName, gangPods = "ring", 4
	gangCPU            = "150m"
)

// TestGang creates a gang of which only a part fits: nothing of it is bound or held, while
// another pod overflows beside it. Once all of it fits, all of it runs, and nothing is left
// of it in the end.
func TestGang(t *testing.T) {
	liqoOnly(t, "gangs concern the scheduler and the broker")
	feature := features.New("gang").Assess("a gang runs as a whole or not at all", runsAsAWhole)
	testenv.Test(t, feature.Feature())
}

func runsAsAWhole(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectUnused(ctx, t)
	ns := namespace(ctx, t, "scenario-gang", true)
	installPodGroups(ctx, t)
	fill(ctx, t, rome, rome.ControlPlane(), "10m")
	fill(ctx, t, berlin, berlin.ControlPlane(), "10m")
	emptyParis := func() {}
	for i, node := range paris.Nodes()[1:] {
		leave := "10m"
		if i == 0 {
			leave = "490m" // three pods, and less than 50m
		}
		emptyParis = fill(ctx, t, paris, node, leave)
	}
	podGroup := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": ns, "name": gangName},
		"spec":     map[string]any{"minMember": int64(gangPods)},
	}}
	create := func(what client.Object) {
		if err := rome.Create(ctx, what); err != nil {
			t.Fatal(err)
		}
	}
	create(podGroup)
	members := deployment(ns, gangName, gangPods, requests("cpu", gangCPU, "memory", "16Mi"))
	members.Spec.Template.Labels["scheduling.x-k8s.io/pod-group"] = gangName
	create(members)
	eventually(ctx, t, "the capacity of the gang is requested as a whole, and is not there", 3*time.Minute, func(ctx context.Context) (bool, string) {
		var all broker.ReservationList
		err := rome.List(ctx, &all, client.InNamespace(ns))
		if err != nil || len(all.Items) != 1 {
			return false, fmt.Sprintf("%d Reservations (%v)", len(all.Items), err)
		}
		r := all.Items[0]
		least := r.Spec.MinAvailable
		return least == gangPods && r.Status.Phase == broker.ReservationPending && len(r.Status.Allocations) == 0,
			fmt.Sprintf("%s: minAvailable %v, %s, %d allocations", r.Name, least, r.Status.Phase, len(r.Status.Allocations))
	})
	// A request for less passes it: the gang would fit nowhere.
	create(deployment(ns, "alone", 1, requests("cpu", gangCPU, "memory", "16Mi")))
	if _, away := allReady(ctx, t, ns, "alone", 1, 3*time.Minute); len(away) != 1 {
		t.Fatal("the pod beside the gang has not overflowed")
	}
	pods, err := podsOf(ctx, ns, gangName)
	if err != nil || len(pods) != gangPods {
		t.Fatalf("the gang has %d pods (%v), want %d", len(pods), err, gangPods)
	}
	for _, p := range pods {
		if p.Spec.NodeName != "" {
			t.Errorf("pod %s is bound to %s without the others", p.Name, p.Spec.NodeName)
		}
	}

	start := time.Now()
	emptyParis()
	if _, away := allReady(ctx, t, ns, gangName, gangPods, 3*time.Minute); len(away) != gangPods {
		t.Errorf("%d pods of the gang have overflowed, want %d", len(away), gangPods)
	}
	timing(t, "room for a gang of 4 appears, all of it is ready", time.Since(start))

	if err := rome.Delete(ctx, members, client.PropagationPolicy(metav1.DeletePropagationForeground)); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "nothing is left of the gang", 3*time.Minute, func(ctx context.Context) (bool, string) {
		var left broker.ReservationList
		err := rome.List(ctx, &left, client.InNamespace(ns))
		var names []string
		for _, r := range left.Items {
			names = append(names, r.Name)
		}
		return err == nil && len(left.Items) == 1, fmt.Sprintf("Reservations %s (%v), want that of the other pod only", strings.Join(names, ", "), err)
	})
	return ctx
}

// installPodGroups installs the CRD of the coscheduling plugins, without their controller.
func installPodGroups(ctx context.Context, t *testing.T) {
	t.Helper()
	crd := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "podgroups.scheduling.x-k8s.io", "annotations": map[string]any{
			"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/scheduler-plugins/pull/50"}},
		"spec": map[string]any{
			"group": "scheduling.x-k8s.io", "scope": "Namespaced",
			"names": map[string]any{"kind": "PodGroup", "listKind": "PodGroupList", "plural": "podgroups", "singular": "podgroup"},
			"versions": []any{map[string]any{"name": "v1alpha1", "served": true, "storage": true, "schema": map[string]any{
				"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true},
			}}},
		},
	}}
	if err := rome.Create(ctx, crd.DeepCopy()); err != nil && !apierrors.IsAlreadyExists(err) { // left by a run that was cut off
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = rome.Delete(context.WithoutCancel(ctx), crd) })
	eventually(ctx, t, "rome serves PodGroups", time.Minute, func(ctx context.Context) (bool, string) {
		_, err := rome.discovery.ServerResourcesForGroupVersion("scheduling.x-k8s.io/v1alpha1")
		return err == nil, fmt.Sprint(err)
	})
}
