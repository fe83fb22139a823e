package usage

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// podOf returns a pod of a Job that requests CPU.
func podOf(job, name, cpu string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, UID: types.UID(name), OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "example.com/v1", Kind: "Batch", Name: job, UID: types.UID(job), Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}}},
	}
}

// keyOfPod is the key of a pod whose owner has none itself.
func keyOfPod(pod *corev1.Pod) demand.Key {
	owner, _ := demand.OwnerOf(pod, func(string, metav1.OwnerReference) (*metav1.OwnerReference, bool) { return nil, true })
	shape, _ := demand.ShapeOf(pod)
	return demand.Key{Namespace: pod.Namespace, OwnerUID: owner.UID, Shape: shape}
}

func virtualNode(provider string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(provider), Labels: map[string]string{broker.LabelProvider: provider}}}
}

// recount compares placements with a sum over the pods. It adds up one pod after the other and
// shares no counting with what it checks.
func recount(t *rapid.T, p *Placements, pods map[types.UID]*corev1.Pod) {
	isVirtual := func(node string) bool {
		if n := p.nodes[node]; n != nil && n.node != nil {
			return n.node.Labels[broker.LabelProvider] != ""
		}
		return node != "home"
	}
	used, living, unresolved := map[usedBy]map[string]int32{}, map[demand.Key]map[string]int32{}, int32(0)
	onNode, virtual := map[string]capacity.Vector{}, map[string]bool{}
	type charged struct {
		pods    int32
		amounts capacity.Vector
		keys    map[demand.Key]int32
	}
	held := map[string]charged{}
	for name, n := range p.nodes {
		if n.node != nil {
			onNode[name], virtual[name] = capacity.Vector{}, isVirtual(name)
		}
	}
	for _, pod := range pods {
		cpu, name, hold := pod.Spec.Containers[0].Resources.Requests.Cpu().MilliValue(), pod.Spec.NodeName, pod.Labels[broker.LabelHold]
		if onNode[name] == nil {
			onNode[name], virtual[name] = capacity.Vector{}, isVirtual(name)
		}
		onNode[name]["cpu"] += cpu
		onNode[name]["pods"] += 1000
		if !isVirtual(name) {
			continue
		}
		at := fmt.Sprint(heldAt{hold, name}, pod.Namespace)
		sum := held[at]
		if sum.amounts == nil {
			sum.amounts, sum.keys = capacity.Vector{}, map[demand.Key]int32{}
		}
		sum.pods++
		sum.amounts["cpu"] += cpu
		sum.amounts["pods"] += 1000
		key, resolved := p.keyOf(pod)
		sum.keys[key]++
		held[at] = sum
		if !resolved {
			unresolved++
			continue
		}
		by := usedBy{key, name}
		if used[by] == nil {
			used[by] = map[string]int32{}
		}
		used[by][hold]++
		if pod.DeletionTimestamp == nil {
			if living[key] == nil {
				living[key] = map[string]int32{}
			}
			living[key][hold]++
		}
	}
	heldText := map[string]string{}
	for at, sum := range held {
		heldText[at] = fmt.Sprint(sum.pods, sum.amounts, sum.keys, sum.pods)
	}
	for name, of := range map[string][2]any{
		"used": {p.used, used}, "charged": {charges(p), heldText}, "living": {p.living, living}, "unresolved": {p.unresolved, unresolved},
	} {
		if got, want := fmt.Sprint(of[0]), fmt.Sprint(of[1]); got != want {
			t.Fatalf("%s: got %s, want %s", name, got, want)
		}
	}
	for name, want := range onNode {
		got := p.nodes[name]
		if got == nil {
			t.Fatalf("%s is not known", name)
		}
		maps.DeleteFunc(got.used, isZero)
		if !maps.Equal(got.used, want) || got.virtual != virtual[name] {
			t.Fatalf("used on %s: got %v, virtual %t, want %v, virtual %t", name, got.used, got.virtual, want, virtual[name])
		}
	}
	if len(p.nodes) != len(onNode) || len(p.pods) != len(pods) {
		t.Fatalf("%d nodes with pods, want %d; %d pods, want %d", len(p.nodes), len(onNode), len(p.pods), len(pods))
	}
}

// TestPlacements: after any events, the counts are those of a recount of the pods.
func TestPlacements(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := NewPlacements(clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), func(pod *corev1.Pod) (demand.Key, bool) { return keyOfPod(pod), true })
		truth := map[types.UID]*corev1.Pod{} // as placed
		uid := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		node := rapid.SampledFrom([]string{"home", broker.VirtualNodeName("paris"), broker.VirtualNodeName("berlin")})
		pod := func(t *rapid.T, node string) *corev1.Pod {
			pod := podOf("crunch", uid.Draw(t, "pod"), rapid.SampledFrom([]string{"1", "2"}).Draw(t, "cpu"))
			pod.Spec.NodeName = node
			pod.Labels = map[string]string{broker.LabelHold: rapid.SampledFrom([]string{"h1", "h2"}).Draw(t, "hold"), broker.LabelShape: "s"}
			return pod
		}
		bound := map[types.UID]bool{}
		t.Repeat(map[string]func(*rapid.T){
			"bound": func(t *rapid.T) {
				b := pod(t, node.Draw(t, "node"))
				if rapid.Bool().Draw(t, "terminating") {
					b.DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
				}
				before := truth[b.UID]
				if before != nil && bound[b.UID] {
					b.Spec.NodeName = before.Spec.NodeName // it never changes
				}
				if before != nil && before.Spec.NodeName == b.Spec.NodeName && namedVirtual(b.Spec.NodeName) {
					defer func() { truth[b.UID].Labels[broker.LabelHold] = before.Labels[broker.LabelHold] }() // the label may, the charge not
				}
				p.SetPod(b)
				truth[b.UID], bound[b.UID] = b.DeepCopy(), true
			},
			"assumed": func(t *rapid.T) {
				b := pod(t, "")
				if bound[b.UID] {
					return
				}
				b.Spec.NodeName = node.Draw(t, "node")
				p.Assume(b, b.Spec.NodeName, b.Labels[broker.LabelHold])
				truth[b.UID] = b
			},
			"forgotten": func(t *rapid.T) {
				id := types.UID(uid.Draw(t, "pod"))
				p.Forget(id)
				if !bound[id] {
					delete(truth, id)
				}
			},
			"ended": func(t *rapid.T) {
				b := pod(t, "home")
				if b.Status.Phase = corev1.PodSucceeded; rapid.Bool().Draw(t, "deleted") {
					p.RemovePod(b.UID)
				} else {
					p.SetPod(b)
				}
				delete(truth, b.UID)
				delete(bound, b.UID)
			},
			"node": func(t *rapid.T) {
				n := virtualNode(rapid.SampledFrom([]string{"paris", "berlin"}).Draw(t, "cluster"))
				if rapid.Bool().Draw(t, "real") {
					n.Labels = nil
				}
				p.SetNode(n)
			},
			"": func(t *rapid.T) { recount(t, p, truth) },
		})
	})
}

