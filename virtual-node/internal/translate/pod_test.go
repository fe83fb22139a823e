package translate

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

const guestNamespace = "spillway-guests-rome"

// shopPod is web-0 in namespace shop, as the API server would store it.
func shopPod(with ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-0", UID: "7f0c",
			Labels: map[string]string{"app": "web"}, Annotations: map[string]string{"note": "costs 5$"}},
		Spec: corev1.PodSpec{
			NodeName: "spillway-paris", ServiceAccountName: "seller", DNSPolicy: corev1.DNSClusterFirst,
			Containers: []corev1.Container{{Name: "main", Image: "web:1", Resources: corev1.ResourceRequirements{Limits: expect.Resources("memory", "1Gi")}}},
		},
	}
	for _, f := range with {
		f(pod)
	}
	return pod
}

func local(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }

func copied(name string) string { return CopyName("shop", name) }

func env(name, path string) corev1.EnvVar {
	return corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: path}}}
}

// guestAffinity is the required node affinity of a guest, in addition to the pod's own.
func guestAffinity(own ...corev1.NodeSelectorRequirement) *corev1.Affinity {
	return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: append(own,
			corev1.NodeSelectorRequirement{Key: "kubernetes.io/os", Operator: corev1.NodeSelectorOpIn, Values: []string{"linux"}},
			corev1.NodeSelectorRequirement{Key: "kubernetes.io/arch", Operator: corev1.NodeSelectorOpIn, Values: []string{"amd64"}},
			corev1.NodeSelectorRequirement{Key: "type", Operator: corev1.NodeSelectorOpNotIn, Values: []string{"virtual-kubelet"}},
		)}},
	}}}
}

// The provider judged the pod's node selector, required node affinity and tolerations:
// a guest without them would run elsewhere, or nowhere.
func TestGuestCarriesWhatWasJudged(t *testing.T) {
	zone := corev1.NodeSelectorRequirement{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"a", "b"}}
	gpu := corev1.Toleration{Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	exists := func(key string) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists}
	}
	pod := shopPod(func(p *corev1.Pod) {
		p.Spec.NodeSelector = map[string]string{"disk": "ssd"}
		p.Spec.Affinity = &corev1.Affinity{
			NodeAffinity: &corev1.NodeAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
					{MatchExpressions: []corev1.NodeSelectorRequirement{zone}},
				}},
				PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 1}},
			},
			PodAntiAffinity: &corev1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 1}}},
		}
		p.Spec.Tolerations = []corev1.Toleration{
			gpu, exists(""), exists("node-role.kubernetes.io/control-plane"), exists("node.kubernetes.io/not-ready"),
			{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: "paris"}, exists("added-for-the-virtual-node"),
		}
	})
	guest, _, _ := Pod(pod, guestNamespace, Options{})
	if diff := cmp.Diff(map[string]string{"disk": "ssd"}, guest.Spec.NodeSelector); diff != "" {
		t.Errorf("node selector (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(guestAffinity(zone), guest.Spec.Affinity); diff != "" {
		t.Errorf("affinity (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]corev1.Toleration{gpu}, guest.Spec.Tolerations); diff != "" {
		t.Errorf("tolerations (-want +got):\n%s", diff)
	}
}

// A term without requirements matches no node, and must not match any with those that
// every guest has.
func TestTermThatMatchesNothing(t *testing.T) {
	none := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{}}}
	guest, _, _ := Pod(shopPod(func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: none}}
	}), guestNamespace, Options{})
	if diff := cmp.Diff(none, guest.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution); diff != "" {
		t.Errorf("affinity (-want +got):\n%s", diff)
	}
}

