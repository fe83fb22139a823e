package guest

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

// fieldPaths are those that the API takes in environment variables and files.
var (
	filePaths = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels", "metadata.annotations",
		"metadata.labels['app']", "metadata.annotations['example.com/note']"}
	envPaths = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels['app']", "metadata.annotations['example.com/note']",
		"spec.nodeName", "spec.serviceAccountName", "status.hostIP", "status.podIP", "status.podIPs"}
)

// maker draws the parts of a pod that the API server would take.
type maker struct{ *rapid.T }

func pick[V any](m maker, what string, of ...V) V { return rapid.SampledFrom(of).Draw(m.T, what) }

func (m maker) yes(what string) bool { return rapid.Bool().Draw(m.T, what) }

func (m maker) optional() *bool { return pick(m, "optional", nil, ptr.To(false), ptr.To(true)) }

func (m maker) source() corev1.LocalObjectReference {
	return local(pick(m, "name", "a", "b", "c.d", "c-d", strings.Repeat("long-name.", 20)+"x"))
}

func (m maker) list() corev1.ResourceList {
	l := corev1.ResourceList{}
	for _, kind := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage, "example.com/gpu"} {
		if m.yes(string(kind)) {
			l[kind] = *resource.NewQuantity(rapid.Int64Range(0, 1<<30).Draw(m.T, "amount"), resource.DecimalSI)
		}
	}
	return l
}

func (m maker) resources() corev1.ResourceRequirements {
	requests := m.list()
	limits := corev1.ResourceList{}
	for kind, amount := range requests {
		// Devices are asked for and limited alike.
		if kind == "example.com/gpu" || m.yes("limited") {
			limits[kind] = amount
		}
	}
	if m.yes("limit alone") {
		if _, ok := requests[corev1.ResourceMemory]; !ok {
			limits[corev1.ResourceMemory] = resource.MustParse("1Gi")
		}
	}
	return corev1.ResourceRequirements{Requests: requests, Limits: limits}
}

func (m maker) items(prefix string) []corev1.DownwardAPIVolumeFile {
	var out []corev1.DownwardAPIVolumeFile
	for i := range rapid.IntRange(1, 3).Draw(m.T, "items") {
		item := corev1.DownwardAPIVolumeFile{Path: fmt.Sprintf("%s%d", prefix, i)}
		if m.yes("of the node") {
			item.ResourceFieldRef = &corev1.ResourceFieldSelector{ContainerName: "c0", Resource: "limits.cpu"}
		} else {
			item.FieldRef = &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: pick(m, "field", filePaths...)}
		}
		out = append(out, item)
	}
	return out
}

func (m maker) volume() corev1.VolumeSource {
	switch pick(m, "volume", "configMap", "secret", "emptyDir", "downwardAPI", "projected") {
	case "configMap":
		return corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: m.source(), Optional: m.optional(), DefaultMode: ptr.To[int32](0o644)}}
	case "secret":
		return corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: m.source().Name, Optional: m.optional(), DefaultMode: ptr.To[int32](0o644)}}
	case "downwardAPI":
		return corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{Items: m.items("f"), DefaultMode: ptr.To[int32](0o644)}}
	case "projected":
		p := &corev1.ProjectedVolumeSource{DefaultMode: ptr.To[int32](0o644)}
		for i := range rapid.IntRange(1, 4).Draw(m.T, "sources") {
			file := fmt.Sprintf("s%d", i)
			keys := []corev1.KeyToPath{{Key: "k", Path: file}}
			switch pick(m, "source", "configMap", "secret", "token", "downwardAPI") {
			case "configMap":
				p.Sources = append(p.Sources, corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: m.source(), Optional: m.optional(), Items: keys}})
			case "secret":
				p.Sources = append(p.Sources, corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: m.source(), Optional: m.optional(), Items: keys}})
			case "token":
				p.Sources = append(p.Sources, corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: file, ExpirationSeconds: ptr.To[int64](3600)}})
			case "downwardAPI":
				p.Sources = append(p.Sources, corev1.VolumeProjection{DownwardAPI: &corev1.DownwardAPIProjection{Items: m.items(file + "-")}})
			}
		}
		return corev1.VolumeSource{Projected: p}
	}
	return corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
}

