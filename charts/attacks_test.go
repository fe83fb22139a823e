package charts_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// attack is a request of a hostile consumer. It is a dry run, so that it can be
// repeated.
type attack struct {
	name string
	do   func() error
	// guards refuse it: it succeeds once all of them are removed, and not before.
	guards []string
	// want is part of the refusal.
	want string
}

// guard is one of the provisions that refuse attacks.
type guard struct {
	name   string
	remove func() error
}

// policyGuard is a ValidatingAdmissionPolicy of the chart, removed by its bindings.
func policyGuard(t *testing.T, admin client.Client, policy string) guard {
	return guard{policy, func() error {
		var bindings admissionv1.ValidatingAdmissionPolicyBindingList
		err := admin.List(t.Context(), &bindings)
		for i := range bindings.Items {
			if bindings.Items[i].Spec.PolicyName == policy {
				err = errors.Join(err, admin.Delete(t.Context(), &bindings.Items[i]))
			}
		}
		return err
	}}
}

// permissionGuard is RBAC, removed by a binding of cluster-admin.
func permissionGuard(t *testing.T, admin client.Client, subject rbacv1.Subject) guard {
	return guard{"RBAC", func() error {
		return admin.Create(t.Context(), &rbacv1.ClusterRoleBinding{
			ObjectMeta: named("attacker"), RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"}, Subjects: []rbacv1.Subject{subject},
		})
	}}
}

// refused describes how an attack went, and whether it was refused as expected.
func (a *attack) refused() (bool, string) {
	err := a.do()
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), a.want), fmt.Sprintf("want a refusal with %q, got %v", a.want, err)
}

// runAttacks runs each attack with all guards and again without its own: an attack
// that is refused without its guards shows nothing about them.
func runAttacks(t *testing.T, guards []guard, attacks []attack) {
	t.Helper()
	active, removed := map[string]bool{}, map[string]bool{}
	for _, a := range attacks {
		t.Run("refused/"+a.name, func(t *testing.T) {
			// A guard takes effect a moment after its creation.
			if name := a.guards[0]; !active[name] {
				active[name] = true
				expect.Eventually(t, "guard "+name+" is in force", a.refused)
			}
			if ok, got := a.refused(); !ok {
				t.Error(got)
			}
		})
	}
	for _, g := range guards {
		expect.NoError(t, g.remove())
		removed[g.name] = true
		waited := false
		for _, a := range attacks {
			if !slices.Contains(a.guards, g.name) || slices.ContainsFunc(a.guards, func(name string) bool { return !removed[name] }) {
				continue
			}
			t.Run("without "+g.name+"/"+a.name, func(t *testing.T) {
				if !waited {
					waited = true
					expect.Eventually(t, "guard "+g.name+" is no longer in force", func() (bool, string) {
						err := a.do()
						return err == nil, fmt.Sprint(err)
					})
				}
				if err := a.do(); err != nil {
					t.Errorf("the attack fails without its guard: %v", err)
				}
			})
		}
	}
	for _, a := range attacks {
		for _, name := range a.guards {
			if !removed[name] {
				t.Errorf("%s: there is no guard %s", a.name, name)
			}
		}
	}
	for name := range removed {
		if !slices.ContainsFunc(attacks, func(a attack) bool { return slices.Contains(a.guards, name) }) {
			t.Errorf("no attack is refused by guard %s", name)
		}
	}
}

// impersonating returns a client of a user.
func impersonating(t *testing.T, config *rest.Config, user string, groups ...string) client.Client {
	t.Helper()
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	c, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	return c
}

// execInto runs a command in pod local of namespace default as a user. The pod's node does
// not exist: a call that is authorized ends when the API server looks for the node's kubelet.
func execInto(t *testing.T, config *rest.Config, user string, groups ...string) error {
	t.Helper()
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: append(groups, "system:authenticated")}
	set, err := kubernetes.NewForConfig(config)
	expect.NoError(t, err)
	err = set.CoreV1().RESTClient().Post().Namespace("default").Resource("pods").Name("local").SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Stdout: true, Command: []string{"true"}}, scheme.ParameterCodec).Do(t.Context()).Error()
	if status := apierrors.APIStatus(nil); apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details.Name == "worker" {
		return nil
	}
	return err
}