// What a guest uses of its node's memory is bounded.
func TestMemoryIsBounded(t *testing.T) {
	list := expect.Resources
	memory := func(limit string) *corev1.EmptyDirVolumeSource {
		v := &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}
		if limit != "" {
			v.SizeLimit = ptr.To(resource.MustParse(limit))
		}
		return v
	}
	for name, c := range map[string]struct {
		reason        string
		first, second corev1.ResourceRequirements
		ofPod         *corev1.ResourceRequirements
		volume        *corev1.EmptyDirVolumeSource
		limits        [2]string
		size          string
	}{
		"no requests": {reason: "each may use a share", volume: memory(""), limits: [2]string{"128Mi", "128Mi"}, size: "256Mi"},
		"requests":    {reason: "each may use twice its request and a share", first: corev1.ResourceRequirements{Requests: list("memory", "1Gi")}, volume: memory(""), limits: [2]string{"2176Mi", "128Mi"}, size: "2304Mi"},
		"limits": {reason: "limits are kept", first: corev1.ResourceRequirements{Limits: list("memory", "1Gi")}, second: corev1.ResourceRequirements{Requests: list("memory", "64Mi"), Limits: list("memory", "1Gi")},
			volume: memory("1Mi"), limits: [2]string{"1Gi", "1Gi"}, size: "1Mi"},
		"a limit of the pod": {reason: "all containers may use it together", ofPod: &corev1.ResourceRequirements{Limits: list("memory", "1Gi")}, first: corev1.ResourceRequirements{Requests: list("memory", "64Mi")},
			volume: memory(""), limits: [2]string{"1Gi", "1Gi"}, size: "1Gi"},
	} {
		t.Run(name, func(t *testing.T) {
			guest, _, _ := Pod(shopPod(func(p *corev1.Pod) {
				p.Spec.Containers[0].Resources, p.Spec.Resources = c.first, c.ofPod
				p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "second", Image: "i", Resources: c.second})
				p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: c.volume.DeepCopy()}}}
			}), guestNamespace, Options{})
			for i, want := range c.limits {
				if got := guest.Spec.Containers[i].Resources.Limits.Memory(); got.Cmp(resource.MustParse(want)) != 0 {
					t.Errorf("%s: want a limit of %s, got %s", c.reason, want, got)
				}
			}
			if got := guest.Spec.Volumes[0].EmptyDir.SizeLimit; got == nil || got.Cmp(resource.MustParse(c.size)) != 0 {
				t.Errorf("%s: want a volume of at most %s, got %v", c.reason, c.size, got)
			}
		})
	}
}

// A guest does not keep its node from being removed, whatever its pod says.
func TestGuestMayBeEvicted(t *testing.T) {
	const key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
	guest, _, notes := Pod(shopPod(func(p *corev1.Pod) { p.Annotations[key] = "false" }), guestNamespace, Options{})
	if guest.Annotations[key] != "true" || !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, key) }) {
		t.Errorf("the annotation is %q, notes %q", guest.Annotations[key], notes)
	}
}

func TestGuestHasNoSchedulingOfTheConsumer(t *testing.T) {
	pod := shopPod(func(p *corev1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "web", UID: "1"}}
		p.Finalizers = []string{"example.com/keep"}
		p.GenerateName, p.ResourceVersion = "web-", "12"
		metav1.SetMetaDataLabel(&p.ObjectMeta, broker.LabelPodGroup, "workers")
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, broker.AnnotationWorkload, "train/workers/")
		s := &p.Spec
		s.Tolerations = []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: "paris"}}
		s.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{TopologyKey: "zone"}}
		s.SchedulerName, s.SchedulingGates = broker.SchedulerName, []corev1.PodSchedulingGate{{Name: "g"}}
		s.Priority, s.PriorityClassName, s.PreemptionPolicy = ptr.To[int32](9), "high", ptr.To(corev1.PreemptNever)
		s.DeprecatedServiceAccount, s.AutomountServiceAccountToken = "seller", ptr.To(true)
		s.Overhead = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}
		s.EnableServiceLinks, s.Subdomain, s.SetHostnameAsFQDN = ptr.To(true), "web", ptr.To(true)
		s.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}}
		s.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
		s.EphemeralContainers = []corev1.EphemeralContainer{{}}
		s.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("workers")}
		s.EvictionResponders = []corev1.EvictionResponder{{Name: "example.com/drain", Priority: ptr.To[int32](1)}}
		p.Status.Phase = corev1.PodRunning
	})
	guest, refs, notes := Pod(pod, guestNamespace, Options{})
	zero := resource.MustParse("0")
	want := corev1.PodSpec{
		Affinity: guestAffinity(), PriorityClassName: "spillway-guest",
		Hostname: "web-0", DNSPolicy: corev1.DNSDefault,
		AutomountServiceAccountToken: ptr.To(false), EnableServiceLinks: ptr.To(false),
		Containers: []corev1.Container{{Name: "main", Image: "web:1", Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: zero, corev1.ResourceMemory: resource.MustParse("1Gi"), corev1.ResourceEphemeralStorage: zero},
			Limits:   expect.Resources("memory", "1Gi"),
		}}},
	}
	if diff := cmp.Diff(want, guest.Spec); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
	if guest.Namespace != guestNamespace || guest.Name != GuestName(pod) || len(guest.OwnerReferences)+len(guest.Finalizers) > 0 ||
		guest.GenerateName+guest.ResourceVersion+string(guest.UID) != "" || guest.Status.Phase != "" {
		t.Errorf("got %+v with status %+v", guest.ObjectMeta, guest.Status)
	}
	if len(refs.ConfigMaps)+len(refs.Secrets) > 0 {
		t.Errorf("got references %v, want none", refs)
	}
	if !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, "Resource claims") }) {
		t.Errorf("no note says that the guest has no devices: %q", notes)
	}
}

