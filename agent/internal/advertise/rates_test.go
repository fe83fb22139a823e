package advertise_test

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/agent/internal/advertise"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/transport/transporttest"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var base = broker.Cost{CPUCost: "1", MemoryCost: "0.1", Currency: "EUR"}

// tariff has the base prices, and rates as YAML.
func tariff(t *testing.T, rates string) advertise.Tariff {
	t.Helper()
	parsed, err := advertise.ParseRates(rates)
	expect.NoError(t, err)
	return advertise.Tariff{Base: base, Rates: parsed}
}

// TestRates: which price of a core applies to the nodes, and to those with labels, at a time in UTC.
func TestRates(t *testing.T) {
	const (
		night  = `[{from: "22:00", to: "06:00", timeZone: Europe/Paris, cpu: "0.5"}]`
		monday = `[{from: "22:00", to: "06:00", days: [Mon], cpu: "0.5"}]`
		nodes  = `
- {nodeSelector: {nvidia.com/gpu.product: A100}, cpu: "3", gpu: "2"}
- {nodeSelector: {spot: "true"}, from: "20:00", to: "08:00", cpu: "0.1"}
- {nodeSelector: {spot: "true"}, cpu: "0.2"}
- {from: "22:00", to: "06:00", cpu: "0.5"}
- {nodeSelector: {disk: ssd}, cpu: "7"}`
	)
	for name, tc := range map[string]struct {
		rates, at, nodes string
		// want is the cluster's price of a core, of that of the nodes; empty if they have no other.
		want, of string
	}{
		"before":                           {rates: night, at: "2026-01-15T20:59:59Z", want: "1"},
		"from":                             {rates: night, at: "2026-01-15T21:00:00Z", want: "0.5"},
		"past midnight":                    {rates: night, at: "2026-01-16T04:59:59Z", want: "0.5"},
		"to":                               {rates: night, at: "2026-01-16T05:00:00Z", want: "1"},
		"from, in summer":                  {rates: night, at: "2026-07-15T20:00:00Z", want: "0.5"},
		"to, in summer":                    {rates: night, at: "2026-07-16T04:00:00Z", want: "1"},
		"the night before summer, hour 5":  {rates: night, at: "2026-03-29T03:59:59Z", want: "0.5"},
		"the night before summer, hour 6":  {rates: night, at: "2026-03-29T04:00:00Z", want: "1"},
		"the night before winter, hour 5":  {rates: night, at: "2026-10-25T04:59:59Z", want: "0.5"},
		"the night before winter, hour 6":  {rates: night, at: "2026-10-25T05:00:00Z", want: "1"},
		"a time that the clocks skip":      {rates: `[{from: "02:30", to: "03:30", timeZone: Europe/Paris, cpu: "0.5"}]`, at: "2026-03-29T01:00:00Z", want: "0.5"},
		"an hour that is repeated":         {rates: `[{from: "02:00", to: "03:00", timeZone: Europe/Paris, cpu: "0.5"}]`, at: "2026-10-25T01:30:00Z", want: "0.5"},
		"on the day":                       {rates: monday, at: "2026-11-30T23:00:00Z", want: "0.5"},
		"after midnight of the day":        {rates: monday, at: "2026-12-01T05:00:00Z", want: "0.5"},
		"before the day's night":           {rates: monday, at: "2026-11-30T05:00:00Z", want: "1"},
		"on the day after":                 {rates: monday, at: "2026-12-01T22:00:00Z", want: "1"},
		"a whole day":                      {rates: `[{days: [Sat, Sun], timeZone: Asia/Tokyo, cpu: "0.5"}]`, at: "2026-11-27T15:00:00Z", want: "0.5"},
		"until midnight":                   {rates: `[{from: "18:00", to: "00:00", cpu: "0.5"}]`, at: "2026-11-27T23:59:00Z", want: "0.5"},
		"within a day":                     {rates: `[{from: "08:00", to: "18:00", cpu: "2"}]`, at: "2026-11-27T08:00:00Z", want: "2"},
		"after it":                         {rates: `[{from: "08:00", to: "18:00", cpu: "2"}]`, at: "2026-11-27T18:00:00Z", want: "1"},
		"a GPU's model":                    {rates: nodes, at: "2026-11-27T12:00:00Z", nodes: "nvidia.com/gpu.product=A100,spot=true", want: "1", of: "3"},
		"spot":                             {rates: nodes, at: "2026-11-27T12:00:00Z", nodes: "spot=true", want: "1", of: "0.2"},
		"spot, at night: the first counts": {rates: nodes, at: "2026-11-27T23:00:00Z", nodes: "spot=true", want: "0.5", of: "0.1"},
		"other nodes":                      {rates: nodes, at: "2026-11-27T12:00:00Z", nodes: "disk=ssd", want: "1", of: "7"},
		"after a rate of all nodes":        {rates: nodes, at: "2026-11-27T23:00:00Z", nodes: "disk=ssd", want: "0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			at, err := time.Parse(time.RFC3339, tc.at)
			expect.NoError(t, err)
			cost, classes := tariff(t, tc.rates).At(at)
			if cost.CPUCost != tc.want || cost.MemoryCost != "0.1" || cost.Currency != "EUR" {
				t.Errorf("the prices are %+v, want %s for a core", cost, tc.want)
			}
			set, err := labels.ConvertSelectorToLabelsMap(tc.nodes)
			expect.NoError(t, err)
			of := ""
			for _, class := range classes {
				if of == "" && class.Selector.Matches(set) {
					of = class.Cost.CPUCost
				}
			}
			if of != tc.of {
				t.Errorf("the price of a core of nodes with %s is %q, want %q", tc.nodes, of, tc.of)
			}
		})
	}
	if cost, _ := (advertise.Tariff{Base: broker.Cost{Currency: "EUR"}}).At(time.Time{}); cost != nil {
		t.Errorf("a tariff without prices has %+v", cost)
	}
}