func (m maker) container(name string, volumes []corev1.Volume) corev1.Container {
	c := corev1.Container{Name: name, Image: "image:1", ImagePullPolicy: corev1.PullIfNotPresent, TerminationMessagePolicy: corev1.TerminationMessageReadFile, Resources: m.resources()}
	for i := range rapid.IntRange(0, 3).Draw(m.T, "variables") {
		e := corev1.EnvVar{Name: fmt.Sprintf("E%d", i)}
		switch pick(m, "variable", "plain", "configMap", "secret", "field", "resource") {
		case "plain":
			e.Value = "$(E0)"
		case "configMap":
			e.ValueFrom = &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: m.source(), Key: "k", Optional: m.optional()}}
		case "secret":
			e.ValueFrom = &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: m.source(), Key: "k", Optional: m.optional()}}
		case "field":
			e.ValueFrom = &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: pick(m, "field", envPaths...)}}
		case "resource":
			e.ValueFrom = &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "requests.cpu"}}
		}
		c.Env = append(c.Env, e)
	}
	if m.yes("all of a ConfigMap") {
		c.EnvFrom = append(c.EnvFrom, corev1.EnvFromSource{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: m.source(), Optional: m.optional()}})
	}
	if m.yes("all of a Secret") {
		c.EnvFrom = append(c.EnvFrom, corev1.EnvFromSource{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: m.source(), Optional: m.optional()}})
	}
	for i, v := range volumes {
		if m.yes("mounted") {
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: v.Name, MountPath: fmt.Sprintf("/m%d", i)})
		}
	}
	return c
}

// pod draws one as it is stored at home, bound to a virtual node.
func (m maker) pod() *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pick(m, "namespace", "shop", "shed"), Name: anyName().Draw(m.T, "pod"), UID: types.UID(rapid.StringMatching(`[0-9a-f]{8}`).Draw(m.T, "uid")),
			Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"example.com/note": rapid.String().Draw(m.T, "note")},
		},
		Spec: corev1.PodSpec{
			NodeName: "spillway-paris", ServiceAccountName: "seller", DeprecatedServiceAccount: "seller", SchedulerName: "spillway-scheduler",
			RestartPolicy: pick(m, "restart", corev1.RestartPolicyAlways, corev1.RestartPolicyNever), DNSPolicy: pick(m, "dns", corev1.DNSClusterFirst, corev1.DNSDefault),
			TerminationGracePeriodSeconds: ptr.To[int64](30), SecurityContext: &corev1.PodSecurityContext{},
			Hostname: pick(m, "hostname", "", "host"), Subdomain: pick(m, "subdomain", "", "web"),
		},
	}
	s := &pod.Spec
	if m.yes("placed") {
		s.NodeSelector = map[string]string{"zone": "a"}
		s.Tolerations = []corev1.Toleration{{Key: "k", Operator: corev1.TolerationOpExists}}
		s.Priority, s.PriorityClassName, s.PreemptionPolicy = ptr.To[int32](9), "high", ptr.To(corev1.PreemptNever)
		s.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{MaxSkew: 1, TopologyKey: "zone", WhenUnsatisfiable: corev1.ScheduleAnyway}}
	}
	if m.yes("gated") {
		s.ReadinessGates = []corev1.PodReadinessGate{{ConditionType: "example.com/gate"}}
	}
	if m.yes("with a resolver") {
		s.DNSConfig = &corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1", "2.2.2.2"}, Searches: []string{"example.com"}}
	}
	for range rapid.IntRange(0, 2).Draw(m.T, "pull secrets") {
		s.ImagePullSecrets = append(s.ImagePullSecrets, m.source())
	}
	for i := range rapid.IntRange(0, 3).Draw(m.T, "volumes") {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: fmt.Sprintf("v%d", i), VolumeSource: m.volume()})
	}
	if m.yes("access to the API") {
		s.Volumes = append(s.Volumes, corev1.Volume{Name: "kube-api-access-abcde", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
			DefaultMode: ptr.To[int32](0o644),
			Sources: []corev1.VolumeProjection{
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token", ExpirationSeconds: ptr.To[int64](3607)}},
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local("kube-root-ca.crt"), Items: []corev1.KeyToPath{{Key: "ca.crt", Path: "ca.crt"}}}},
				{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{{Path: "namespace", FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.namespace"}}}}},
			},
		}}})
	}
	for i := range rapid.IntRange(1, 2).Draw(m.T, "containers") {
		s.Containers = append(s.Containers, m.container(fmt.Sprintf("c%d", i), s.Volumes))
	}
	for i := range rapid.IntRange(0, 2).Draw(m.T, "init containers") {
		s.InitContainers = append(s.InitContainers, m.container(fmt.Sprintf("i%d", i), s.Volumes))
	}
	return pod
}

