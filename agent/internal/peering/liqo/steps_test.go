package liqo

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func list(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

func TestNextMessageOfAHandshake(t *testing.T) {
	now := time.Unix(1000, 0)
	const patience = 3 * time.Second
	heard := func(kinds ...kind) map[kind]message {
		out := map[kind]message{}
		for _, k := range kinds {
			out[k] = samples[k]
		}
		return out
	}
	cases := map[string]struct {
		reason string
		heard  map[kind]message
		said   map[kind]time.Time
		say    kind
		answer kind
		want   string
	}{
		"nothing yet":        {reason: "it begins with a Hello", say: kindHello, want: "Greeting"},
		"just greeted":       {reason: "an answer takes its time", said: map[kind]time.Time{kindHello: now.Add(-time.Second)}, want: "Greeting"},
		"greeted in vain":    {reason: "messages get lost", said: map[kind]time.Time{kindHello: now.Add(-patience)}, say: kindHello, want: "Greeting"},
		"offered":            {reason: "an Offer is answered", heard: heard(kindOffer), say: kindRequest, answer: kindOffer, want: "Requesting"},
		"requested":          {reason: "signing takes its time", heard: heard(kindOffer), said: map[kind]time.Time{kindRequest: now.Add(-time.Second)}, answer: kindOffer, want: "Requesting"},
		"requested in vain":  {reason: "messages get lost", heard: heard(kindOffer), said: map[kind]time.Time{kindRequest: now.Add(-patience)}, say: kindRequest, answer: kindOffer, want: "Requesting"},
		"granted":            {reason: "a Grant ends it", heard: heard(kindOffer, kindGrant), answer: kindGrant, want: "Granted"},
		"refused":            {reason: "the reason is reported, in time it begins again", heard: heard(kindOffer, kindRefusal), said: map[kind]time.Time{kindHello: now.Add(-2 * patience)}, answer: kindRefusal, want: "Refused"},
		"refused long since": {reason: "what was wrong may be right now", heard: heard(kindRefusal), said: map[kind]time.Time{kindHello: now.Add(-5 * patience)}, say: kindHello, answer: kindRefusal, want: "Refused"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			c := &conversation{heard: tc.heard, said: tc.said}
			got := c.next(7, now, patience)
			if got.say != tc.say || got.answer.Kind != tc.answer || got.progress.Reason != tc.want || got.progress.Done {
				t.Errorf("%s: got %+v", tc.reason, got)
			}
			if other := c.next(8, now, patience); other.answer.Kind != "" {
				t.Errorf("an answer to session 7 was taken for one to session 8: %+v", other)
			}
		})
	}
}