// TestUsedOf: which pods count for the grant of a key, whose hold is r1.
func TestUsedOf(t *testing.T) {
	web, gang := demand.Key{Namespace: "shop", OwnerUID: "web", Shape: "s"}, demand.Key{Namespace: "shop", OwnerUID: "gang-1", Shape: "a"}
	other := func(key demand.Key, owner types.UID, shape string) demand.Key {
		key.OwnerUID, key.Shape = owner, shape
		return key
	}
	for name, tc := range map[string]struct {
		reason      string
		of, key     demand.Key // key is zero if the owner is unknown
		hold        string
		namespace   string
		used, lives int32
	}{
		"its own":                 {"the hold is that of its key", web, web, "r1", "shop", 1, 1},
		"a former one":            {"another Reservation of the key has replaced it", web, web, "r0", "shop", 1, 1},
		"a pool":                  {"it uses that", web, web, "pool", "shop", 0, 0},
		"unknown owner":           {"the label says what it uses", web, demand.Key{}, "r1", "shop", 1, 0},
		"unknown owner elsewhere": {"the hold is one of another namespace", web, demand.Key{}, "r1", "bank", 0, 0},
		"unknown owner of others": {"the label names another hold", web, demand.Key{}, "r2", "shop", 0, 0},
		"adopted":                 {"its owner has no grant: it uses what it was bound for", web, other(web, "new", "s"), "r1", "shop", 1, 0},
		"adopted with a grant":    {"its owner has one", web, other(web, "db", "s"), "r1", "shop", 0, 0},
		"of the gang":             {"it has a slot of its shape", gang, gang, "r1", "shop", 1, 1},
		"another of the gang":     {"it has a slot of another shape", gang, other(gang, "gang-1", "b"), "r1", "shop", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			p := NewPlacements(clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), func(*corev1.Pod) (demand.Key, bool) { return tc.key, tc.key != demand.Key{} })
			p.Pooled = func(hold string) bool { return hold == "pool" }
			p.Grants = func(key demand.Key) *Grants {
				return &Grants{Slots: map[string]int32{"paris": int32(strings.Count(string(key.OwnerUID), "db"))}}
			}
			pod := podOf("crunch", "crunch-0", "1")
			pod.Namespace, pod.Labels, pod.Spec.NodeName = tc.namespace, map[string]string{broker.LabelHold: tc.hold}, broker.VirtualNodeName("paris")
			p.SetPod(pod)
			if used, lives := p.UsedOf(tc.of, pod.Spec.NodeName, []Charge{{Label: "r1"}}), p.LivingOf(tc.of); used != tc.used || lives != tc.lives {
				t.Errorf("%s: %d use the grant and %d live, want %d and %d", tc.reason, used, lives, tc.used, tc.lives)
			}
			if p.RemovePod(pod.UID); len(p.Counted()) > 0 || p.unresolved != 0 || len(p.charged) > 0 {
				t.Errorf("the pod is gone, and counted: %v", p.Counted())
			}
		})
	}
}

func isZero(_ corev1.ResourceName, n int64) bool { return n == 0 }

// charges are what is charged to holds, to be compared.
func charges(p *Placements) map[string]string {
	all := map[string]string{}
	for at, byNamespace := range p.charged {
		for namespace, u := range byNamespace {
			var pods int32
			for _, shape := range u.shapes {
				pods += shape.pods
			}
			maps.DeleteFunc(u.amounts, isZero)
			all[fmt.Sprint(at, namespace)] = fmt.Sprint(u.count, u.amounts, u.keys, pods)
		}
	}
	return all
}

// TestAbsurdPod: what a node has in use is right again once a pod is gone that requests more than
// can be counted.
func TestAbsurdPod(t *testing.T) {
	p := NewPlacements(clocktesting.NewFakePassiveClock(time.Unix(1000, 0)), func(pod *corev1.Pod) (demand.Key, bool) { return keyOfPod(pod), true })
	for name, cpu := range map[string]string{"small": "1", "absurd": "10P"} {
		pod := podOf("crunch", name, cpu)
		pod.Spec.NodeName = "home"
		p.SetPod(pod)
	}
	p.RemovePod("absurd")
	if used := p.nodes["home"].used[corev1.ResourceCPU]; used != 1000 {
		t.Errorf("%d of CPU are in use", used)
	}
}
