package main

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/spillway-dev/spillway/agent/internal/usage"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestUsage: the verb shows the agent's copy in all formats, and says what is missing.
func TestUsage(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	if _, errors := c.run(exitNoAnswer, "usage"); !strings.Contains(errors, "the broker keeps no history, or the agent has not asked it yet") {
		t.Errorf("without a copy: %s", errors)
	}
	content, err := json.Marshal(usage.Copy{Days: []protocol.UsageItem{
		{Period: "2026-03-01", Namespace: "shop", OwnerKind: "Deployment", Owner: "web", Provider: "paris", PromisedHours: map[string]string{"cpu": "12"}, Cost: "1.2", Currency: "EUR"},
		{Period: "2026-03-01", Namespace: "blog", OwnerKind: "Job", Owner: "build", Provider: "paris", PromisedHours: map[string]string{"cpu": "1"}},
	}})
	expect.NoError(t, err)
	c.create(&corev1.ConfigMap{ObjectMeta: named(broker.SystemNamespace, usage.Name), Data: map[string]string{usage.Key: string(content)}})
	for _, arguments := range [][]string{{}, {"-o", "wide"}, {"-o", "json"}, {"-o", "yaml"}, {"-o", "csv"}} {
		out, _ := c.run(0, append([]string{"usage", "-n", "shop"}, arguments...)...)
		if !strings.Contains(out, "Deployment/web") || !strings.Contains(out, "12") || strings.Contains(out, "build") {
			t.Errorf("usage %v\n%s", arguments, out)
		}
	}
	if out, _ := c.run(0, "usage", "-A"); !strings.Contains(out, "build") {
		t.Errorf("usage of all namespaces\n%s", out)
	}
	for want, arguments := range map[string][]string{
		"neither day nor month": {"usage", "--by=year"}, "none of wide, json and yaml": {"usage", "-o", "xml"}, "you may not get configmaps": {"usage", "--as=alice"},
	} {
		if _, errors := c.run(exitNoAnswer, arguments...); !strings.Contains(errors, want) {
			t.Errorf("%v: want an error with %q, got %s", arguments, want, errors)
		}
	}
	if _, errors := c.run(exitNoAnswer, "status", "-o", "csv"); !strings.Contains(errors, "none of wide") {
		t.Errorf("status -o csv: %s", errors)
	}
}
