package cluster

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// Shortened timings, so that the pods of a lost node move within seconds.
const (
	// NodeGrace is the time without a heartbeat after which a node is lost.
	NodeGrace = 40 * time.Second
	// EvictAfter is how long pods stay on a node that is lost.
	EvictAfter = 2 * time.Second
)

// Programs are the paths of what a control plane is made of.
type Programs struct {
	Etcd, APIServer, ControllerManager string
}

// Options of a cluster.
type Options struct {
	Name string
	// Dir is made for the cluster's state, and readable to its owner only.
	Dir      string
	Programs Programs
	// DefaultTimings keeps the timings of Kubernetes instead of EvictAfter, and makes
	// heartbeats rarer than those of real nodes instead of NodeGrace.
	DefaultTimings bool
	// APIServerFlags are added to those of the API server.
	APIServerFlags []string
}

// Cluster is a control plane.
type Cluster struct {
	Name string
	// Endpoint of the API server, https://127.0.0.1:<port>, and CA its authority.
	Endpoint string
	CA       *Authority
	// Kubeconfig is a file for an administrator, Admin the same as a
	// configuration.
	Kubeconfig string
	Admin      *rest.Config
	// Client and Set act as the administrator. Client knows Spillway's kinds.
	Client client.WithWatch
	Set    kubernetes.Interface

	options      Options
	stopKubelets func()
	mu           sync.Mutex
	all          []*process.Process
}

// attempts at starting on ports that were free a moment before.
const attempts = 4

// Start starts etcd and the API server and returns when that is ready. Without
// StartControllers and StartScheduler, nothing else runs.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	for attempt := 1; ; attempt++ {
		dir := o
		dir.Dir = fmt.Sprintf("%s/%d", o.Dir, attempt)
		c, err := start(ctx, dir)
		switch {
		case err == nil:
			return c, nil
		case attempt == attempts || !strings.Contains(err.Error(), "address already in use"):
			return nil, fmt.Errorf("starting cluster %s: %w", o.Name, err)
		}
	}
}

func start(ctx context.Context, o Options) (_ *Cluster, err error) {
	if err := os.MkdirAll(o.Dir, 0o700); err != nil {
		return nil, err
	}
	c := &Cluster{Name: o.Name, options: o, stopKubelets: func() {}}
	defer func() {
		if err != nil {
			c.Kill()
		}
	}()
	port, err := FreePort()
	if err != nil {
		return nil, err
	}
	c.Endpoint = "https://" + Address(port)
	if err := c.makeKeys(); err != nil {
		return nil, err
	}
	if err := c.connect(); err != nil {
		return nil, err
	}
	if err := c.startAPIServer(port); err != nil {
		return nil, err
	}
	return c, c.awaitAPIServer(ctx)
}

// makeKeys writes every certificate of the cluster.
func (c *Cluster) makeKeys() (err error) {
	if c.CA, err = NewAuthority(c.Name); err != nil {
		return err
	}
	frontProxy, err := NewAuthority(c.Name + "-front-proxy")
	if err != nil {
		return err
	}
	dir := c.options.Dir
	return errors.Join(
		writeFiles(dir, map[string][]byte{"ca.crt": c.CA.PEM, "front-proxy-ca.crt": frontProxy.PEM}),
		writeServiceAccountKeys(dir),
		c.CA.issueFiles(dir, "apiserver", "kube-apiserver", nil, []string{"127.0.0.1", "localhost", "kubernetes.default.svc", "10.96.0.1"}),
		c.CA.issueFiles(dir, "kubelet-client", "kube-apiserver-kubelet-client", []string{"system:masters"}, nil),
		frontProxy.issueFiles(dir, "front-proxy", "front-proxy-client", nil, nil),
		c.CA.issueFiles(dir, "admin", "admin", []string{"system:masters"}, nil),
		c.CA.issueFiles(dir, "controller-manager", "system:kube-controller-manager", nil, nil),
		c.CA.issueFiles(dir, "scheduler", "system:kube-scheduler", nil, nil),
	)
}

