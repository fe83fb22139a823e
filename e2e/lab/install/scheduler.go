package install

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/cluster"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
)

// Where kubelet finds kube-scheduler's manifest, and where it is while kube-scheduler is
// replaced.
const (
	schedulerManifest = "/etc/kubernetes/manifests/kube-scheduler.yaml"
	parkedManifest    = "/etc/kubernetes/kube-scheduler.yaml"
)

// OnlyScheduler lets Spillway's scheduler take the place of kube-scheduler in a member of a
// running lab, in the order that the README gives. restore reverts it; it is to be called
// even if OnlyScheduler failed, and may be repeated. So does Up, after a run that was cut off.
func OnlyScheduler(ctx context.Context, lab *cluster.Lab, c cluster.Cluster) (restore func(context.Context) error, err error) {
	helm, err := binaries.Program(ctx, "helm", lab.Log)
	if err != nil {
		return func(context.Context) error { return nil }, err
	}
	i := installer{lab: lab, helm: helm}
	restore = func(ctx context.Context) error {
		// First a scheduler that does not depend on the second step.
		return errors.Join(i.startKubeScheduler(ctx, c), i.schedulerMode(ctx, c, "beside"))
	}
	if err := i.schedulerMode(ctx, c, "only"); err != nil {
		return restore, err
	}
	return restore, i.stopKubeScheduler(ctx, c)
}

// schedulerMode upgrades the agent's release to a mode of its scheduler. All other values
// stay. The description is not the one that Up looks for, so Up installs its own values again.
func (i *installer) schedulerMode(ctx context.Context, c cluster.Cluster, mode string) error {
	root, err := binaries.Root()
	if err != nil {
		return err
	}
	target := []string{"--kubeconfig", i.lab.Kubeconfig, "--kube-context", c.Context(), "--namespace", namespace}
	if mode == "beside" {
		values, err := engine.Run(exec.CommandContext(ctx, i.helm, append([]string{"get", "values", "spillway-agent", "--output", "yaml"}, target...)...))
		if err != nil {
			return err
		}
		if !strings.Contains(values, "mode: only") {
			return nil
		}
	}
	if _, err = engine.Run(exec.CommandContext(ctx, i.helm, append([]string{
		"upgrade", "spillway-agent", filepath.Join(root, "charts/agent"), "--reset-then-reuse-values", "--set", "scheduler.mode=" + mode,
		"--wait", "--timeout", "3m", "--description", "lab, scheduler.mode=" + mode}, target...)...)); err != nil {
		return err
	}
	// Until its end, a replica of before assigns pods to the scheduler of its mode. helm does not
	// wait for that.
	kubectl := []string{"--kubeconfig", i.lab.Kubeconfig, "--context", c.Context(), "--namespace", namespace}
	if _, err := engine.Run(exec.CommandContext(ctx, i.lab.Kubectl, append(kubectl, "rollout", "status", "deployment/spillway-scheduler", "--timeout=3m")...)); err != nil {
		return err
	}
	return i.waitFor(ctx, c, "replicas of spillway-scheduler that are terminating", "",
		"-n", namespace, "get", "pods", "-l", "app.kubernetes.io/name=spillway-scheduler", "-o", "jsonpath={.items[*].metadata.deletionTimestamp}")
}

// stopKubeScheduler moves kube-scheduler's manifest away, and waits until its pod is gone.
func (i *installer) stopKubeScheduler(ctx context.Context, c cluster.Cluster) error {
	if _, err := engine.Docker(ctx, "exec", c.ControlPlane(), "mv", schedulerManifest, parkedManifest); err != nil {
		return err
	}
	return i.waitForKubeScheduler(ctx, c, "")
}

// startKubeScheduler moves kube-scheduler's manifest back if it is not in its place, and waits
// until its pod is Ready.
func (i *installer) startKubeScheduler(ctx context.Context, c cluster.Cluster) error {
	if _, err := engine.Docker(ctx, "exec", c.ControlPlane(), "sh", "-c",
		fmt.Sprintf("if [ -e %[1]s ]; then mv %[1]s %[2]s; fi", parkedManifest, schedulerManifest)); err != nil {
		return err
	}
	return i.waitForKubeScheduler(ctx, c, "true")
}

// waitForKubeScheduler waits until the containers of kube-scheduler's pod are ready ("true"),
// or until there is no such pod ("").
func (i *installer) waitForKubeScheduler(ctx context.Context, c cluster.Cluster, want string) error {
	return i.waitFor(ctx, c, "ready containers of kube-scheduler", want,
		"-n", "kube-system", "get", "pods", "-l", "component=kube-scheduler", "-o", "jsonpath={.items[*].status.containerStatuses[*].ready}")
}

// waitFor waits until kubectl prints want.
func (i *installer) waitFor(ctx context.Context, c cluster.Cluster, what, want string, args ...string) error {
	deadline := time.Now().Add(3 * time.Minute)
	for {
		seen, err := engine.Run(exec.CommandContext(ctx, i.lab.Kubectl, append([]string{"--kubeconfig", i.lab.Kubeconfig, "--context", c.Context()}, args...)...))
		if err == nil && seen == want {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s in %s: %q after 3 minutes, want %q (%v)", what, c.Name, seen, want, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
}

// restoreSchedulers undoes what an interrupted OnlyScheduler has left.
func (i *installer) restoreSchedulers(ctx context.Context) error {
	return onMembers(ctx, func(ctx context.Context, c cluster.Cluster) error { return i.startKubeScheduler(ctx, c) })
}
