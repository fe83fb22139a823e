package scenarios_test

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// TestKubectlSpillway asks the plugin about a pod that runs in another cluster and one that waits,
// and about the clusters: its user sees what the programs have written, in a few words.
func TestKubectlSpillway(t *testing.T) {
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "1", "memory", "1Gi")},
		"berlin": {group("berlin", 1, "cpu", "100m", "memory", "1Gi")},
	})
	dir := t.TempDir()
	expect.NoError(t, binaries.Own(t.Context(), t.Logf, dir, "./agent/kubectl-spillway"))
	ask := func(cluster string, arguments ...string) (string, error) {
		arguments = append(arguments, "--kubeconfig="+s.p.Cluster(cluster).Kubeconfig, "--cache-dir="+filepath.Join(dir, cluster))
		out, err := exec.CommandContext(t.Context(), filepath.Join(dir, "kubectl-spillway"), arguments...).CombinedOutput()
		return string(out), err
	}
	says := func(what, cluster string, arguments []string, words ...string) {
		t.Helper()
		s.eventually(what, func() error {
			out, err := ask(cluster, arguments...)
			for _, word := range words {
				if !strings.Contains(out, word) {
					err = errors.Join(err, fmt.Errorf("it does not say %q", word))
				}
			}
			if err != nil {
				return fmt.Errorf("%w:\n%s", err, out)
			}
			t.Logf("%s: %s\n%s", cluster, strings.Join(arguments, " "), out)
			return nil
		})
	}
	ns := s.optedIn("explained")
	s.createIn(ns, "first", "600m", nil)
	s.allReady(ns, "first", 1)
	says("the plugin explains a pod that runs in paris", "rome", []string{"explain", "first", "-n", ns},
		"✓ Namespace     explained is opted in", "✓ Policy", "✓ Providers     chosen: paris", "✓ paris: 1 pod, cpu 600m", "berlin InsufficientCapacity",
		"✓ Peering", "✓ Virtual node  node spillway-paris is ready", "✓ Guest         running in paris", "The pod runs in paris.")
	second := s.createIn(ns, "second", "700m", nil)
	says("the plugin explains a pod that waits", "rome", []string{"explain", "pod/second", "-n", ns},
		"✓ Home          it fits no node of this cluster", "is queued as number 1", "✗ Providers     None of 2 clusters can take it: InsufficientCapacity",
		"requested 700m, available 400m", "Fix: Wait")
	says("all is well in rome", "rome", []string{"status"}, "Cluster rome", "spillway-scheduler: ", "the broker heard from this cluster", "paris: node spillway-paris has cpu 600m", "1 have capacity, 1 wait for it", "All is well.")
	says("all is well in the hub", "hub", []string{"status"}, "3 of 3 clusters active", "All is well.")
	says("rome knows what it has in paris", "rome", []string{"clusters"}, "paris ", " Ready ", "600m 16Mi")
	says("the hub shows what is lent", "hub", []string{"top", "--once"}, "paris", "rome")
	says("rome has what an overflow needs", "rome", []string{"check"}, "✓ Webhook")
	says("the hub knows all clusters", "hub", []string{"clusters", "-o", "wide"}, "berlin", "paris", "rome", "Consumer")

	once := func(words string, arguments ...string) {
		t.Helper()
		out, err := ask("rome", arguments...)
		t.Logf("%s\n%s", strings.Join(arguments, " "), out)
		if err != nil || !strings.Contains(out, words) {
			t.Errorf("%v: %v: it does not say %q:\n%s", arguments, err, words, out)
		}
	}
	once("Active: ", "reserve", "warm", "-n", ns, "--cpu=50m", "--memory=16Mi", "--cluster=berlin", "--wait=4m")
	once("Released", "release", "warm", "-n", ns, "--wait=4m")
	expect.NoError(t, s.rome.Delete(t.Context(), second))
	once("drained: 1 pods have left", "drain", "paris", "--force", "--timeout=4m")
	once("node/spillway-paris uncordoned", "uncordon", "paris")
}