// connect writes the kubeconfigs and makes the administrator's clients.
func (c *Cluster) connect() error {
	for _, user := range []string{"admin", "controller-manager", "scheduler"} {
		who := clientcmdapi.AuthInfo{ClientCertificate: c.path(user + ".crt"), ClientKey: c.path(user + ".key")}
		if err := c.WriteKubeconfig(c.path(user+".kubeconfig"), &who); err != nil {
			return err
		}
	}
	c.Kubeconfig = c.path("admin.kubeconfig")
	config, err := clientcmd.BuildConfigFromFlags("", c.Kubeconfig)
	if err != nil {
		return err
	}
	config.QPS = -1 // no limit
	config.WarningHandler = rest.NoWarnings{}
	c.Admin = config
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return err
	}
	if c.Set, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	// Connects to the API server on first use.
	c.Client, err = client.NewWithWatch(config, client.Options{Scheme: scheme})
	return err
}

// WriteKubeconfig writes a kubeconfig for the cluster.
func (c *Cluster) WriteKubeconfig(path string, who *clientcmdapi.AuthInfo) error {
	access := clientcmdapi.NewConfig()
	access.Clusters[c.Name] = &clientcmdapi.Cluster{Server: c.Endpoint, CertificateAuthorityData: c.CA.PEM}
	access.AuthInfos[c.Name] = who
	access.Contexts[c.Name] = &clientcmdapi.Context{Cluster: c.Name, AuthInfo: c.Name}
	access.CurrentContext = c.Name
	if err := clientcmd.WriteToFile(*access, path); err != nil {
		return fmt.Errorf("writing the kubeconfig %s: %w", path, err)
	}
	return nil
}

// awaitAPIServer waits until the API server is ready.
func (c *Cluster) awaitAPIServer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	for {
		_, err := c.Set.Discovery().RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err == nil {
			return nil
		}
		if ended := c.Err(); ended != nil {
			return ended
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the API server is not ready: %w (%w); the end of its log:\n%s", err, ctx.Err(), process.Tail(c.path("kube-apiserver.log"), 15))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// Run starts a program beside the control plane, as part of the cluster: it ends
// with it.
func (c *Cluster) Run(spec process.Spec) (*process.Process, error) {
	spec.LogDir = c.options.Dir
	p, err := process.Start(spec)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	// A program that is started again replaces the one that was stopped.
	c.all = append(slices.DeleteFunc(c.all, func(old *process.Process) bool { return old.Name() == p.Name() && old.Stopped() }), p)
	return p, nil
}

// Processes returns the started processes in order.
func (c *Cluster) Processes() []*process.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.all)
}

// Process returns the process of that name, or nil.
func (c *Cluster) Process(name string) *process.Process {
	for _, p := range c.Processes() {
		if p.Name() == name {
			return p
		}
	}
	return nil
}

// Err returns an error if a process ended unexpectedly.
func (c *Cluster) Err() error {
	for _, p := range c.Processes() {
		if err := p.Err(); err != nil {
			return fmt.Errorf("in cluster %s, %w", c.Name, err)
		}
	}
	return nil
}

// Kill kills every process of the cluster with SIGKILL, as a power cut would.
func (c *Cluster) Kill() {
	c.stopKubelets()
	for _, p := range slices.Backward(c.Processes()) {
		p.Kill()
	}
}

// Stop sends SIGTERM to the programs beside the control plane, and then ends the
// control plane.
func (c *Cluster) Stop(grace time.Duration) {
	c.stopKubelets()
	var stopping sync.WaitGroup
	for _, p := range c.Processes() {
		stopping.Go(func() { p.Stop(grace) })
	}
	stopping.Wait()
}

// Dir is where the cluster's state and logs are.
func (c *Cluster) Dir() string { return c.options.Dir }

func (c *Cluster) path(name string) string { return filepath.Join(c.options.Dir, name) }
