package charts_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// By default, the scheduler and the agent have two replicas each and are not preempted when
// the cluster is full.
func TestDefaultsOnAFullCluster(t *testing.T) {
	for _, d := range only[appsv1.Deployment](t, render(t, "agent", needed), "Deployment") {
		if class := d.Spec.Template.Spec.PriorityClassName; *d.Spec.Replicas != 2 || class != "system-cluster-critical" {
			t.Errorf("%s: %d replicas with priority class %q", d.Name, *d.Spec.Replicas, class)
		}
	}
}

// Without placeholders the agent does not hold with them: nothing is installed for them.
func TestHoldOfAgent(t *testing.T) {
	for values, want := range map[string]string{"replicas=2": "--hold=placeholders", "hold=none": "--hold=none", "lend.enabled=false": "--hold=none"} {
		found := false
		for _, d := range only[appsv1.Deployment](t, render(t, "agent", append(slices.Clone(needed), values)), "Deployment") {
			found = found || slices.Contains(d.Spec.Template.Spec.Containers[0].Args, want)
		}
		if !found {
			t.Errorf("with %q no container has the flag %s", values, want)
		}
	}
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
			for _, c := range only[corev1.ConfigMap](t, objects, "ConfigMap") {
				var config struct {
					Profiles []struct {
						PluginConfig []struct {
							Args struct{ OwnerKinds []owners.Kind }
						}
					}
				}
				if c.Data["config.yaml"] == "" {
					continue
				}
				expect.NoError(t, yaml.Unmarshal([]byte(c.Data["config.yaml"]), &config))
				for _, kind := range config.Profiles[0].PluginConfig[0].Args.OwnerKinds {
					asked = append(asked, kind.String())
				}
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