func TestGuestKeepsTheRestOfTheSpec(t *testing.T) {
	spec := corev1.PodSpec{
		RestartPolicy: corev1.RestartPolicyOnFailure, TerminationGracePeriodSeconds: ptr.To[int64](7), ActiveDeadlineSeconds: ptr.To[int64](9),
		RuntimeClassName: ptr.To("kata"), ShareProcessNamespace: ptr.To(true), HostUsers: ptr.To(false),
		OS:              &corev1.PodOS{Name: corev1.Linux},
		HostAliases:     []corev1.HostAlias{{IP: "10.0.0.1", Hostnames: []string{"db"}}},
		SecurityContext: &corev1.PodSecurityContext{RunAsUser: ptr.To[int64](1000)},
		DNSPolicy:       corev1.DNSNone, DNSConfig: &corev1.PodDNSConfig{Nameservers: []string{"9.9.9.9"}},
		Resources: &corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("3")}, Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("1Gi")}},
		Volumes: []corev1.Volume{
			{Name: "scratch", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: ptr.To(resource.MustParse("1Gi"))}}},
			{Name: "model", VolumeSource: corev1.VolumeSource{Image: &corev1.ImageVolumeSource{Reference: "model:1"}}},
		},
		InitContainers: []corev1.Container{{Name: "side", Image: "side:1", RestartPolicy: ptr.To(corev1.ContainerRestartPolicyAlways)}},
		Containers: []corev1.Container{{
			Name: "main", Image: "web:1", ImagePullPolicy: corev1.PullAlways, Command: []string{"run"}, Args: []string{"$(HOME)"}, WorkingDir: "/w", TTY: true,
			Ports:           []corev1.ContainerPort{{Name: "http", ContainerPort: 80}},
			LivenessProbe:   &corev1.Probe{PeriodSeconds: 3},
			Lifecycle:       &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 1}}},
			SecurityContext: &corev1.SecurityContext{ReadOnlyRootFilesystem: ptr.To(true)},
			VolumeMounts:    []corev1.VolumeMount{{Name: "scratch", MountPath: "/w"}},
			Env: []corev1.EnvVar{{Name: "A", Value: "$(B)"}, env("IP", "status.podIP"), env("HOST", "status.hostIP"),
				{Name: "CPU", ValueFrom: &corev1.EnvVarSource{ResourceFieldRef: &corev1.ResourceFieldSelector{Resource: "limits.cpu"}}}},
			TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		}},
	}
	guest, _, notes := Pod(shopPod(func(p *corev1.Pod) { p.Spec = *spec.DeepCopy() }), guestNamespace, Options{})
	if len(notes) > 0 {
		t.Errorf("got notes %q, want none", notes)
	}
	spec.Hostname, spec.AutomountServiceAccountToken, spec.EnableServiceLinks = "web-0", ptr.To(false), ptr.To(false)
	spec.Affinity, spec.PriorityClassName = guestAffinity(), "spillway-guest"
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers, guest.Spec.InitContainers, guest.Spec.Containers} {
		for i := range containers {
			containers[i].Resources = corev1.ResourceRequirements{} // TestRequests
		}
	}
	if diff := cmp.Diff(spec, guest.Spec); diff != "" {
		t.Errorf("spec (-want +got):\n%s", diff)
	}
}

