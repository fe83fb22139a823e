package guest

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Options of a translation: the home cluster's DNS, where guests can reach it.
type Options struct {
	// ClusterDNS are IP addresses; none where home's Services cannot be reached.
	ClusterDNS []string
	// ClusterDomain is home's, such as cluster.local.
	ClusterDomain string
}

// Reference is a ConfigMap or Secret of the home namespace.
type Reference struct {
	Name string
	// Optional is true where no mention requires it.
	Optional bool
}

// References are all that a pod refers to, sorted by name.
type References struct{ ConfigMaps, Secrets []Reference }

// maxNameservers and maxSearches are the most that a pod's DNS may have.
const maxNameservers, maxSearches = 3, 32

// apiAccess begins the name of the volume that admission adds for access to the
// cluster's own API.
const apiAccess = "kube-api-access-"

// Translate makes the pod to run in namespace at the provider. refs must be there
// under their CopyName, and what Files makes, before it can start. notes are
// sentences on what is not as at home. home is not changed.
func Translate(home *corev1.Pod, namespace string, o Options) (made *corev1.Pod, refs References, notes []string) {
	t := translation{home: home, configMaps: map[string]bool{}, secrets: map[string]bool{}}
	from := home.DeepCopy()
	made = &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: Name(home),
			Labels: map[string]string{}, Annotations: map[string]string{},
		},
		Spec: from.Spec,
	}
	maps.Copy(made.Labels, home.Labels)
	maps.Copy(made.Annotations, home.Annotations)
	for key := range made.Annotations {
		// They speak of home, or to programs at home.
		if strings.HasPrefix(key, "kubectl.kubernetes.io/") || strings.HasPrefix(key, "controller.kubernetes.io/") ||
			strings.HasPrefix(key, "container.apparmor.security.beta.kubernetes.io/") || key == corev1.MirrorPodAnnotationKey {
			delete(made.Annotations, key)
		}
	}
	delete(made.Labels, broker.LabelOverflow)
	maps.Copy(made.Labels, map[string]string{LabelUID: string(home.UID), broker.LabelManagedBy: broker.ManagedBySpillway})
	maps.Copy(made.Annotations, map[string]string{AnnotationNamespace: home.Namespace, AnnotationName: home.Name})

	spec := &made.Spec
	spec.Hostname = hostname(home)
	// Where it runs is for the provider's scheduler to say, and its rank there for
	// nobody.
	spec.NodeName, spec.NodeSelector, spec.Affinity, spec.Tolerations, spec.TopologySpreadConstraints = "", nil, nil, nil, nil
	if len(spec.ResourceClaims) > 0 {
		t.note("Devices of resource claims are not lent: the pod runs without them there.")
	}
	spec.SchedulerName, spec.SchedulingGates, spec.ResourceClaims = "", nil, nil
	spec.Priority, spec.PriorityClassName, spec.PreemptionPolicy, spec.Overhead = nil, "", nil, nil
	// Accounts, names and Services of home mean nothing there.
	spec.ServiceAccountName, spec.DeprecatedServiceAccount, spec.AutomountServiceAccountToken = "", "", ptr.To(false)
	spec.EnableServiceLinks, spec.Subdomain, spec.SetHostnameAsFQDN = ptr.To(false), "", nil
	spec.EphemeralContainers, spec.WorkloadRef = nil, nil
	// Who sets the gates' conditions does so at home: Status counts them in.
	spec.ReadinessGates = nil
	t.dns(spec, o)
	t.volumes(spec)
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			t.container(&containers[i])
		}
	}
	// The API takes empty names here, which mean nothing.
	spec.ImagePullSecrets = slices.DeleteFunc(spec.ImagePullSecrets, func(s corev1.LocalObjectReference) bool { return s.Name == "" })
	for i := range spec.ImagePullSecrets {
		spec.ImagePullSecrets[i].Name = t.secret(spec.ImagePullSecrets[i].Name, true)
	}
	refs = References{ConfigMaps: sorted(t.configMaps), Secrets: sorted(t.secrets)}
	return made, refs, t.notes
}

// hostname is what the pod is called inside, at home.
func hostname(home *corev1.Pod) string {
	name := home.Spec.Hostname
	if name == "" {
		name = home.Name
	}
	// A host name has no dots, and the kubelet cuts what is too long.
	name, _, _ = strings.Cut(name, ".")
	if len(name) > maxName {
		name = name[:maxName]
	}
	return strings.TrimRight(name, "-")
}

type translation struct {
	home *corev1.Pod
	// configMaps and secrets referred to, and whether each mention is optional.
	configMaps, secrets map[string]bool
	notes               []string
}

func (t *translation) note(format string, args ...any) {
	if note := fmt.Sprintf(format, args...); !slices.Contains(t.notes, note) {
		t.notes = append(t.notes, note)
	}
}

func mention(in map[string]bool, name string, optional bool) {
	if was, ok := in[name]; ok {
		optional = optional && was
	}
	in[name] = optional
}

