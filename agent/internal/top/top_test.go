package top_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	tea "github.com/charmbracelet/bubbletea"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	"github.com/spillway-dev/spillway/agent/internal/top"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var update = flag.Bool("update", false, "Write the golden files.")

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// hub is a hub of some clusters, with as many Reservations, of which every third waits.
func hub(clusters, reservations int) *health.Observed {
	o := &health.Observed{Now: now, System: broker.SystemNamespace}
	amount := func(cpu int) broker.ResourceQuantities {
		return broker.FromList(expect.Resources("cpu", fmt.Sprint(cpu), "memory", fmt.Sprintf("%dGi", 2*cpu)))
	}
	for i := range clusters {
		id := fmt.Sprintf("cluster-%02d", i)
		o.Advertisements = append(o.Advertisements, broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Name: id}, Spec: broker.ClusterAdvertisementSpec{ClusterID: id,
			Lending: broker.Lending{Enabled: true}, Resources: broker.AdvertisedResources{Allocatable: amount(64)}, Cost: &broker.Cost{CPUCost: "0.04", Currency: "EUR"}},
			Status: broker.ClusterAdvertisementStatus{Active: i%7 != 3, Reserved: amount(8), Available: amount(56)}})
	}
	for i := range reservations {
		r := broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: fmt.Sprint("r-", i), CreationTimestamp: metav1.Time{Time: now.Add(-time.Duration(i) * time.Second)},
			Labels: map[string]string{broker.LabelRequester: fmt.Sprintf("cluster-%02d", i%clusters), broker.LabelSourceNamespace: "shop", broker.LabelSourceName: fmt.Sprint("web-", i)}},
			Spec: broker.ReservationSpec{RequesterID: fmt.Sprintf("cluster-%02d", i%clusters)}}
		if i%3 == 1 {
			r.Status = broker.ReservationStatus{Phase: broker.ReservationPending, QueuePosition: int32(i/3 + 1), Wanted: "2 pods: cpu 4", Conditions: []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue}}}
		} else {
			r.Status = broker.ReservationStatus{Phase: broker.ReservationActive, Allocations: []broker.Allocation{{Cluster: fmt.Sprintf("cluster-%02d", (i+1)%clusters), Accepted: i%5 != 0,
				Resources: amount(2), PodSets: []broker.PodSet{{Name: "pods", Count: 2}}, PricePerHour: "0.08 EUR"}}}
		}
		o.Reservations = append(o.Reservations, r)
	}
	return o
}

// rome is a consumer whose pods run in paris, with a Reservation of the hub that is not its own.
func rome() (*health.Observed, []corev1.Pod) {
	o := &health.Observed{Now: now, System: broker.SystemNamespace, Nodes: []corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris", Labels: map[string]string{broker.LabelProvider: "paris"}}}}}
	amount := broker.FromList(expect.Resources("cpu", "4", "memory", "2Gi"))
	o.Reservations = []broker.Reservation{{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}, Spec: broker.ReservationSpec{RequesterID: "rome"}, Status: broker.ReservationStatus{
		Phase: broker.ReservationActive, Allocations: []broker.Allocation{{Cluster: "paris", Accepted: true, Resources: amount, PricePerHour: "0.16 EUR"}}}}}
	o.Instructions = []broker.ReservationInstruction{{Spec: broker.ReservationInstructionSpec{TargetClusterID: "paris", RequestedResources: amount, PricePerHour: "0.16 EUR"}}}
	o.Unreadable = []explain.Unreadable{{What: health.Deployments, Permission: "list deployments.apps in namespace spillway-system"}}
	pod := corev1.Pod{Spec: corev1.PodSpec{NodeName: "spillway-paris", Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "2", "memory", "1Gi")}}}}}
	return o, []corev1.Pod{pod}
}

// drawn is what a terminal of a size shows of a board.
func drawn(board top.Board, width, height int, style explain.Style) string {
	var model tea.Model = top.Model{Style: style}
	for _, message := range []tea.Msg{tea.WindowSizeMsg{Width: width, Height: height}, board} {
		model, _ = model.Update(message)
	}
	return model.View()
}