// The provider rejects these volumes and the pod stays pending. An emptyDir in
// their place would lose data.
func TestPersistentStorageIsNotReplaced(t *testing.T) {
	volumes := []corev1.Volume{
		{Name: "claim", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}},
		{Name: "dir", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var"}}},
	}
	guest, _, _ := Pod(shopPod(func(p *corev1.Pod) { p.Spec.Volumes = volumes }), guestNamespace, Options{})
	if diff := cmp.Diff(volumes, guest.Spec.Volumes); diff != "" {
		t.Errorf("volumes (-want +got):\n%s", diff)
	}
}

func TestLabelsAndAnnotations(t *testing.T) {
	guest, _, _ := Pod(shopPod(func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "web", broker.LabelHold: "r-1", broker.LabelManagedBy: "Helm", LabelUID: "forged", broker.LabelOverflow: "enabled"}
		p.Annotations = map[string]string{"note": "n", AnnotationNamespace: "forged", AnnotationName: "forged",
			"kubectl.kubernetes.io/last-applied-configuration": "{}", corev1.MirrorPodAnnotationKey: "m"}
	}), guestNamespace, Options{})
	if diff := cmp.Diff(map[string]string{"app": "web", broker.LabelHold: "r-1", broker.LabelManagedBy: broker.ManagedBySpillway, LabelUID: "7f0c"}, guest.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"note": "n", AnnotationNamespace: "shop", AnnotationName: "web-0", "cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}, guest.Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
}

func TestHostname(t *testing.T) {
	for name, c := range map[string]struct{ name, hostname, want string }{
		"the pod's name":  {"web-0", "", "web-0"},
		"its own":         {"web-0", "shop", "shop"},
		"too long":        {strings.Repeat("a", 70), "", strings.Repeat("a", 63)},
		"a trailing dash": {strings.Repeat("a", 62) + "-b", "", strings.Repeat("a", 62)},
		"dots":            {"web.v2", "", "web"},
	} {
		t.Run(name, func(t *testing.T) {
			guest, _, _ := Pod(shopPod(func(p *corev1.Pod) { p.Name, p.Spec.Hostname = c.name, c.hostname }), guestNamespace, Options{})
			if guest.Spec.Hostname != c.want {
				t.Errorf("want %q, got %q", c.want, guest.Spec.Hostname)
			}
		})
	}
}

func TestDNS(t *testing.T) {
	ndots := corev1.PodDNSConfigOption{Name: "ndots", Value: ptr.To("5")}
	ours := []string{"shop.svc.cluster.local", "svc.cluster.local", "cluster.local"}
	many := slices.Repeat([]string{"example.com"}, 40)
	reached := Options{ClusterDNS: []string{"10.96.0.10"}, ClusterDomain: "cluster.local"}
	for name, c := range map[string]struct {
		reason string
		policy corev1.DNSPolicy
		own    *corev1.PodDNSConfig
		o      Options
		want   corev1.DNSPolicy
		config *corev1.PodDNSConfig
		noted  bool
	}{
		"unreachable":   {"the node's resolver, with a note", corev1.DNSClusterFirst, nil, Options{}, corev1.DNSDefault, nil, true},
		"no domain":     {"search domains cannot be formed", corev1.DNSClusterFirst, nil, Options{ClusterDNS: []string{"10.96.0.10"}}, corev1.DNSDefault, nil, true},
		"reachable":     {"the consumer's", corev1.DNSClusterFirst, nil, reached, corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"10.96.0.10"}, Searches: ours, Options: []corev1.PodDNSConfigOption{ndots}}, false},
		"not requested": {"the pod uses its node's resolver", corev1.DNSDefault, nil, reached, corev1.DNSDefault, nil, false},
		"with its own": {"the consumer's first, within the limits of the API", corev1.DNSClusterFirst,
			&corev1.PodDNSConfig{Nameservers: []string{"1.1.1.1", "2.2.2.2", "3.3.3.3"}, Searches: many, Options: []corev1.PodDNSConfigOption{{Name: "edns0"}}},
			reached, corev1.DNSNone, &corev1.PodDNSConfig{Nameservers: []string{"10.96.0.10", "1.1.1.1", "2.2.2.2"}, Searches: append(slices.Clone(ours), many[:29]...),
				Options: []corev1.PodDNSConfigOption{ndots, {Name: "edns0"}}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			guest, _, notes := Pod(shopPod(func(p *corev1.Pod) { p.Spec.DNSPolicy, p.Spec.DNSConfig = c.policy, c.own }), guestNamespace, c.o)
			if guest.Spec.DNSPolicy != c.want || (len(notes) > 0) != c.noted {
				t.Errorf("%s: want %s, noted %v; got %s and %q", c.reason, c.want, c.noted, guest.Spec.DNSPolicy, notes)
			}
			if diff := cmp.Diff(c.config, guest.Spec.DNSConfig); diff != "" {
				t.Errorf("%s (-want +got):\n%s", c.reason, diff)
			}
		})
	}
}