func (t *translation) configMap(name string, optional bool) string {
	mention(t.configMaps, name, optional)
	return CopyName(t.home.Namespace, name)
}

func (t *translation) secret(name string, optional bool) string {
	mention(t.secrets, name, optional)
	return CopyName(t.home.Namespace, name)
}

func sorted(in map[string]bool) []Reference {
	var out []Reference
	for _, name := range slices.Sorted(maps.Keys(in)) {
		out = append(out, Reference{Name: name, Optional: in[name]})
	}
	return out
}

// dns has the guest ask home's DNS where that can be reached, and else the
// resolver of its node.
func (t *translation) dns(spec *corev1.PodSpec, o Options) {
	if spec.DNSPolicy != corev1.DNSClusterFirst && spec.DNSPolicy != corev1.DNSClusterFirstWithHostNet && spec.DNSPolicy != "" {
		return
	}
	if len(o.ClusterDNS) == 0 || o.ClusterDomain == "" {
		spec.DNSPolicy = corev1.DNSDefault
		t.note("Services of this cluster are not known by name there: the pod asks the DNS of its node (give virtual-node --cluster-dns where pods there reach this cluster's DNS).")
		return
	}
	spec.DNSPolicy = corev1.DNSNone
	config := &corev1.PodDNSConfig{
		Nameservers: slices.Clone(o.ClusterDNS),
		Searches:    []string{t.home.Namespace + ".svc." + o.ClusterDomain, "svc." + o.ClusterDomain, o.ClusterDomain},
		Options:     []corev1.PodDNSConfigOption{{Name: "ndots", Value: ptr.To("5")}},
	}
	if own := spec.DNSConfig; own != nil {
		config.Nameservers = append(config.Nameservers, own.Nameservers...)
		config.Searches = append(config.Searches, own.Searches...)
		config.Options = append(config.Options, own.Options...)
	}
	// More the API does not take.
	config.Nameservers = config.Nameservers[:min(len(config.Nameservers), maxNameservers)]
	config.Searches = config.Searches[:min(len(config.Searches), maxSearches)]
	spec.DNSConfig = config
}

// isAPIAccess tells the volume that admission added from one that is only named
// like it.
func isAPIAccess(v corev1.Volume) bool {
	return strings.HasPrefix(v.Name, apiAccess) && v.Projected != nil &&
		slices.ContainsFunc(v.Projected.Sources, func(s corev1.VolumeProjection) bool { return s.ServiceAccountToken != nil })
}

// volumes points them to the copies, and drops what only home has.
func (t *translation) volumes(spec *corev1.PodSpec) {
	dropped := map[string]bool{}
	var kept []corev1.Volume
	for _, v := range spec.Volumes {
		switch {
		case isAPIAccess(v):
			dropped[v.Name] = true
			continue
		case v.ConfigMap != nil:
			v.ConfigMap.Name = t.configMap(v.ConfigMap.Name, ptr.Deref(v.ConfigMap.Optional, false))
		case v.Secret != nil:
			v.Secret.SecretName = t.secret(v.Secret.SecretName, ptr.Deref(v.Secret.Optional, false))
		case v.Projected != nil:
			t.projected(v.Name, v.Projected)
			if len(v.Projected.Sources) == 0 {
				v.VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
			}
		case v.DownwardAPI != nil:
			v.VolumeSource = corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				DefaultMode: v.DownwardAPI.DefaultMode, Sources: t.downward(v.DownwardAPI.Items),
			}}
			if len(v.Projected.Sources) == 0 {
				v.VolumeSource = corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
			}
		}
		kept = append(kept, v)
	}
	spec.Volumes = kept
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			containers[i].VolumeMounts = slices.DeleteFunc(containers[i].VolumeMounts, func(m corev1.VolumeMount) bool { return dropped[m.Name] })
		}
	}
}

func (t *translation) projected(volume string, p *corev1.ProjectedVolumeSource) {
	var kept []corev1.VolumeProjection
	for _, source := range p.Sources {
		switch {
		case source.ServiceAccountToken != nil, source.ClusterTrustBundle != nil, source.PodCertificate != nil:
			t.note("Volume %q has no token or certificate of this cluster there: none leaves it.", volume)
		case source.ConfigMap != nil:
			source.ConfigMap.Name = t.configMap(source.ConfigMap.Name, ptr.Deref(source.ConfigMap.Optional, false))
			kept = append(kept, source)
		case source.Secret != nil:
			source.Secret.Name = t.secret(source.Secret.Name, ptr.Deref(source.Secret.Optional, false))
			kept = append(kept, source)
		case source.DownwardAPI != nil:
			kept = append(kept, t.downward(source.DownwardAPI.Items)...)
		}
	}
	p.Sources = kept
}

