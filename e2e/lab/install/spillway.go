package install

import (
	"context"
	"encoding/base64"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/cluster"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
)

const (
	namespace  = "spillway-system"
	brokerPort = "30443"
)

// spillway installs the broker in hub and an agent in every member, as the
// broker chart's notes say.
func (i *installer) spillway(ctx context.Context) error {
	root, err := binaries.Root()
	if err != nil {
		return err
	}
	hub := cluster.Topology[0]
	address, err := cluster.Address(ctx, hub.ControlPlane())
	if err != nil {
		return err
	}
	if err := i.helmUpgrade(ctx, hub, namespace, "spillway-broker", filepath.Join(root, "charts/broker"),
		"image.tag="+i.tags["spillway-broker"], "replicas=2", "service.type=NodePort", "service.nodePort="+brokerPort, "tls.sans={"+address+"}"); err != nil {
		return err
	}
	caHash, err := i.read(ctx, hub, "configmap/spillway-broker-ca", "{.data.caHash}")
	if err != nil {
		return err
	}
	encoded, err := i.read(ctx, hub, "secret/spillway-join-token", "{.data.token}")
	if err != nil {
		return err
	}
	token, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return err
	}
	// The token is passed in a file so that no error message contains it.
	tokenFile, err := os.CreateTemp("", "spillway-lab-*")
	if err != nil {
		return err
	}
	defer os.Remove(tokenFile.Name())
	if _, err := tokenFile.Write(token); err != nil {
		return err
	}
	if err := tokenFile.Close(); err != nil {
		return err
	}
	if err := i.waitForOtherDriver(ctx); err != nil {
		return err
	}
	return onMembers(ctx, func(ctx context.Context, c cluster.Cluster) error {
		endpoint, err := cluster.Address(ctx, c.ControlPlane())
		if err != nil {
			return err
		}
		// Shorter intervals than the defaults, so that the scenarios need not
		// wait for them.
		values := []string{
			"image.tag=" + i.tags["spillway-agent"], "scheduler.image.tag=" + i.tags["spillway-scheduler"], "driver=" + i.driver,
			"clusterID=" + c.Name, "broker.url=https://" + address + ":" + brokerPort, "broker.caHash=" + caHash,
			"@join.token=" + tokenFile.Name(), "apiServer.endpoint=https://" + endpoint + ":6443",
			// The lab's workload and most images that users try there run as root.
			"guests.podSecurity=baseline",
			// A Service at home reaches its overflowed pods.
			"guests.allowIngressFrom={" + strings.Join(otherPods(c), ",") + "}",
			"providerNetworks={" + strings.Join(otherPods(c), ",") + "}",
			"release.grace=5s", "peering.idleTime=20s", "advertisement.requeueInterval=10s",
		}
		if i.driver == "direct" {
			values = append(values, "virtualNode.image.tag="+i.tags["spillway-virtual-node"])
		}
		return i.helmUpgrade(ctx, c, namespace, "spillway-agent", filepath.Join(root, "charts/agent"), values...)
	})
}

// otherPods are the networks of the other members' pods.
func otherPods(of cluster.Cluster) (cidrs []string) {
	for _, c := range cluster.Topology {
		if c.Member && c.Name != of.Name {
			cidrs = append(cidrs, c.PodCIDR)
		}
	}
	return cidrs
}

// waitForOtherDriver waits until the peerings of the other driver are removed: a
// driver removes only its own.
func (i *installer) waitForOtherDriver(ctx context.Context) error {
	deadline := time.Now().Add(3 * time.Minute)
	for logged := false; ; {
		var left []string
		for _, c := range cluster.Topology {
			if !c.Member {
				continue
			}
			out, err := engine.Run(exec.CommandContext(ctx, i.lab.Kubectl, "--kubeconfig", i.lab.Kubeconfig, "--context", c.Context(),
				"get", "nodes,namespaces", "-o", "name"))
			if err != nil {
				return err
			}
			for line := range strings.Lines(out) {
				name := strings.TrimSpace(line)
				other := i.driver == "direct" && strings.HasPrefix(name, "namespace/liqo-tenant-") ||
					i.driver != "direct" && strings.HasPrefix(name, "namespace/spillway-guests-")
				if other {
					left = append(left, c.Name+" "+name)
				}
			}
		}
		if len(left) == 0 {
			return nil
		}
		if !logged {
			i.lab.Log("waiting for idle peerings of the other driver to be removed: %s", strings.Join(left, ", "))
			logged = true
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("peerings of the other driver still exist: %s; delete the workloads that overflowed, or run make lab-down", strings.Join(left, ", "))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Second):
		}
	}
}

// read returns a field of an object that a program creates when it starts.
func (i *installer) read(ctx context.Context, c cluster.Cluster, object, jsonpath string) (string, error) {
	deadline := time.Now().Add(time.Minute)
	for {
		value, err := engine.Run(exec.CommandContext(ctx, i.lab.Kubectl, "--kubeconfig", i.lab.Kubeconfig, "--context", c.Context(),
			"-n", namespace, "get", object, "-o", "jsonpath="+jsonpath))
		if err == nil && value != "" {
			return value, nil
		}
		if time.Now().After(deadline) {
			return "", fmt.Errorf("%s has no %s after a minute (%w)", object, jsonpath, err)
		}
		select {
		case <-ctx.Done():
			return "", ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}