// listAttacks list what is not the consumer's.
func listAttacks(t *testing.T, consumer client.Client) []attack {
	list := func(objects client.ObjectList, options ...client.ListOption) func() error {
		return func() error { return consumer.List(t.Context(), objects, options...) }
	}
	rbac := []string{"RBAC"}
	return []attack{
		{"pods of another namespace", list(&corev1.PodList{}, client.InNamespace("default")), rbac, "cannot list resource"},
		{"all namespaces", list(&corev1.NamespaceList{}), rbac, "cannot list resource"},
		{"all Secrets of the provider's agent", list(&corev1.SecretList{}, client.InNamespace(namespace)), rbac, "cannot list resource"},
		{"the provider's nodes", list(&corev1.NodeList{}), rbac, "cannot list resource"},
	}
}

// guestSpec is the spec of an ordinary guest, which complies with the Pod Security
// Standard restricted.
func guestSpec() corev1.PodSpec {
	return corev1.PodSpec{
		AutomountServiceAccountToken: ptr.To(false),
		Affinity:                     &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: guest.NodeAffinity(nil)}},
		SecurityContext:              &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
		Containers: []corev1.Container{{
			Name: "c", Image: "pause",
			Resources: corev1.ResourceRequirements{
				Requests: expect.Resources("cpu", "100m", "memory", "16Mi", "ephemeral-storage", "0"), Limits: expect.Resources("memory", "64Mi"),
			},
			SecurityContext: &corev1.SecurityContext{AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}},
		}},
	}
}

// podAttack is a change to an ordinary guest, and what its refusal says.
type podAttack struct {
	name   string
	change func(*corev1.PodSpec)
	want   string
}

func volume(source corev1.VolumeSource) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) { s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
}

func toleration(t corev1.Toleration) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) { s.Tolerations = []corev1.Toleration{t} }
}

func podAntiAffinity(term corev1.PodAffinityTerm) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		s.Affinity.PodAntiAffinity = &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{term}}
	}
}

func capability(name corev1.Capability) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		s.Containers[0].SecurityContext.Capabilities.Add = []corev1.Capability{name}
	}
}

// everyPodAttack are those on the cluster that runs a guest, whatever the driver. The
// refusals are those of the policy for guests.
var everyPodAttack = []podAttack{
	{"choosing a node", func(s *corev1.PodSpec) { s.NodeName = "worker" }, "choose its node"},
	{"choosing a scheduler", func(s *corev1.PodSpec) { s.SchedulerName = "own" }, "scheduler"},
	{"repelling every pod from the cluster", podAntiAffinity(corev1.PodAffinityTerm{
		TopologyKey: "kubernetes.io/os", NamespaceSelector: &metav1.LabelSelector{}, LabelSelector: &metav1.LabelSelector{},
	}), "affinity"},
	{"repelling pods of a namespace", podAntiAffinity(corev1.PodAffinityTerm{TopologyKey: corev1.LabelHostname, Namespaces: []string{"default"}, LabelSelector: &metav1.LabelSelector{}}), "affinity"},
	{"using a PersistentVolumeClaim", volume(corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "x"}}), "volumes of type"},
	{"using a resource claim", func(s *corev1.PodSpec) {
		s.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("x")}}
	}, "resource claims"},
	{"choosing a runtime class", func(s *corev1.PodSpec) { s.RuntimeClassName = ptr.To("kata") }, "runtime class"},
	{"running on a virtual node", func(s *corev1.PodSpec) { s.Affinity.NodeAffinity = nil }, "virtual nodes"},
	{"running on a virtual node by one of two terms", func(s *corev1.PodSpec) {
		required := s.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
		required.NodeSelectorTerms = append(required.NodeSelectorTerms, corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "type", Operator: corev1.NodeSelectorOpIn, Values: []string{"virtual-kubelet"}}}})
	}, "virtual nodes"},
	{"terminating after a day", func(s *corev1.PodSpec) { s.TerminationGracePeriodSeconds = ptr.To[int64](86400) }, "terminate within an hour"},
	{"tolerating all taints", toleration(corev1.Toleration{Operator: corev1.TolerationOpExists}), "tolerate"},
	{"tolerating Liqo's virtual nodes", toleration(corev1.Toleration{Key: "virtual-node.liqo.io/not-allowed", Operator: corev1.TolerationOpExists}), "tolerate"},
	{"tolerating the control plane", toleration(corev1.Toleration{Key: "node-role.kubernetes.io/control-plane", Operator: corev1.TolerationOpExists}), "tolerate"},
}

