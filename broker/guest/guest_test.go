package guest_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// requirement draws a requirement that may match a node.
func requirement(t *rapid.T) corev1.NodeSelectorRequirement {
	r := corev1.NodeSelectorRequirement{
		Key:      rapid.SampledFrom([]string{"zone", "type", corev1.LabelArchStable}).Draw(t, "key"),
		Operator: rapid.SampledFrom([]corev1.NodeSelectorOperator{corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn, corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist}).Draw(t, "operator"),
	}
	if r.Operator == corev1.NodeSelectorOpIn || r.Operator == corev1.NodeSelectorOpNotIn {
		r.Values = []string{rapid.SampledFrom([]string{"a", "b", guest.Arch, broker.NodeTypeVirtual}).Draw(t, "value")}
	}
	return r
}

// A guest runs on those of its pod's nodes that run guests, and on no others.
func TestNodeAffinityNarrows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var own *corev1.NodeSelector
		if rapid.Bool().Draw(t, "own") {
			own = &corev1.NodeSelector{}
			for range rapid.IntRange(1, 3).Draw(t, "terms") {
				term := corev1.NodeSelectorTerm{}
				for range rapid.IntRange(0, 2).Draw(t, "requirements") {
					term.MatchExpressions = append(term.MatchExpressions, requirement(t))
				}
				own.NodeSelectorTerms = append(own.NodeSelectorTerms, term)
			}
		}
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{}}}
		for key, values := range map[string][]string{
			"zone": {"", "a", "b"}, broker.LabelNodeType: {"", "a", broker.NodeTypeVirtual},
			corev1.LabelArchStable: {guest.Arch, "arm64"}, corev1.LabelOSStable: {guest.OS, "windows"},
		} {
			if value := rapid.SampledFrom(values).Draw(t, key); value != "" {
				node.Labels[key] = value
			}
		}
		before := own.DeepCopy()
		got := matches(t, guest.NodeAffinity(own), node)
		if diff := cmp.Diff(before, own); diff != "" {
			t.Fatalf("the argument has changed (-before +after):\n%s", diff)
		}
		runsGuests := node.Labels[corev1.LabelArchStable] == guest.Arch && node.Labels[corev1.LabelOSStable] == guest.OS && node.Labels[broker.LabelNodeType] != broker.NodeTypeVirtual
		if want := runsGuests && (own == nil || matches(t, own, node)); got != want {
			t.Errorf("node %v: the guest matches: %t, want %t (own: %v)", node.Labels, got, want, own)
		}
	})
}

func matches(t *rapid.T, selector *corev1.NodeSelector, node *corev1.Node) bool {
	match, err := nodeaffinity.NewLazyErrorNodeSelector(selector).Match(node)
	if err != nil {
		t.Fatal(err)
	}
	return match
}

// What was judged is what is carried: tolerations taken from a pod set, which has those
// of the author, are those taken from the pod.
func TestTolerationsOfAPodSet(t *testing.T) {
	exists := func(key string) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists}
	}
	pod := []corev1.Toleration{exists("gpu"), exists(""), exists(corev1.TaintNodeUnschedulable), exists("node-role.kubernetes.io/control-plane"), exists(corev1.TaintNodeNotReady), exists(broker.TaintOverflow), exists("late")}
	carried := guest.Tolerations(pod)
	if diff := cmp.Diff([]corev1.Toleration{exists("gpu")}, carried); diff != "" {
		t.Errorf("tolerations of the pod (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(carried, guest.Tolerations(pod[:5])); diff != "" {
		t.Errorf("tolerations of the pod set differ (-pod +set):\n%s", diff)
	}
}