func TestTarget(t *testing.T) {
	cases := map[string]struct {
		capacity peering.Capacity
		known    corev1.ResourceList
		want     corev1.ResourceList
	}{
		"exact":                      {capacity: peering.Capacity{Resources: list("cpu", "1333m", "memory", "1234567891"), Pods: 3}, want: list("cpu", "1333m", "memory", "1234567891", "pods", "3")},
		"parked":                     {want: list("cpu", "1m", "memory", "1Mi", "pods", "0")},
		"parked, whatever the pods":  {capacity: peering.Capacity{Pods: 3}, want: list("cpu", "1m", "memory", "1Mi", "pods", "0")},
		"a GPU":                      {capacity: peering.Capacity{Resources: list("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "2"), Pods: 1}, want: list("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "2", "pods", "1")},
		"what there was is zero now": {known: list("nvidia.com/gpu", "2", "cpu", "4"), want: list("cpu", "1m", "memory", "1Mi", "pods", "0", "nvidia.com/gpu", "0")},
		"pods that ask for nothing":  {capacity: peering.Capacity{Resources: list("ephemeral-storage", "1Gi"), Pods: 2}, want: list("cpu", "1m", "memory", "1Mi", "pods", "2", "ephemeral-storage", "1Gi")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := target(tc.capacity, tc.known)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestLists(t *testing.T) {
	if diff := cmp.Diff(list("cpu", "1", "memory", "0"), atMost(list("cpu", "2", "memory", "1Gi"), list("cpu", "1", "pods", "9"))); diff != "" {
		t.Errorf("atMost (-want +got):\n%s", diff)
	}
	for _, tc := range []struct {
		a, b corev1.ResourceList
		want bool
	}{
		{list("cpu", "1"), list("cpu", "1000m"), true},
		{list("cpu", "1", "nvidia.com/gpu", "0"), list("cpu", "1"), true},
		{list("cpu", "1"), list("cpu", "1", "nvidia.com/gpu", "1"), false},
		{list("cpu", "1001m"), list("cpu", "1"), false},
		{nil, nil, true},
	} {
		if same(tc.a, tc.b) != tc.want || same(tc.b, tc.a) != tc.want {
			t.Errorf("same(%v, %v) is not %v", tc.a, tc.b, tc.want)
		}
	}
	if answerTo(list("cpu", "1", "nvidia.com/gpu", "0")) != answerTo(list("cpu", "1000m")) {
		t.Error("equal requests have different marks")
	}
	if answerTo(list("cpu", "1")) == answerTo(list("cpu", "2")) {
		t.Error("different requests have the same mark")
	}
}

func TestDecide(t *testing.T) {
	held := list("cpu", "2", "memory", "4Gi", "pods", "4")
	cases := map[string]struct {
		reason    string
		requested corev1.ResourceList
		total     corev1.ResourceList
		finished  corev1.ResourceList
		second    bool
		want      corev1.ResourceList
		denied    bool
		cordoned  bool
	}{
		"within the total":        {reason: "exactly what was asked for", requested: list("cpu", "500m", "memory", "1Gi", "pods", "1"), total: held, want: list("cpu", "500m", "memory", "1Gi", "pods", "1")},
		"all of it":               {reason: "up to the last unit", requested: held, total: held, want: held},
		"more than held":          {reason: "denied, and cut to the total", requested: list("cpu", "3", "memory", "1Gi", "pods", "1"), total: held, want: list("cpu", "2", "memory", "1Gi", "pods", "1"), denied: true},
		"a resource that is not":  {reason: "no hold, no GPU", requested: list("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "1", "pods", "1"), total: held, want: list("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "0", "pods", "1"), denied: true},
		"parked with nothing":     {reason: "a parked node costs next to nothing, but no guest starts", requested: list("cpu", "1m", "memory", "1Mi", "pods", "0"), total: list("pods", "0"), want: list("cpu", "1m", "memory", "1Mi", "pods", "0"), cordoned: true},
		"parked with holds":       {reason: "the consumer has yet to grow it", requested: list("cpu", "1m", "memory", "1Mi", "pods", "0"), total: held, want: list("cpu", "1m", "memory", "1Mi", "pods", "0")},
		"everything with nothing": {reason: "a hold that ended ends the right", requested: held, total: nil, want: list("cpu", "1m", "memory", "1Mi", "pods", "0"), denied: true, cordoned: true},
		"finished guests":         {reason: "Liqo counts them, the consumer's scheduler does not", requested: held, total: held, finished: list("cpu", "1", "memory", "1Gi"), want: list("cpu", "3", "memory", "5Gi", "pods", "4")},
		"a second slice":          {reason: "a hold is granted once", requested: held, total: held, second: true, want: list("cpu", "1m", "memory", "1Mi", "pods", "0"), denied: true, cordoned: true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := decide(tc.requested, tc.total, tc.finished, !tc.second)
			if !same(got.resources, tc.want) {
				t.Errorf("%s: granted %v, want %v", tc.reason, got.resources, tc.want)
			}
			if (got.status == authv1beta1.ResourceSliceConditionDenied) != tc.denied || got.cordoned != tc.cordoned {
				t.Errorf("%s: got %+v", tc.reason, got)
			}
			if got.message == "" || got.reason == "" {
				t.Errorf("no reason is given: %+v", got)
			}
		})
	}
}

func TestNodeShows(t *testing.T) {
	want := list("cpu", "1500m", "memory", "1Gi", "pods", "2")
	good := func(change func(*corev1.Node)) *corev1.Node {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris", Labels: map[string]string{broker.LabelProvider: "paris", broker.LabelNodeType: broker.NodeTypeVirtual}}}
		node.Spec.Taints = []corev1.Taint{{Key: broker.TaintOverflow, Value: "paris", Effect: corev1.TaintEffectNoSchedule}}
		node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
		node.Status.Allocatable = list("cpu", "1500m", "memory", "1Gi", "pods", "2", "nvidia.com/gpu", "0")
		change(node)
		return node
	}
	cases := map[string]struct {
		change func(*corev1.Node)
		absent bool
		want   string
	}{
		"ready":          {change: func(*corev1.Node) {}},
		"absent":         {change: func(*corev1.Node) {}, absent: true, want: "is not there yet"},
		"unmarked":       {change: func(n *corev1.Node) { n.Spec.Taints = nil }, want: "does not carry Spillway's taint and labels yet"},
		"not ready":      {change: func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }, want: "is not Ready yet"},
		"a milliCPU off": {change: func(n *corev1.Node) { n.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("1501m") }, want: "does not show the capacity yet"},
		"a byte off":     {change: func(n *corev1.Node) { n.Status.Allocatable[corev1.ResourceMemory] = resource.MustParse("1073741823") }, want: "does not show the capacity yet"},
		"a GPU too much": {change: func(n *corev1.Node) { n.Status.Allocatable["nvidia.com/gpu"] = resource.MustParse("1") }, want: "does not show the capacity yet"},
		"still cordoned": {change: func(n *corev1.Node) {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule})
		}, want: "still has taint " + corev1.TaintNodeUnschedulable},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			if got := nodeShows(good(tc.change), !tc.absent, "paris", want, false); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestNextStageOfATeardown(t *testing.T) {
	// Everything there is, taken away one after another in the order asked for.
	virtualNode := &offloadingv1beta1.VirtualNode{Spec: offloadingv1beta1.VirtualNodeSpec{Template: &offloadingv1beta1.DeploymentTemplate{}}}
	left := remains{
		virtualNode: virtualNode, pods: make([]corev1.Pod, 1), kubelets: make([]corev1.Pod, 1), node: &corev1.Node{}, slice: &authv1beta1.ResourceSlice{},
		maps: make([]offloadingv1beta1.NamespaceMap, 1), offloadings: make([]offloadingv1beta1.NamespaceOffloading, 1),
		credentials: []client.Object{&authv1beta1.Identity{}}, namespace: &corev1.Namespace{}, foreignCluster: &liqov1beta1.ForeignCluster{}, session: 7,
	}
	steps := []struct {
		want stage
		done func()
	}{
		{stagePods, func() { left.pods = nil }},
		{stageKubelet, func() {
			virtualNode.Labels = map[string]string{labelWebhookSkip: "true"}
			virtualNode.Spec.Template.Spec.Replicas = new(int32)
		}},
		{stageKubelet, func() { left.kubelets = nil }},
		{stageVirtualNode, func() { left.virtualNode = nil }},
		{stageNode, func() { left.node = nil }},
		{stageSlice, func() { left.slice = nil }},
		{stageMaps, func() { left.maps = nil }},
		{stageOffloadings, func() { left.offloadings = nil }},
		{stageIdentity, func() { left.credentials = nil }},
		{stageProvider, func() { left.released = true }},
		{stageNamespace, func() { left.namespace = nil }},
		{stageForeignCluster, func() { left.foreignCluster = nil }},
		{stageNothing, func() {}},
	}
	for _, step := range steps {
		if got := left.next(); got != step.want {
			t.Fatalf("got %s, want %s", got, step.want)
		}
		step.done()
	}
	for name, tc := range map[string]struct {
		left remains
		want stage
	}{
		"never entered":             {remains{}, stageNothing},
		"never greeted":             {remains{namespace: &corev1.Namespace{}, session: 7}, stageProvider},
		"also lends, to be told":    {remains{namespace: &corev1.Namespace{}, foreignCluster: &liqov1beta1.ForeignCluster{}, session: 7, released: true, shared: true}, stageNamespace},
		"also lends, told":          {remains{namespace: &corev1.Namespace{}, foreignCluster: &liqov1beta1.ForeignCluster{}, shared: true}, stageNothing},
		"only a summary is left":    {remains{foreignCluster: &liqov1beta1.ForeignCluster{}}, stageForeignCluster},
		"a summary of joined nets":  {remains{foreignCluster: &liqov1beta1.ForeignCluster{}, shared: true}, stageNothing},
		"somebody deleted it first": {remains{virtualNode: &offloadingv1beta1.VirtualNode{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: time.Unix(1, 0)}}}, kubelets: make([]corev1.Pod, 1)}, stageVirtualNode},
		"a node that nobody serves": {remains{node: &corev1.Node{}}, stageNode},
	} {
		if got := tc.left.next(); got != tc.want {
			t.Errorf("%s: got %s, want %s", name, got, tc.want)
		}
	}
}