func TestReferencesPointToCopies(t *testing.T) {
	yes := ptr.To(true)
	pod := shopPod(func(p *corev1.Pod) {
		p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{local("registry"), local("")}
		p.Spec.Volumes = []corev1.Volume{
			{Name: "a", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: local("files"), Items: []corev1.KeyToPath{{Key: "k", Path: "p"}}}}},
			{Name: "b", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "cert", Optional: yes}}},
			{Name: "c", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local("part"), Optional: yes}},
				{Secret: &corev1.SecretProjection{LocalObjectReference: local("cert")}},
			}}}},
		}
		p.Spec.InitContainers = []corev1.Container{{Name: "init", EnvFrom: []corev1.EnvFromSource{
			{Prefix: "X_", SecretRef: &corev1.SecretEnvSource{LocalObjectReference: local("early"), Optional: yes}}}}}
		c := &p.Spec.Containers[0]
		c.EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: local("words"), Optional: yes}}}
		c.Env = []corev1.EnvVar{
			{Name: "W", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: local("words"), Key: "w"}}},
			{Name: "S", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: local("key"), Key: "s", Optional: yes}}},
		}
	})
	guest, refs, _ := Pod(pod, guestNamespace, Options{})
	want := References{
		// Optional only if every reference is.
		ConfigMaps: []Reference{{"files", false}, {"part", true}, {"words", false}},
		Secrets:    []Reference{{"cert", false}, {"early", true}, {"key", true}, {"registry", true}},
	}
	if diff := cmp.Diff(want, refs); diff != "" {
		t.Errorf("references (-want +got):\n%s", diff)
	}
	s, c := guest.Spec, guest.Spec.Containers[0]
	for what, pair := range map[string][2]string{
		"ConfigMap volume":             {s.Volumes[0].ConfigMap.Name, "files"},
		"Secret volume":                {s.Volumes[1].Secret.SecretName, "cert"},
		"projected ConfigMap":          {s.Volumes[2].Projected.Sources[0].ConfigMap.Name, "part"},
		"projected Secret":             {s.Volumes[2].Projected.Sources[1].Secret.Name, "cert"},
		"envFrom of an init container": {s.InitContainers[0].EnvFrom[0].SecretRef.Name, "early"},
		"envFrom":                      {c.EnvFrom[0].ConfigMapRef.Name, "words"},
		"key of a ConfigMap":           {c.Env[0].ValueFrom.ConfigMapKeyRef.Name, "words"},
		"key of a Secret":              {c.Env[1].ValueFrom.SecretKeyRef.Name, "key"},
		"image pull secret":            {s.ImagePullSecrets[0].Name, "registry"},
	} {
		if pair[0] != copied(pair[1]) {
			t.Errorf("%s: want the copy of %s, %s; got %s", what, pair[1], copied(pair[1]), pair[0])
		}
	}
	if len(s.ImagePullSecrets) != 1 {
		t.Errorf("got image pull secrets %v, want the one with a name", s.ImagePullSecrets)
	}
	if !ptr.Deref(c.EnvFrom[0].ConfigMapRef.Optional, false) || s.Volumes[0].ConfigMap.Items[0].Path != "p" || s.InitContainers[0].EnvFrom[0].Prefix != "X_" {
		t.Error("more than the names was changed")
	}
}

