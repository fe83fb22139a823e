package demand_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// compliant makes a pod comply with the Pod Security Standard restricted.
func compliant(p *corev1.Pod) {
	p.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}}
	for i := range p.Spec.Containers {
		p.Spec.Containers[i].SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
	}
}

func podWith(change ...func(*corev1.Pod)) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-1", UID: "pod-1"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{
			Name: "main",
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("300m"),
				corev1.ResourceMemory: resource.MustParse("64Mi"),
			}},
		}}},
	}
	for _, c := range change {
		c(pod)
	}
	return pod
}

func request(name corev1.ResourceName, amount string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests[name] = resource.MustParse(amount) }
}

func tolerate(t ...corev1.Toleration) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, t...) }
}

func requireNode(terms ...corev1.NodeSelectorTerm) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: terms},
		}}
	}
}

func expression(key string, op corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorTerm {
	return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: op, Values: values}}}
}

// boundAs is a pod that was bound with a shape.
func boundAs(shape, cpu string) *corev1.Pod {
	return podWith(request("cpu", cpu), func(p *corev1.Pod) {
		p.Spec.NodeName, p.Labels = broker.VirtualNodeName("paris"), map[string]string{broker.LabelShape: shape}
	})
}

func TestShapeOf(t *testing.T) {
	base, set := demand.ShapeOf(podWith())
	if set.Name != demand.PodSetName || set.Count != 0 || set.Requests.String() != "cpu 300m, memory 64Mi" {
		t.Errorf("unexpected pod set %+v", set)
	}
	if errs := validation.IsValidLabelValue(base); len(errs) > 0 {
		t.Errorf("shape %q is no label value: %v", base, errs)
	}
	exists := func(key string, effect corev1.TaintEffect) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: effect}
	}
	overflow := func(provider string) corev1.Toleration {
		return corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: provider, Effect: corev1.TaintEffectNoSchedule}
	}
	gpu, keyless, driver := exists("gpu", ""), exists("", ""), exists("driver.example.com/virtual-node", corev1.TaintEffectNoExecute)
	paris, berlin := overflow("paris"), overflow("berlin")
	notReady, unreachable := exists(corev1.TaintNodeNotReady, corev1.TaintEffectNoExecute), exists(corev1.TaintNodeUnreachable, corev1.TaintEffectNoExecute)
	notReady.TolerationSeconds, unreachable.TolerationSeconds = ptr.To[int64](300), ptr.To[int64](300)
	cases := map[string]struct {
		reason string
		pods   [2]*corev1.Pod
		same   bool
	}{
		"equal amounts in different notations": {
			reason: "1 core and 1000m are equal",
			pods:   [2]*corev1.Pod{podWith(request("cpu", "1"), request("memory", "1Gi")), podWith(request("cpu", "1000m"), request("memory", "1024Mi"))},
			same:   true,
		},
		"amounts of zero": {
			reason: "they need nothing, of whatever resource",
			pods:   [2]*corev1.Pod{podWith(), podWith(request("nvidia.com/gpu", "0"), request("ephemeral-storage", "0Gi"), request("hugepages-2Mi", "0m"))},
			same:   true,
		},
		"another Pod Security Standard": {
			reason: "a provider may admit only those that comply with restricted",
			pods:   [2]*corev1.Pod{podWith(), podWith(compliant)},
		},
		"an ephemeral container": {
			reason: "it may comply with less than the pod, and no guest has it",
			pods: [2]*corev1.Pod{podWith(compliant), podWith(compliant, func(p *corev1.Pod) {
				p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug"}}}
			})},
			same: true,
		},
		"other names and labels": {
			reason: "metadata are no scheduling requirements",
			pods:   [2]*corev1.Pod{podWith(), podWith(func(p *corev1.Pod) { p.Name, p.UID, p.Labels = "web-2", "pod-2", map[string]string{"a": "b"} })},
			same:   true,
		},
		"tolerations that Kubernetes adds": {
			reason: "DefaultTolerationSeconds adds them to every pod",
			pods:   [2]*corev1.Pod{podWith(tolerate(gpu)), podWith(tolerate(gpu, notReady, unreachable))},
			same:   true,
		},
		"tolerations that the agent adds": {
			reason: "the shape must not change when the agent adds the tolerations for a virtual node and its driver",
			pods:   [2]*corev1.Pod{podWith(tolerate(gpu, notReady)), podWith(tolerate(gpu, notReady, paris, driver, berlin))},
			same:   true,
		},
		"tolerations that others append": {
			reason: "such as Kueue's for nodes of the cluster: its guest does not carry them",
			pods:   [2]*corev1.Pod{podWith(), podWith(tolerate(paris, driver, gpu))},
			same:   true,
		},
		"a driver's toleration from the author": {
			reason: "only the agent's tolerations follow the one for broker.TaintOverflow",
			pods:   [2]*corev1.Pod{podWith(), podWith(tolerate(driver))},
		},
		"tolerations in another order": {
			reason: "their order has no meaning",
			pods:   [2]*corev1.Pod{podWith(tolerate(gpu, keyless)), podWith(tolerate(keyless, gpu))},
			same:   true,
		},
		"a toleration of its own": {
			reason: "it permits other nodes",
			pods:   [2]*corev1.Pod{podWith(), podWith(tolerate(gpu))},
		},
		"other requests": {
			reason: "it needs different capacity",
			pods:   [2]*corev1.Pod{podWith(), podWith(request("cpu", "301m"))},
		},
		"another resource": {
			reason: "it needs different capacity",
			pods:   [2]*corev1.Pod{podWith(), podWith(request("nvidia.com/gpu", "1"))},
		},
		"a guest that is resized": {
			reason: "its grant is for the shape that it was bound with",
			pods:   [2]*corev1.Pod{boundAs("1", "300m"), boundAs("1", "500m")},
			same:   true,
		},
		"a pending pod that claims a shape": {
			reason: "every user can write the label of a pending pod",
			pods: [2]*corev1.Pod{podWith(request("cpu", "1"), func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelShape: "claimed"} }),
				podWith(request("cpu", "2"), func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelShape: "claimed"} })},
		},
		"another node selector": {
			reason: "it needs a different node",
			pods:   [2]*corev1.Pod{podWith(), podWith(func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} })},
		},
		"another node affinity": {
			reason: "it needs a different node",
			pods:   [2]*corev1.Pod{podWith(), podWith(requireNode(expression("disk", corev1.NodeSelectorOpIn, "ssd")))},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			a, _ := demand.ShapeOf(tc.pods[0])
			b, _ := demand.ShapeOf(tc.pods[1])
			if (a == b) != tc.same {
				t.Errorf("same shape: got %t, want %t, because %s", a == b, tc.same, tc.reason)
			}
		})
	}
}

