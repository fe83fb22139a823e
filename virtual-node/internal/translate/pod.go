package translate

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	placement "github.com/spillway-dev/spillway/broker/guest"
)

// Options are the consumer's DNS, where guests can reach it.
type Options struct {
	// ClusterDNS are IP addresses of the consumer's DNS; empty if guests cannot
	// reach it.
	ClusterDNS []string
	// ClusterDomain is the consumer's DNS domain, such as cluster.local.
	ClusterDomain string
}

// Reference is a ConfigMap or Secret in the pod's namespace.
type Reference struct {
	Name string
	// Optional is true if every reference of the pod to the object is optional.
	Optional bool
}

// References are what a guest mounts or reads at its start.
type References struct {
	// ConfigMaps and Secrets are the pod's, sorted by name. The guest refers to copies
	// named by CopyName.
	ConfigMaps, Secrets []Reference
	// DownwardFiles has the values of those downward API files that are the overflowed
	// pod's, such as its labels; nil if there are none.
	DownwardFiles *corev1.ConfigMap
}

// Limits of the API on a pod's DNS configuration.
const maxNameservers, maxSearches = 3, 32

// apiAccessPrefix begins the name of the volume that admission adds for access
// to the cluster's API server.
const apiAccessPrefix = "kube-api-access-"

// Pod returns the guest of an overflowed pod, in the given namespace of the
// provider. The guest cannot start before the copies of refs exist. notes are
// sentences about what differs for the guest.
func Pod(pod *corev1.Pod, namespace string, o Options) (guest *corev1.Pod, refs References, notes []string) {
	t := translation{pod: pod, configMaps: map[string]bool{}, secrets: map[string]bool{}, files: map[string]string{}}
	guest = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: GuestName(pod),
			Labels: map[string]string{}, Annotations: map[string]string{},
		},
		Spec: *pod.Spec.DeepCopy(),
	}
	maps.Copy(guest.Labels, pod.Labels)
	maps.Copy(guest.Annotations, pod.Annotations)
	for key := range guest.Annotations {
		// They describe the consumer's objects, or address its controllers.
		if strings.HasPrefix(key, "kubectl.kubernetes.io/") || strings.HasPrefix(key, "controller.kubernetes.io/") ||
			strings.HasPrefix(key, "container.apparmor.security.beta.kubernetes.io/") || key == corev1.MirrorPodAnnotationKey {
			delete(guest.Annotations, key)
		}
	}
	delete(guest.Labels, broker.LabelOverflow)
	// The consumer's scheduler holds its gang together.
	delete(guest.Labels, broker.LabelPodGroup)
	delete(guest.Annotations, broker.AnnotationWorkload)
	maps.Copy(guest.Labels, map[string]string{LabelUID: string(pod.UID), broker.LabelManagedBy: broker.ManagedBySpillway})
	if guest.Annotations[placement.AnnotationEvict] == "false" {
		t.note("The provider may evict the guest, as any, to remove its node: annotation %s is not carried.", placement.AnnotationEvict)
	}
	maps.Copy(guest.Annotations, map[string]string{AnnotationNamespace: pod.Namespace, AnnotationName: pod.Name, placement.AnnotationEvict: "true"})

	spec := &guest.Spec
	spec.Hostname = hostname(pod)
	// The provider's scheduler decides, by what the grant was judged on; priorities of
	// the consumer do not apply there.
	var affinity *corev1.NodeSelector
	if a := spec.Affinity; a != nil && a.NodeAffinity != nil {
		affinity = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	}
	spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: placement.NodeAffinity(affinity)}}
	spec.NodeName, spec.Tolerations, spec.TopologySpreadConstraints = "", placement.Tolerations(spec.Tolerations), nil
	if len(spec.ResourceClaims) > 0 {
		t.note("Resource claims are not supported at providers: the guest runs without their devices.")
	}
	spec.SchedulerName, spec.SchedulingGates, spec.ResourceClaims = "", nil, nil
	spec.Priority, spec.PriorityClassName, spec.PreemptionPolicy, spec.Overhead = nil, placement.PriorityClass, nil, nil
	// ServiceAccounts and Services of the consumer do not exist there.
	spec.ServiceAccountName, spec.DeprecatedServiceAccount, spec.AutomountServiceAccountToken = "", "", ptr.To(false)
	spec.EnableServiceLinks, spec.Subdomain, spec.SetHostnameAsFQDN = ptr.To(false), "", nil
	spec.EphemeralContainers, spec.SchedulingGroup, spec.EvictionResponders = nil, nil, nil
	// The controllers that set their conditions run in the consumer: see Status.
	spec.ReadinessGates = nil
	t.dns(spec, o)
	t.volumes(spec)
	placement.DropZeros(spec)
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			t.container(&containers[i])
		}
	}
	if placement.BoundMemory(spec) {
		t.note("Containers without a memory limit may use twice their request and a share of %s.", resource.NewQuantity(placement.MemoryPerPod, resource.BinarySI))
	}
	// The API server accepts empty names here and ignores them.
	spec.ImagePullSecrets = slices.DeleteFunc(spec.ImagePullSecrets, func(s corev1.LocalObjectReference) bool { return s.Name == "" })
	for i := range spec.ImagePullSecrets {
		t.secret(&spec.ImagePullSecrets[i].Name, ptr.To(true))
	}
	refs = References{ConfigMaps: sorted(t.configMaps), Secrets: sorted(t.secrets), DownwardFiles: t.downwardFiles(namespace)}
	return guest, refs, t.notes
}

