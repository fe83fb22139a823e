package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"golang.org/x/sync/errgroup"
)

// resetter brings an API server back to what it was when it had started.
type resetter struct {
	set      kubernetes.Interface
	metadata metadata.Interface
	// before has the objects of then.
	before map[object]metav1.ObjectMeta
}

// object is an object of any kind.
type object struct {
	resource        schema.GroupVersionResource
	namespace, name string
}

func (o object) String() string {
	return fmt.Sprintf("%s %s/%s", o.resource.GroupResource(), o.namespace, o.name)
}

// kept reports whether the API server itself keeps an object, and changes it at any time.
func (o object) kept() bool {
	switch o.resource.Resource {
	case "apiservices", "ipaddresses": // of CRDs, and of Services
		return true
	case "leases":
		return o.namespace == metav1.NamespaceSystem && strings.HasPrefix(o.name, "apiserver-")
	case "endpoints", "endpointslices":
		return o.namespace == metav1.NamespaceDefault && o.name == "kubernetes"
	}
	return false
}

func newResetter(ctx context.Context, config *rest.Config) (*resetter, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.WarningHandler = -1, rest.NoWarnings{}
	r := &resetter{}
	var err error
	if r.set, err = kubernetes.NewForConfig(config); err != nil {
		return nil, err
	}
	if r.metadata, err = metadata.NewForConfig(config); err != nil {
		return nil, err
	}
	// The API server makes these after it has become ready.
	for _, namespace := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease} {
		if err := r.await(ctx, func() error {
			_, err := r.set.CoreV1().Namespaces().Get(ctx, namespace, metav1.GetOptions{})
			return err
		}); err != nil {
			return nil, err
		}
	}
	if err := r.await(ctx, func() error {
		_, err := r.set.CoreV1().Services(metav1.NamespaceDefault).Get(ctx, "kubernetes", metav1.GetOptions{})
		return err
	}); err != nil {
		return nil, err
	}
	if err := r.await(ctx, func() error {
		_, err := r.set.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "extension-apiserver-authentication", metav1.GetOptions{})
		return err
	}); err != nil {
		return nil, err
	}
	r.before, err = r.objects(ctx, nil)
	return r, err
}

// await repeats a request until it succeeds or ctx ends.
func (r *resetter) await(ctx context.Context, get func() error) error {
	for {
		err := get()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// objects lists everything, or only some resources if there are any.
func (r *resetter) objects(ctx context.Context, some map[schema.GroupVersionResource]bool) (map[object]metav1.ObjectMeta, error) {
	lists, err := discovery.ServerPreferredResources(r.set.Discovery())
	if err != nil {
		return nil, err
	}
	var mu sync.Mutex
	all := map[object]metav1.ObjectMeta{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(8)
	for _, list := range lists {
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			return nil, err
		}
		for _, kind := range list.APIResources {
			if !slices.Contains(kind.Verbs, "list") || !slices.Contains(kind.Verbs, "delete") {
				continue
			}
			resource := gv.WithResource(kind.Name)
			if len(some) > 0 && !some[resource] {
				continue
			}
			group.Go(func() error {
				list, err := r.metadata.Resource(resource).List(ctx, metav1.ListOptions{})
				if apierrors.IsNotFound(err) {
					return nil // its CRD is going
				}
				if err != nil {
					return fmt.Errorf("listing %s: %w", resource.Resource, err)
				}
				mu.Lock()
				defer mu.Unlock()
				for _, item := range list.Items {
					if o := (object{resource, item.Namespace, item.Name}); !o.kept() {
						all[o] = item.ObjectMeta
					}
				}
				return nil
			})
		}
	}
	return all, group.Wait()
}

// run deletes what is new, without regard to finalizers, until nothing of it is left. An error
// says what is left, what is missing, and what has changed.
func (r *resetter) run(ctx context.Context) error {
	policies, added := false, map[object]metav1.ObjectMeta{}
	for {
		// A list of everything is expensive: until they are gone, only the resources of those
		// that were there.
		some := map[schema.GroupVersionResource]bool{}
		for o := range added {
			some[o.resource] = true
		}
		var now map[object]metav1.ObjectMeta
		if err := r.await(ctx, func() (err error) {
			now, err = r.objects(ctx, some)
			return err
		}); err != nil {
			return fmt.Errorf("%w; seen before: %s", err, names(added))
		}
		clear(added)
		for o, meta := range now {
			if _, ok := r.before[o]; !ok {
				added[o] = meta
				policies = policies || strings.HasSuffix(o.resource.Resource, "admissionpolicybindings")
			}
		}
		if len(added) == 0 && len(some) > 0 {
			continue
		}
		if len(added) == 0 {
			if policies {
				if err := r.awaitPolicies(ctx); err != nil {
					return err
				}
			}
			return r.compare(ctx, now)
		}
		// What policies refuse is allowed soon after they were deleted.
		refused := r.remove(ctx, added)
		select {
		case <-ctx.Done():
			return fmt.Errorf("there are still: %s (%w)", names(added), errors.Join(refused, ctx.Err()))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// remove deletes objects: first what could refuse that, and CRDs and namespaces after what is in
// them.
func (r *resetter) remove(ctx context.Context, all map[object]metav1.ObjectMeta) error {
	rank := func(o object) int {
		switch {
		case o.resource.Group == admissionv1.GroupName:
			return 0
		case o.resource.Resource == "customresourcedefinitions" || o.resource.Resource == "namespaces":
			return 2
		}
		return 1
	}
	first := 2
	for o := range all {
		first = min(first, rank(o))
	}
	var group errgroup.Group // an error does not end the others
	group.SetLimit(8)
	for o, meta := range all {
		if rank(o) == first {
			group.Go(func() error { return r.removeOne(ctx, o, meta) })
		}
	}
	return group.Wait()
}

func (r *resetter) removeOne(ctx context.Context, o object, meta metav1.ObjectMeta) error {
	api := r.metadata.Resource(o.resource).Namespace(o.namespace)
	if len(meta.Finalizers) > 0 && o.resource.Resource != "customresourcedefinitions" {
		_, err := api.Patch(ctx, o.name, types.MergePatchType, []byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) {
			return fmt.Errorf("removing the finalizers of %s: %w", o, err)
		}
	}
	if meta.DeletionTimestamp == nil || o.resource.Resource == "pods" {
		err := api.Delete(ctx, o.name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0), PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("deleting %s: %w", o, err)
		}
	}
	if o.resource.Resource == "namespaces" {
		_, err := r.set.CoreV1().Namespaces().Finalize(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: o.name}}, metav1.UpdateOptions{})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("finalizing %s: %w", o, err)
		}
	}
	return nil
}

// compare reports what of before is missing, was made again, or has another spec (where it has a
// generation), labels or annotations. Those of namespaces, which a test cannot make again, are
// restored.
func (r *resetter) compare(ctx context.Context, now map[object]metav1.ObjectMeta) error {
	var problems []error
	for o, before := range r.before {
		is, ok := now[o]
		switch {
		case !ok:
			problems = append(problems, fmt.Errorf("%s is missing", o))
		case is.UID != before.UID || is.Generation != before.Generation:
			problems = append(problems, fmt.Errorf("%s has changed", o))
		case maps.Equal(is.Labels, before.Labels) && maps.Equal(is.Annotations, before.Annotations):
		case o.resource.Resource == "namespaces":
			_, err := r.set.CoreV1().Namespaces().Update(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
				Name: o.name, Labels: before.Labels, Annotations: before.Annotations,
			}, Spec: corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{corev1.FinalizerKubernetes}}}, metav1.UpdateOptions{})
			problems = append(problems, err)
		default:
			problems = append(problems, fmt.Errorf("%s has labels %v and annotations %v instead of %v and %v", o, is.Labels, is.Annotations, before.Labels, before.Annotations))
		}
	}
	return errors.Join(problems...)
}

