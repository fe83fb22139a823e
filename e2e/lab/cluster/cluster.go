package cluster

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/engine"
)

const (
	network       = "spillway-lab"
	networkBridge = "br-spillway"
	networkCIDR   = "172.28.0.0/16"
	// reserved covers the pod and service CIDRs of the topology.
	reserved = "10.10.0.0/15 10.12.0.0/15 10.110.0.0/15 10.112.0.0/15"
	// readyFile on a control plane node marks a cluster that was created completely;
	// it holds the cluster's stamp.
	readyFile = "/kind/spillway-lab"
	timeout   = 4 * time.Minute
)

// corefile has no forward plugin: no DNS query leaves the machine.
const corefile = `.:53 {
    errors
    health
    ready
    kubernetes cluster.local in-addr.arpa ip6.arpa {
        pods insecure
        fallthrough in-addr.arpa ip6.arpa
        ttl 30
    }
    cache 30
    loop
    reload
}
`

// Lab is the set of clusters and the tools that manage them.
type Lab struct {
	// Kubeconfig with a context for each cluster.
	Kubeconfig string
	// Kubectl and Kind are paths of programs.
	Kubectl, Kind string
	Log           binaries.Log
}

// Open builds the lab's tools where needed. It does not create clusters.
func Open(ctx context.Context, log binaries.Log) (*Lab, error) {
	root, err := binaries.Root()
	if err != nil {
		return nil, err
	}
	lab := &Lab{Kubeconfig: filepath.Join(root, ".work", "kubeconfig"), Log: log}
	for name, path := range map[string]*string{"kubectl": &lab.Kubectl, "kind": &lab.Kind} {
		if *path, err = binaries.Program(ctx, name, log); err != nil {
			return nil, err
		}
	}
	return lab, os.MkdirAll(filepath.Dir(lab.Kubeconfig), 0o755)
}

