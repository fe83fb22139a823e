package translate

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	core "k8s.io/kubernetes/pkg/apis/core"
	defaults "k8s.io/kubernetes/pkg/apis/core/v1"
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"
)

// The field paths that the API accepts in downward API files and variables.
var (
	filePaths = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations",
		"metadata.labels['app']", "metadata.annotations['example.com/note']"}
	envPaths = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels['app']", "metadata.annotations['example.com/note']",
		"spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.podIP", "status.podIPs"}
)

// generator draws pods that the API server would accept.
type generator struct{ *rapid.T }

func pick[V any](g generator, what string, of ...V) V { return rapid.SampledFrom(of).Draw(g.T, what) }

func (g generator) yes(what string) bool { return rapid.Bool().Draw(g.T, what) }

func (g generator) optional() *bool { return pick(g, "optional", nil, ptr.To(false), ptr.To(true)) }

func (g generator) source() corev1.LocalObjectReference {
	return local(pick(g, "name", "a", "b", "c.d", "c-d", strings.Repeat("long-name.", 20)+"x"))
}

func (g generator) list() corev1.ResourceList {
	l := corev1.ResourceList{}
	for _, kind := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, "example.com/gpu"} {
		if g.yes(string(kind)) {
			l[kind] = *resource.NewQuantity(rapid.Int64Range(0, 1<<30).Draw(g.T, "amount"), resource.DecimalSI)
		}
	}
	return l
}

func (g generator) resources() corev1.ResourceRequirements {
	requests := g.list()
	limits := corev1.ResourceList{}
	for kind, amount := range requests {
		// Extended resources need equal requests and limits.
		if kind == "example.com/gpu" || g.yes("limited") {
			limits[kind] = amount
		}
	}
	if g.yes("limit alone") {
		if _, ok := requests[corev1.ResourceMemory]; !ok {
			limits[corev1.ResourceMemory] = resource.MustParse("1Gi")
		}
	}
	return corev1.ResourceRequirements{Requests: requests, Limits: limits}
}

func (g generator) items(prefix string) []corev1.DownwardAPIVolumeFile {
	var out []corev1.DownwardAPIVolumeFile
	for i := range rapid.IntRange(1, 3).Draw(g.T, "items") {
		item := corev1.DownwardAPIVolumeFile{Path: fmt.Sprintf("%s%d", prefix, i)}
		if g.yes("of the node") {
			item.ResourceFieldRef = &corev1.ResourceFieldSelector{ContainerName: "c0", Resource: "limits.cpu"}
		} else {
			item.FieldRef = &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: pick(g, "field", filePaths...)}
		}
		out = append(out, item)
	}
	return out
}

func (g generator) volume() corev1.VolumeSource {
	switch pick(g, "volume", "configMap", "secret", "emptyDir", "downwardAPI", "projected") {
	case "configMap":
		return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: g.source(), Optional: g.optional(), DefaultMode: ptr.To[int32](0o644)}}
	case "secret":
		return corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: g.source().Name, Optional: g.optional(), DefaultMode: ptr.To[int32](0o644)}}
	case "downwardAPI":
		return corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: g.items("f"), DefaultMode: ptr.To[int32](0o644)}}
	case "projected":
		p := &corev1.ProjectedVolumeSource{DefaultMode: ptr.To[int32](0o644)}
		for i := range rapid.IntRange(1, 4).Draw(g.T, "sources") {
			file := fmt.Sprintf("s%d", i)
			keys := []corev1.KeyToPath{{Key: "k", Path: file}}
			switch pick(g, "source", "configMap", "secret", "token", "downwardAPI") {
			case "configMap":
				p.Sources = append(p.Sources, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: g.source(), Optional: g.optional(), Items: keys}})
			case "secret":
				p.Sources = append(p.Sources, corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: g.source(), Optional: g.optional(), Items: keys}})
			case "token":
				p.Sources = append(p.Sources, corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: file, ExpirationSeconds: ptr.To[int64](3600)}})
			case "downwardAPI":
				p.Sources = append(p.Sources, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: g.items(file + "-")}})
			}
		}
		return corev1.VolumeSource{Projected: p}
	}
	return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
}

func (g generator) container(name string, volumes []corev1.Volume) corev1.Container {
	c := corev1.Container{Name: name, Image: "image:1", ImagePullPolicy: corev1.PullIfNotPresent, TerminationMessagePolicy: corev1.TerminationMessageReadFile, Resources: g.resources()}
	for i := range rapid.IntRange(0, 3).Draw(g.T, "variables") {
		e := corev1.EnvVar{Name: fmt.Sprintf("E%d", i)}
		switch pick(g, "variable", "plain", "configMap", "secret", "field", "resource") {
		case "plain":
			e.Value = "$(E0)"
		case "configMap":
			e.ValueFrom = &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: g.source(), Key: "k", Optional: g.optional()}}
		case "secret":
			e.ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: g.source(), Key: "k", Optional: g.optional()}}
		case "field":
			e.ValueFrom = &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: pick(g, "field", envPaths...)}}
		case "resource":
			e.ValueFrom = &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "requests.cpu"}}
		}
		c.Env = append(c.Env, e)
	}
	if g.yes("all of a ConfigMap") {
		c.EnvFrom = append(c.EnvFrom, corev1.EnvFromSource{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: g.source(), Optional: g.optional()}})
	}
	if g.yes("all of a Secret") {
		c.EnvFrom = append(c.EnvFrom, corev1.EnvFromSource{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: g.source(), Optional: g.optional()}})
	}
	for i, v := range volumes {
		if g.yes("mounted") {
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: v.Name, MountPath: fmt.Sprintf("/m%d", i)})
		}
	}
	return c
}

