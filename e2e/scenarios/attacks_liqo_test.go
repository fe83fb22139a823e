//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// liqoObject is an object of one of Liqo's types.
func liqoObject(group, kind, namespace, name string, spec map[string]any) *unstructured.Unstructured {
	object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	object.SetAPIVersion(group + ".liqo.io/v1beta1")
	object.SetKind(kind)
	object.SetNamespace(namespace)
	object.SetName(name)
	return object
}

// liqoIdentity is a client of paris with a kubeconfig that Liqo made for rome, and its
// configuration.
func liqoIdentity(ctx context.Context, t *testing.T, name string) (client.Client, *rest.Config) {
	t.Helper()
	var secret corev1.Secret
	if err := rome.Get(ctx, client.ObjectKey{Namespace: "liqo-tenant-paris", Name: "kubeconfig-" + name}, &secret); err != nil {
		t.Fatal(err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(secret.Data["kubeconfig"])
	if err != nil {
		t.Fatal(err)
	}
	identity, err := client.New(config, client.Options{Scheme: paris.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	return identity, config
}

// cpuPlusOne is more than a grant.
func cpuPlusOne(granted resource.Quantity) *resource.Quantity {
	more := granted.DeepCopy()
	more.Add(resource.MustParse("1"))
	return &more
}

// liqoAttacks are those with the identities of rome's virtual kubelet and of its
// crd-replicator, in the namespace that Liqo made for rome's guests.
func liqoAttacks(ctx context.Context, t *testing.T, guests string) []attack {
	t.Helper()
	const tenant = "liqo-tenant-rome"
	slice, config := liqoIdentity(ctx, t, "resourceslice-spillway-paris")
	replicator, _ := liqoIdentity(ctx, t, "controlplane-paris")
	guest := func(change func(*corev1.PodSpec)) func(context.Context) error {
		return creating(slice, func() client.Object {
			spec := guestSpec()
			change(&spec)
			pod := liqoObject("offloading", "ShadowPod", guests, "attack", map[string]any{"pod": asUnstructured(t, &spec)})
			pod.SetLabels(map[string]string{"offloading.liqo.io/origin": "rome"})
			return pod
		})
	}
	sidecars := func(s *corev1.PodSpec) {
		for _, name := range []string{"first", "second"} {
			c := *s.Containers[0].DeepCopy()
			c.Name, c.Ports, c.RestartPolicy = name, nil, ptr.To(corev1.ContainerRestartPolicyAlways)
			c.Resources.Requests["cpu"] = resource.MustParse("10m")
			s.InitContainers = append(s.InitContainers, c)
		}
	}
	for what, change := range map[string]func(*corev1.PodSpec){"an ordinary guest": func(*corev1.PodSpec) {}, "a guest with small sidecars": sidecars} {
		eventually(ctx, t, what+" is admitted", 20*time.Second, func(ctx context.Context) (bool, string) {
			err := guest(change)(ctx)
			return err == nil, fmt.Sprint(err)
		})
	}
	list := &unstructured.UnstructuredList{}
	list.SetAPIVersion("offloading.liqo.io/v1beta1")
	list.SetKind("QuotaList")
	if err := paris.List(ctx, list, client.InNamespace(tenant)); err != nil || len(list.Items) != 1 {
		t.Fatalf("%d quotas of rome: %v", len(list.Items), err)
	}
	text, _, _ := unstructured.NestedString(list.Items[0].Object, "spec", "resources", "cpu")

	another := creating(replicator, func() client.Object {
		slice := liqoObject("authentication", "ResourceSlice", tenant, "attack", map[string]any{
			"class": "spillway", "consumerClusterID": "rome", "providerClusterID": "paris", "resources": map[string]any{"cpu": "1000"},
		})
		slice.SetLabels(map[string]string{"liqo.io/originID": "rome", "liqo.io/replicated": "true"})
		return slice
	})
	patching := func(group, kind, name, patch string) func(context.Context) error {
		return func(ctx context.Context) error {
			return replicator.Patch(ctx, liqoObject(group, kind, tenant, name, nil), client.RawPatch("application/merge-patch+json", []byte(patch)), client.DryRunAll)
		}
	}
	class := patching("authentication", "ResourceSlice", "spillway-paris", `{"spec":{"class":"default"}}`)
	mapping := patching("offloading", "NamespaceMap", "paris", `{"spec":{"desiredMapping":{"x":"kube-system"}}}`)
	origin := patching("offloading", "NamespaceMap", "paris", `{"metadata":{"labels":{"liqo.io/originID":"liqo.io"}}}`)
	status := func(ctx context.Context) error {
		own := liqoObject("authentication", "ResourceSlice", tenant, "spillway-paris", nil)
		return replicator.Status().Patch(ctx, own, client.RawPatch("application/merge-patch+json", []byte(`{"status":{"resources":{"cpu":"999"}}}`)), client.DryRunAll)
	}
	orphan := func(ctx context.Context) error {
		own := liqoObject("authentication", "ResourceSlice", tenant, "spillway-paris", nil)
		return replicator.Delete(ctx, own, client.PropagationPolicy(metav1.DeletePropagationOrphan), client.DryRunAll)
	}
	kept := creating(slice, func() client.Object {
		spec := guestSpec()
		pod := liqoObject("offloading", "ShadowPod", guests, "attack", map[string]any{"pod": asUnstructured(t, &spec)})
		pod.SetLabels(map[string]string{"offloading.liqo.io/origin": "rome"})
		pod.SetFinalizers([]string{"example.com/keep"})
		return pod
	})
	attacks := foreignAttacks(ctx, t, slice, config)
	for _, a := range specAttacks() {
		do := guest(a.change)
		if a.podSecurity { // the pod that Liqo creates of the ShadowPod
			do = creating(paris, func() client.Object {
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: "attack"}, Spec: guestSpec()}
				a.change(&pod.Spec)
				return pod
			})
		}
		attacks = append(attacks, attack{a.name, do, a.want})
	}
	more := func(s *corev1.PodSpec) {
		s.Containers[0].Resources.Requests["cpu"] = *cpuPlusOne(resource.MustParse(text))
	}
	negative := func(s *corev1.PodSpec) { s.Containers[0].Resources.Requests["cpu"] = resource.MustParse("-1") }
	return slices.Concat(attacks, []attack{
		{"granting itself capacity", status, "only Liqo and Spillway"},
		{"a slice of Liqo's default class", class, "class spillway"},
		{"another slice", another, "spillway-paris"},
		{"namespaces for every control plane", origin, "liqo.io/originID=rome"},
		{"mapping onto an existing namespace", mapping, "-rome"},
		{"more than the grant", guest(more), "quota"},
		{"a negative request, which frees quota", guest(negative), "less than nothing"},
		{"a guest that cannot be deleted", kept, "remove metadata.finalizers"},
		{"deleting its slice, but not Liqo's quota", orphan, "without propagationPolicy Orphan"},
		{"a Service of type NodePort", creating(slice, func() client.Object { return nodePort(guests) }), "NodePort"},
		{"a ServiceAccount token", creating(slice, func() client.Object { return tokenSecret(guests) }), "service-account-token"},
		{"a pod in another namespace", creating(slice, func() client.Object {
			return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "attack"}, Spec: guestSpec()}
		}), "cannot create resource"},
	})
}
