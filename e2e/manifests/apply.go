package manifests

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// owner is the field manager of server-side apply.
const owner = client.FieldOwner("spillway-e2e")

// first lists the kinds that others depend on, in the order of creation.
var first = []string{"Namespace", "CustomResourceDefinition", "ServiceAccount", "Secret", "ConfigMap"}

// Apply applies objects and their namespace, and returns when all kinds that they define
// are served: programs that start before end with an error.
func Apply(ctx context.Context, api client.Client, objects []*unstructured.Unstructured) error {
	namespace := &unstructured.Unstructured{}
	namespace.SetAPIVersion("v1")
	namespace.SetKind("Namespace")
	namespace.SetName(broker.SystemNamespace)
	objects = append([]*unstructured.Unstructured{namespace}, objects...)
	rank := func(o *unstructured.Unstructured) int {
		if i := slices.Index(first, o.GetKind()); i >= 0 {
			return i
		}
		return len(first)
	}
	slices.SortStableFunc(objects, func(a, b *unstructured.Unstructured) int { return rank(a) - rank(b) })
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for _, object := range objects {
		// A kind is served shortly after its CRD is created.
		err := retry(ctx, meta.IsNoMatchError, func() error {
			return api.Apply(ctx, client.ApplyConfigurationFromUnstructured(object.DeepCopy()), owner, client.ForceOwnership)
		})
		if err != nil {
			return fmt.Errorf("applying %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return awaitKinds(ctx, api, objects)
}

// awaitKinds waits until the API server serves the kinds of all CRDs.
func awaitKinds(ctx context.Context, api client.Client, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		if object.GetKind() != "CustomResourceDefinition" {
			continue
		}
		group, _, _ := unstructured.NestedString(object.Object, "spec", "group")
		kind, _, _ := unstructured.NestedString(object.Object, "spec", "names", "kind")
		if err := retry(ctx, meta.IsNoMatchError, func() error {
			_, err := api.RESTMapper().RESTMapping(schema.GroupKind{Group: group, Kind: kind})
			return err
		}); err != nil {
			return fmt.Errorf("waiting for kind %s: %w", kind, err)
		}
	}
	return nil
}

// retry repeats an action while it fails with a temporary error.
func retry(ctx context.Context, passes func(error) bool, do func() error) error {
	for {
		err := do()
		if err == nil || !passes(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w, until %w", err, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}