func TestOwnerOf(t *testing.T) {
	controlledBy := func(apiVersion, kind, name string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{
				{APIVersion: "v1", Kind: "ConfigMap", Name: "no-controller", UID: "no-controller"},
				{APIVersion: apiVersion, Kind: kind, Name: name, UID: types.UID("uid-of-" + name), Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)},
			}
		}
	}
	ofWorkload := func(workload, group, replica string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			metav1.SetMetaDataAnnotation(&p.ObjectMeta, broker.AnnotationWorkload, strings.Join([]string{workload, group, replica}, "/"))
		}
	}
	resolve := func(_ string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		if _, known := demand.Resolvable(ref); !known && ref.Kind != "JobSet" {
			return nil, true
		}
		switch ref.Name {
		case "web-abc":
			return &metav1.OwnerReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web", UID: "uid-of-web", Controller: ptr.To(true)}, true
		case "nightly-1":
			return &metav1.OwnerReference{APIVersion: "batch/v1", Kind: "CronJob", Name: "nightly", UID: "uid-of-nightly", Controller: ptr.To(true)}, true
		case "train-workers-0":
			return &metav1.OwnerReference{APIVersion: "jobset.x-k8s.io/v1alpha2", Kind: "JobSet", Name: "train", UID: "uid-of-train", Controller: ptr.To(true)}, true
		case "leader-0":
			return &metav1.OwnerReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-abc", UID: "uid-of-web-abc", Controller: ptr.To(true)}, true
		case "train":
			return &metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Training", Name: "nightly", UID: "uid-of-training", Controller: ptr.To(true)}, true
		case "circle":
			return &ref, true
		case "bare", "crunch":
			return nil, true
		}
		return nil, false
	}
	cases := map[string]struct {
		pod    *corev1.Pod
		want   string
		unsure bool
	}{
		"a bare pod shares":                    {pod: podWith(), want: "v1 Namespace shop shared"},
		"a Deployment, through its ReplicaSet": {pod: podWith(controlledBy("apps/v1", "ReplicaSet", "web-abc")), want: "apps/v1 Deployment web uid-of-web"},
		"a ReplicaSet without owner":           {pod: podWith(controlledBy("apps/v1", "ReplicaSet", "bare")), want: "apps/v1 ReplicaSet bare uid-of-bare"},
		"a ReplicaSet that is not known yet":   {pod: podWith(controlledBy("apps/v1", "ReplicaSet", "new")), unsure: true},
		"a Job without owner shares":           {pod: podWith(controlledBy("batch/v1", "Job", "crunch")), want: "v1 Namespace shop shared"},
		"a Job that is not known yet":          {pod: podWith(controlledBy("batch/v1", "Job", "new")), unsure: true},
		"a CronJob, through its Job":           {pod: podWith(controlledBy("batch/v1", "Job", "nightly-1")), want: "batch/v1 CronJob nightly uid-of-nightly"},
		"what controls a JobSet":               {pod: podWith(controlledBy("batch/v1", "Job", "train-workers-0")), want: "example.com/v1 Training nightly uid-of-training"},
		"three controllers":                    {pod: podWith(controlledBy("apps/v1", "StatefulSet", "leader-0")), want: "apps/v1 Deployment web uid-of-web"},
		"a gang":                               {pod: podWith(controlledBy("batch/v1", "Job", "new"), func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelPodGroup: "ring"} }), want: "scheduling.x-k8s.io/v1alpha1 PodGroup ring gang-16b974583155fdcb"},
		"a PodGroup of Kubernetes":             {pod: podWith(controlledBy("batch/v1", "Job", "new"), func(p *corev1.Pod) { p.Spec.SchedulingGroup = &corev1.PodSchedulingGroup{PodGroupName: ptr.To("ring")} }), want: "scheduling.k8s.io/v1beta1 PodGroup ring gang-a2d3e456a1221617"},
		"a Workload's pod group":               {pod: podWith(controlledBy("batch/v1", "Job", "new"), ofWorkload("train", "workers", "")), want: "scheduling.k8s.io/v1alpha1 Workload train gang-9b54f19ed92de505"},
		"a replica of a pod group":             {pod: podWith(ofWorkload("train", "workers", "1")), want: "scheduling.k8s.io/v1alpha1 Workload train gang-803ee224ac3f5295"},
		"a circle ends":                        {pod: podWith(controlledBy("apps/v1", "StatefulSet", "circle")), want: "apps/v1 StatefulSet circle uid-of-circle"},
		"ReplicaSet of another API group":      {pod: podWith(controlledBy("acme.io/v1", "ReplicaSet", "web-abc")), want: "acme.io/v1 ReplicaSet web-abc uid-of-web-abc"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			owner, ok := demand.OwnerOf(tc.pod, resolve)
			if ok == tc.unsure {
				t.Fatalf("known: got %t", ok)
			}
			if !ok {
				return
			}
			if got := strings.Join([]string{owner.APIVersion, owner.Kind, owner.Name, string(owner.UID)}, " "); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
			if owner.Controller != nil || owner.BlockOwnerDeletion != nil {
				t.Errorf("the root owner does not control the Reservation: %+v", owner)
			}
		})
	}
}