func TestMapping(t *testing.T) {
	maps := []offloadingv1beta1.NamespaceMap{{
		Spec: offloadingv1beta1.NamespaceMapSpec{DesiredMapping: map[string]string{"a": "a-rome", "b": "b-rome"}},
		Status: offloadingv1beta1.NamespaceMapStatus{CurrentMapping: map[string]offloadingv1beta1.RemoteNamespaceStatus{
			"a": {Phase: offloadingv1beta1.MappingAccepted}, "c": {Phase: offloadingv1beta1.MappingAccepted},
		}},
	}}
	for namespace, want := range map[string]offloadingv1beta1.MappingPhase{"a": offloadingv1beta1.MappingAccepted, "b": "", "c": ""} {
		if got := mapping(maps, namespace); got != want {
			t.Errorf("%s: got %q, want %q", namespace, got, want)
		}
	}
	maps[0].DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	if got := mapping(maps, "a"); got != "" {
		t.Errorf("a map that is going still counts: %q", got)
	}
}

func TestQuotaOf(t *testing.T) {
	requests := func(pairs ...string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Requests: list(pairs...)}
	}
	pod := &corev1.PodSpec{
		Containers:     []corev1.Container{{Resources: requests("cpu", "100m", "memory", "1Gi")}, {Resources: requests("cpu", "200m")}},
		InitContainers: []corev1.Container{{Resources: requests("cpu", "250m", "memory", "2Gi")}},
	}
	if got := quotaOf(pod); !same(got, list("cpu", "300m", "memory", "2Gi")) {
		t.Errorf("got %v", got)
	}
}