// pod draws a pod as stored in the consumer, bound to a virtual node.
func (g generator) pod() *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pick(g, "namespace", "shop", "test"), Name: anyName().Draw(g.T, "pod"), UID: types.UID(rapid.StringMatching(`[0-9a-f]{8}`).Draw(g.T, "uid")),
			Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"example.com/note": rapid.String().Draw(g.T, "note")},
		},
		Spec: corev1.PodSpec{
			NodeName: "spillway-paris", ServiceAccountName: "seller", DeprecatedServiceAccount: "seller", SchedulerName: "spillway-scheduler",
			RestartPolicy: pick(g, "restart", corev1.RestartPolicyAlways, corev1.RestartPolicyNever), DNSPolicy: pick(g, "dns", corev1.DNSClusterFirst, corev1.DNSDefault),
			TerminationGracePeriodSeconds: ptr.To[int64](30), SecurityContext: &corev1.PodSecurityContext{},
			Hostname: pick(g, "hostname", "", "host"), Subdomain: pick(g, "subdomain", "", "web"),
		},
	}
	s := &pod.Spec
	if g.yes("placed") {
		s.NodeSelector = map[string]string{"zone": "a"}
		s.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
		s.Priority, s.PriorityClassName, s.PreemptionPolicy = ptr.To[int32](9), "high", ptr.To(corev1.PreemptNever)
		s.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: "zone", WhenUnsatisfiable: corev1.ScheduleAnyway}}
	}
	if g.yes("gated") {
		s.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/gate"}}
	}
	if g.yes("with a resolver") {
		s.DNSConfig = &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1", "2.2.2.2"}, Searches: []string{"example.com"}}
	}
	for range rapid.IntRange(0, 2).Draw(g.T, "pull secrets") {
		s.ImagePullSecrets = append(s.ImagePullSecrets, g.source())
	}
	for i := range rapid.IntRange(0, 3).Draw(g.T, "volumes") {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: fmt.Sprintf("v%d", i), VolumeSource: g.volume()})
	}
	if g.yes("access to the API") {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: "kube-api-access-abcde", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			DefaultMode: ptr.To[int32](0o644),
			Sources: []corev1.VolumeProjection{
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: ptr.To[int64](3607)}},
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local("kube-root-ca.crt"), Items: []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}}}},
				{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"}}}}},
			},
		}}})
	}
	for i := range rapid.IntRange(1, 2).Draw(g.T, "containers") {
		s.Containers = append(s.Containers, g.container(fmt.Sprintf("c%d", i), s.Volumes))
	}
	for i := range rapid.IntRange(0, 2).Draw(g.T, "init containers") {
		s.InitContainers = append(s.InitContainers, g.container(fmt.Sprintf("i%d", i), s.Volumes))
	}
	return pod
}

// referenced returns the names of the ConfigMaps and Secrets that a pod refers to.
func referenced(pod *corev1.Pod) (configMaps, secrets []string) {
	configMap := func(name string) { configMaps = append(configMaps, name) }
	secret := func(name string) { secrets = append(secrets, name) }
	for _, s := range pod.Spec.ImagePullSecrets {
		secret(s.Name)
	}
	for _, v := range pod.Spec.Volumes {
		if v.ConfigMap != nil {
			configMap(v.ConfigMap.Name)
		}
		if v.Secret != nil {
			secret(v.Secret.SecretName)
		}
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ConfigMap != nil {
				configMap(s.ConfigMap.Name)
			}
			if s.Secret != nil {
				secret(s.Secret.Name)
			}
		}
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		for _, e := range c.EnvFrom {
			if e.ConfigMapRef != nil {
				configMap(e.ConfigMapRef.Name)
			}
			if e.SecretRef != nil {
				secret(e.SecretRef.Name)
			}
		}
		for _, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.ConfigMapKeyRef != nil {
				configMap(e.ValueFrom.ConfigMapKeyRef.Name)
			}
			if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
				secret(e.ValueFrom.SecretKeyRef.Name)
			}
		}
	}
	return configMaps, secrets
}

// validationError returns why the API server would reject the pod, or "".
func validationError(t *rapid.T, pod *corev1.Pod) string {
	pod = pod.DeepCopy()
	defaults.SetObjectDefaults_Pod(pod)
	internal := &core.Pod{}
	if err := defaults.Convert_v1_Pod_To_core_Pod(pod, internal, nil); err != nil {
		t.Fatalf("converting the pod: %v", err)
	}
	if err := validation.ValidatePodCreate(internal, validation.PodValidationOptions{}).ToAggregate(); err != nil {
		return err.Error()
	}
	return ""
}

func TestPodProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := generator{t}
		pod := g.pod()
		o := pick(g, "options", Options{}, Options{ClusterDNS: []string{"10.96.0.10", "10.96.0.11"}, ClusterDomain: "cluster.local"})
		before := pod.DeepCopy()
		guest, refs, notes := Pod(pod, guestNamespace, o)
		if diff := cmp.Diff(before, pod); diff != "" {
			t.Fatalf("the argument before changed (-before +after):\n%s", diff)
		}
		second, _, _ := Pod(pod, guestNamespace, o)
		if diff := cmp.Diff(guest, second); diff != "" {
			t.Errorf("the second result differs:\n%s", diff)
		}

		s := guest.Spec
		if s.NodeName+s.ServiceAccountName+s.DeprecatedServiceAccount+s.SchedulerName+s.Subdomain != "" || s.Priority != nil || s.TopologySpreadConstraints != nil || ptr.Deref(s.AutomountServiceAccountToken, true) {
			t.Errorf("the guest has fields of the consumer: %+v", s)
		}
		if !maps.Equal(s.NodeSelector, pod.Spec.NodeSelector) || !slices.Equal(s.Tolerations, pod.Spec.Tolerations) {
			t.Errorf("the guest's placement differs from what was judged: %+v", s)
		}
		checkReferences(t, pod, guest, refs)
		checkContainers(t, pod, guest)
		if err := validationError(t, guest); err != "" {
			t.Errorf("the API server would reject the guest: %s\n%+v", err, guest)
		}
		for _, note := range notes {
			if !strings.HasSuffix(note, ".") {
				t.Errorf("the note is not a sentence: %q", note)
			}
		}

		if phase := Status(pod, guest).Phase; phase != corev1.PodPending {
			t.Errorf("the phase of a new guest is %s, want Pending", phase)
		}
	})
}

func checkReferences(t *rapid.T, pod, guest *corev1.Pod, refs References) {
	files := refs.DownwardFiles
	copies := func(refs []Reference) map[string]bool {
		of := map[string]bool{}
		for _, ref := range refs {
			of[CopyName(pod.Namespace, ref.Name)] = true
		}
		if !slices.IsSortedFunc(refs, func(a, b Reference) int { return strings.Compare(a.Name, b.Name) }) || len(of) != len(refs) {
			t.Errorf("references are not sorted or not unique: %v", refs)
		}
		return of
	}
	configMaps, secrets := referenced(guest)
	allowed := copies(refs.ConfigMaps)
	if files != nil {
		allowed[files.Name] = true
	}
	names := map[string]bool{}
	for _, name := range configMaps {
		names[name] = true
	}
	if !maps.Equal(names, allowed) {
		t.Errorf("the guest refers to ConfigMaps %v, want %v", names, allowed)
	}
	names = map[string]bool{}
	for _, name := range secrets {
		names[name] = true
	}
	if copied := copies(refs.Secrets); !maps.Equal(names, copied) {
		t.Errorf("the guest refers to Secrets %v, want %v", names, copied)
	}
	volumes := map[string]bool{}
	for _, v := range guest.Spec.Volumes {
		volumes[v.Name] = true
		if v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(p corev1.VolumeProjection) bool { return p.ServiceAccountToken != nil }) {
			t.Errorf("volume %s has a token", v.Name)
		}
	}
	for _, c := range slices.Concat(guest.Spec.InitContainers, guest.Spec.Containers) {
		for _, mount := range c.VolumeMounts {
			if !volumes[mount.Name] {
				t.Errorf("container %s mounts volume %s, which does not exist", c.Name, mount.Name)
			}
		}
	}
	if files != nil && len(mountedFiles(t, guest, files)) == 0 {
		t.Errorf("no volume mounts any of %v", files.Data)
	}
}

func checkContainers(t *rapid.T, pod, guest *corev1.Pod) {
	before, after := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers), slices.Concat(guest.Spec.InitContainers, guest.Spec.Containers)
	if len(before) != len(after) {
		t.Fatalf("the pod has %d containers, the guest %d", len(before), len(after))
	}
	for i := range before {
		if before[i].Name != after[i].Name || before[i].Image != after[i].Image || len(before[i].Env) != len(after[i].Env) {
			t.Errorf("container %s before changed to %+v", before[i].Name, after[i])
		}
		for kind, amount := range before[i].Resources.Requests {
			if got := after[i].Resources.Requests[kind]; got.Cmp(amount) != 0 {
				t.Errorf("container %s requests %s of %s, its guest %s", before[i].Name, &amount, kind, &got)
			}
		}
		for _, kind := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			if _, ok := after[i].Resources.Requests[kind]; !ok {
				t.Errorf("container %s has no request of %s", before[i].Name, kind)
			}
		}
		if after[i].Resources.Limits.Memory().IsZero() {
			t.Errorf("the memory of container %s is not bounded", before[i].Name)
		}
	}
}
