package charts_test

import (
	"debug/buildinfo"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestMakeBuild: programs are static; those for production have no symbols, and the commit. The
// environment changes nothing.
func TestMakeBuild(t *testing.T) {
	bin := t.TempDir()
	for target, symbols := range map[string]bool{"build": true, "build-prod": false} {
		build := exec.CommandContext(t.Context(), "make", "--no-print-directory", "-C", "..", target, "PROGRAMS=spillway-agent:agent", "BIN="+bin)
		build.Env = append(os.Environ(), "GOFLAGS=-tags=other", "CGO_ENABLED=1", "PROD=-ldflags=-s", "BIN=/nowhere", "PROGRAMS=none:none")
		out, err := build.CombinedOutput()
		if err != nil {
			t.Fatalf("make %s: %v\n%s", target, err, out)
		}
		file, err := elf.Open(filepath.Join(bin, "spillway-agent"))
		expect.NoError(t, err)
		for _, part := range file.Progs {
			if part.Type == elf.PT_INTERP {
				t.Errorf("make %s: the program is not static", target)
			}
		}
		if have := file.Section(".symtab") != nil; have != symbols {
			t.Errorf("make %s: symbols: %t, want %t", target, have, symbols)
		}
		expect.NoError(t, file.Close())
		info, err := buildinfo.ReadFile(filepath.Join(bin, "spillway-agent"))
		expect.NoError(t, err)
		if !slices.Contains(info.Settings, debug.BuildSetting{Key: "-trimpath", Value: "true"}) || slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "-tags" }) {
			t.Errorf("make %s takes flags of the environment: %v", target, info.Settings)
		}
		// The go command does not know other work trees of a repository.
		git, err := os.Stat("../.git")
		if !symbols && !slices.ContainsFunc(info.Settings, func(s debug.BuildSetting) bool { return s.Key == "vcs.revision" }) && err == nil && git.IsDir() {
			t.Errorf("make %s: the program has no commit", target)
		}
	}
}

// TestMakeTargets runs the targets that act on a cluster, as the README describes them.
func TestMakeTargets(t *testing.T) {
	for chart, values := range map[string][]string{"broker": nil, "agent": append(slices.Clone(needed), "driver=direct")} {
		t.Run(chart, func(t *testing.T) {
			config := controlplane.StartBare(t)
			access := strings.TrimPrefix(kubeconfig(t, config), "--kubeconfig=")
			run := func(target string, args ...string) (string, error) {
				cmd := exec.CommandContext(t.Context(), "make", append([]string{"--no-print-directory", "-C", "..", target, "CHART=" + chart}, args...)...)
				home := t.TempDir()
				cmd.Env = append(os.Environ(), "KUBECONFIG="+access, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
				out, err := cmd.CombinedOutput()
				return string(out), err
			}
			makeTarget := func(target string, args ...string) string {
				out, err := run(target, args...)
				if err != nil {
					t.Fatalf("make %s: %v\n%s", target, err, out)
				}
				return out
			}
			admin := as(t, config, "")
			deployment := &appsv1.Deployment{ObjectMeta: within(namespace, "spillway-"+chart)}

			makeTarget("install")
			makeTarget("deploy", "ARGS="+strings.Join(set(values), " "))
			expect.NoError(t, admin.Get(t.Context(), client.ObjectKeyFromObject(deployment), deployment))
			makeTarget("deploy") // again, with the values of the first time
			makeTarget("samples")
			samples := unstructured.UnstructuredList{}
			samples.SetGroupVersionKind(broker.GroupVersion.WithKind("ReservationList"))
			expect.NoError(t, admin.List(t.Context(), &samples))
			if len(samples.Items) < 2 {
				t.Errorf("make samples created %d Reservations, want at least 2", len(samples.Items))
			}
			makeTarget("undeploy")
			if err := admin.Get(t.Context(), client.ObjectKeyFromObject(deployment), deployment); !apierrors.IsNotFound(err) {
				t.Errorf("after make undeploy, getting the Deployment returned %v, want not found", err)
			}
			expect.NoError(t, admin.List(t.Context(), &samples))
			if len(samples.Items) < 2 {
				t.Errorf("make undeploy left %d Reservations, want those of make samples", len(samples.Items))
			}
			if out, err := run("uninstall"); err == nil || !strings.Contains(out, "delete these first") || !strings.Contains(out, ".broker.fluidos.eu/") {
				t.Errorf("make uninstall returned %v while there are Reservations:\n%s", err, out)
			}
			for _, kind := range []string{"Reservation", "OverflowPolicy", "BrokerConfig", "ClusterAdvertisement"} {
				object := &unstructured.Unstructured{}
				object.SetGroupVersionKind(broker.GroupVersion.WithKind(kind))
				for _, ns := range []string{"", "default", namespace} {
					if err := admin.DeleteAllOf(t.Context(), object, client.InNamespace(ns)); !apierrors.IsNotFound(err) && !apierrors.IsMethodNotSupported(err) && !meta.IsNoMatchError(err) {
						expect.NoError(t, err)
					}
				}
			}
			makeTarget("uninstall")
			err := as(t, config, "").List(t.Context(), &samples)
			if !apierrors.IsNotFound(err) && !meta.IsNoMatchError(err) {
				t.Errorf("after make uninstall, listing Reservations returned %v, want no such kind", err)
			}
			if out := makeTarget("run", "ARGS=-h"); !strings.Contains(out, "-zap-log-level") {
				t.Errorf("make run with -h does not list the flags:\n%s", out)
			}
		})
	}
}