// memoryAttacks use memory in volumes. The kubelet sizes these by the memory limits of the
// containers, which the volumes count for: so each container must have one.
var memoryAttacks = []podAttack{
	{"an unbounded emptyDir in memory", unlimited(nil), "memory"},
	{"an emptyDir in memory beyond its limits", unlimited(ptr.To(resource.MustParse("1Gi"))), "memory"},
}

func unlimited(size *resource.Quantity) func(*corev1.PodSpec) {
	return func(s *corev1.PodSpec) {
		s.Containers[0].Resources.Limits = nil
		volume(corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory, SizeLimit: size}})(s)
	}
}

// podSecurityAttacks violate the Pod Security Standards.
var podSecurityAttacks = slices.Concat(probeAttacks(), []podAttack{
	{"privileged", func(s *corev1.PodSpec) {
		*s.Containers[0].SecurityContext = corev1.SecurityContext{Privileged: ptr.To(true)}
	}, "privileged"},
	{"a privileged init container", func(s *corev1.PodSpec) {
		s.InitContainers = []corev1.Container{*s.Containers[0].DeepCopy()}
		s.InitContainers[0].Name, s.InitContainers[0].SecurityContext = "i", &corev1.SecurityContext{Privileged: ptr.To(true)}
	}, "privileged"},
	{"hostPath", volume(corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}), "hostPath"},
	{"hostNetwork", func(s *corev1.PodSpec) { s.HostNetwork = true }, "hostNetwork"},
	{"hostPID", func(s *corev1.PodSpec) { s.HostPID = true }, "hostPID"},
	{"hostIPC", func(s *corev1.PodSpec) { s.HostIPC = true }, "hostIPC"},
	{"hostPort", func(s *corev1.PodSpec) {
		s.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 80}}
	}, "hostPort"},
	{"a capability", capability("SYS_ADMIN"), "apabilities"},
	{"an unsafe sysctl", func(s *corev1.PodSpec) {
		s.SecurityContext.Sysctls = []corev1.Sysctl{{Name: "kernel.msgmax", Value: "1"}}
	}, "sysctl"},
	{"an unmasked /proc", func(s *corev1.PodSpec) {
		s.Containers[0].SecurityContext.ProcMount, s.HostUsers = ptr.To(corev1.UnmaskedProcMount), ptr.To(false)
	}, "procMount"},
	{"no seccomp", func(s *corev1.PodSpec) {
		s.SecurityContext.SeccompProfile.Type = corev1.SeccompProfileTypeUnconfined
	}, "seccompProfile"},
	{"running as root", func(s *corev1.PodSpec) { s.SecurityContext.RunAsNonRoot = nil }, "runAsNonRoot"},
	{"escalating privileges", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.AllowPrivilegeEscalation = nil }, "allowPrivilegeEscalation"},
	{"keeping the default capabilities", func(s *corev1.PodSpec) { s.Containers[0].SecurityContext.Capabilities = nil }, "apabilities"},
})

// probeAttacks make the kubelet of a guest's node connect to an address of the guest's choice,
// in a container and in an init container that keeps running.
func probeAttacks() (attacks []podAttack) {
	get := &corev1.HTTPGetAction{Host: "169.254.169.254", Port: intstr.FromInt32(80)}
	connect := &corev1.TCPSocketAction{Host: "169.254.169.254", Port: intstr.FromInt32(80)}
	for name, kind := range map[string]struct {
		probe corev1.ProbeHandler
		hook  *corev1.LifecycleHandler
	}{
		"httpGet":   {corev1.ProbeHandler{HTTPGet: get}, &corev1.LifecycleHandler{HTTPGet: get}},
		"tcpSocket": {corev1.ProbeHandler{TCPSocket: connect}, &corev1.LifecycleHandler{TCPSocket: connect}},
	} {
		probe := &corev1.Probe{ProbeHandler: kind.probe}
		for field, set := range map[string]func(*corev1.Container){
			"livenessProbe":  func(c *corev1.Container) { c.LivenessProbe = probe },
			"readinessProbe": func(c *corev1.Container) { c.ReadinessProbe = probe },
			"startupProbe":   func(c *corev1.Container) { c.StartupProbe = probe },
			"postStart":      func(c *corev1.Container) { c.Lifecycle = &corev1.Lifecycle{PostStart: kind.hook} },
			"preStop":        func(c *corev1.Container) { c.Lifecycle = &corev1.Lifecycle{PreStop: kind.hook} },
		} {
			attacks = append(attacks,
				podAttack{field + " by " + name, func(s *corev1.PodSpec) { set(&s.Containers[0]) }, "remove host from"},
				podAttack{field + " by " + name + " of an init container", func(s *corev1.PodSpec) {
					s.InitContainers = []corev1.Container{*s.Containers[0].DeepCopy()}
					s.InitContainers[0].Name, s.InitContainers[0].RestartPolicy = "i", ptr.To(corev1.ContainerRestartPolicyAlways)
					set(&s.InitContainers[0])
				}, "remove host from"})
		}
	}
	return attacks
}

