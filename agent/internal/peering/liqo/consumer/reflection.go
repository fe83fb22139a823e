package consumer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// kubeletOptions is the VkOptionsTemplate of virtual nodes, in each tenant namespace;
	// defaultKubeletOptions is Liqo's own, in its namespace.
	kubeletOptions, defaultKubeletOptions = "spillway", "virtual-kubelet-default"
	// apiServerSupport is the argument of Liqo's virtual kubelet by which guests get
	// tokens of this cluster.
	apiServerSupport = "--enable-apiserver-support"
	// disableAddresses is the one by which it takes over no addresses of other clusters.
	disableAddresses = "--disable-ip-reflection"
	// labelReflected marks the ConfigMaps and Secrets that Spillway lets Liqo reflect.
	labelReflected = broker.Group + "/reflected"
	// reflectionBinding is the RoleBinding by which the agent may mark them.
	reflectionBinding = "spillway-agent-reflection"
	// rootCA is the ConfigMap that Kubernetes creates in each namespace. Liqo always
	// reflects it.
	rootCA = "kube-root-ca.crt"
)

// ensureKubeletOptions makes the options of a provider's virtual kubelet those of Liqo
// with what this cluster lets out. The progress is nil if they exist.
func (d *Driver) ensureKubeletOptions(ctx context.Context, provider string) (*peering.Progress, error) {
	defaults, err := session.Find(ctx, d.Client, d.LiqoNamespace, defaultKubeletOptions, &offloadingv1beta1.VkOptionsTemplate{})
	if err != nil {
		return nil, fmt.Errorf("reading Liqo's options of virtual kubelets: %w", err)
	}
	if defaults == nil {
		return ptr.To(peering.Waiting("LiqoIncomplete", fmt.Sprintf("VkOptionsTemplate %s/%s does not exist; install Liqo with its chart", d.LiqoNamespace, defaultKubeletOptions))), nil
	}
	withoutAddresses, err := d.ProviderNetworks.none(ctx, provider)
	if err != nil {
		return nil, err
	}
	want := d.restrict(defaults.Spec, withoutAddresses)
	options, err := session.Find(ctx, d.Client, liqo.TenantNamespace(provider), kubeletOptions, &offloadingv1beta1.VkOptionsTemplate{})
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the options of the virtual kubelet: %w", err)
	case options == nil:
		options = &offloadingv1beta1.VkOptionsTemplate{
			ObjectMeta: metav1.ObjectMeta{Namespace: liqo.TenantNamespace(provider), Name: kubeletOptions, Labels: liqo.ManagedLabels(provider)}, Spec: want,
		}
		err = d.Client.Create(ctx, options)
	default:
		before := options.DeepCopy()
		options.Spec = want
		err = d.Client.Patch(ctx, options, client.MergeFrom(before))
	}
	if err != nil {
		return nil, fmt.Errorf("writing the options of the virtual kubelet: %w", err)
	}
	return nil, nil
}

// restrict returns options with which Liqo reflects only the ConfigMaps and Secrets that
// are marked for it, and gives no guest a token of this cluster, unless Options ask for
// either. Without networks in which guests have addresses, it reports none, and what takes them off is
// not needed.
func (d *Driver) restrict(defaults offloadingv1beta1.VkOptionsTemplateSpec, withoutAddresses bool) offloadingv1beta1.VkOptionsTemplateSpec {
	spec := *defaults.DeepCopy()
	if !d.ReflectAll {
		if spec.ReflectorsConfig == nil {
			spec.ReflectorsConfig = map[string]offloadingv1beta1.ReflectorConfig{}
		}
		for _, kind := range []string{"configmap", "secret"} {
			config := spec.ReflectorsConfig[kind]
			config.NumWorkers, config.Type = max(config.NumWorkers, 1), offloadingv1beta1.AllowList
			spec.ReflectorsConfig[kind] = config
		}
	}
	if !d.ServiceAccountTokens {
		spec.ExtraArgs = withOption(spec.ExtraArgs, apiServerSupport, "false")
	}
	if withoutAddresses {
		spec.ExtraArgs = withOption(spec.ExtraArgs, disableAddresses, "true")
	}
	return spec
}

func withOption(args []string, option, value string) []string {
	return append(slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		name, _, _ := strings.Cut(arg, "=")
		return name == option
	}), option+"="+value)
}

