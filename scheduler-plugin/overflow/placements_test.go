package overflow

import (
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// recount compares placements with a sum over the pods. It adds up one pod after the other and
// shares no counting with what it checks.
func recount(t *rapid.T, p *placements, pods map[types.UID]*corev1.Pod) {
	isVirtual := func(node string) bool {
		if n := p.nodes[node]; n != nil && n.node != nil {
			return n.node.Labels[broker.LabelProvider] != ""
		}
		return node != "home"
	}
	used, living, unresolved := map[usedBy]map[string]int32{}, map[demand.Key]map[string]int32{}, map[heldBy]int32{}
	onNode, virtual := map[string]amounts{}, map[string]bool{}
	type charged struct {
		pods    int32
		amounts amounts
	}
	held := map[string]charged{}
	for name, n := range p.nodes {
		if n.node != nil {
			onNode[name], virtual[name] = amounts{}, isVirtual(name)
		}
	}
	for _, pod := range pods {
		cpu, name, hold := pod.Spec.Containers[0].Resources.Requests.Cpu().MilliValue(), pod.Spec.NodeName, pod.Labels[broker.LabelHold]
		if onNode[name] == nil {
			onNode[name], virtual[name] = amounts{}, isVirtual(name)
		}
		onNode[name]["cpu"] += cpu
		onNode[name]["pods"]++
		if !isVirtual(name) {
			continue
		}
		at := fmt.Sprint(heldAt{hold, name}, pod.Namespace)
		sum := held[at]
		if sum.amounts == nil {
			sum.amounts = amounts{}
		}
		sum.pods++
		sum.amounts["cpu"] += cpu
		sum.amounts["pods"]++
		held[at] = sum
		key, resolved := p.keyOf(pod)
		if !resolved {
			unresolved[heldBy{pod.Namespace, hold, name}]++
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
		heldText[at] = fmt.Sprint(sum.pods, sum.amounts, sum.pods)
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
