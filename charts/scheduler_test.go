package charts_test

import (
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

// By default, no program is preempted, or waits for a place, when the cluster is full, with
// either driver. The scheduler and the agent have two replicas each; the program that serves
// all virtual nodes at its own address has one.
func TestDefaultsOnAFullCluster(t *testing.T) {
	for driver, want := range map[string]map[string]int32{
		"liqo":   {"agent": 2, "scheduler": 2},
		"direct": {"agent": 2, "scheduler": 2, "virtual-node": 1},
	} {
		replicas := map[string]int32{}
		for _, d := range only[appsv1.Deployment](t, render(t, "agent", append(slices.Clone(needed), "driver="+driver)), "Deployment") {
			pod := d.Spec.Template.Spec
			replicas[pod.Containers[0].Name] = *d.Spec.Replicas
			if class := pod.PriorityClassName; class != "system-cluster-critical" {
				t.Errorf("driver %s: %s has priority class %q", driver, d.Name, class)
			}
		}
		if !maps.Equal(replicas, want) {
			t.Errorf("driver %s: replicas %v, want %v", driver, replicas, want)
		}
	}
}

// Where nothing is offered, the agent holds with no placeholders: nothing is installed for them.
func TestHoldOfAgent(t *testing.T) {
	for values, want := range map[string]string{"replicas=2": "--placeholders-namespace=spillway-holds", "lend.enabled=false": "--lend-enabled=false"} {
		found := false
		for _, d := range only[appsv1.Deployment](t, render(t, "agent", append(slices.Clone(needed), values)), "Deployment") {
			found = found || slices.Contains(d.Spec.Template.Spec.Containers[0].Args, want)
		}
		if !found {
			t.Errorf("with %q no container has the flag %s", values, want)
		}
	}
}

// profile is what the tests read of the scheduler's profile.
type profile struct {
	Plugins      map[string]struct{ Enabled, Disabled []struct{ Name string } }
	PluginConfig []struct {
		Args struct {
			OwnerKinds         []owners.Kind
			RefusePodResources bool
		}
	}
}

// schedulerProfile returns the one profile of the scheduler.
func schedulerProfile(t *testing.T, objects []unstructured.Unstructured) profile {
	t.Helper()
	for _, c := range only[corev1.ConfigMap](t, objects, "ConfigMap") {
		if c.Data["config.yaml"] == "" {
			continue
		}
		var config struct{ Profiles []profile }
		expect.NoError(t, yaml.Unmarshal([]byte(c.Data["config.yaml"]), &config))
		if len(config.Profiles) == 1 {
			return config.Profiles[0]
		}
	}
	t.Fatal("the scheduler has not one profile")
	return profile{}
}

// The scheduler and the agent look up the same kinds of owners, and may get these, no more.
func TestOwnerKinds(t *testing.T) {
	for name, tc := range map[string]struct {
		values []string
		want   []string // nil: the defaults
	}{
		"defaults": {},
		"own":      {[]string{"scheduler.ownerKinds[0].group=batch.example.com", "scheduler.ownerKinds[0].kind=Run", "scheduler.ownerKinds[0].resource=runs"}, []string{"Run=runs.batch.example.com"}},
		"none":     {[]string{"scheduler.ownerKinds=null"}, []string{}},
	} {
		t.Run(name, func(t *testing.T) {
			objects := render(t, "agent", append(slices.Clone(needed), tc.values...))
			var asked, flags []string
			for _, d := range only[appsv1.Deployment](t, objects, "Deployment") {
				for _, arg := range d.Spec.Template.Spec.Containers[0].Args {
					if kind, ok := strings.CutPrefix(arg, "--owner-kinds="); ok {
						_, err := owners.ParseKind(kind)
						expect.NoError(t, err)
						flags = append(flags, kind)
					}
				}
			}
			for _, kind := range schedulerProfile(t, objects).PluginConfig[0].Args.OwnerKinds {
				asked = append(asked, kind.String())
			}
			if !slices.Equal(asked, flags) || tc.want != nil && !slices.Equal(asked, tc.want) || tc.want == nil && !slices.Contains(asked, "JobSet=jobsets.jobset.x-k8s.io") {
				t.Errorf("the scheduler looks up %v, the agent %v", asked, flags)
			}
			for _, role := range only[rbacv1.ClusterRole](t, objects, "ClusterRole") {
				if role.Name != "spillway-agent" && role.Name != "spillway-scheduler" {
					continue
				}
				for _, text := range asked {
					kind, _ := owners.ParseKind(text)
					i := slices.IndexFunc(role.Rules, func(r rbacv1.PolicyRule) bool { return slices.Contains(r.APIGroups, kind.Group) })
					if i < 0 || !slices.Equal(role.Rules[i].Resources, []string{kind.Resource}) || !slices.Equal(role.Rules[i].Verbs, []string{"get"}) {
						t.Errorf("%s may not get %s, or more", role.Name, text)
					}
				}
			}
		})
	}
}

// Liqo drops the pod-level resources of a guest, which would request nothing: such pods stay.
func TestPodResources(t *testing.T) {
	for driver, refused := range map[string]bool{"liqo": true, "direct": false} {
		if got := schedulerProfile(t, render(t, "agent", append(slices.Clone(needed), "driver="+driver))).PluginConfig[0].Args.RefusePodResources; got != refused {
			t.Errorf("driver %s: pods with pod-level resources are refused: %t, want %t", driver, got, refused)
		}
	}
}

// The webhook steers pods only while a replica of the scheduler holds the Lease by which they
// elect their leader, and the scheduler may read it.
func TestSteeringLease(t *testing.T) {
	for _, mode := range []string{"beside", "only"} {
		objects := render(t, "agent", append(slices.Clone(needed), "scheduler.mode="+mode))
		var config struct {
			LeaderElection struct {
				LeaderElect                     bool
				ResourceName, ResourceNamespace string
			}
		}
		for _, c := range only[corev1.ConfigMap](t, objects, "ConfigMap") {
			if text := c.Data["config.yaml"]; text != "" {
				expect.NoError(t, yaml.Unmarshal([]byte(text), &config))
			}
		}
		elects := config.LeaderElection
		if !elects.LeaderElect || elects.ResourceName == "" || elects.ResourceNamespace == "" {
			t.Errorf("%s: no leader is elected: %+v", mode, elects)
		}
		var flags []string
		for _, d := range only[appsv1.Deployment](t, objects, "Deployment") {
			for _, arg := range d.Spec.Template.Spec.Containers[0].Args {
				if lease, ok := strings.CutPrefix(arg, "--steering-lease="); ok {
					flags = append(flags, d.Spec.Template.Spec.Containers[0].Name+" "+lease)
				}
			}
		}
		if want := []string{"scheduler " + elects.ResourceNamespace + "/" + elects.ResourceName}; !slices.Equal(flags, want) {
			t.Errorf("%s: --steering-lease is %q, want %q", mode, flags, want)
		}
		if !slices.ContainsFunc(only[rbacv1.Role](t, objects, "Role"), func(r rbacv1.Role) bool {
			return r.Namespace == elects.ResourceNamespace && slices.ContainsFunc(r.Rules, func(rule rbacv1.PolicyRule) bool {
				return slices.Contains(rule.Resources, "leases") && slices.Contains(rule.Verbs, "get") && slices.Contains(rule.ResourceNames, elects.ResourceName)
			})
		}) {
			t.Errorf("%s: no role permits to read Lease %s/%s", mode, elects.ResourceNamespace, elects.ResourceName)
		}
	}
}

// The API server waits long enough for the webhook that steers: 10,000 pods created at once
// on two cores kept it busy for more than 2 s, and such a pod never overflows. The others
// are short, since the binding policy denies what they would prevent.
func TestWebhookTimeouts(t *testing.T) {
	want := map[string]int32{"steering": 10, "avoidance": 2, "avoidance-system": 2, "avoidance-guests": 2, "gangs": 10}
	got := map[string]int32{}
	for _, w := range webhooksOf(t, render(t, "agent", needed), "spillway-scheduler") {
		got[strings.TrimSuffix(w.Name, ".broker.fluidos.eu")] = *w.TimeoutSeconds
	}
	if !maps.Equal(got, want) {
		t.Errorf("the webhooks have timeouts %v, want %v", got, want)
	}
}

const gangWebhook = "gangs.broker.fluidos.eu"

// On Kubernetes 1.35, no pod of a gang is created without the scheduler's knowing its gang. Later
// versions have no such pods.
func TestGangWebhook(t *testing.T) {
	for version, want := range map[string]int{"1.35.3": 1, "1.36.0": 0, "1.37.2": 0} {
		text, err := helm(t, append([]string{"template", "spillway-agent", "agent", "--kube-version=" + version}, set(needed)...)...)
		expect.NoError(t, err)
		webhooks := slices.DeleteFunc(webhooksOf(t, decode(t, "agent", text), "spillway-scheduler"), func(w admissionv1.MutatingWebhook) bool { return w.Name != gangWebhook })
		if len(webhooks) != want {
			t.Errorf("%s: %d webhooks %s, want %d", version, len(webhooks), gangWebhook, want)
		}
		for _, w := range webhooks {
			if w.NamespaceSelector != nil || len(w.MatchConditions) != 1 || w.MatchConditions[0].Expression != "has(object.spec.workloadRef)" || *w.ClientConfig.Service.Path != steering.GangPath {
				t.Errorf("%s: %+v", version, w)
			}
		}
	}
}

// Overflow filters before NodeResourcesFit, binds before DefaultBinder and, if that is
// wanted, runs before DefaultPreemption: kube-scheduler runs first what is enabled by
// extension point, and then what multiPoint enables.
func TestOverflowRunsFirst(t *testing.T) {
	for overflow, want := range map[string]map[string][]string{
		"AfterPreemption":  {"multiPoint": {"Overflow"}, "filter": {"Overflow"}, "bind": {"Overflow"}},
		"BeforePreemption": {"multiPoint": {"Overflow"}, "filter": {"Overflow"}, "bind": {"Overflow"}, "postFilter": {"Overflow"}},
	} {
		got := map[string][]string{}
		for point, plugins := range schedulerProfile(t, render(t, "agent", append(slices.Clone(needed), "scheduler.overflow="+overflow))).Plugins {
			for _, p := range plugins.Enabled {
				got[point] = append(got[point], p.Name)
			}
			if len(plugins.Disabled) > 0 {
				t.Errorf("%s: at %s %v are disabled", overflow, point, plugins.Disabled)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: enabled %v, want %v", overflow, got, want)
		}
	}
}