// setAddresses makes the virtual kubelet of a VirtualNode that exists report addresses, or none. Liqo
// applies the options of virtual kubelets only when they are made.
func setAddresses(virtualNode *offloadingv1beta1.VirtualNode, withoutAddresses bool) (changed bool) {
	template := virtualNode.Spec.Template
	if template == nil || len(template.Spec.Template.Spec.Containers) == 0 {
		return false
	}
	kubelet := &template.Spec.Template.Spec.Containers[0]
	if slices.Contains(kubelet.Args, disableAddresses+"=true") == withoutAddresses {
		return false
	}
	kubelet.Args = withOption(kubelet.Args, disableAddresses, strconv.FormatBool(withoutAddresses))
	return true
}

// source is a ConfigMap or Secret that a pod refers to.
type source struct{ kind, name string }

// sources are the ConfigMaps and Secrets that a pod refers to. The value is whether it
// starts without them.
func sources(pod *corev1.PodSpec) map[source]bool {
	found := map[source]bool{}
	add := func(kind, name string, optional *bool) {
		if s := (source{kind, name}); name != "" && s != (source{"ConfigMap", rootCA}) {
			before, again := found[s]
			found[s] = ptr.Deref(optional, false) && (before || !again)
		}
	}
	for _, v := range pod.Volumes {
		if v.ConfigMap != nil {
			add("ConfigMap", v.ConfigMap.Name, v.ConfigMap.Optional)
		}
		if v.Secret != nil {
			add("Secret", v.Secret.SecretName, v.Secret.Optional)
		}
		if v.Projected == nil {
			continue
		}
		for _, p := range v.Projected.Sources {
			if p.ConfigMap != nil {
				add("ConfigMap", p.ConfigMap.Name, p.ConfigMap.Optional)
			}
			if p.Secret != nil {
				add("Secret", p.Secret.Name, p.Secret.Optional)
			}
		}
	}
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		for _, e := range c.EnvFrom {
			if e.ConfigMapRef != nil {
				add("ConfigMap", e.ConfigMapRef.Name, e.ConfigMapRef.Optional)
			}
			if e.SecretRef != nil {
				add("Secret", e.SecretRef.Name, e.SecretRef.Optional)
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				add("ConfigMap", e.ValueFrom.ConfigMapKeyRef.Name, e.ValueFrom.ConfigMapKeyRef.Optional)
			}
			if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
				add("Secret", e.ValueFrom.SecretKeyRef.Name, e.ValueFrom.SecretKeyRef.Optional)
			}
		}
	}
	for _, s := range pod.ImagePullSecrets {
		add("Secret", s.Name, ptr.To(true))
	}
	return found
}

// lookAgainAfter is how long a source that is marked is not read again, whichever pods refer
// to it. It may be deleted and created again without the mark.
const lookAgainAfter = time.Minute

// maxDecided is how many sources are remembered for that.
const maxDecided = 1 << 16

// sourceIn is a source of a namespace.
type sourceIn struct {
	namespace string
	source
}

// Carry lets Liqo reflect the ConfigMaps and Secrets that a pod refers to. Their owner
// may have decided about one: it is left as it is.
func (d *Driver) Carry(ctx context.Context, pod *corev1.Pod) (peering.Progress, error) {
	found := sources(&pod.Spec)
	if d.ReflectAll || len(found) == 0 {
		return peering.Done("Carried", "nothing to mark"), nil
	}
	if err := d.allowMarking(ctx, pod.Namespace); err != nil {
		return peering.Progress{}, err
	}
	for s, optional := range found {
		id := sourceIn{pod.Namespace, s}
		if _, recent := d.decided.Get(id); recent {
			continue
		}
		err := d.mark(ctx, pod.Namespace, s)
		switch {
		case apierrors.IsNotFound(err) && optional:
			d.decided.Add(id, nil, lookAgainAfter)
		case apierrors.IsNotFound(err):
			return peering.Waiting(peering.ReasonSourceMissing, fmt.Sprintf("%s %s/%s does not exist", s.kind, pod.Namespace, s.name)), nil
		case apierrors.IsForbidden(err), apierrors.IsConflict(err):
			// The RoleBinding takes effect a moment after its creation.
			return peering.Waiting("MarkPending", fmt.Sprintf("%s %s/%s: %v", s.kind, pod.Namespace, s.name, err)), nil
		case err != nil:
			return peering.Progress{}, fmt.Errorf("marking %s %s/%s for Liqo: %w", s.kind, pod.Namespace, s.name, err)
		default:
			d.decided.Add(id, nil, lookAgainAfter)
		}
	}
	return peering.Done("Carried", "Liqo may reflect what the pod refers to"), nil
}