// downward splits items into those that only home can answer, which come from
// Files, and those that only the guest's node can.
func (t *translation) downward(items []corev1.DownwardAPIVolumeFile) (out []corev1.VolumeProjection) {
	var there []corev1.DownwardAPIVolumeFile
	var files []corev1.KeyToPath
	for _, item := range items {
		if item.FieldRef != nil {
			if _, ok := field(t.home, item.FieldRef.FieldPath); ok {
				files = append(files, corev1.KeyToPath{Key: fileKey(item.FieldRef.FieldPath), Path: item.Path, Mode: item.Mode})
				continue
			}
		}
		there = append(there, item)
	}
	if len(there) > 0 {
		out = append(out, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: there}})
	}
	if len(files) > 0 {
		out = append(out, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{
			LocalObjectReference: corev1.LocalObjectReference{Name: filesName(t.home)}, Items: files,
		}})
	}
	return out
}

// Files is what only home knows of the files in downward API volumes, nil where
// there is none. Labels and annotations change in a pod's life, and so does it.
func Files(home *corev1.Pod, namespace string) *corev1.ConfigMap {
	data := map[string]string{}
	each := func(items []corev1.DownwardAPIVolumeFile) {
		for _, item := range items {
			if item.FieldRef == nil {
				continue
			}
			if value, ok := field(home, item.FieldRef.FieldPath); ok {
				data[fileKey(item.FieldRef.FieldPath)] = value
			}
		}
	}
	for _, v := range home.Spec.Volumes {
		switch {
		case isAPIAccess(v):
		case v.DownwardAPI != nil:
			each(v.DownwardAPI.Items)
		case v.Projected != nil:
			for _, source := range v.Projected.Sources {
				if source.DownwardAPI != nil {
					each(source.DownwardAPI.Items)
				}
			}
		}
	}
	if len(data) == 0 {
		return nil
	}
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: filesName(home),
			Labels:      map[string]string{LabelCopy: "downward", LabelUID: string(home.UID), broker.LabelManagedBy: broker.ManagedBySpillway},
			Annotations: map[string]string{AnnotationNamespace: home.Namespace, AnnotationName: home.Name},
		},
		Data: data,
	}
}

// field is the value of a field that is home's own; not ok for those that only
// the guest's kubelet knows.
func field(home *corev1.Pod, path string) (value string, ok bool) {
	within := func(prefix string, m map[string]string) (string, bool) {
		key, found := strings.CutPrefix(path, prefix+"['")
		key, closed := strings.CutSuffix(key, "']")
		return m[key], found && closed
	}
	if value, ok := within("metadata.labels", home.Labels); ok {
		return value, true
	}
	if value, ok := within("metadata.annotations", home.Annotations); ok {
		return value, true
	}
	switch path {
	case "metadata.name":
		return home.Name, true
	case "metadata.namespace":
		return home.Namespace, true
	case "metadata.uid":
		return string(home.UID), true
	case "metadata.labels":
		return lines(home.Labels), true
	case "metadata.annotations":
		return lines(home.Annotations), true
	case "spec.nodeName":
		return home.Spec.NodeName, true
	case "spec.serviceAccountName":
		return home.Spec.ServiceAccountName, true
	}
	return "", false
}

// lines is a map as the kubelet writes it to a file.
func lines(m map[string]string) string {
	var out []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		out = append(out, fmt.Sprintf("%s=%q", key, m[key]))
	}
	return strings.Join(out, "\n")
}

func (t *translation) container(c *corev1.Container) {
	for i := range c.EnvFrom {
		switch e := &c.EnvFrom[i]; {
		case e.ConfigMapRef != nil:
			e.ConfigMapRef.Name = t.configMap(e.ConfigMapRef.Name, ptr.Deref(e.ConfigMapRef.Optional, false))
		case e.SecretRef != nil:
			e.SecretRef.Name = t.secret(e.SecretRef.Name, ptr.Deref(e.SecretRef.Optional, false))
		}
	}
	for i := range c.Env {
		e := &c.Env[i]
		if e.ValueFrom == nil {
			continue
		}
		switch from := e.ValueFrom; {
		case from.ConfigMapKeyRef != nil:
			from.ConfigMapKeyRef.Name = t.configMap(from.ConfigMapKeyRef.Name, ptr.Deref(from.ConfigMapKeyRef.Optional, false))
		case from.SecretKeyRef != nil:
			from.SecretKeyRef.Name = t.secret(from.SecretKeyRef.Name, ptr.Deref(from.SecretKeyRef.Optional, false))
		case from.FieldRef != nil:
			if value, ok := field(t.home, from.FieldRef.FieldPath); ok {
				// A dollar sign would begin a variable where it is not doubled.
				e.Value, e.ValueFrom = strings.ReplaceAll(value, "$", "$$"), nil
			}
		}
	}
	// The provider's quota asks of every container to name an amount of each kind.
	if c.Resources.Requests == nil {
		c.Resources.Requests = corev1.ResourceList{}
	}
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
		if _, ok := c.Resources.Requests[name]; !ok {
			amount := resource.MustParse("0")
			if limit, ok := c.Resources.Limits[name]; ok {
				// What the API server would have made of it.
				amount = limit.DeepCopy()
			}
			c.Resources.Requests[name] = amount
		}
	}
	c.Resources.Claims = nil
}