// mentioned are the ConfigMaps and Secrets that a pod names.
func mentioned(pod *corev1.Pod) (configMaps, secrets []string) {
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

// invalid is what the API server would say against creating a pod.
func invalid(t *rapid.T, pod *corev1.Pod) string {
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

func TestAnyPodBecomesAGuest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := maker{t}
		home := m.pod()
		o := pick(m, "options", Options{}, Options{ClusterDNS: []string{"10.96.0.10", "10.96.0.11"}, ClusterDomain: "cluster.local"})
		before := home.DeepCopy()
		made, refs, notes := Translate(home, guests, o)
		files := Files(home, guests)
		if diff := cmp.Diff(before, home); diff != "" {
			t.Fatalf("the pod of home was changed (-before +after):\n%s", diff)
		}
		again, _, _ := Translate(home, guests, o)
		if diff := cmp.Diff(made, again); diff != "" {
			t.Errorf("the same pod makes another guest:\n%s", diff)
		}

		s := made.Spec
		if s.NodeName+s.ServiceAccountName+s.DeprecatedServiceAccount+s.SchedulerName+s.PriorityClassName+s.Subdomain != "" || s.Priority != nil ||
			s.NodeSelector != nil || s.Affinity != nil || s.Tolerations != nil || s.TopologySpreadConstraints != nil || ptr.Deref(s.AutomountServiceAccountToken, true) {
			t.Errorf("the guest carries what is home's: %+v", s)
		}
		checkReferences(t, home, made, refs, files)
		checkContainers(t, home, made)
		if problems := invalid(t, made); problems != "" {
			t.Errorf("the provider would not take it: %s\n%+v", problems, made)
		}
		for _, note := range notes {
			if !strings.HasSuffix(note, ".") {
				t.Errorf("not a sentence: %q", note)
			}
		}

		status := Status(home, made)
		if status.Phase != corev1.PodPending {
			t.Errorf("a guest that was just made is %s", status.Phase)
		}
	})
}

func checkReferences(t *rapid.T, home, made *corev1.Pod, refs References, files *corev1.ConfigMap) {
	copies := func(refs []Reference) map[string]bool {
		of := map[string]bool{}
		for _, ref := range refs {
			of[CopyName(home.Namespace, ref.Name)] = true
		}
		if !slices.IsSortedFunc(refs, func(a, b Reference) int { return strings.Compare(a.Name, b.Name) }) || len(of) != len(refs) {
			t.Errorf("references are not sorted or stand twice: %v", refs)
		}
		return of
	}
	configMaps, secrets := mentioned(made)
	allowed := copies(refs.ConfigMaps)
	if files != nil {
		allowed[files.Name] = true
	}
	named := map[string]bool{}
	for _, name := range configMaps {
		named[name] = true
	}
	if !maps.Equal(named, allowed) {
		t.Errorf("the guest names ConfigMaps %v, and %v are copied", named, allowed)
	}
	named = map[string]bool{}
	for _, name := range secrets {
		named[name] = true
	}
	if copied := copies(refs.Secrets); !maps.Equal(named, copied) {
		t.Errorf("the guest names Secrets %v, and %v are copied", named, copied)
	}
	volumes := map[string]bool{}
	for _, v := range made.Spec.Volumes {
		volumes[v.Name] = true
		if v.Projected != nil && slices.ContainsFunc(v.Projected.Sources, func(p corev1.VolumeProjection) bool { return p.ServiceAccountToken != nil }) {
			t.Errorf("volume %s holds a token", v.Name)
		}
	}
	for _, c := range slices.Concat(made.Spec.InitContainers, made.Spec.Containers) {
		for _, mount := range c.VolumeMounts {
			if !volumes[mount.Name] {
				t.Errorf("container %s mounts volume %s, which is gone", c.Name, mount.Name)
			}
		}
	}
	if files != nil {
		if len(filesSeen(t, made, files)) == 0 {
			t.Errorf("nothing is mounted of %v", files.Data)
		}
	}
}

func checkContainers(t *rapid.T, home, made *corev1.Pod) {
	was, is := slices.Concat(home.Spec.InitContainers, home.Spec.Containers), slices.Concat(made.Spec.InitContainers, made.Spec.Containers)
	if len(was) != len(is) {
		t.Fatalf("home has %d containers, the guest %d", len(was), len(is))
	}
	for i := range was {
		if was[i].Name != is[i].Name || was[i].Image != is[i].Image || len(was[i].Env) != len(is[i].Env) {
			t.Errorf("container %s has become %+v", was[i].Name, is[i])
		}
		for kind, amount := range was[i].Resources.Requests {
			if got := is[i].Resources.Requests[kind]; got.Cmp(amount) != 0 {
				t.Errorf("container %s asks for %s of %s at home and for %s there", was[i].Name, &amount, kind, &got)
			}
		}
		for _, kind := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage} {
			if _, ok := is[i].Resources.Requests[kind]; !ok {
				t.Errorf("container %s names no amount of %s", was[i].Name, kind)
			}
		}
	}
}
