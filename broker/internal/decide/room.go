package decide

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	scheduling "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
)

// offer is what one cluster can take of an ask.
type offer struct {
	cluster *Cluster
	// available by the ledger, before the placement.
	available vector
	placed    broker.HeldCapacity
	complete  bool
	score     int64
	// reason and message say why not all of it.
	reason, message string
}

// fit packs an ask into a cluster's free places, after all that holds may still
// claim there.
func fit(ask *Request, cluster *Cluster) *offer {
	_, available := ledger.Account(&cluster.Spec, &broker.ClusterAdvertisementStatus{Holds: cluster.Holds})
	o := &offer{cluster: cluster, available: room(available), complete: true}
	places := placesOf(cluster)
	places.claim(cluster)
	left := o.available

	if len(ask.Want.PodSets) == 0 {
		total := need(ask.Want.Totals)
		free := places.sum(broker.PodSet{})
		switch {
		case total.times(left) == 0:
			o.refuse(ReasonNoRoom, fmt.Sprintf("The whole needs %s; %s is left to lend%s.",
				total.figures(total.names()), left.figures(total.names()), account(cluster, total.names())))
		case total.times(free) == 0:
			o.refuse(ReasonNoRoom, fmt.Sprintf("The whole needs %s; its free places sum up to %s%s.",
				total.figures(total.names()), free.figures(total.names()), account(cluster, total.names())))
		default:
			o.placed = *ask.Want.DeepCopy()
		}
		return o
	}

	var placed []broker.PodSet
	var short []string
	reasons := map[string]bool{}
	for _, set := range decreasing(ask.Want.PodSets) {
		request, count := need(set.Requests), int64(set.Count)
		n := places.place(set, request, min(count, request.times(left)))
		left = left.take(request, n)
		if n > 0 {
			taken := set
			taken.Count = int32(n)
			placed = append(placed, taken)
		}
		if n < count {
			reason, message := places.obstacle(set, request, left)
			reasons[reason] = true
			short = append(short, fmt.Sprintf("It takes %d of %d pods of %q: %s", n, count, set.Name, message))
		}
	}
	slices.SortFunc(placed, func(a, b broker.PodSet) int { return cmp.Compare(a.Name, b.Name) })
	o.placed = capacity.OfPodSets(placed)
	if len(short) > 0 {
		reason := ReasonNoRoom
		if len(placed) > 0 {
			reason = ReasonNotEnoughRoom
		} else if reasons[ReasonNoMatchingNodes] {
			reason = ReasonNoMatchingNodes
		}
		slices.Sort(short)
		o.refuse(reason, strings.Join(short, " "))
	}
	return o
}

func (o *offer) refuse(reason, message string) {
	o.complete, o.reason, o.message = false, reason, message
}

// place is a number of nodes of one class with the same room each.
type place struct {
	class *broker.NodeClass
	nodes int64
	free  vector
	pods  int64
}

// fits is how many pods of a request one node of the place takes.
func (p place) fits(request vector) int64 { return min(p.pods, request.times(p.free)) }

// places are a cluster's free places, in the order they are filled in: as
// advertised, the largest of each class first. Equal nodes stay together, so
// that packing costs by the number of shapes and not of nodes.
type places struct {
	cluster *Cluster
	list    []place
}

func placesOf(cluster *Cluster) *places {
	p := &places{cluster: cluster}
	for i := range cluster.Spec.NodeClasses {
		class := &cluster.Spec.NodeClasses[i]
		for _, shape := range class.FreeShapes {
			if shape.Nodes > 0 && shape.Pods > 0 {
				p.list = append(p.list, place{class: class, nodes: int64(shape.Nodes), free: room(shape.Free), pods: int64(shape.Pods)})
			}
		}
	}
	return p
}

// place puts up to count pods of a set where they fit first and returns how
// many it put.
func (p *places) place(set broker.PodSet, request vector, count int64) (put int64) {
	admitted := map[*broker.NodeClass]bool{}
	list := make([]place, 0, len(p.list)+2)
	for _, at := range p.list {
		admits, known := admitted[at.class]
		if !known {
			admits = objection(at.class, set) == ""
			admitted[at.class] = admits
		}
		each := at.fits(request)
		if !admits || each == 0 || put == count {
			list = append(list, at)
			continue
		}
		n := min(count-put, each*at.nodes)
		full, rest := n/each, n%each
		add := func(nodes, taken int64) {
			if nodes > 0 {
				list = append(list, place{class: at.class, nodes: nodes, free: at.free.take(request, taken), pods: at.pods - taken})
			}
		}
		add(full, each)
		untouched := at.nodes - full
		if rest > 0 {
			add(1, rest)
			untouched--
		}
		add(untouched, 0)
		put += n
	}
	p.list = list
	return put
}

