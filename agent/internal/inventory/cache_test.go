package inventory_test

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// wholePod is a pod of a Deployment as the API server has it.
func wholePod(name, node string) *corev1.Pod {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: name, Generation: 1,
			Labels:          map[string]string{"app": name[:3], "pod-template-hash": "5d9c7b8f6", broker.LabelHold: "hold-1", broker.LabelPodGroup: "gang"},
			Annotations:     map[string]string{"kubectl.kubernetes.io/restartedAt": fmt.Sprint(name, " then")},
			ManagedFields:   []metav1.ManagedFieldsEntry{{Manager: "kubelet", FieldsV1: metav1.NewFieldsV1(name)}},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-5d9c7b8f6", UID: "rs", Controller: ptr.To(true)}},
		},
		Spec: corev1.PodSpec{
			SchedulerName: broker.SchedulerName, NodeName: node, NodeSelector: map[string]string{"disk": "ssd"}, SchedulingGroup: &corev1.PodSchedulingGroup{PodGroupName: ptr.To("workers")},
			Containers: []corev1.Container{{
				Name: "main", Image: "registry.example.org/app:1", Args: []string{"serve"}, Env: []corev1.EnvVar{{Name: "NAME", Value: name}},
				Resources:       corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1", "memory", "1Gi"), Limits: expect.Resources("cpu", "2", "memory", "1Gi")},
				SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), RunAsUser: ptr.To[int64](1000), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
			}},
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Tolerations: []corev1.Toleration{
				{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
				{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](300)},
			},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, StartTime: ptr.To(metav1.Now()), ContainerStatuses: []corev1.ContainerStatus{{Name: "main", Image: "app:1"}}},
	}
	for _, kind := range []corev1.PodConditionType{corev1.PodScheduled, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady} {
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue, Message: fmt.Sprint(kind, " of ", name)})
	}
	return pod
}

// TestTrimPodKeepsTheKey: a trimmed pod has the gang and shape of the whole one, wherever it
// may overflow to; of a pod that stays in this cluster, it has what it uses.
func TestTrimPodKeepsTheKey(t *testing.T) {
	for name, tc := range map[string]struct {
		node   string
		change func(*corev1.Pod)
		local  bool
	}{
		"a pod that waits":     {change: func(*corev1.Pod) {}},
		"one that may be root": {change: func(p *corev1.Pod) { p.Spec.SecurityContext = nil }},
		"one whose init container may be root": {change: func(p *corev1.Pod) {
			p.Spec.InitContainers = []corev1.Container{{Name: "init"}}
		}},
		"one of a pod group": {change: func(p *corev1.Pod) { p.Spec.SchedulingGroup = nil }},
		"one of a Workload of Kubernetes 1.35": {change: func(p *corev1.Pod) {
			p.Spec.SchedulingGroup = nil
			p.Annotations[broker.AnnotationWorkload] = "train/workers/"
		}},
		"one that overflowed": {node: broker.VirtualNodeName("paris"), change: func(*corev1.Pod) {}},
		"one of the cluster":  {node: "home-1", change: func(*corev1.Pod) {}, local: true},
		"a guest on its node": {node: "home-1", change: func(p *corev1.Pod) {
			p.OwnerReferences[0] = metav1.OwnerReference{APIVersion: "example.com/v1", Kind: "Guest", Name: "g", Controller: ptr.To(true)}
		}},
		"a pod without an owner": {node: "home-1", change: func(p *corev1.Pod) { p.OwnerReferences = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			whole := wholePod("web-1", tc.node)
			tc.change(whole)
			object, err := inventory.TrimPod(whole.DeepCopy())
			expect.NoError(t, err)
			trimmed := object.(*corev1.Pod)
			if got, want := broker.FromList(inventory.Requests(trimmed)).String(), broker.FromList(inventory.Requests(whole)).String(); got != want {
				t.Errorf("requests %s, want %s", got, want)
			}
			others := maps.Clone(trimmed.Annotations)
			delete(others, broker.AnnotationWorkload)
			if len(trimmed.ManagedFields)+len(others) > 0 {
				t.Errorf("%v and %v are kept", trimmed.ManagedFields, others)
			}
			if tc.local {
				if len(trimmed.Status.Conditions)+len(trimmed.Spec.Tolerations) > 0 {
					t.Errorf("%+v is kept of a pod that stays", trimmed)
				}
				return
			}
			wantGang, _ := demand.GangOf(whole)
			if gang, _ := demand.GangOf(trimmed); gang != wantGang {
				t.Errorf("gang %v, want %v", gang, wantGang)
			}
			shape, _ := demand.ShapeOf(trimmed)
			if want, _ := demand.ShapeOf(whole); shape != want {
				t.Errorf("shape %s, want %s", shape, want)
			}
			kept := []corev1.PodConditionType{}
			for _, c := range trimmed.Status.Conditions {
				kept = append(kept, c.Type)
			}
			if trimmed.Labels[broker.LabelHold] != "hold-1" || !slices.Equal(kept, []corev1.PodConditionType{corev1.PodScheduled, corev1.PodReady}) {
				t.Errorf("lost labels or conditions: %v, %v", trimmed.Labels, trimmed.Status.Conditions)
			}
		})
	}
}