// TestInvalidRates: what is not valid is refused, with what to do.
func TestInvalidRates(t *testing.T) {
	for name, tc := range map[string]struct{ rates, want string }{
		"no list":               {`cheap`, "the rates are not a list"},
		"an unknown key":        {`[{cpus: "1"}]`, `unknown field "cpus"`},
		"no price":              {`[{cpu: "1"}, {from: "22:00", to: "06:00"}]`, "rate 2: it has no price: set cpu, memory, gpu or storage"},
		"a negative price":      {`[{cpu: -1}]`, `rate 1: the price of cpu, "-1", is not a decimal number`},
		"a price in words":      {`[{gpu: "cheap"}]`, `the price of gpu, "cheap", is not a decimal number`},
		"a price that is a map": {`[{gpu: {a: b}}]`, `is not a decimal number`},
		"an unknown time zone":  {`[{timeZone: Mars/Base, cpu: "1"}]`, `the time zone "Mars/Base" is unknown: use a name of the IANA database`},
		"the machine's zone":    {`[{timeZone: Local, cpu: "1"}]`, `the time zone "Local" is unknown`},
		"no time":               {`[{from: "6pm", to: "22:00", cpu: "1"}]`, `from "6pm" to "22:00" are not two times of day such as 22:00`},
		"no end":                {`[{from: "22:00", cpu: "1"}]`, "set both, or neither for all day"},
		"no duration":           {`[{from: "22:00", to: "22:00", cpu: "1"}]`, "from and to are both 22:00: set neither for all day"},
		"an unknown day":        {`[{days: [Monday], cpu: "1"}]`, `the day "Monday" is not one of Mon, Tue`},
		"no label":              {`[{nodeSelector: {"a b": c}, cpu: "1"}]`, "the nodeSelector is not valid"},
		"a node's name":         {`[{nodeSelector: {kubernetes.io/hostname: w1}, cpu: "1"}]`, "the nodeSelector has kubernetes.io/hostname, which names single nodes: use a label"},
		"all that is wrong":     {`[{days: [never], cpu: "1"}, {timeZone: Mars, cpu: "1"}]`, "rate 2: the time zone"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := advertise.ParseRates(tc.rates); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("want an error with %q, got %v", tc.want, err)
			}
		})
	}
}