func TestNames(t *testing.T) {
	key := demand.Key{Namespace: "shop", OwnerUID: "u", Shape: "s"}
	long := strings.Repeat("a", 49) + ".b" + strings.Repeat("c", 100)
	for _, owner := range []string{"web", long} {
		name := key.Name(owner)
		if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 || len(name) > 63 {
			t.Errorf("%q is no name: %v", name, errs)
		}
		if name != key.Name(owner) {
			t.Errorf("the name of %s changes", owner)
		}
	}
	if other := (demand.Key{Namespace: "shop", OwnerUID: "u", Shape: "t"}); other.Name("web") == key.Name("web") {
		t.Error("two shapes share a name")
	}
}

// Pods with pod-level resources stay at home where guests would have none.
func TestPodResources(t *testing.T) {
	for name, tc := range map[string]struct {
		resources *corev1.ResourceRequirements
		refused   bool
	}{
		"none":     {},
		"empty":    {resources: &corev1.ResourceRequirements{}},
		"requests": {resources: &corev1.ResourceRequirements{Requests: expect.Resources("cpu", "4")}, refused: true},
		"limits":   {resources: &corev1.ResourceRequirements{Limits: expect.Resources("memory", "1Gi")}, refused: true},
	} {
		reason := demand.PodResources(podWith(func(p *corev1.Pod) { p.Spec.Resources = tc.resources }))
		if (reason != "") != tc.refused {
			t.Errorf("%s: reason %q, want one: %t", name, reason, tc.refused)
		}
	}
}

