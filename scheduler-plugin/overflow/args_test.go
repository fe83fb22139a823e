package overflow

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/kubernetes/pkg/features"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

// TestGenericWorkload: with the gate on, kube-scheduler would not run PostFilter for the pods of a
// group, so that they would never overflow.
func TestGenericWorkload(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.GenericWorkload, true)
	if _, err := New(t.Context(), nil, nil, compatibility.Newest, nil); err == nil || !strings.Contains(err.Error(), "GenericWorkload") {
		t.Errorf("got %v, want that the feature gate must be off", err)
	}
}

func TestArgs(t *testing.T) {
	const head = "apiVersion: broker.fluidos.eu/v1alpha1\nkind: OverflowArgs\n"
	cases := map[string]struct {
		raw  string
		want string // "order decisionTimeout", or part of an error after "error: "
	}{
		"none":             {"", "AfterPreemption 10s"},
		"empty":            {head, "AfterPreemption 10s"},
		"all":              {head + "overflow: BeforePreemption\ndecisionTimeout: 3s", "BeforePreemption 3s"},
		"unknown field":    {head + "overflw: BeforePreemption", `error: unknown field "overflw"`},
		"unknown order":    {head + "overflow: Never", "error: want AfterPreemption or BeforePreemption"},
		"negative":         {head + "askAfter: -1s", "error: askAfter"},
		"no timeout":       {head + "decisionTimeout: 0s", "error: decisionTimeout"},
		"an hour too long": {head + "askAfter: 1h1s", "error: askAfter"},
		"no version":       {"overflow: BeforePreemption", "error: want arguments with apiVersion broker.fluidos.eu/v1alpha1"},
		"another version":  {"apiVersion: broker.fluidos.eu/v9\nkind: OverflowArgs", "error: want arguments with apiVersion"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			args, err := parseArgs(&runtime.Unknown{Raw: []byte(tc.raw)})
			if part, wantErr := strings.CutPrefix(tc.want, "error: "); wantErr {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Fatalf("want an error with %q, got %v", part, err)
				}
				return
			}
			expect.NoError(t, err)
			if got := fmt.Sprint(args.Overflow, " ", args.DecisionTimeout.Duration); got != tc.want {
				t.Errorf("got %s, want %s", got, tc.want)
			}
		})
	}
	// These are what the comments of OverflowArgs and the documentation say.
	seconds := func(n float64) *metav1.Duration {
		return &metav1.Duration{Duration: time.Duration(n * float64(time.Second))}
	}
	defaults := &OverflowArgs{
		Overflow: AfterPreemption, DecisionTimeout: seconds(10),
		InstructionNamespace: "spillway-system", AskAfter: seconds(0), GangTimeout: seconds(60),
	}
	args, err := parseArgs(nil)
	expect.NoError(t, err)
	if diff := cmp.Diff(defaults, args); diff != "" {
		t.Errorf("defaults (-want +got):\n%s", diff)
	}
}
