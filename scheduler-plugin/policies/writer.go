package policies

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
)

// period is how often the statuses are compared, and timeout that of each write.
const period, timeout = 10 * time.Second, 10 * time.Second

// Writer writes the statuses of OverflowPolicies.
type Writer struct {
	Log          klog.Logger
	Clock        clock.WithTicker
	Client       rest.Interface
	Policies     request.PolicyCache
	Namespaces   corelisters.NamespaceLister
	Reservations *request.Reservations
	// Ready reports whether the caches are complete, and this replica has to write.
	Ready func() bool
}

// Run writes what has changed each 10 s, until ctx ends.
func (w *Writer) Run(ctx context.Context) {
	ticker := w.Clock.NewTicker(period)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
		if w.Ready() {
			w.write(ctx)
		}
	}
}

// write gathers what the statuses are decided on, and writes those that differ.
func (w *Writer) write(ctx context.Context) {
	in := input{policies: w.Policies.List(), requested: map[string]corev1.ResourceList{}, now: metav1.NewTime(w.Clock.Now())}
	if len(in.policies.Decoded) == 0 {
		return
	}
	selector := labels.SelectorFromSet(labels.Set{broker.LabelOverflow: broker.OverflowEnabled})
	namespaces, err := w.Namespaces.List(selector)
	if err != nil {
		w.Log.Error(err, "Failed to list namespaces")
		return
	}
	in.namespaces = namespaces
	for _, namespace := range namespaces {
		if in.requested[namespace.Name], err = w.Reservations.Requested(namespace.Name); err != nil {
			w.Log.Error(err, "Failed to list the Reservations of a namespace", "namespace", namespace.Name)
			return
		}
	}
	before := map[string]broker.OverflowPolicyStatus{}
	for _, policy := range in.policies.Decoded {
		before[policy.Name] = policy.Status
	}
	for name, status := range statuses(in, before) {
		if equality.Semantic.DeepEqual(before[name], status) {
			continue
		}
		// The API server accepts no status of an object from before the CRD refused its spec.
		// It may be gone, or have no status before its CRD is updated.
		if err := w.patch(ctx, name, status); err != nil && !apierrors.IsInvalid(err) && !apierrors.IsNotFound(err) {
			w.Log.Error(err, "Failed to write the status of an OverflowPolicy; retrying", "policy", name)
		}
	}
}

// patch replaces the status of a policy.
func (w *Writer) patch(ctx context.Context, name string, status broker.OverflowPolicyStatus) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	// What is empty is to be removed.
	fields := map[string]any{"namespaces": status.Namespaces, "namespaceCount": status.NamespaceCount, "usage": status.Usage,
		"conditions": status.Conditions, "observedGeneration": status.ObservedGeneration}
	patch, err := json.Marshal(map[string]any{"status": fields})
	if err != nil {
		return fmt.Errorf("encoding a status: %w", err)
	}
	return w.Client.Patch(types.MergePatchType).Resource("overflowpolicies").Name(name).SubResource("status").Body(patch).Do(ctx).Error()
}