// awaitPolicies waits until the API server has forgotten policies that were deleted: it reads
// them about once a second, all at once, so it knows of a new one no earlier.
func (r *resetter) awaitPolicies(ctx context.Context) error {
	const name = "reset"
	policies := r.set.AdmissionregistrationV1()
	always := admissionv1.Fail
	policy := &admissionv1.ValidatingAdmissionPolicy{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicySpec{
		FailurePolicy: &always,
		MatchConstraints: &admissionv1.MatchResources{ResourceRules: []admissionv1.NamedRuleWithOperations{{ResourceNames: []string{name}, RuleWithOperations: admissionv1.RuleWithOperations{
			Operations: []admissionv1.OperationType{admissionv1.Create}, Rule: admissionv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
		}}}},
		Validations: []admissionv1.Validation{{Expression: "false"}},
	}}
	binding := &admissionv1.ValidatingAdmissionPolicyBinding{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: admissionv1.ValidatingAdmissionPolicyBindingSpec{
		PolicyName: name, ValidationActions: []admissionv1.ValidationAction{admissionv1.Deny},
	}}
	if _, err := policies.ValidatingAdmissionPolicies().Create(ctx, policy, metav1.CreateOptions{}); err != nil {
		return err
	}
	if _, err := policies.ValidatingAdmissionPolicyBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return err
	}
	for {
		_, err := r.set.CoreV1().ConfigMaps(metav1.NamespaceDefault).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil && strings.Contains(err.Error(), "failed expression: false") {
			break
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the API server does not learn of a policy: %w", err)
		case <-time.After(50 * time.Millisecond):
		}
	}
	return errors.Join(
		policies.ValidatingAdmissionPolicyBindings().Delete(ctx, name, metav1.DeleteOptions{}),
		policies.ValidatingAdmissionPolicies().Delete(ctx, name, metav1.DeleteOptions{}))
}

// names lists objects.
func names(all map[object]metav1.ObjectMeta) string {
	var list []string
	for o, meta := range all {
		text := o.String()
		if len(meta.Finalizers) > 0 {
			text += fmt.Sprintf(" (finalizers %v)", meta.Finalizers)
		}
		list = append(list, text)
	}
	slices.Sort(list)
	const most = 20
	if len(list) > most {
		list = append(list[:most], fmt.Sprintf("and %d more", len(list)-most))
	}
	return strings.Join(list, ", ")
}
