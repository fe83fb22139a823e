package reachability

import (
	"context"
	"maps"
	"net"
	"slices"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func instructionOf(cluster, endpoint string, ready bool) broker.ReservationInstruction {
	i := broker.ReservationInstruction{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: cluster},
		Spec:       broker.ReservationInstructionSpec{TargetClusterID: cluster, Endpoint: endpoint},
	}
	if ready {
		i.Status.Conditions = []metav1.Condition{{Type: broker.ConditionVirtualNodeReady, Status: metav1.ConditionTrue}}
	}
	return i
}

func TestNext(t *testing.T) {
	now := time.Unix(10000, 0)
	paris := instructionOf("paris", "https://192.0.2.1:6443", false)
	for what, test := range map[string]struct {
		last         map[string]target
		instructions []broker.ReservationInstruction
		want         map[string]target
	}{
		"nothing granted":           {},
		"a grant":                   {nil, []broker.ReservationInstruction{paris}, map[string]target{"paris": {"192.0.2.1:6443", 0, now}}},
		"a grant after failures":    {map[string]target{"paris": {"old", 3, now.Add(-time.Hour)}}, []broker.ReservationInstruction{paris}, map[string]target{"paris": {"192.0.2.1:6443", 3, now}}},
		"without a port":            {nil, []broker.ReservationInstruction{instructionOf("paris", "https://[2001:db8::1]", false)}, map[string]target{"paris": {"[2001:db8::1]:443", 0, now}}},
		"without an endpoint":       {nil, []broker.ReservationInstruction{instructionOf("paris", "", false)}, nil},
		"ready":                     {map[string]target{"paris": {"old", 3, now}}, []broker.ReservationInstruction{paris, instructionOf("paris", "", true)}, nil},
		"no longer granted":         {map[string]target{"paris": {"a", 3, now.Add(-9 * time.Minute)}}, nil, map[string]target{"paris": {"a", 3, now.Add(-9 * time.Minute)}}},
		"reachable and not granted": {map[string]target{"paris": {"a", 0, now}}, nil, nil},
		"not granted for long":      {map[string]target{"paris": {"a", 3, now.Add(-10 * time.Minute)}}, nil, nil},
	} {
		if got := next(test.last, test.instructions, now); !maps.Equal(got, test.want) {
			t.Errorf("%s: got %v, want %v", what, got, test.want)
		}
	}
}

// TestProber: a provider whose port is closed is reported after two probes, and no longer
// once it accepts connections.
func TestProber(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.53:0")
	expect.NoError(t, err)
	address := listener.Addr().String()
	expect.NoError(t, listener.Close())
	instruction := instructionOf("paris", "https://"+address, false)

	changes := 0
	p := New(nil, "", clocktesting.NewFakeClock(time.Unix(10000, 0)), func() { changes++ })
	p.instructions = func(context.Context) ([]broker.ReservationInstruction, error) {
		return []broker.ReservationInstruction{instruction}, nil
	}
	expectAfterProbe := func(wantChanges int, want ...string) {
		t.Helper()
		expect.NoError(t, p.probe(t.Context()))
		if got := p.Unreachable(); !slices.Equal(got, want) || changes != wantChanges {
			t.Errorf("unreachable: %v after %d changes, want %v after %d", got, changes, want, wantChanges)
		}
	}
	expectAfterProbe(0)
	expectAfterProbe(1, "paris")
	expectAfterProbe(1, "paris")
	listener, err = net.Listen("tcp", address)
	expect.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	expectAfterProbe(2)
}

// TestLatencies: a provider that capacity is granted in is measured, also one that is ready, and
// not again before it is due.
func TestLatencies(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.53:0")
	expect.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	clock := clocktesting.NewFakeClock(time.Unix(10000, 0))
	p := New(nil, "", clock, func() {})
	p.instructions = func(context.Context) ([]broker.ReservationInstruction, error) {
		return []broker.ReservationInstruction{instructionOf("paris", "https://"+listener.Addr().String(), true), instructionOf("oslo", "https://127.0.0.53:1", true)}, nil
	}
	expect.NoError(t, p.probe(t.Context()))
	got := p.Latencies()
	if len(got) != 1 || got[0].Cluster != "paris" || got[0].Milliseconds < 1 {
		t.Errorf("latencies are %v, want one of paris", got)
	}
	if cut := p.Unreachable(); len(cut) > 0 {
		t.Errorf("%v are reported as unreachable, and their virtual nodes are ready", cut)
	}
	instructions, _ := p.instructions(t.Context())
	if due := unmeasured(p.latencies, instructions, clock.Now().Add(measuredEvery-time.Second)); len(due) > 0 {
		t.Errorf("%v are measured again too early", due)
	}
	if due := unmeasured(p.latencies, instructions, clock.Now().Add(measuredEvery)); len(due) != 2 {
		t.Errorf("only %v are measured again", due)
	}
}

// TestMeasured: what is reported changes only if the latency has about doubled or halved.
func TestMeasured(t *testing.T) {
	now := time.Unix(10000, 0)
	known := map[string]latency{"paris": {rounded: 10 * time.Millisecond, at: now.Add(-time.Hour)}, "gone": {rounded: time.Second, at: now.Add(-measuredFor)}}
	for what, tc := range map[string]struct {
		took []time.Duration
		want time.Duration
	}{
		"about the same": {[]time.Duration{19 * time.Millisecond}, 10 * time.Millisecond},
		"twice as long":  {[]time.Duration{21 * time.Millisecond}, 21 * time.Millisecond},
		"half as long":   {[]time.Duration{4600 * time.Microsecond}, 5 * time.Millisecond},
		"very short":     {[]time.Duration{time.Microsecond}, time.Millisecond},
		"not connected":  {nil, 0},
	} {
		took := map[string]time.Duration{}
		for _, each := range tc.took {
			took["paris"] = each
		}
		if got := measured(known, map[string]string{"paris": "a"}, took, now); !maps.Equal(got, map[string]latency{"paris": {tc.want, now}}) {
			t.Errorf("%s: got %v", what, got)
		}
	}
}
