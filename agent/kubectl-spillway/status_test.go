package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// installed creates what the programs of a consumer leave in their namespace.
func (c *testCluster) installed() {
	c.t.Helper()
	for _, program := range []string{health.Agent, health.Scheduler} {
		c.create(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: program}, Spec: coordinationv1.LeaseSpec{
			HolderIdentity: ptr.To(program + "-1"), LeaseDurationSeconds: ptr.To[int32](3600), RenewTime: ptr.To(metav1.NowMicro())}})
	}
	amount := broker.FromList(expect.Resources("cpu", "8", "memory", "16Gi"))
	c.create(&broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: health.CopyName}, Spec: broker.ClusterAdvertisementSpec{
		ClusterID: "rome", Timestamp: metav1.Now(), Resources: broker.AdvertisedResources{Capacity: amount, Allocatable: amount, Allocated: amount}}})
}

// TestStatus: exit codes, and one list of each kind, also with 1,000 Reservations.
func TestStatus(t *testing.T) {
	config := controlplane.Start(t)
	c := clusterOf(t, config)
	c.shop()
	if out, _ := c.run(exitNo, "status"); !strings.Contains(out, "spillway-agent is not installed in namespace spillway-system") {
		t.Errorf("without the agent, status says\n%s", out)
	}
	if out, _ := c.run(exitNo, "status", "--wait=1ms"); !strings.Contains(out, "Not all is well") {
		t.Errorf("without the agent, status --wait says\n%s", out)
	}
	c.installed()
	out, _ := c.run(0, "status", "--wait", "-o", "json")
	var report health.Report
	expect.NoError(t, json.Unmarshal([]byte(out), &report))
	if !report.Well || report.Cluster != "rome" || len(report.Steps) != 5 {
		t.Errorf("status is %s", out)
	}
	c.refuses("status")

	var reservation broker.Reservation
	expect.NoError(t, c.Get(t.Context(), nameOf("shop", "web-1a2b3c4d"), &reservation))
	for i := range 999 {
		another := &broker.Reservation{ObjectMeta: named("shop", fmt.Sprint("job-", i)), Spec: reservation.Spec}
		expect.NoError(t, c.Create(t.Context(), another))
	}
	out, _ = c.run(0, "status")
	if !strings.Contains(out, "1000 Reservations") {
		t.Errorf("status says\n%s", out)
	}
	counting, requests := counted(t, config)
	counting.run(0, "status")
	discovery := requests.Load()
	counting.run(0, "status")
	if n := requests.Load() - discovery; n != 6 {
		t.Errorf("status sends %d requests, want one for each of 6 kinds", n)
	}
}

// counted is the cluster behind a proxy that counts requests.
func counted(t *testing.T, config *rest.Config) (*testCluster, *atomic.Int64) {
	t.Helper()
	transport, err := rest.TransportFor(config)
	expect.NoError(t, err)
	target, err := url.Parse(config.Host)
	expect.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(target)
	proxy.Transport = transport
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n.Add(1)
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	return clusterOf(t, &rest.Config{Host: server.URL}), &n
}
