package cluster

import (
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/spillway-dev/spillway/e2e/playground/kubelet"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// startAPIServer starts etcd and the API server. Between them is a socket file
// instead of a port: no other program can take it, and only its owner has access.
// Both name it relative to their directory, since such names have to be short.
func (c *Cluster) startAPIServer(port int) error {
	const socket = "unix://etcd:1" // the file etcd:1; etcd requires a port
	_, err := c.runServer(process.Spec{Name: "etcd", Path: c.options.Programs.Etcd, Dir: c.options.Dir, Args: []string{
		"--data-dir=etcd",
		"--listen-client-urls=" + socket,
		"--advertise-client-urls=" + socket,
		"--listen-peer-urls=http://127.0.0.1:0",
		"--unsafe-no-fsync", // all data is temporary
		"--log-level=warn",
	}})
	if err != nil {
		return err
	}
	var monitoring []string
	if !c.options.DefaultTimings {
		monitoring = []string{
			fmt.Sprintf("--default-not-ready-toleration-seconds=%d", int(EvictAfter.Seconds())),
			fmt.Sprintf("--default-unreachable-toleration-seconds=%d", int(EvictAfter.Seconds())),
		}
	}
	_, err = c.runServer(process.Spec{Name: "kube-apiserver", Path: c.options.Programs.APIServer, Dir: c.options.Dir, Args: slices.Concat(monitoring, []string{
		"--etcd-servers=" + socket,
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		fmt.Sprintf("--secure-port=%d", port),
		"--endpoint-reconciler-type=none",
		"--tls-cert-file=apiserver.crt",
		"--tls-private-key-file=apiserver.key",
		"--client-ca-file=ca.crt",
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--service-cluster-ip-range=10.96.0.0/16",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=sa.pub",
		"--service-account-signing-key-file=sa.key",
		"--kubelet-client-certificate=kubelet-client.crt",
		"--kubelet-client-key=kubelet-client.key",
		"--requestheader-client-ca-file=front-proxy-ca.crt",
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=front-proxy.crt",
		"--proxy-client-key-file=front-proxy.key",
		"--profiling=false",
	}, c.options.APIServerFlags)})
	return err
}

// runServer starts one of Kubernetes' own programs. They share the machine's cores: where there
// are few, a third of what they use while idle wakes further threads; and a fifth of their CPU
// would collect garbage where many objects are measured: there they take memory instead.
func (c *Cluster) runServer(spec process.Spec) (*process.Process, error) {
	if c.options.DefaultTimings {
		spec.Env = append(spec.Env, "GOGC=400")
	}
	if runtime.NumCPU() <= 4 {
		spec.Env = append(spec.Env, "GOMAXPROCS=1")
	}
	return c.Run(spec)
}

// StartKubelets simulates the kubelets of the nodes with annotation kubelet.Simulated, until
// the cluster ends.
func (c *Cluster) StartKubelets(lease time.Duration) error {
	stop, err := kubelet.Start(c.Admin, lease)
	if err == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.stopKubelets = stop
	}
	return err
}

// StartControllers starts kube-controller-manager and the kubelets.
func (c *Cluster) StartControllers() error {
	monitoring := []string{"--node-monitor-period=1s", fmt.Sprintf("--node-monitor-grace-period=%s", NodeGrace)}
	lease := 20 * time.Second
	if c.options.DefaultTimings {
		// Heartbeats of a thousand nodes must not dominate the measurement.
		monitoring, lease = []string{"--node-monitor-grace-period=4m"}, 200*time.Second
	}
	_, err := c.runServer(process.Spec{Name: "kube-controller-manager", Path: c.options.Programs.ControllerManager, Dir: c.options.Dir, Args: append(monitoring,
		"--kubeconfig=controller-manager.kubeconfig",
		"--service-account-private-key-file=sa.key",
		"--root-ca-file=ca.crt",
		"--use-service-account-credentials=true",
		// The default of 20 requests a second would limit any crowd of pods.
		"--kube-api-qps=200", "--kube-api-burst=400",
		"--leader-elect=false",
		"--secure-port=0",
	)})
	if err != nil {
		return err
	}
	return c.StartKubelets(lease)
}

// StartScheduler starts Spillway's scheduler, which without a configuration is plain
// kube-scheduler.
func (c *Cluster) StartScheduler(program string) error {
	_, err := c.runServer(process.Spec{Name: "kube-scheduler", Path: program, Dir: c.options.Dir, Args: []string{
		"--kubeconfig=scheduler.kubeconfig",
		"--leader-elect=false",
		"--secure-port=0",
		"--steering-listen=",
	}})
	return err
}