func TestTokensAreNotCopied(t *testing.T) {
	token := corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}}
	root := corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local("kube-root-ca.crt")}}
	projected := func(name string, sources ...corev1.VolumeProjection) corev1.Volume {
		return corev1.Volume{Name: name, VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: sources}}}
	}
	mounts := []corev1.VolumeMount{{Name: "kube-api-access-x1y2z", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"}, {Name: "own", MountPath: "/own"}}
	guest, refs, notes := Pod(shopPod(func(p *corev1.Pod) {
		p.Spec.Volumes = []corev1.Volume{
			projected("kube-api-access-x1y2z", token, root),
			projected("own", token, corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: local("key")}}),
			projected("only", token, corev1.VolumeProjection{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{}}, corev1.VolumeProjection{PodCertificate: &corev1.PodCertificateProjection{}}),
			projected("kube-api-access-of-mine", corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local("words")}}),
		}
		p.Spec.InitContainers = []corev1.Container{{Name: "init", VolumeMounts: slices.Clone(mounts)}}
		p.Spec.Containers[0].VolumeMounts = slices.Clone(mounts)
		p.Spec.DNSPolicy = corev1.DNSDefault
	}), guestNamespace, Options{})
	want := []corev1.Volume{
		projected("own", corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: local(copied("key"))}}),
		{Name: "only", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		projected("kube-api-access-of-mine", corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local(copied("words"))}}),
	}
	if diff := cmp.Diff(want, guest.Spec.Volumes); diff != "" {
		t.Errorf("volumes (-want +got):\n%s", diff)
	}
	for _, c := range append(guest.Spec.InitContainers, guest.Spec.Containers...) {
		if diff := cmp.Diff(mounts[1:], c.VolumeMounts); diff != "" {
			t.Errorf("mounts of %s (-want +got):\n%s", c.Name, diff)
		}
	}
	if diff := cmp.Diff([]Reference{{"words", false}}, refs.ConfigMaps); diff != "" {
		t.Errorf("kube-root-ca.crt is the consumer's and must not be copied (-want +got):\n%s", diff)
	}
	notes = slices.DeleteFunc(notes, func(n string) bool { return !strings.Contains(n, "lacks its tokens") })
	if len(notes) != 2 || !strings.Contains(notes[0], `"own"`) || !strings.Contains(notes[1], `"only"`) {
		t.Errorf("want a note for each volume without its tokens; got %q", notes)
	}
}

func TestDownwardAPIShowsTheOverflowedPod(t *testing.T) {
	pod := shopPod(func(p *corev1.Pod) {
		p.Labels["tier"], p.Annotations["two"] = "front", "a\n\"b\""
		p.Spec.Containers[0].Env = []corev1.EnvVar{
			env("NAME", "metadata.name"), env("NAMESPACE", "metadata.namespace"), env("UID", "metadata.uid"),
			env("NODE", "spec.nodeName"), env("ACCOUNT", "spec.serviceAccountName"),
			env("LABEL", "metadata.labels['app']"), env("NONE", "metadata.labels['none']"), env("NOTE", "metadata.annotations['note']"),
			env("IPS", "status.podIPs"),
		}
		item := func(path, field string) corev1.DownwardAPIVolumeFile {
			return corev1.DownwardAPIVolumeFile{Path: path, FieldRef: &corev1.ObjectFieldSelector{FieldPath: field}, Mode: ptr.To[int32](0o400)}
		}
		p.Spec.Volumes = []corev1.Volume{
			{Name: "info", VolumeSource: corev1.VolumeSource{DownwardAPI: &corev1.DownwardAPIVolumeSource{DefaultMode: ptr.To[int32](0o440), Items: []corev1.DownwardAPIVolumeFile{
				item("labels", "metadata.labels"), item("annotations", "metadata.annotations"),
				{Path: "cpu", ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: "main", Resource: "limits.cpu"}},
			}}}},
			{Name: "parts", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{item("name", "metadata.name")}}},
				{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{item("uid", "metadata.uid")}}},
			}}}},
		}
	})
	guest, refs, _ := Pod(pod, guestNamespace, Options{})
	got := map[string]string{}
	for _, e := range guest.Spec.Containers[0].Env {
		if e.ValueFrom == nil {
			got[e.Name] = e.Value
		}
	}
	if diff := cmp.Diff(map[string]string{
		"NAME": "web-0", "NAMESPACE": "shop", "UID": "7f0c", "NODE": "spillway-paris", "ACCOUNT": "seller",
		"LABEL": "web", "NONE": "", "NOTE": "costs 5$$", // unescaped by the kubelet
	}, got); diff != "" {
		t.Errorf("environment (-want +got):\n%s", diff)
	}

	files := refs.DownwardFiles
	if files == nil {
		t.Fatal("got no ConfigMap for the files")
	}
	if namespace, name, uid, ok := Origin(files); !ok || namespace != "shop" || name != "web-0" || uid != pod.UID || files.Namespace != guestNamespace || files.Labels[LabelCopy] == "" {
		t.Errorf("the ConfigMap does not name its pod: %+v", files.ObjectMeta)
	}
	if diff := cmp.Diff(map[string]string{
		"info/labels": "app=\"web\"\ntier=\"front\"", "info/annotations": "note=\"costs 5$\"\ntwo=\"a\\n\\\"b\\\"\"",
		"parts/name": "web-0", "parts/uid": "7f0c",
	}, mountedFiles(t, guest, files)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if p := guest.Spec.Volumes[0].Projected; *p.DefaultMode != 0o440 || p.Sources[0].DownwardAPI.Items[0].Path != "cpu" ||
		ptr.Deref(p.Sources[1].ConfigMap.Items[0].Mode, 0) != 0o400 {
		t.Errorf("resource fields must be left to the guest's kubelet, and modes be kept: %+v", p)
	}
	if len(refs.ConfigMaps) > 0 {
		t.Errorf("got references %v, want none: the ConfigMap is not a copy", refs.ConfigMaps)
	}

	pod.Labels["tier"] = "back"
	if later := downwardFiles(pod); later.Name != files.Name || cmp.Equal(later.Data, files.Data) {
		t.Error("a changed label does not update the same ConfigMap")
	}
	if none := downwardFiles(shopPod()); none != nil {
		t.Errorf("got %v for a pod without downward API volumes, want none", none.Data)
	}
}