// restartsAll makes a container restart all of its pod, which nodes must declare that they can.
func restartsAll(p *corev1.Pod) {
	p.Spec.Containers[0].RestartPolicyRules = []corev1.ContainerRestartRule{{Action: corev1.ContainerRestartRuleActionRestartAllContainers}}
}

func TestAdmissible(t *testing.T) {
	term := corev1.PodAffinityTerm{TopologyKey: corev1.LabelHostname}
	volume := func(source corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: source}} }
	}
	projected := func(sources ...corev1.VolumeProjection) corev1.VolumeSource {
		return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: sources}}
	}
	selector := func(key, value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{key: value} }
	}
	affinity := func(a corev1.Affinity) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.Affinity = &a } }
	controlled := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: "x", UID: "x", Controller: ptr.To(true)}}
		}
	}
	inMemory := func(limit string, memory corev1.ResourceRequirements, ofPod *corev1.ResourceRequirements) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			volume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: ptr.To(resource.MustParse(limit))}})(p)
			p.Spec.Containers[0].Resources, p.Spec.Resources = memory, ofPod
		}
	}
	limits := func(memory string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Limits: expect.Resources("memory", memory)}
	}
	requests := func(memory string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Requests: expect.Resources("memory", memory)}
	}
	const admissible, silent = "admissible", "silent"
	// want is admissible, silent (neither admissible nor with a reason), or a part
	// of the reason.
	cases := map[string]struct {
		change func(*corev1.Pod)
		want   string
	}{
		"a feature that nodes must declare": {restartsAll, "RestartAllContainers"},
		"an image volume":                   {volume(corev1.VolumeSource{Image: &corev1.ImageVolumeSource{}}), admissible},
		"an ordinary pod":                   {func(*corev1.Pod) {}, admissible},
		"capabilities of the default": {func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"NET_BIND_SERVICE"}}}
		}, admissible},
		"a capability": {func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}}
		}, `must not include "SYS_ADMIN" in securityContext.capabilities.add`},
		"a runtime class":    {func(p *corev1.Pod) { p.Spec.RuntimeClassName = ptr.To("kata") }, `runtimeClassName "kata"`},
		"a day to terminate": {func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](86400) }, "terminate within 3600"},
		"an unsafe sysctl": {func(p *corev1.Pod) {
			p.Spec.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: "kernel.msgmax", Value: "1"}}}
		}, "forbidden sysctls (kernel.msgmax)"},
		"a config volume":       {volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}), admissible},
		"amd64 by selector":     {selector(corev1.LabelArchStable, "amd64"), admissible},
		"any other selector":    {selector("disk", "ssd"), admissible},
		"one of several arches": {requireNode(expression(corev1.LabelArchStable, corev1.NodeSelectorOpIn, "arm64", "amd64")), admissible},
		"not one node":          {requireNode(expression(corev1.LabelHostname, corev1.NodeSelectorOpNotIn, "home-1")), admissible},
		"an alternative is enough": {requireNode(
			expression(corev1.LabelHostname, corev1.NodeSelectorOpIn, "home-1"), expression("disk", corev1.NodeSelectorOpExists)), admissible},
		"preferred anti-affinity": {affinity(corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 1, PodAffinityTerm: term}}}}), admissible},
		"soft spread": {func(p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.ScheduleAnyway}}
		}, admissible},

		"an emptyDir in memory":                       {inMemory("1Gi", limits("1Gi"), nil), admissible},
		"an emptyDir in memory above the limit":       {inMemory("2Gi", limits("1Gi"), nil), `volume "data" is an emptyDir in memory with sizeLimit 2Gi, more than the 1Gi that`},
		"an emptyDir in memory, of requests":          {inMemory("2304Mi", requests("1Gi"), nil), admissible},
		"an emptyDir in memory above requests":        {inMemory("2305Mi", requests("1Gi"), nil), `sizeLimit 2305Mi, more than the 2304Mi`},
		"an emptyDir in memory within the pod's":      {inMemory("2Gi", corev1.ResourceRequirements{}, ptr.To(limits("2Gi"))), admissible},
		"an emptyDir in memory above the pod's":       {inMemory("3Gi", corev1.ResourceRequirements{}, ptr.To(limits("2Gi"))), "more than the 2Gi"},
		"an emptyDir in memory above the container's": {inMemory("2Gi", limits("1Gi"), ptr.To(limits("2Gi"))), "more than the 1Gi"},
		"an emptyDir on disk above the memory's size": {volume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{SizeLimit: ptr.To(resource.MustParse("1Ti"))}}), admissible},

		"bound":       {func(p *corev1.Pod) { p.Spec.NodeName = "home-1" }, silent},
		"terminating": {func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{} }, silent},
		"finished":    {func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, silent},
		"gated":       {func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "wait"}} }, silent},
		"opted out":   {func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }, silent},

		"a DaemonSet's":  {controlled("DaemonSet"), "DaemonSet"},
		"static":         {controlled("Node"), "static"},
		"a mirror":       {func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} }, "mirror"},
		"a host path":    {volume(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/x"}}), `volume "data"`},
		"a trust bundle": {volume(projected(corev1.VolumeProjection{ClusterTrustBundle: &corev1.ClusterTrustBundleProjection{}})), `volume "data"`},
		"a pod certificate beside a ConfigMap": {volume(projected(corev1.VolumeProjection{ConfigMap: &corev1.ConfigMapProjection{}},
			corev1.VolumeProjection{PodCertificate: &corev1.PodCertificateProjection{}})), `volume "data"`},
		"a token":         {volume(projected(corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}})), admissible},
		"a claim":         {volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{}}), `volume "data"`},
		"its own claim":   {volume(corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}), `volume "data"`},
		"a CSI volume":    {volume(corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "secrets"}}), `volume "data"`},
		"an NFS volume":   {volume(corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "nas"}}), `volume "data"`},
		"a device claim":  {func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}} }, "ResourceClaims"},
		"host network":    {func(p *corev1.Pod) { p.Spec.HostNetwork = true }, "hostNetwork"},
		"a node by name":  {selector(corev1.LabelHostname, "home-1"), "nodeSelector selects a node"},
		"arm64":           {selector(corev1.LabelArchStable, "arm64"), "arm64"},
		"windows":         {func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} }, "windows"},
		"nodes by name":   {requireNode(expression(corev1.LabelHostname, corev1.NodeSelectorOpIn, "home-1")), "node affinity selects nodes"},
		"any hostname":    {requireNode(expression(corev1.LabelHostname, corev1.NodeSelectorOpExists)), "requires label kubernetes.io/hostname"},
		"arm64, affinity": {requireNode(expression(corev1.LabelArchStable, corev1.NodeSelectorOpIn, "arm64")), "arm64"},
		"hard spread": {func(p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{TopologyKey: "zone", WhenUnsatisfiable: corev1.DoNotSchedule}}
		}, "topologySpreadConstraint"},
		"required affinity": {affinity(corev1.Affinity{PodAffinity: &corev1.PodAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{term}}}), "required pod affinity"},
		"required anti-affinity": {affinity(corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{term}}}), "required pod anti-affinity"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			ok, reason := demand.Admissible(podWith(tc.change))
			said := strings.Contains(reason, tc.want)
			if tc.want == admissible || tc.want == silent {
				said = reason == ""
			}
			if ok != (tc.want == admissible) || !said {
				t.Errorf("got %t %q, want %q", ok, reason, tc.want)
			}
		})
	}
}

// TestAddedTolerations: what others append to a pod is not for virtual nodes.
func TestAddedTolerations(t *testing.T) {
	overflow := corev1.Toleration{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}
	driver := corev1.Toleration{Key: "driver.example.com/virtual-node", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}
	notReady := corev1.Toleration{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}
	spot := corev1.Toleration{Key: "spot", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}
	for name, tc := range map[string]struct{ all, want []corev1.Toleration }{
		"steered":     {[]corev1.Toleration{spot, notReady, overflow, driver}, []corev1.Toleration{overflow, driver}},
		"appended":    {[]corev1.Toleration{overflow, driver, notReady, spot}, []corev1.Toleration{overflow, driver}},
		"not steered": {[]corev1.Toleration{driver, spot}, nil},
	} {
		if got := demand.AddedTolerations(tc.all); !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, want %v", name, got, tc.want)
		}
	}
}