// typeMeta makes a PartialObjectMetadata that of a kind of source: nothing else of a
// Secret is read.
func typeMeta(kind string) metav1.TypeMeta { return metav1.TypeMeta{APIVersion: "v1", Kind: kind} }

// mark lets Liqo reflect a source.
func (d *Driver) mark(ctx context.Context, namespace string, s source) error {
	object := &metav1.PartialObjectMetadata{TypeMeta: typeMeta(s.kind)}
	if err := d.Client.Get(ctx, client.ObjectKey{Namespace: namespace, Name: s.name}, object); err != nil {
		return err
	}
	_, allowed := object.Annotations[consts.AllowReflectionAnnotationKey]
	_, skipped := object.Annotations[consts.SkipReflectionAnnotationKey]
	if allowed || skipped || !object.DeletionTimestamp.IsZero() {
		return nil
	}
	before := object.DeepCopy()
	metav1.SetMetaDataAnnotation(&object.ObjectMeta, consts.AllowReflectionAnnotationKey, "true")
	metav1.SetMetaDataLabel(&object.ObjectMeta, labelReflected, "true")
	return d.Client.Patch(ctx, object, client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
}

// allowMarking binds the agent's role for marking sources in a namespace.
func (d *Driver) allowMarking(ctx context.Context, namespace string) error {
	bound, err := d.markedNamespaces(ctx)
	if err != nil || slices.Contains(bound, namespace) {
		return err
	}
	if err := d.BindRole(ctx, d.NamespaceRole, metav1.ObjectMeta{Namespace: namespace, Name: reflectionBinding, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, labelReflected: "true"}}); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.marked[namespace] = true
	return nil
}

// markedNamespaces are those in which sources may be marked. The first call reads what
// former processes left.
func (d *Driver) markedNamespaces(ctx context.Context) ([]string, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.marked == nil {
		var bindings rbacv1.RoleBindingList
		if err := d.Client.List(ctx, &bindings, client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway, labelReflected: "true"}); err != nil {
			return nil, fmt.Errorf("listing role bindings: %w", err)
		}
		d.marked = map[string]bool{}
		for i := range bindings.Items {
			d.marked[bindings.Items[i].Namespace] = true
		}
	}
	return slices.Collect(maps.Keys(d.marked)), nil
}

// unmark removes the marks of all sources in namespaces that are not used, and the
// permission for them.
func (d *Driver) unmark(ctx context.Context, used func(namespace string) bool) error {
	namespaces, err := d.markedNamespaces(ctx)
	for _, namespace := range namespaces {
		if !used(namespace) {
			err = errors.Join(err, d.unmarkNamespace(ctx, namespace))
		}
	}
	return err
}

func (d *Driver) unmarkNamespace(ctx context.Context, namespace string) error {
	forget := func() { d.decided.RemoveAll(func(of any) bool { return of.(sourceIn).namespace == namespace }) }
	forget() // before, so that a pod that comes meanwhile is looked at
	for _, kind := range []string{"ConfigMap", "Secret"} {
		if err := d.unmarkKind(ctx, namespace, kind); err != nil {
			return fmt.Errorf("removing marks in namespace %s: %w", namespace, err)
		}
	}
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: reflectionBinding}}
	if err := client.IgnoreNotFound(d.Client.Delete(ctx, binding)); err != nil {
		return fmt.Errorf("revoking the permission for namespace %s: %w", namespace, err)
	}
	d.mu.Lock()
	delete(d.marked, namespace)
	d.mu.Unlock()
	forget()
	return nil
}

func (d *Driver) unmarkKind(ctx context.Context, namespace, kind string) error {
	list := &metav1.PartialObjectMetadataList{TypeMeta: typeMeta(kind + "List")}
	err := d.Client.List(ctx, list, client.InNamespace(namespace), client.MatchingLabels{labelReflected: "true"})
	if apierrors.IsForbidden(err) {
		return nil // the binding is gone, and with it the namespace
	}
	if err != nil {
		return err
	}
	for i := range list.Items {
		object := &list.Items[i]
		object.TypeMeta = typeMeta(kind)
		before := object.DeepCopy()
		delete(object.Annotations, consts.AllowReflectionAnnotationKey)
		delete(object.Labels, labelReflected)
		if err := client.IgnoreNotFound(d.Client.Patch(ctx, object, client.MergeFrom(before))); err != nil {
			return err
		}
	}
	return nil
}
