package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestThroughTheHub runs the real broker, outside of the hub's cluster, and two agents that reach
// it with the kubeconfigs that its command prints: to a hold that is accepted, and its release.
func TestThroughTheHub(t *testing.T) {
	ctx := t.Context()
	crds := liqoCRDs(t)
	hubConfig, romeConfig, parisConfig := controlplane.Start(t), controlplane.Start(t, crds), controlplane.Start(t, crds)
	controlplane.StartControllers(t, hubConfig, "resourcequota-controller")
	hub, rome, paris := newClient(t, hubConfig), newClient(t, romeConfig), newClient(t, parisConfig)
	createNode(t, paris)
	reservation := newReservation(t, rome, 2)
	program, server := build(t, "agent"), build(t, "broker")
	ended := start(t, server, hubConfig, "--broker-interface=kubernetes", "--listen="+freeAddress(t), "--health-probe-bind-address="+freeAddress(t))
	admin := writeKubeconfig(t, hubConfig)
	agent := func(config *rest.Config, id string, lend bool) {
		access, err := exec.CommandContext(ctx, server, "kubeconfig", "--kubeconfig="+admin, "--namespace=default", id).Output()
		if err != nil {
			t.Fatalf("spillway-broker kubeconfig: %v", err)
		}
		path := filepath.Join(t.TempDir(), "hub")
		expect.NoError(t, os.WriteFile(path, access, 0o600))
		start(t, program, config, "--broker-kubeconfig="+path, "--broker-namespace=spillway-cluster-"+id, "--cluster-id="+id, "--health-probe-bind-address="+freeAddress(t),
			"--api-server-endpoint="+config.Host, fmt.Sprintf("--lend-enabled=%t", lend), "--placeholders-namespace=")
	}
	if out, err := exec.CommandContext(ctx, program, "--broker-kubeconfig="+admin, "--broker-namespace=spillway-cluster-paris", "--cluster-id=rome", "--kubeconfig="+writeKubeconfig(t, romeConfig),
		"--namespace=default", "--metrics-bind-address=0", "--health-probe-bind-address=0").CombinedOutput(); err == nil || !strings.Contains(string(out), "namespace spillway-cluster-paris of the hub is not that of cluster rome") {
		t.Errorf("an agent with the namespace of another cluster: %v: %s", err, out)
	}
	agent(romeConfig, "rome", false)
	agent(parisConfig, "paris", true)
	id := protocol.ReservationID("rome", reservation.UID)
	eventually(t, ended, "paris to accept the hold", func() error {
		err := rome.Get(ctx, client.ObjectKeyFromObject(reservation), reservation)
		if a := reservation.Status.Allocations; err != nil || len(a) != 1 || a[0].Cluster != "paris" || !a[0].Accepted || a[0].Endpoint != parisConfig.Host {
			return fmt.Errorf("%v, have %+v", err, reservation.Status)
		}
		return nil
	})
	copied := &broker.Reservation{}
	expect.NoError(t, hub.Get(ctx, client.ObjectKey{Namespace: "spillway-cluster-rome", Name: id}, copied))
	expect.NoError(t, hub.Get(ctx, client.ObjectKey{Namespace: "spillway-cluster-paris", Name: id}, &broker.ProviderInstruction{}))
	expect.NoError(t, rome.Delete(ctx, reservation))
	for namespace, kind := range map[string]client.Object{"default": &broker.Reservation{}, "spillway-cluster-rome": &broker.Reservation{}, "spillway-cluster-paris": &broker.ProviderInstruction{}} {
		eventually(t, ended, "nothing to be left in namespace "+namespace, func() error {
			if err := hub.Get(ctx, client.ObjectKey{Namespace: namespace, Name: id}, kind); client.IgnoreNotFound(err) != nil || err == nil {
				return fmt.Errorf("%s still exists: %v", id, err)
			}
			return nil
		})
	}
}