// expectTooLarge checks that the API server keeps no ConfigMap or Secret above its own limits, 1 MiB
// of data and 1.5 MiB in all, in each of the fields that have what a consumer writes; it drops what
// managedFields say of fields that the object lacks. How many of these a consumer may keep is up to
// the quota. The limit of all is that of etcd, so that the requests are no dry runs.
func expectTooLarge(t *testing.T, consumer client.Client, namespace string) {
	large := strings.Repeat("x", 1700<<10)
	managed := func(fields string) client.Object {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "large", ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "own", Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(fields),
		}}}}
	}
	for name, object := range map[string]client.Object{
		"a large ConfigMap":                    &corev1.ConfigMap{ObjectMeta: within(namespace, "large"), Data: map[string]string{"k": large}},
		"a ConfigMap with a large file":        &corev1.ConfigMap{ObjectMeta: within(namespace, "large"), BinaryData: map[string][]byte{"k": []byte(large)}},
		"a ConfigMap of characters of 3 bytes": &corev1.ConfigMap{ObjectMeta: within(namespace, "large"), Data: map[string]string{"k": strings.Repeat("…", 400<<10)}},
		"a ConfigMap with large annotations": &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "large", Annotations: map[string]string{"k": large[:300<<10]}}, Data: map[string]string{"k": large[:400<<10]},
		},
		"a large Secret":             &corev1.Secret{ObjectMeta: within(namespace, "large"), Data: map[string][]byte{"k": []byte(large)}},
		"a Secret with a large type": &corev1.Secret{ObjectMeta: within(namespace, "large"), Type: corev1.SecretType(large)},
		"a ConfigMap with a large owner": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
			Namespace: namespace, Name: "large", OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "ConfigMap", Name: large, UID: "x"}},
		}},
		"a ConfigMap with large managed fields": managed(`{"f:data":{"f:` + large + `":{}}}`),
		"a ConfigMap with deep managed fields":  managed(`{"f:metadata":{"f:annotations":{"f:a":{"f:b":{"f:` + large + `":{}}}}}}`),
	} {
		err := consumer.Create(t.Context(), object)
		if kept, _ := json.Marshal(object); err == nil && len(kept) < 1<<20 {
			expect.NoError(t, consumer.Delete(t.Context(), object))
			continue
		}
		if err == nil || !slices.ContainsFunc([]string{"may not be more than", "Too long", "too large"}, func(text string) bool { return strings.Contains(err.Error(), text) }) {
			t.Errorf("%s: want a refusal because of its size, got %.300s", name, fmt.Sprint(err))
		}
	}
}

// largestObjects are those that a consumer may keep.
func largestObjects(namespace string) map[string]client.Object {
	largest := strings.Repeat("x", 1<<20-1)
	return map[string]client.Object{
		"a ConfigMap":             &corev1.ConfigMap{ObjectMeta: within(namespace, "small"), Data: map[string]string{"k": largest}},
		"a ConfigMap with a file": &corev1.ConfigMap{ObjectMeta: within(namespace, "small"), BinaryData: map[string][]byte{"k": []byte(largest)}},
		"a Secret":                &corev1.Secret{ObjectMeta: within(namespace, "small"), Type: "t", Data: map[string][]byte{"k": []byte(largest)}},
		"an empty ConfigMap":      &corev1.ConfigMap{ObjectMeta: within(namespace, "small")},
	}
}