// What a pod excludes is excluded at the provider, where its guest carries the exclusion.
// A virtual node with such a label would get none of these pods: they would stay pending.
func TestLabelsThatPodsExclude(t *testing.T) {
	classes := []broker.NodeClass{{Labels: map[string]string{"gpu": "a100", "spot": "true"}}, {Labels: map[string]string{}}}
	guest.Selectable(classes, true)
	term := func(key string, operator corev1.NodeSelectorOperator, values ...string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: key, Operator: operator, Values: values}
	}
	for name, c := range map[string]struct {
		requirements []corev1.NodeSelectorRequirement
		want         map[string]string
	}{
		"DoesNotExist":         {requirements: []corev1.NodeSelectorRequirement{term("gpu", corev1.NodeSelectorOpDoesNotExist)}},
		"NotIn":                {requirements: []corev1.NodeSelectorRequirement{term("gpu", corev1.NodeSelectorOpNotIn, "a100")}},
		"In":                   {requirements: []corev1.NodeSelectorRequirement{term("gpu", corev1.NodeSelectorOpIn, "a100")}, want: map[string]string{"gpu": "a100"}},
		"Exists":               {requirements: []corev1.NodeSelectorRequirement{term("gpu", corev1.NodeSelectorOpExists)}, want: map[string]string{"gpu": "a100"}},
		"one of each":          {requirements: []corev1.NodeSelectorRequirement{term("gpu", corev1.NodeSelectorOpExists), term("spot", corev1.NodeSelectorOpDoesNotExist)}, want: map[string]string{"gpu": "a100"}},
		"both of the same key": {requirements: []corev1.NodeSelectorRequirement{term("gpu", corev1.NodeSelectorOpExists), term("gpu", corev1.NodeSelectorOpNotIn, "h100")}, want: map[string]string{"gpu": "a100"}},
		"a key that none has":  {requirements: []corev1.NodeSelectorRequirement{term("zone", corev1.NodeSelectorOpNotIn, "a")}},
	} {
		t.Run(name, func(t *testing.T) {
			affinity := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: c.requirements}}}
			labels := guest.NodeLabels(classes, []broker.PodSet{{NodeAffinity: affinity}})
			if diff := cmp.Diff(c.want, labels); diff != "" {
				t.Errorf("labels of the virtual node (-want +got):\n%s", diff)
			}
			// The guest runs on a node without them, if it excludes them.
			node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: map[string]string{corev1.LabelArchStable: guest.Arch, corev1.LabelOSStable: guest.OS}}}
			for _, gpu := range []string{"", "a100"} {
				node.Labels["gpu"] = gpu
				if gpu == "" {
					delete(node.Labels, "gpu")
				}
				own, err := nodeaffinity.NewLazyErrorNodeSelector(affinity).Match(node)
				if err != nil {
					t.Fatal(err)
				}
				carried, err := nodeaffinity.NewLazyErrorNodeSelector(guest.NodeAffinity(affinity)).Match(node)
				if err != nil || carried != own {
					t.Errorf("gpu %q: the guest matches: %t (%v), its pod: %t", gpu, carried, err, own)
				}
			}
		})
	}
}

// A virtual node has those labels by which its provider's nodes can be selected
// without doubt.
func TestLabels(t *testing.T) {
	classes := func() []broker.NodeClass {
		return []broker.NodeClass{
			{Labels: map[string]string{"region": "it", "zone": "a", "gpu": "a100", corev1.LabelArchStable: "amd64"}},
			{Labels: map[string]string{"region": "it", "zone": "b", corev1.LabelArchStable: "arm64"}},
			// Not one that guests can run on.
			{Labels: map[string]string{"zone": "c"}, Taints: []corev1.Taint{{Key: "node-role.kubernetes.io/control-plane", Effect: corev1.TaintEffectNoSchedule}}},
		}
	}
	in := func(key string) *corev1.NodeSelector {
		return &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: key, Operator: corev1.NodeSelectorOpExists}}}}}
	}
	sets := []broker.PodSet{{NodeSelector: map[string]string{"zone": "a", "gpu": "a100", corev1.LabelArchStable: "amd64"}}, {NodeAffinity: in("region")}}
	for name, c := range map[string]struct {
		carried       bool
		first, second map[string]string
		node          map[string]string
	}{
		"guests carry their selection": {
			true, map[string]string{"region": "it", "gpu": "a100", corev1.LabelArchStable: "amd64"}, map[string]string{"region": "it", corev1.LabelArchStable: "arm64"},
			map[string]string{"region": "it", "gpu": "a100"},
		},
		"guests do not": {
			false, map[string]string{"region": "it", corev1.LabelArchStable: "amd64"}, map[string]string{"region": "it", corev1.LabelArchStable: "arm64"},
			map[string]string{"region": "it"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := classes()
			guest.Selectable(got, c.carried)
			if diff := cmp.Diff([]map[string]string{c.first, c.second}, []map[string]string{got[0].Labels, got[1].Labels}); diff != "" {
				t.Errorf("labels of the classes (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.node, guest.NodeLabels(got, sets)); diff != "" {
				t.Errorf("labels of the virtual node (-want +got):\n%s", diff)
			}
			if labels := guest.NodeLabels(got, []broker.PodSet{{}}); labels != nil {
				t.Errorf("labels that no pod selects: %v", labels)
			}
		})
	}
}