func downwardFiles(pod *corev1.Pod) *corev1.ConfigMap {
	_, refs, _ := Pod(pod, guestNamespace, Options{})
	return refs.DownwardFiles
}

// mountedFiles returns the files in the guest's projected volumes that come from
// the ConfigMap, by volume and path.
func mountedFiles(t interface{ Errorf(string, ...any) }, guest *corev1.Pod, from *corev1.ConfigMap) map[string]string {
	seen := map[string]string{}
	for _, v := range guest.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, source := range v.Projected.Sources {
			if source.ConfigMap == nil || source.ConfigMap.Name != from.Name {
				continue
			}
			for _, item := range source.ConfigMap.Items {
				value, ok := from.Data[item.Key]
				if !ok {
					t.Errorf("volume %s refers to key %s, which the ConfigMap lacks", v.Name, item.Key)
				}
				seen[v.Name+"/"+item.Path] = value
			}
		}
	}
	return seen
}

func TestRequests(t *testing.T) {
	list := expect.Resources
	for name, c := range map[string]struct {
		reason                 string
		requests, limits, want corev1.ResourceList
	}{
		"none":    {"a ResourceQuota rejects pods without requests", nil, nil, list("cpu", "0", "memory", "0", "ephemeral-storage", "0")},
		"some":    {"requests are kept", list("cpu", "250m"), nil, list("cpu", "250m", "memory", "0", "ephemeral-storage", "0")},
		"limited": {"the request defaults to the limit, not to 0", nil, list("memory", "1Gi"), list("cpu", "0", "memory", "1Gi", "ephemeral-storage", "0")},
		"devices": {"other resources are kept", list("nvidia.com/gpu", "1", "cpu", "1"), list("nvidia.com/gpu", "1"),
			list("nvidia.com/gpu", "1", "cpu", "1", "memory", "0", "ephemeral-storage", "0")},
		"no devices": {"the provider refuses resources that it does not grant, whatever the amount", list("nvidia.com/gpu", "0", "hugepages-2Mi", "0Mi", "cpu", "1"),
			list("cpu", "1"), list("cpu", "1", "memory", "0", "ephemeral-storage", "0")},
	} {
		t.Run(name, func(t *testing.T) {
			guest, _, _ := Pod(shopPod(func(p *corev1.Pod) {
				p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: c.requests, Limits: c.limits}
				p.Spec.InitContainers = []corev1.Container{{Name: "init", Resources: p.Spec.Containers[0].Resources}}
			}), guestNamespace, Options{})
			for _, container := range append(guest.Spec.InitContainers, guest.Spec.Containers...) {
				if diff := cmp.Diff(c.want, container.Resources.Requests); diff != "" {
					t.Errorf("%s: requests of %s (-want +got):\n%s", c.reason, container.Name, diff)
				}
				for name, want := range c.limits {
					if got := container.Resources.Limits[name]; got.Cmp(want) != 0 {
						t.Errorf("%s: want a limit of %s for %s, got %s", c.reason, &want, name, &got)
					}
				}
			}
		})
	}
}