func saturated(a, b int64) int64 {
	if a > 0 && b > math.MaxInt64/a {
		return math.MaxInt64
	}
	return a * b
}

// spread takes a divisible total out of the places that admit any pod, one
// after the other.
func (p *places) spread(total vector) {
	total = maps.Clone(total)
	var list []place
	for _, at := range p.list {
		for at.nodes > 0 && !total.zero() && objection(at.class, broker.PodSet{}) == "" {
			one := place{class: at.class, nodes: 1, free: maps.Clone(at.free), pods: at.pods}
			var some bool
			for name, wanted := range total {
				got := min(wanted, one.free[name])
				one.free[name] -= got
				total[name] -= got
				some = some || got > 0
			}
			if !some {
				break
			}
			list = append(list, one)
			at.nodes--
		}
		if at.nodes > 0 {
			list = append(list, at)
		}
	}
	p.list = list
}

// sum is the room of all places that admit a set, together.
func (p *places) sum(set broker.PodSet) vector {
	out := vector{}
	for _, at := range p.list {
		if objection(at.class, set) != "" {
			continue
		}
		for name, amount := range at.free {
			if all := saturated(amount, at.nodes); out[name] > math.MaxInt64-all {
				out[name] = math.MaxInt64
			} else {
				out[name] += all
			}
		}
	}
	return out
}

// claim fills the places with what each consumer's holds are charged for and
// its guests do not use yet: the guests are not in the places that are
// advertised as free.
func (p *places) claim(cluster *Cluster) {
	type claims struct {
		held  broker.HeldCapacity
		total broker.ResourceQuantities
	}
	byRequester := map[string]*claims{}
	var requesters []string
	for _, hold := range cluster.Holds {
		c := byRequester[hold.Requester]
		if c == nil {
			c = &claims{}
			byRequester[hold.Requester] = c
			requesters = append(requesters, hold.Requester)
		}
		charged := ledger.Charged(hold)
		if len(charged.PodSets) == 0 {
			c.total = broker.FromList(broker.AddTo(c.total.List(), charged.Totals.List()))
			continue
		}
		for _, set := range charged.PodSets {
			// Sets of several holds may share a name and still differ in more
			// than their requests.
			set.Name = hold.ReservationName + "/" + set.Name
			c.held.PodSets = append(c.held.PodSets, set)
		}
	}
	slices.Sort(requesters)
	for _, requester := range requesters {
		c := byRequester[requester]
		used, guests := observed(cluster, requester)
		sets := decreasing(c.held.PodSets)
		seen, used := explain(sets, used, guests)
		for i, set := range sets {
			p.place(set, need(set.Requests), int64(set.Count)-seen[i])
		}
		total := need(c.total)
		for name, amount := range total {
			total[name] = max(0, amount-used[name])
		}
		p.spread(total)
	}
}

// observed is what a consumer's guests use, and how many they are.
func observed(cluster *Cluster, requester string) (used vector, guests int64) {
	used = vector{}
	for _, hold := range cluster.Spec.ObservedHolds {
		if hold.Requester == requester {
			guests += int64(hold.Pods)
			for name, amount := range room(hold.Used) {
				used[name] += amount
			}
		}
	}
	return used, guests
}

// explain says how many pods of each set (in decreasing order) are among the
// guests, and how much of what they use is left unexplained. Where it cannot be
// known, the guests are taken for the smaller ones: the larger places stay
// claimed.
func explain(sets []broker.PodSet, used vector, guests int64) (seen []int64, rest vector) {
	try := func(order []int) (seen []int64, rest vector, all bool) {
		seen, rest = make([]int64, len(sets)), maps.Clone(used)
		left := guests
		for _, i := range order {
			request := need(sets[i].Requests)
			n := min(left, int64(sets[i].Count), request.times(rest))
			seen[i], rest, left = n, rest.take(request, n), left-n
		}
		return seen, rest, left == 0 && rest.zero()
	}
	order := make([]int, len(sets))
	for i := range order {
		order[i] = i
	}
	if seen, rest, all := try(order); all {
		return seen, rest
	}
	slices.Reverse(order)
	seen, rest, _ = try(order)
	return seen, rest
}

