package health_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var update = flag.Bool("update", false, "Write the golden files.")

var now = time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)

func before(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }

func deployment(name string, ready int32) appsv1.Deployment {
	return appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: appsv1.DeploymentSpec{Replicas: ptr.To[int32](2)}, Status: appsv1.DeploymentStatus{ReadyReplicas: ready}}
}

func lease(name string, renewed time.Duration) coordinationv1.Lease {
	return coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{
		HolderIdentity: ptr.To(name + "-x2x9k"), LeaseDurationSeconds: ptr.To[int32](15), RenewTime: ptr.To(metav1.NewMicroTime(now.Add(-renewed)))}}
}

func advertisement(name, id string, heard time.Duration) broker.ClusterAdvertisement {
	return broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: before(26 * time.Hour)}, Spec: broker.ClusterAdvertisementSpec{
		ClusterID: id, Timestamp: before(heard), Lending: broker.Lending{Enabled: true}, Cost: &broker.Cost{CPUCost: "0.04", MemoryCost: "0.005", Currency: "EUR"},
		Resources: broker.AdvertisedResources{Capacity: broker.FromList(expect.Resources("cpu", "16", "memory", "64Gi")),
			Allocatable: broker.FromList(expect.Resources("cpu", "15", "memory", "60Gi")), Allocated: broker.FromList(expect.Resources("cpu", "9", "memory", "20Gi"))}}}
}

func node(provider string, ready corev1.ConditionStatus, message string) corev1.Node {
	return corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(provider), CreationTimestamp: before(time.Hour), Labels: map[string]string{broker.LabelProvider: provider}}, Status: corev1.NodeStatus{
		Allocatable: expect.Resources("cpu", "4", "memory", "8Gi"), Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready, Message: message}}}}
}

func reservation(name string, position int32) broker.Reservation {
	r := broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, CreationTimestamp: before(90 * time.Second)}, Spec: broker.ReservationSpec{RequesterID: "rome"}}
	if r.Status.QueuePosition = position; position > 0 {
		r.Status.Conditions = []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}
	}
	return r
}

// rome is a consumer in which all is well.
func rome() *health.Observed {
	return &health.Observed{
		Now: now, System: broker.SystemNamespace,
		Deployments:    []appsv1.Deployment{deployment(health.Agent, 2), deployment(health.Scheduler, 2)},
		Leases:         []coordinationv1.Lease{lease(health.Agent, 2*time.Second), lease(health.Scheduler, time.Second)},
		Advertisements: []broker.ClusterAdvertisement{advertisement(health.CopyName, "rome", 12*time.Second)},
		Nodes:          []corev1.Node{node("paris", corev1.ConditionTrue, ""), node("berlin", corev1.ConditionTrue, "")},
		Reservations:   []broker.Reservation{reservation("web-1", 0), reservation("train-2", 2), reservation("train-1", 1)},
	}
}

var statuses = map[string]func(*health.Observed){
	"well": func(*health.Observed) {},
	"hub": func(o *health.Observed) {
		*o = health.Observed{Now: now, System: o.System, Deployments: []appsv1.Deployment{deployment(health.Broker, 1)}, Leases: []coordinationv1.Lease{lease(health.Broker, 0)},
			Advertisements: []broker.ClusterAdvertisement{advertisement("paris", "paris", 0), advertisement("berlin", "berlin", 0)}}
		o.Advertisements[0].Status.Active = true
		o.Reservations = []broker.Reservation{reservation("rome-7f3a", 1)}
		o.Reservations[0].Labels = map[string]string{broker.LabelRequester: "rome", broker.LabelSourceNamespace: "shop", broker.LabelSourceName: "web-1"}
	},
	"hub-late": func(o *health.Observed) { o.Advertisements[0].Spec.Timestamp = before(5 * time.Minute) },
	"hub-rare": func(o *health.Observed) { // it is set to report rarely
		o.Advertisements[0].Spec.Timestamp = before(5 * time.Minute)
		o.Deployments[0].Spec.Template.Spec.Containers = []corev1.Container{{Args: []string{"--cluster-id=rome", "--advertisement-requeue-interval=2m"}}}
	},
	"hub-lost": func(o *health.Observed) {
		o.Advertisements[0].Spec.Timestamp = before(7 * time.Minute)
		o.Nodes[0] = node("paris", corev1.ConditionUnknown, "The API server of paris has not answered for 2m0s.")
		o.Leases[1] = lease(health.Scheduler, 4*time.Minute)
	},
	"broker-unreachable": func(o *health.Observed) {
		o.Reservations[0].Status.Conditions = []metav1.Condition{{Type: broker.ConditionReported, Status: metav1.ConditionFalse, Reason: "BrokerUnreachable", Message: "connection refused"}}
	},
	"no-agent": func(o *health.Observed) { *o = health.Observed{Now: now, System: o.System} },
	"no-permission": func(o *health.Observed) {
		o.Deployments, o.Leases, o.Nodes, o.Advertisements = nil, nil, nil, nil
		for _, what := range []string{health.Deployments, health.Leases, explain.Nodes, health.Advertisements} {
			o.Unreadable = append(o.Unreadable, explain.Unreadable{What: what, Permission: "list " + what})
		}
	},
	"many": func(o *health.Observed) {
		o.Reservations, o.Nodes = nil, nil
		for i := range int32(10_000) {
			o.Reservations = append(o.Reservations, reservation(fmt.Sprint("job-", i), i+1))
		}
		for i := range 200 {
			o.Nodes = append(o.Nodes, node(fmt.Sprintf("p\x1b[2J%03d", i), corev1.ConditionTrue, ""))
		}
	},
}