// hostname returns the host name that the pod would have in the consumer.
func hostname(pod *corev1.Pod) string {
	name := cmp.Or(pod.Spec.Hostname, pod.Name)
	// As the kubelet does: no dots, and at most 63 characters.
	name, _, _ = strings.Cut(name, ".")
	if len(name) > maxName {
		name = name[:maxName]
	}
	return strings.TrimRight(name, "-")
}

// translation collects what one call of Pod finds.
type translation struct {
	pod *corev1.Pod
	// configMaps and secrets are the names referred to; the value is
	// Reference.Optional.
	configMaps, secrets map[string]bool
	// files are the data of References.DownwardFiles.
	files map[string]string
	notes []string
}

func (t *translation) note(format string, args ...any) {
	if note := fmt.Sprintf(format, args...); !slices.Contains(t.notes, note) {
		t.notes = append(t.notes, note)
	}
}

// configMap records a reference to a ConfigMap and replaces its name by that of
// the copy.
func (t *translation) configMap(name *string, optional *bool) {
	t.refer(t.configMaps, name, optional)
}

// secret is configMap for a Secret.
func (t *translation) secret(name *string, optional *bool) { t.refer(t.secrets, name, optional) }

func (t *translation) refer(seen map[string]bool, name *string, optional *bool) {
	before, found := seen[*name]
	seen[*name] = ptr.Deref(optional, false) && (before || !found)
	*name = CopyName(t.pod.Namespace, *name)
}

func sorted(optional map[string]bool) []Reference {
	var out []Reference
	for _, name := range slices.Sorted(maps.Keys(optional)) {
		out = append(out, Reference{Name: name, Optional: optional[name]})
	}
	return out
}

