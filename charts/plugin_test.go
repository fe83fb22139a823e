package charts_test

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// TestPluginChecksCharts: of a chart that was installed well, kubectl spillway check finds no fault
// other than that nothing runs here.
func TestPluginChecksCharts(t *testing.T) {
	config := controlplane.StartOwn(t)
	access := kubeconfig(t, config)
	install(t, "install", "agent", access, append(slices.Clone(needed), "driver=direct", "networkPolicy.enabled=true"))
	dir := t.TempDir()
	expect.NoError(t, binaries.Own(t.Context(), t.Logf, dir, "./agent/kubectl-spillway"))
	out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "kubectl-spillway"), access, "--cache-dir="+dir, "check", "-o=json").Output()
	if err == nil {
		t.Error("the check exits with 0 although no program runs")
	}
	var report struct {
		Steps []struct{ Name, State, Message string }
	}
	expect.NoError(t, json.Unmarshal(out, &report))
	want := map[string]string{"Kubernetes": "ok", "CRDs": "ok", "Programs": "failed", "Permissions": "ok", "Webhook": "failed", "Hub": "failed",
		"Reach": "skipped", "Clocks": "ok", "Certificates": "ok", "Network": "ok", "Namespaces": "waiting"}
	for _, step := range report.Steps {
		if step.State != want[step.Name] {
			t.Errorf("%s is %s, want %s: %s", step.Name, step.State, want[step.Name], step.Message)
		}
		delete(want, step.Name)
	}
	if len(want) > 0 {
		t.Errorf("the check has no steps %v:\n%s", want, out)
	}
}