// Up creates the clusters of the topology that do not exist or were created from
// another image, and the routes between them. It can be interrupted and run again
// at any point.
func (l *Lab) Up(ctx context.Context, nodeImage string) error {
	if err := l.ensureNetwork(ctx); err != nil {
		return err
	}
	group, groupCtx := errgroup.WithContext(ctx)
	group.SetLimit(2) // more would compete for CPU
	for _, c := range Topology {
		group.Go(func() error {
			if err := l.ensureCluster(groupCtx, c, nodeImage); err != nil {
				return fmt.Errorf("cluster %s: %w", c.Name, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := l.addRoutes(ctx); err != nil {
		return err
	}
	for _, c := range Topology {
		if err := l.configure(ctx, c); err != nil {
			return fmt.Errorf("cluster %s: %w", c.Name, err)
		}
	}
	return nil
}

// Ready reports whether every cluster was created from this image and is running.
func (l *Lab) Ready(ctx context.Context, nodeImage string) bool {
	for _, c := range Topology {
		if !l.clusterReady(ctx, c, nodeImage) {
			return false
		}
	}
	return true
}

// Down removes everything that Up created.
func (l *Lab) Down(ctx context.Context) error {
	if engine.Running(ctx) {
		for _, c := range Topology {
			if err := l.remove(ctx, c); err != nil {
				return err
			}
		}
		if _, err := engine.Docker(ctx, "network", "inspect", network); err == nil {
			if _, err := engine.Docker(ctx, "network", "rm", network); err != nil {
				return err
			}
		}
	}
	for cidr := range strings.FieldsSeq(reserved) {
		exec.CommandContext(ctx, "ip", "route", "delete", "unreachable", cidr).Run()
	}
	for _, rule := range isolationRules() {
		exec.CommandContext(ctx, "iptables", append([]string{"-D"}, rule...)...).Run()
	}
	exec.CommandContext(ctx, "ip", "link", "delete", networkBridge).Run()
	if err := os.Remove(l.Kubeconfig); err != nil && !os.IsNotExist(err) {
		return err
	}
	return nil
}

// isolationRules are iptables rules that keep the traffic of the clusters on their
// own network.
func isolationRules() [][]string {
	return [][]string{{"DOCKER-USER", "-i", networkBridge, "!", "-o", networkBridge, "-j", "REJECT"}}
}

func (l *Lab) ensureNetwork(ctx context.Context) error {
	if _, err := engine.Docker(ctx, "network", "inspect", network); err != nil {
		if _, err := engine.Docker(ctx, "network", "create", "--driver", "bridge", "--subnet", networkCIDR,
			"--opt", "com.docker.network.bridge.name="+networkBridge,
			"--opt", "com.docker.network.bridge.enable_ip_masquerade=false", network); err != nil {
			return err
		}
	}
	for _, rule := range isolationRules() {
		if exec.CommandContext(ctx, "iptables", append([]string{"-C"}, rule...)...).Run() == nil {
			continue
		}
		if _, err := engine.Run(exec.CommandContext(ctx, "iptables", append([]string{"-I"}, rule...)...)); err != nil {
			return err
		}
	}
	// A packet for a pod or a Service never leaves the machine, even if a route
	// between the nodes is missing.
	for cidr := range strings.FieldsSeq(reserved) {
		if _, err := engine.Run(exec.CommandContext(ctx, "ip", "route", "replace", "unreachable", cidr)); err != nil {
			return err
		}
	}
	return nil
}

func (l *Lab) clusterReady(ctx context.Context, c Cluster, nodeImage string) bool {
	found, err := engine.Docker(ctx, "exec", c.ControlPlane(), "cat", readyFile)
	if err != nil || found != stamp(c, nodeImage) {
		return false
	}
	for _, node := range c.Nodes() {
		if running, err := engine.Docker(ctx, "inspect", "--format", "{{.State.Running}}", node); err != nil || running != "true" {
			return false
		}
	}
	_, err = l.kubectl(ctx, c, "get", "--raw", "/readyz")
	return err == nil
}

// stamp identifies what a cluster was created from.
func stamp(c Cluster, nodeImage string) string {
	return fmt.Sprintf("%s %s %s %d %d", nodeImage, c.PodCIDR, c.ServiceCIDR, c.Workers, c.MilliCPU)
}

func (l *Lab) ensureCluster(ctx context.Context, c Cluster, nodeImage string) error {
	if l.clusterReady(ctx, c, nodeImage) {
		return nil
	}
	if err := l.remove(ctx, c); err != nil {
		return err
	}
	start := time.Now()
	l.Log("creating cluster %s (%d nodes) …", c.Name, len(c.Nodes()))
	cmd := exec.CommandContext(ctx, l.Kind, "create", "cluster", "--name", c.Name, "--image", nodeImage,
		"--kubeconfig", l.Kubeconfig, "--config", "-", "--retain")
	cmd.Env = append(os.Environ(), "KIND_EXPERIMENTAL_DOCKER_NETWORK="+network)
	cmd.Stdin = strings.NewReader(kindConfig(c, runtime.NumCPU()))
	if _, err := engine.Run(cmd); err != nil {
		return err
	}
	// After a crash, dockerd would start them again beside what is built before they are replaced.
	if _, err := engine.Docker(ctx, append([]string{"update", "--restart=no"}, c.Nodes()...)...); err != nil {
		return err
	}
	if err := l.configureCNI(ctx, c); err != nil {
		return err
	}
	if _, err := engine.Docker(ctx, "exec", c.ControlPlane(), "sh", "-c", `printf %s "$1" > "$2"`, "sh", stamp(c, nodeImage), readyFile); err != nil {
		return err
	}
	l.Log("created cluster %s in %s", c.Name, time.Since(start).Round(100*time.Millisecond))
	return nil
}

// remove deletes a cluster's containers, including one that docker was still
// creating when an earlier run was interrupted. A kind cluster of the same name on
// another network is left alone.
func (l *Lab) remove(ctx context.Context, c Cluster) error {
	ids, err := engine.Docker(ctx, "ps", "-aq", "--filter", "label=io.x-k8s.kind.cluster="+c.Name)
	if err != nil {
		return err
	}
	var ours []string
	for id := range strings.FieldsSeq(ids) {
		if mode, err := engine.Docker(ctx, "inspect", "--format", "{{.HostConfig.NetworkMode}}", id); err == nil && mode == network {
			ours = append(ours, id)
		}
	}
	if len(ours) == 0 {
		return nil
	}
	l.Log("removing cluster %s …", c.Name)
	_, err = engine.Docker(ctx, append([]string{"rm", "-f", "-v"}, ours...)...)
	return err
}

// kindConfig returns the configuration of a cluster for kind. CPU is reserved so
// that a node's allocatable CPU is that of the topology on any machine.
func kindConfig(c Cluster, cores int) string {
	var b strings.Builder
	fmt.Fprintf(&b, `kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
networking:
  disableDefaultCNI: true
  podSubnet: %s
  serviceSubnet: %s
  kubeProxyMode: iptables
kubeadmConfigPatches:
# What a control plane of one node, whose data is temporary, writes to no avail, and that each
# watcher hears every 5 s that nothing has happened.
- |
  kind: ClusterConfiguration
  etcd: {local: {extraArgs: {unsafe-no-fsync: "true", watch-progress-notify-interval: 1m}}}
  controllerManager: {extraArgs: {leader-elect: "false"}}
  scheduler: {extraArgs: {leader-elect: "false"}}
- |
  kind: KubeletConfiguration
  failCgroupV1: false
  featureGates:
    KubeletInUserNamespace: true
`, c.PodCIDR, c.ServiceCIDR)
	if surplus := cores*1000 - c.MilliCPU; surplus > 0 {
		fmt.Fprintf(&b, "  kubeReserved:\n    cpu: %dm\n", surplus)
	}
	b.WriteString("nodes:\n- role: control-plane\n")
	for range c.Workers {
		b.WriteString("- role: worker\n")
	}
	return b.String()
}

// kubectl runs kubectl against a cluster.
func (l *Lab) kubectl(ctx context.Context, c Cluster, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return engine.Run(exec.CommandContext(ctx, l.Kubectl, append([]string{"--kubeconfig", l.Kubeconfig, "--context", c.Context()}, args...)...))
}

// configureCNI writes a CNI configuration for its pod CIDR on each node.
func (l *Lab) configureCNI(ctx context.Context, c Cluster) error {
	cidrs, err := l.podCIDRs(ctx, c)
	if err != nil {
		return err
	}
	for node, cidr := range cidrs {
		conflist := fmt.Sprintf(`{"cniVersion":"1.0.0","name":"lab","plugins":[{"type":"ptp","ipMasq":false,"mtu":1500,`+
			`"ipam":{"type":"host-local","dataDir":"/run/cni-ipam","ranges":[[{"subnet":%q}]],"routes":[{"dst":"0.0.0.0/0"}]}}]}`, cidr)
		if _, err := engine.Docker(ctx, "exec", node, "sh", "-c", `mkdir -p /etc/cni/net.d && printf %s "$1" > /etc/cni/net.d/10-lab.conflist`, "sh", conflist); err != nil {
			return err
		}
	}
	return nil
}

// podCIDRs returns the pod CIDR of each node of a cluster, once all have one.
func (l *Lab) podCIDRs(ctx context.Context, c Cluster) (map[string]string, error) {
	deadline := time.Now().Add(timeout)
	for {
		out, err := l.kubectl(ctx, c, "get", "nodes", "-l", "kubernetes.io/hostname", "-o", `jsonpath={range .items[*]}{.metadata.name} {.spec.podCIDR}{"\n"}{end}`)
		cidrs := map[string]string{}
		if err == nil {
			for line := range strings.Lines(out) {
				if name, cidr, ok := strings.Cut(strings.TrimSpace(line), " "); ok && cidr != "" && strings.HasPrefix(name, c.Name+"-") {
					cidrs[name] = cidr
				}
			}
			if len(cidrs) == len(c.Nodes()) {
				return cidrs, nil
			}
		}
		if time.Now().After(deadline) {
			return nil, fmt.Errorf("not all nodes have a pod CIDR after %s (found %v, %v)", timeout, cidrs, err)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// Address returns a node's address on the lab's network.
func Address(ctx context.Context, node string) (string, error) {
	address, err := engine.Docker(ctx, "inspect", "--format", fmt.Sprintf(`{{(index .NetworkSettings.Networks %q).IPAddress}}`, network), node)
	if err == nil && address == "" {
		err = fmt.Errorf("node %s has no address on network %s", node, network)
	}
	return address, err
}

// addRoutes adds a route to the pods of every other node on each node.
func (l *Lab) addRoutes(ctx context.Context) error {
	type hop struct{ node, cidr, address string }
	var hops []hop
	for _, c := range Topology {
		cidrs, err := l.podCIDRs(ctx, c)
		if err != nil {
			return fmt.Errorf("cluster %s: %w", c.Name, err)
		}
		for node, cidr := range cidrs {
			address, err := Address(ctx, node)
			if err != nil {
				return err
			}
			hops = append(hops, hop{node, cidr, address})
		}
	}
	for _, from := range hops {
		var script strings.Builder
		for _, to := range hops {
			if to.node != from.node {
				fmt.Fprintf(&script, "ip route replace %s via %s\n", to.cidr, to.address)
			}
		}
		if _, err := engine.Docker(ctx, "exec", from.node, "sh", "-euc", script.String()); err != nil {
			return fmt.Errorf("routes of %s: %w", from.node, err)
		}
	}
	return nil
}

// configure waits for a cluster's nodes, configures its DNS, adds its extended
// resources and waits until they are allocatable.
func (l *Lab) configure(ctx context.Context, c Cluster) error {
	for _, node := range c.Nodes() {
		if _, err := l.kubectl(ctx, c, "wait", "--for=condition=Ready", "node/"+node, "--timeout=180s"); err != nil {
			return err
		}
	}
	if _, err := l.kubectl(ctx, c, "-n", "kube-system", "patch", "configmap", "coredns", "--type=merge", "-p",
		fmt.Sprintf(`{"data":{"Corefile":%q}}`, corefile)); err != nil {
		return err
	}
	if _, err := l.kubectl(ctx, c, "-n", "kube-system", "scale", "deployment/coredns", "--replicas=1"); err != nil {
		return err
	}
	for node, count := range c.GPUs {
		patch := fmt.Sprintf(`[{"op":"add","path":"/status/capacity/nvidia.com~1gpu","value":"%d"}]`, count)
		if _, err := l.kubectl(ctx, c, "patch", "node", node, "--subresource=status", "--type=json", "-p", patch); err != nil {
			return err
		}
		if _, err := l.kubectl(ctx, c, "wait", "node/"+node, "--timeout=120s",
			fmt.Sprintf(`--for=jsonpath={.status.allocatable.nvidia\.com/gpu}=%d`, count)); err != nil {
			return err
		}
	}
	_, err := l.kubectl(ctx, c, "-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=180s")
	return err
}