// dns makes the guest use the consumer's DNS where guests can reach it, else the
// resolver of its node.
func (t *translation) dns(spec *corev1.PodSpec, o Options) {
	if spec.DNSPolicy != corev1.DNSClusterFirst && spec.DNSPolicy != corev1.DNSClusterFirstWithHostNet && spec.DNSPolicy != "" {
		return
	}
	if len(o.ClusterDNS) == 0 || o.ClusterDomain == "" {
		spec.DNSPolicy = corev1.DNSDefault
		t.note("Names of this cluster's Services do not resolve there: the guest uses the DNS of its node (set virtual-node's --cluster-dns if guests can reach this cluster's DNS).")
		return
	}
	spec.DNSPolicy = corev1.DNSNone
	config := &corev1.PodDNSConfig{
		Nameservers: slices.Clone(o.ClusterDNS),
		Searches:    []string{t.pod.Namespace + ".svc." + o.ClusterDomain, "svc." + o.ClusterDomain, o.ClusterDomain},
		Options:     []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr.To("5")}},
	}
	if own := spec.DNSConfig; own != nil {
		config.Nameservers = append(config.Nameservers, own.Nameservers...)
		config.Searches = append(config.Searches, own.Searches...)
		config.Options = append(config.Options, own.Options...)
	}
	config.Nameservers = config.Nameservers[:min(len(config.Nameservers), maxNameservers)]
	config.Searches = config.Searches[:min(len(config.Searches), maxSearches)]
	spec.DNSConfig = config
}

// isAPIAccess reports whether admission added the volume; a user's volume may
// have the same prefix.
func isAPIAccess(v corev1.Volume) bool {
	return strings.HasPrefix(v.Name, apiAccessPrefix) && v.Projected != nil &&
		slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool { return s.ServiceAccountToken != nil })
}

// volumes makes volumes refer to the copies, and removes the one for access to
// the consumer's API server.
func (t *translation) volumes(spec *corev1.PodSpec) {
	removed := map[string]bool{}
	var kept []corev1.Volume
	for _, v := range spec.Volumes {
		switch {
		case isAPIAccess(v):
			removed[v.Name] = true
			continue
		case v.ConfigMap != nil:
			t.configMap(&v.ConfigMap.Name, v.ConfigMap.Optional)
		case v.Secret != nil:
			t.secret(&v.Secret.SecretName, v.Secret.Optional)
		case v.Projected != nil:
			t.projected(v.Name, v.Projected)
		case v.DownwardAPI != nil:
			v.VolumeSource = corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				DefaultMode: v.DownwardAPI.DefaultMode, Sources: t.downward(v.DownwardAPI.Items),
			}}
		}
		if v.Projected != nil && len(v.Projected.Sources) == 0 {
			v.VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
		}
		kept = append(kept, v)
	}
	spec.Volumes = kept
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			containers[i].VolumeMounts = slices.DeleteFunc(containers[i].VolumeMounts, func(m corev1.VolumeMount) bool { return removed[m.Name] })
		}
	}
}

func (t *translation) projected(volume string, p *corev1.ProjectedVolumeSource) {
	var kept []corev1.VolumeProjection
	for _, source := range p.Sources {
		switch {
		case source.ServiceAccountToken != nil, source.ClusterTrustBundle != nil, source.PodCertificate != nil:
			t.note("Volume %q lacks its tokens and certificates of this cluster: they are not copied to other clusters.", volume)
		case source.ConfigMap != nil:
			t.configMap(&source.ConfigMap.Name, source.ConfigMap.Optional)
			kept = append(kept, source)
		case source.Secret != nil:
			t.secret(&source.Secret.Name, source.Secret.Optional)
			kept = append(kept, source)
		case source.DownwardAPI != nil:
			kept = append(kept, t.downward(source.DownwardAPI.Items)...)
		}
	}
	p.Sources = kept
}

// downward splits items into those whose value is the overflowed pod's, which
// come from References.DownwardFiles, and those that the guest's kubelet fills in.
func (t *translation) downward(items []corev1.DownwardAPIVolumeFile) (out []corev1.VolumeProjection) {
	var kubelets []corev1.DownwardAPIVolumeFile
	var files []corev1.KeyToPath
	for _, item := range items {
		if item.FieldRef != nil {
			if value, ok := field(t.pod, item.FieldRef.FieldPath); ok {
				key := fileKey(item.FieldRef.FieldPath)
				t.files[key] = value
				files = append(files, corev1.KeyToPath{Key: key, Path: item.Path, Mode: item.Mode})
				continue
			}
		}
		kubelets = append(kubelets, item)
	}
	if len(kubelets) > 0 {
		out = append(out, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: kubelets}})
	}
	if len(files) > 0 {
		out = append(out, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: filesName(t.pod)}, Items: files,
		}})
	}
	return out
}