// decreasing orders sets by what one pod needs, the largest first: by devices,
// then cpu, then memory, then the rest.
func decreasing(sets []broker.PodSet) []broker.PodSet {
	sorted := slices.Clone(sets)
	slices.SortStableFunc(sorted, func(a, b broker.PodSet) int {
		x, y := need(a.Requests), need(b.Requests)
		return cmp.Or(
			cmp.Compare(y[broker.ResourceGPU], x[broker.ResourceGPU]),
			cmp.Compare(y[corev1.ResourceCPU], x[corev1.ResourceCPU]),
			cmp.Compare(y[corev1.ResourceMemory], x[corev1.ResourceMemory]),
			cmp.Compare(y[corev1.ResourceEphemeralStorage], x[corev1.ResourceEphemeralStorage]),
			cmp.Compare(a.Name, b.Name),
		)
	})
	return sorted
}

// obstacle says what would keep one more pod of a set away.
func (p *places) obstacle(set broker.PodSet, request, left vector) (reason, message string) {
	kinds := request.names()
	needs := "needs " + request.figures(kinds) + " for one pod"
	if len(kinds) == 0 {
		needs = "needs a place for one pod"
	}
	var objections []string
	for i := range p.cluster.Spec.NodeClasses {
		class := &p.cluster.Spec.NodeClasses[i]
		if why := objection(class, set); why != "" {
			objections = append(objections, fmt.Sprintf("node class %q %s", class.Name, why))
		}
	}
	if len(objections) > 0 && len(objections) == len(p.cluster.Spec.NodeClasses) {
		return ReasonNoMatchingNodes, "no node may run them: " + strings.Join(objections, "; ") + "."
	}
	if request.times(left) == 0 {
		return ReasonNoRoom, fmt.Sprintf("%s; %s is left to lend%s.", needs, left.figures(kinds), account(p.cluster, kinds))
	}
	largest := -1
	for i, at := range p.list {
		if objection(at.class, set) == "" && (largest < 0 || larger(at, p.list[largest], kinds)) {
			largest = i
		}
	}
	if largest < 0 {
		return ReasonNoRoom, fmt.Sprintf("%s; no node has any place left%s.", needs, account(p.cluster, kinds))
	}
	if p.list[largest].pods == 0 {
		return ReasonNoRoom, fmt.Sprintf("%s; every node runs as many pods as it may.", needs)
	}
	return ReasonNoRoom, fmt.Sprintf("%s; the largest free place has %s%s.", needs, p.list[largest].free.figures(kinds), account(p.cluster, kinds))
}

// larger compares two places by the kinds a pod asks for. One that may run no
// more pods is smaller than any other.
func larger(a, b place, kinds []corev1.ResourceName) bool {
	if (a.pods > 0) != (b.pods > 0) {
		return a.pods > 0
	}
	for _, name := range kinds {
		if a.free[name] != b.free[name] {
			return a.free[name] > b.free[name]
		}
	}
	return false
}

// account tells where the rest of a cluster is, by kinds.
func account(cluster *Cluster, kinds []corev1.ResourceName) string {
	if len(kinds) == 0 {
		return ""
	}
	reserved, _ := ledger.Account(&cluster.Spec, &broker.ClusterAdvertisementStatus{Holds: cluster.Holds})
	return fmt.Sprintf(" (allocatable %s, in use %s, reserved %s)",
		room(cluster.Spec.Resources.Allocatable).figures(kinds),
		need(cluster.Spec.Resources.Allocated).figures(kinds),
		need(reserved).figures(kinds))
}

// objection says why the nodes of a class do not run pods of a set, "" if they
// do.
func objection(class *broker.NodeClass, set broker.PodSet) string {
	labels := class.Labels
	if _, told := labels[corev1.LabelArchStable]; !told && class.Arch != "" {
		labels = map[string]string{corev1.LabelArchStable: class.Arch}
		maps.Copy(labels, class.Labels)
	}
	for _, key := range slices.Sorted(maps.Keys(set.NodeSelector)) {
		if have, ok := labels[key]; !ok || have != set.NodeSelector[key] {
			return fmt.Sprintf("lacks label %s=%s", key, set.NodeSelector[key])
		}
	}
	if set.NodeAffinity != nil {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: labels}}
		if match, err := nodeaffinity.NewLazyErrorNodeSelector(set.NodeAffinity).Match(node); err != nil {
			return "cannot be compared with the pods' node affinity: " + err.Error()
		} else if !match {
			return "does not match the pods' node affinity"
		}
	}
	taint, untolerated := scheduling.FindMatchingUntoleratedTaint(logr.Discard(), class.Taints, set.Tolerations, func(t *corev1.Taint) bool {
		return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
	}, false)
	if untolerated {
		return "has taint " + taint.ToString() + ", which the pods do not tolerate"
	}
	return ""
}