// TestTrimPodKeepsParts: a trimmed placeholder says what it holds of a total.
func TestTrimPodKeepsParts(t *testing.T) {
	in := placeholder.Input{
		Holds:  []placeholder.Hold{{UID: "a", Unused: broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "1", "nvidia.com/gpu", "2"))}}},
		Usable: func(string) bool { return true },
	}
	for _, pod := range placeholder.Make(in).Create {
		trimmed, err := inventory.TrimPod(pod)
		expect.NoError(t, err)
		in.Pods = append(in.Pods, trimmed.(*corev1.Pod))
	}
	if plan := placeholder.Make(in); len(in.Pods) != 1 || len(plan.Create)+len(plan.Remove) > 0 {
		t.Errorf("of %d placeholders, %d are removed; %d are created", len(in.Pods), len(plan.Remove), len(plan.Create))
	}
}

// TestTrimPodKeepsWhetherItOverflows: a trimmed pod that waits can overflow if and only if the
// whole one can, whatever keeps it from that, and has its scheduler. One that has a node has
// neither: what refused it says nothing any more.
func TestTrimPodKeepsWhetherItOverflows(t *testing.T) {
	volume := func(source corev1.VolumeSource) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: source}} }
	}
	container := func(change func(*corev1.Container)) func(*corev1.Pod) {
		return func(p *corev1.Pod) { change(&p.Spec.Containers[0]) }
	}
	antiAffinity := &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{TopologyKey: corev1.LabelHostname}}}
	for name, change := range map[string]func(*corev1.Pod){
		"":                 func(*corev1.Pod) {},
		"a ConfigMap":      volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}),
		"that may be root": func(p *corev1.Pod) { p.Spec.SecurityContext = nil },

		"NFS":          volume(corev1.VolumeSource{NFS: &corev1.NFSVolumeSource{Server: "nas"}}),
		"a claim":      volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}),
		"a device":     func(p *corev1.Pod) { p.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}} },
		"hostNetwork":  func(p *corev1.Pod) { p.Spec.HostNetwork = true },
		"hostPID":      func(p *corev1.Pod) { p.Spec.HostPID = true },
		"hostPort":     container(func(c *corev1.Container) { c.Ports = []corev1.ContainerPort{{HostPort: 80}} }),
		"privileged":   container(func(c *corev1.Container) { c.SecurityContext.Privileged = ptr.To(true) }),
		"a capability": container(func(c *corev1.Container) { c.SecurityContext.Capabilities.Add = []corev1.Capability{"SYS_ADMIN"} }),
		"a probe's host": container(func(c *corev1.Container) {
			c.LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Host: "h"}}}
		}),
		"runtimeClassName": func(p *corev1.Pod) { p.Spec.RuntimeClassName = ptr.To("kata") },
		"a long grace":     func(p *corev1.Pod) { p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](86400) },
		"a sysctl":         func(p *corev1.Pod) { p.Spec.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "kernel.msgmax"}} },
		"windows":          func(p *corev1.Pod) { p.Spec.OS = &corev1.PodOS{Name: corev1.Windows} },
		"a node's name":    func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "home-1"} },
		"anti-affinity":    func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: antiAffinity} },
		"a hard spread": func(p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{TopologyKey: "zone", WhenUnsatisfiable: corev1.DoNotSchedule}}
		},
		"a mirror":    func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} },
		"a gate":      func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "wait"}} },
		"opting out":  func(p *corev1.Pod) { p.Labels[broker.LabelOverflow] = broker.OverflowDisabled },
		"its end":     func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
		"termination": func(p *corev1.Pod) { p.DeletionTimestamp = ptr.To(metav1.Now()) },
	} {
		whole := wholePod("web-1", "")
		whole.Status.Phase, whole.Spec.SchedulerName = corev1.PodPending, "some-scheduler"
		change(whole)
		want, reason := demand.Admissible(whole)
		pod := whole
		for range 2 { // a cache may transform what it has already
			object, err := inventory.TrimPod(pod.DeepCopy())
			expect.NoError(t, err)
			pod = object.(*corev1.Pod)
			if got, _ := demand.Admissible(pod); got != want || pod.Spec.SchedulerName != whole.Spec.SchedulerName {
				t.Errorf("a pod with %q of %q can overflow: %t, want %t (%s)", name, pod.Spec.SchedulerName, got, want, reason)
			}
		}
		whole.Spec.NodeName = "home-1"
		object, err := inventory.TrimPod(whole)
		expect.NoError(t, err)
		if bound := object.(*corev1.Pod); bound.Spec.HostNetwork || bound.Spec.SchedulerName != "" {
			t.Errorf("a pod with %q has hostNetwork (%t) or scheduler %q on its node", name, bound.Spec.HostNetwork, bound.Spec.SchedulerName)
		}
	}
}