// downwardFiles returns the ConfigMap for the files that downward found, or nil.
func (t *translation) downwardFiles(namespace string) *corev1.ConfigMap {
	if len(t.files) == 0 {
		return nil
	}
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: filesName(t.pod),
			Labels:      map[string]string{LabelCopy: "downward", LabelUID: string(t.pod.UID), broker.LabelManagedBy: broker.ManagedBySpillway},
			Annotations: map[string]string{AnnotationNamespace: t.pod.Namespace, AnnotationName: t.pod.Name},
		},
		Data: t.files,
	}
}

// field returns the value of a field of the overflowed pod; ok is false for
// fields that only the guest's kubelet knows.
func field(pod *corev1.Pod, path string) (value string, ok bool) {
	entry := func(prefix string, m map[string]string) (string, bool) {
		key, found := strings.CutPrefix(path, prefix+"['")
		key, closed := strings.CutSuffix(key, "']")
		return m[key], found && closed
	}
	if value, ok := entry("metadata.labels", pod.Labels); ok {
		return value, true
	}
	if value, ok := entry("metadata.annotations", pod.Annotations); ok {
		return value, true
	}
	switch path {
	case "metadata.name":
		return pod.Name, true
	case "metadata.namespace":
		return pod.Namespace, true
	case "metadata.uid":
		return string(pod.UID), true
	case "metadata.labels":
		return formatMap(pod.Labels), true
	case "metadata.annotations":
		return formatMap(pod.Annotations), true
	case "spec.nodeName":
		return pod.Spec.NodeName, true
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, true
	}
	return "", false
}

// formatMap formats a map as the kubelet does in downward API files.
func formatMap(m map[string]string) string {
	var out []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%s=%q", key, m[key]))
	}
	return strings.Join(out, "\n")
}

func (t *translation) container(c *corev1.Container) {
	for _, e := range c.EnvFrom {
		switch {
		case e.ConfigMapRef != nil:
			t.configMap(&e.ConfigMapRef.Name, e.ConfigMapRef.Optional)
		case e.SecretRef != nil:
			t.secret(&e.SecretRef.Name, e.SecretRef.Optional)
		}
	}
	for i := range c.Env {
		e := &c.Env[i]
		if e.ValueFrom == nil {
			continue
		}
		switch from := e.ValueFrom; {
		case from.ConfigMapKeyRef != nil:
			t.configMap(&from.ConfigMapKeyRef.Name, from.ConfigMapKeyRef.Optional)
		case from.SecretKeyRef != nil:
			t.secret(&from.SecretKeyRef.Name, from.SecretKeyRef.Optional)
		case from.FieldRef != nil:
			if value, ok := field(t.pod, from.FieldRef.FieldPath); ok {
				// Escaped: the kubelet expands $(VARIABLE) in values.
				e.Value, e.ValueFrom = strings.ReplaceAll(value, "$", "$$"), nil
			}
		}
	}
	// The provider's ResourceQuota requires a request of each of its resources.
	if c.Resources.Requests == nil {
		c.Resources.Requests = corev1.ResourceList{}
	}
	for _, name := range placement.Listed() {
		if _, ok := c.Resources.Requests[name]; !ok {
			request := resource.MustParse("0")
			if limit, ok := c.Resources.Limits[name]; ok {
				// The API server's default.
				request = limit.DeepCopy()
			}
			c.Resources.Requests[name] = request
		}
	}
	c.Resources.Claims = nil
}
