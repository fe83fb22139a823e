package session

import (
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestEqual(t *testing.T) {
	for _, tc := range []struct {
		a, b corev1.ResourceList
		want bool
	}{
		{expect.Resources("cpu", "1"), expect.Resources("cpu", "1000m"), true},
		{expect.Resources("cpu", "1", "nvidia.com/gpu", "0"), expect.Resources("cpu", "1"), true},
		{expect.Resources("cpu", "1"), expect.Resources("cpu", "1", "nvidia.com/gpu", "1"), false},
		{expect.Resources("cpu", "1001m"), expect.Resources("cpu", "1"), false},
		{nil, nil, true},
	} {
		if Equal(tc.a, tc.b) != tc.want || Equal(tc.b, tc.a) != tc.want {
			t.Errorf("Equal(%v, %v) is not %v", tc.a, tc.b, tc.want)
		}
	}
}

func TestNodePending(t *testing.T) {
	want := expect.Resources("cpu", "1500m", "memory", "1Gi", "pods", "2")
	nodeWith := func(change func(*corev1.Node)) *corev1.Node {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris", Labels: map[string]string{broker.LabelProvider: "paris", broker.LabelNodeType: broker.NodeTypeVirtual}}}
		node.Spec.Taints = []corev1.Taint{{Key: broker.TaintOverflow, Value: "paris", Effect: corev1.TaintEffectNoSchedule}}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		node.Status.Allocatable = expect.Resources("cpu", "1500m", "memory", "1Gi", "pods", "2", "nvidia.com/gpu", "0")
		change(node)
		return node
	}
	cases := map[string]struct {
		change func(*corev1.Node)
		absent bool
		want   string
	}{
		"ready":     {change: func(*corev1.Node) {}},
		"absent":    {change: func(*corev1.Node) {}, absent: true, want: "does not exist yet"},
		"unmarked":  {change: func(n *corev1.Node) { n.Spec.Taints = nil }, want: "does not have Spillway's taint and labels yet"},
		"not ready": {change: func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }, want: "is not Ready yet"},
		"reason": {change: func(n *corev1.Node) {
			n.Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: "full"}
		}, want: "is not Ready: full"},
		"hostname":       {change: func(n *corev1.Node) { n.Labels[corev1.LabelHostname] = "spillway-paris" }, want: "still has label kubernetes.io/hostname"},
		"a milliCPU off": {change: func(n *corev1.Node) { n.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("1501m") }, want: "does not show the capacity yet"},
		"a byte off":     {change: func(n *corev1.Node) { n.Status.Allocatable[corev1.ResourceMemory] = resource.MustParse("1073741823") }, want: "does not show the capacity yet"},
		"a GPU too much": {change: func(n *corev1.Node) { n.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("1") }, want: "does not show the capacity yet"},
		"cordoned": {change: func(n *corev1.Node) {
			n.Spec.Unschedulable = true
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
		}},
		"still not ready": {change: func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeNotReady, Effect: corev1.TaintEffectNoSchedule})
		}, want: "still has taint " + corev1.TaintNodeNotReady},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			node := nodeWith(tc.change)
			if tc.absent {
				node = nil
			}
			if got := NodePending(node, "paris", want); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestRefused(t *testing.T) {
	webhook := &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: 400, Message: `admission webhook "x" denied the request: no`}}
	gone := schema.GroupResource{Resource: "rolebindings"}
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"a quota":                  {apierrors.NewForbidden(gone, "a", errors.New("exceeded quota")), true},
		"an invalid object":        {apierrors.NewInvalid(schema.GroupKind{}, "a", nil), true},
		"a webhook without reason": {fmt.Errorf("creating: %w", webhook), true},
		"a conflict":               {apierrors.NewConflict(gone, "a", errors.New("changed")), false},
		"an object that is gone":   {apierrors.NewNotFound(gone, "a"), false},
		"too many requests":        {apierrors.NewTooManyRequests("later", 1), false},
		"no credentials":           {apierrors.NewUnauthorized("expired"), false},
		"an unavailable server":    {apierrors.NewServiceUnavailable("starting"), false},
		"no connection":            {errors.New("connection refused"), false},
		"none":                     {nil, false},
	} {
		if got := Refused(tc.err); got != tc.want {
			t.Errorf("%s: got %t, want %t", name, got, tc.want)
		}
	}
}