// podTransform is what makes pods smaller on their way into the cache.
func podTransform() func(any) (any, error) {
	for object, by := range inventory.CacheByObject() {
		if _, ok := object.(*corev1.Pod); ok {
			return by.Transform
		}
	}
	return nil
}

// TestSharedParts: pods of one controller share what is equal in them, and nothing that is not;
// each is what it is alone.
func TestSharedParts(t *testing.T) {
	transform := podTransform()
	inCache := func(pod *corev1.Pod) *corev1.Pod {
		t.Helper()
		alone, err := inventory.TrimPod(pod.DeepCopy())
		expect.NoError(t, err)
		object, err := transform(pod)
		expect.NoError(t, err)
		if diff := cmp.Diff(alone, object); diff != "" {
			t.Errorf("%s differs (-alone +shared):\n%s", pod.Name, diff)
		}
		return object.(*corev1.Pod)
	}
	node := broker.VirtualNodeName("paris")
	first, second := inCache(wholePod("web-1", node)), inCache(wholePod("web-2", node))
	if &first.Spec.Containers[0] != &second.Spec.Containers[0] || &first.Spec.Tolerations[0] != &second.Spec.Tolerations[0] || &first.OwnerReferences[0] != &second.OwnerReferences[0] {
		t.Error("equal parts are kept twice")
	}
	for name, change := range map[string]func(*corev1.Pod){
		"requests": func(p *corev1.Pod) { p.Spec.Containers[0].Resources.Requests = expect.Resources("cpu", "3") },
		"root":     func(p *corev1.Pod) { p.Spec.SecurityContext = nil },
		"restarts": func(p *corev1.Pod) { p.Spec.Containers[0].RestartPolicy = ptr.To(corev1.ContainerRestartPolicyAlways) },
		"secret": func(p *corev1.Pod) {
			p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{}}}
		},
		"init":        func(p *corev1.Pod) { p.Spec.InitContainers = []corev1.Container{{Name: "init"}} },
		"tolerations": func(p *corev1.Pod) { p.Spec.Tolerations[1].TolerationSeconds = ptr.To[int64](3) },
		"selector":    func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "hdd"} },
		"affinity":    func(p *corev1.Pod) { p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{}} },
		"namespace":   func(p *corev1.Pod) { p.Namespace = "other" },
		"hold":        func(p *corev1.Pod) { p.Labels[broker.LabelHold] = "hold-2" },
		"node":        func(p *corev1.Pod) { p.Spec.NodeName = "home-1" },
		"owners":      func(p *corev1.Pod) { p.OwnerReferences[0].Name = "another" },
		"volumes": func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "keys", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "keys"}}}}
		},
	} {
		changed := wholePod(name, node)
		change(changed)
		inCache(changed)
		inCache(wholePod("web-3", node))
	}
}

// BenchmarkTrimmedHeap: the memory of 10,000 pods in the cache, of which a fifth stays, half
// overflowed and the others wait.
func BenchmarkTrimmedHeap(b *testing.B) {
	heap := func() float64 {
		var stats runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&stats)
		return float64(stats.HeapAlloc) / (1 << 20)
	}
	for b.Loop() {
		before, pods, trim := heap(), make([]any, 10000), podTransform()
		for i := range pods {
			node := []string{"home-1", broker.VirtualNodeName("paris"), broker.VirtualNodeName("paris"), "", ""}[i%5]
			// Each pod has strings of its own, as one that is decoded.
			raw, err := wholePod(fmt.Sprint("web-", i), node).Marshal()
			expect.NoError(b, err)
			pod := &corev1.Pod{}
			expect.NoError(b, pod.Unmarshal(raw))
			pods[i], err = trim(pod)
			expect.NoError(b, err)
		}
		b.ReportMetric(heap()-before, "MiB")
		runtime.KeepAlive(pods)
	}
}