// expectGolden compares with a golden file, and expects that a terminal shows only text.
func expectGolden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		expect.NoError(t, os.WriteFile(path, []byte(got), 0o644))
	}
	want, err := os.ReadFile(path)
	expect.NoError(t, err)
	if got != string(want) {
		t.Errorf("%s differs; -update writes it. Now:\n%s", path, got)
	}
	if i := strings.IndexFunc(got, func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }); i >= 0 {
		t.Errorf("a terminal gets %q", got[i:min(i+10, len(got))])
	}
}

func TestStatus(t *testing.T) {
	well := map[string]bool{"well": true, "many": true, "hub": true, "hub-rare": true, "no-permission": true}
	for name, change := range statuses {
		t.Run(name, func(t *testing.T) {
			o := rome()
			change(o)
			report := health.Status(o)
			expectGolden(t, "status-"+name, report.Text(explain.Style{Width: 80}))
			if report.Well != well[name] {
				t.Errorf("all is well: %t", report.Well)
			}
		})
	}
}

// TestStatusGrows: with the Reservations, not with their square. Allocations are counted, which
// the machine's load does not change.
func TestStatusGrows(t *testing.T) {
	of := func(reservations int) float64 {
		o := rome()
		for i := range reservations {
			o.Reservations = append(o.Reservations, reservation(fmt.Sprint("job-", i), int32(i)))
		}
		return testing.AllocsPerRun(1, func() { health.Status(o) })
	}
	if few, many := of(1000), of(10_000); many > 12*few {
		t.Errorf("1,000 Reservations take %.0f allocations, 10,000 %.0f", few, many)
	}
}

// pods that run in paris, of 3 cores, and one that has ended.
func overflowed() []corev1.Pod {
	pod := corev1.Pod{Spec: corev1.PodSpec{NodeName: "spillway-paris", Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "3", "memory", "1Gi")}}}}}
	ended := *pod.DeepCopy()
	ended.Status.Phase = corev1.PodSucceeded
	return []corev1.Pod{pod, ended}
}

func grant(provider, cpu, price string) broker.ReservationInstruction {
	return broker.ReservationInstruction{Spec: broker.ReservationInstructionSpec{TargetClusterID: provider, RequestedResources: broker.FromList(expect.Resources("cpu", cpu, "memory", "8Gi")), PricePerHour: price}}
}

func TestClusters(t *testing.T) {
	o := rome()
	o.Instructions = []broker.ReservationInstruction{grant("paris", "4", "0.20 EUR"), grant("paris", "1", "0.055 EUR"), grant("oslo\x1b[2J", "2", "")}
	o.Nodes[1].Spec.Unschedulable = true
	hub := &health.Observed{Now: now, System: o.System, Advertisements: []broker.ClusterAdvertisement{advertisement("paris", "paris", 0), advertisement("wien", "wien", 0)}}
	for i := range hub.Advertisements {
		hub.Advertisements[i].Status = broker.ClusterAdvertisementStatus{Active: i == 0, Reserved: broker.FromList(expect.Resources("cpu", "5")), Available: broker.FromList(expect.Resources("cpu", "1", "nvidia.com/gpu", "2"))}
		hub.Advertisements[i].Spec.Region, hub.Advertisements[i].Spec.Zone = "eu", "eu-1"
		hub.Advertisements[i].Spec.ObservedHolds = []broker.ObservedHold{{Requester: "rome", Used: broker.FromList(expect.Resources("cpu", "3"))}, {Requester: "bonn", Used: broker.FromList(expect.Resources("cpu", "1"))}}
	}
	hub.Advertisements[1].Spec.NodeClasses = []broker.NodeClass{{Cost: &broker.Cost{CPUCost: "0.01", Currency: "EUR"}}}
	style := explain.Style{}
	consumer := health.Clusters(o, overflowed(), nil)
	expectGolden(t, "clusters-consumer", consumer.Text(style))
	both := health.Clusters(o, overflowed(), hub)
	expectGolden(t, "clusters-both", both.Text(style))
	wide := health.Clusters(hub, nil, nil)
	expectGolden(t, "clusters-hub", wide.Text(explain.Style{Wide: true}))
	none := health.Clusters(&health.Observed{Now: now, Unreadable: []explain.Unreadable{{What: explain.Nodes, Permission: "list nodes"}}}, nil, nil)
	expectGolden(t, "clusters-none", none.Text(style))
}