func TestView(t *testing.T) {
	consumer, pods := rome()
	many := top.Of(hub(30, 10_000), nil)
	lost := top.Of(hub(3, 9), nil)
	lost.Problem = "Get \"https://10.0.0.1:6443\": connection refused"
	hostile := hub(2, 3)
	hostile.Advertisements[0].Spec.ClusterID = "cluster\x1b[2J\u202e"
	for name, got := range map[string]string{
		"hub":      drawn(top.Of(hub(3, 9), nil), 120, 40, explain.Style{}),
		"narrow":   drawn(top.Of(hub(3, 9), nil), 60, 24, explain.Style{}),
		"consumer": drawn(top.Of(consumer, pods), 80, 24, explain.Style{}),
		"many":     drawn(many, 80, 24, explain.Style{}),
		"lost":     drawn(lost, 80, 24, explain.Style{ASCII: true}),
		"empty":    drawn(top.Of(&health.Observed{Now: now}, nil), 80, 24, explain.Style{}),
		"hostile":  drawn(top.Of(hostile, nil), 80, 24, explain.Style{}),
		"once":     many.View(0, 0, explain.Style{})[:600],
	} {
		if strings.ContainsAny(got, "\x1b\u202e") {
			t.Errorf("%s has characters that change how others are shown: %q", name, got)
		}
		path := filepath.Join("testdata", name+".golden")
		if *update {
			expect.NoError(t, os.WriteFile(path, []byte(got+"\n"), 0o644))
		}
		want, err := os.ReadFile(path)
		expect.NoError(t, err)
		if got+"\n" != string(want) {
			t.Errorf("%s differs; -update writes it. Now:\n%s", path, got)
		}
	}
}

// TestSizes: whatever is shown stays within the terminal, also one of no size.
func TestSizes(t *testing.T) {
	board := top.Of(hub(30, 10_000), nil)
	if len(board.Queue) > 100 || board.Waiting != 3333 {
		t.Errorf("%d Reservations wait, of which %d are kept", board.Waiting, len(board.Queue))
	}
	for _, width := range []int{1, 2, 20, 80, 200} {
		for _, height := range []int{1, 2, 3, 8, 24, 100} {
			got := drawn(board, width, height, explain.Style{})
			lines := strings.Split(got, "\n")
			if len(lines) > height {
				t.Errorf("%dx%d has %d lines", width, height, len(lines))
			}
			for _, line := range lines[:len(lines)-1] {
				if utf8.RuneCountInString(line) > width {
					t.Errorf("%dx%d has a line of %d: %s", width, height, utf8.RuneCountInString(line), line)
				}
			}
		}
	}
	drawn(board, 0, 0, explain.Style{})
	if tall := drawn(top.Of(hub(3, 3000), nil), 80, 200, explain.Style{}); !strings.Contains(tall, "and 900 more") {
		t.Errorf("1,000 wait, and a terminal of 200 lines shows\n%s", tall)
	}
	// Work grows with the Reservations: as allocations, which the machine's load does not change.
	few, many := hub(30, 1000), hub(30, 10_000)
	of := func(o *health.Observed) float64 { return testing.AllocsPerRun(1, func() { top.Of(o, nil) }) }
	if each, ofMany := of(few), of(many); ofMany > 12*each {
		t.Errorf("1,000 Reservations take %.0f allocations, 10,000 %.0f", each, ofMany)
	}
}

// TestKeys: q, Esc and Ctrl-C end it, no other key does; before the first board it says so.
func TestKeys(t *testing.T) {
	model := top.Model{}
	if got := model.View(); got != "reading…" {
		t.Errorf("it shows %q", got)
	}
	for _, of := range []struct {
		key  tea.KeyMsg
		quit bool
	}{{tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune("q")}, true}, {tea.KeyMsg{Type: tea.KeyEsc}, true}, {tea.KeyMsg{Type: tea.KeyCtrlC}, true}, {tea.KeyMsg{Type: tea.KeyRunes, Runes: []rune("x")}, false}} {
		if _, command := model.Update(of.key); (command != nil) != of.quit {
			t.Errorf("key %s ends it: %t", of.key, command != nil)
		}
	}
}