// TestMachineInUTC: its zone has the name of one of the IANA database.
func TestMachineInUTC(t *testing.T) {
	if os.Getenv("TZ") != "UTC" {
		// In a process of its own: timers read time.Local, so it must not be changed.
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMachineInUTC$")
		cmd.Env = append(os.Environ(), "TZ=UTC")
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, output)
		}
		return
	}
	for name, want := range map[string]string{"UTC": "", "Local": `the time zone "Local" is unknown`} {
		_, err := advertise.ParseRates(`[{timeZone: ` + name + `, cpu: "1"}]`)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("want an error with %q, got %v", want, err)
		}
	}
}

// TestRatesBeginAndEnd: the advertisement has the prices of the time of its beat, of all nodes and of
// those with prices of their own.
func TestRatesBeginAndEnd(t *testing.T) {
	hub, clock := transporttest.New("paris"), clocktesting.NewFakeClock(time.Date(2026, 11, 27, 21, 58, 0, 0, time.UTC))
	tracker := inventory.NewTracker(inventory.Recognizer{Guest: inventory.AnyOf()})
	for name, of := range map[string]map[string]string{"w1": nil, "w2": {"spot": "true"}} {
		tracker.Set(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: of}, Status: corev1.NodeStatus{
			Allocatable: expect.Resources("cpu", "4", "pods", "110"),
			Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		}})
	}
	publisher := advertise.New(hub, &connections{}, advertise.Options{
		Terms: inventory.Terms{ClusterID: "paris"}, Inventory: tracker, Interval: 30 * time.Second, Clock: clock,
		Tariff: tariff(t, `[{nodeSelector: {spot: "true"}, cpu: "0.2"}, {from: "22:00", to: "22:10", cpu: "0.5"}]`),
	})
	ctx, stop := context.WithCancel(t.Context())
	stopped := make(chan error, 1)
	go func() { stopped <- publisher.Start(ctx) }()
	t.Cleanup(func() { stop(); <-stopped })

	type prices struct{ Cluster, Plain, Spot string }
	// next waits for another advertisement, beat by beat, and returns when it was measured.
	sent := 0
	next := func(want prices) time.Time {
		t.Helper()
		var spec broker.ClusterAdvertisementSpec
		expect.Eventually(t, "another advertisement", func() (bool, string) {
			calls := hub.Calls("PublishAdvertisement", "")
			if len(calls) == sent {
				if clock.HasWaiters() {
					clock.Step(30 * time.Second)
				}
				return false, clock.Now().String()
			}
			sent, spec = len(calls), calls[sent].Argument.(broker.ClusterAdvertisementSpec)
			return true, ""
		})
		got := prices{Cluster: spec.Cost.CPUCost}
		for _, class := range spec.NodeClasses {
			switch {
			case class.Cost == nil:
			case class.Labels["spot"] != "":
				got.Spot = class.Cost.CPUCost
			default:
				got.Plain = class.Cost.CPUCost
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("prices at %s (-want +got):\n%s", spec.Timestamp, diff)
		}
		return spec.Timestamp.Time.UTC()
	}
	next(prices{Cluster: "1", Spot: "0.2"})
	for _, change := range []struct {
		at   time.Time
		want prices
	}{
		{time.Date(2026, 11, 27, 22, 0, 0, 0, time.UTC), prices{Cluster: "0.5", Spot: "0.2"}},
		{time.Date(2026, 11, 27, 22, 10, 0, 0, time.UTC), prices{Cluster: "1", Spot: "0.2"}},
	} {
		// The clock may step once more while the advertisement is sent.
		if at := next(change.want); at.Before(change.at) || at.After(change.at.Add(time.Minute)) {
			t.Errorf("the prices of %s were advertised at %s", change.at, at)
		}
	}
}
