package main

import (
	"path/filepath"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/features"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

// TestCommand is one test, because a process can have one command.
func TestCommand(t *testing.T) {
	type webhook struct {
		address, certDir string
		options          steering.Options
	}
	now, served := clocktesting.NewFakeClock(time.Unix(1000, 0)), make(chan webhook, 1)
	command, err := newCommand(now, func(address, certDir string, options steering.Options) { served <- webhook{address, certDir, options} })
	expect.NoError(t, err)
	if utilfeature.DefaultFeatureGate.Enabled(features.NominatedNodeNameForExpectation) {
		t.Error("each pod costs a write of its nomination before it is bound, and one that waits in Permit keeps its place when it is rejected")
	}

	// The scheduler ends at once: it has no configuration.
	command.SilenceErrors, command.SilenceUsage = true, true
	command.SetArgs([]string{
		"--config=" + filepath.Join(t.TempDir(), "none.yaml"), "--steering-listen=127.0.0.1:0", "--steering-cert-dir=/certs", "--steering-lease=system/scheduler",
		"--steering-scheduler-name=other", "--steering-toleration=driver.example.com/no=true:NoExecute",
	})
	if err := command.Execute(); err == nil {
		t.Error("the scheduler runs without a configuration")
	}
	var got webhook
	select {
	case got = <-served:
	case <-time.After(expect.Deadline):
		t.Fatal("the webhook is not served")
	}
	if got.address != "127.0.0.1:0" || got.certDir != "/certs" || got.options.SchedulerName != "other" {
		t.Errorf("the webhook is served as %+v", got)
	}
	want := []corev1.Toleration{{Key: "driver.example.com/no", Operator: corev1.TolerationOpEqual, Value: "true", Effect: corev1.TaintEffectNoExecute}}
	if !slices.Equal(got.options.Tolerations, want) {
		t.Errorf("pods get the tolerations %v, want %v", got.options.Tolerations, want)
	}
	if got.options.Leads == nil {
		t.Fatal("pods are steered whether a scheduler leads or not")
	}
	if !got.options.Leads() {
		t.Error("no pods are steered before the Lease is observed")
	}
	now.Step(time.Minute)
	if got.options.Leads() {
		t.Error("pods are steered although the Lease has not been seen for a minute")
	}
}

// TestSteeringTolerations: only those that Spillway can tell from the author's.
func TestSteeringTolerations(t *testing.T) {
	for text, valid := range map[string]bool{
		"driver.example.com/no=true:NoExecute": true, "gpu=true:NoSchedule": false, "driver.example.com/no": false, "=true:NoExecute": false,
	} {
		if _, err := steeringOptions([]string{text}); (err == nil) != valid {
			t.Errorf("%q: %v, want valid %t", text, err, valid)
		}
	}
}
