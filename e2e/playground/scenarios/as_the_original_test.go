package scenarios_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// quickStart are clusters of which somebody follows the original system's documents by hand.
type quickStart struct {
	t                 *testing.T
	root, dir         string
	programs          cluster.Programs
	paths             map[string]string
	certManagerModule string
	all               []*cluster.Cluster
}

// TestAsTheOriginalSays plays the quick starts of liqo-resource-broker and liqo-resource-agent with their
// commands, flags and files, as far as broker/ORIGINAL.md does not say otherwise: programs that are started by
// hand, with certificates that cert-manager issues in each cluster.
func TestAsTheOriginalSays(t *testing.T) {
	q := newQuickStart(t)
	q.do(nil, "make", "build", "PROGRAMS=spillway-broker:broker spillway-agent:agent", "BIN="+q.dir)

	hub := q.cluster("hub")
	q.do(hub, "make", "install", "CHART=broker")
	q.installCertManager(hub)
	q.do(hub, "kubectl", "apply", "-k", "charts/broker/examples/certmanager")
	url := q.runBroker(hub)
	q.checkHealth(url)

	rome, provider := q.agentCluster(hub, "rome"), q.agentCluster(hub, "cluster-1")
	expect.NoError(t, provider.StartControllers())
	q.do(provider, "kubectl", "create", "priorityclass", "spillway-guest", "--preemption-policy=Never") // as the chart does
	expect.NoError(t, provider.AddNodes(t.Context(), "node", 1, expect.Resources("cpu", "16", "memory", "32Gi"), nil))
	certificates := map[string]string{}
	for _, c := range []*cluster.Cluster{rome, provider} {
		certificates[c.Name] = q.runAgent(c, url)
		q.do(hub, "kubectl", "wait", "-n", environment.Namespace, "clusteradvertisement/"+c.Name, "--for=create", "--timeout=4m")
		q.do(hub, "kubectl", "wait", "-n", environment.Namespace, "clusteradvertisement/"+c.Name, "--for=jsonpath={.status.active}=true", "--timeout=4m")
		q.do(c, "kubectl", "wait", "clusteradvertisement/cluster-advertisement", "--for=create", "--timeout=4m") // in namespace default
	}
	q.eventually("the node of cluster-1 to be offered", func() error {
		return q.resources(hub, provider.Name, "16", "16")
	})

	q.do(hub, "kubectl", "apply", "-f", "charts/broker/examples/original")
	q.do(hub, "kubectl", "wait", "-n", environment.Namespace, "reservation/impossible", "--for=jsonpath={.status.phase}=Failed", "--timeout=4m")
	for _, name := range []string{"small", "large"} {
		q.do(hub, "kubectl", "wait", "-n", environment.Namespace, "reservation/"+name, "--for=jsonpath={.status.phase}=Reserved", "--timeout=4m")
		q.do(hub, "kubectl", "wait", "-n", environment.Namespace, "reservation/"+name, "--for=jsonpath={.status.targetClusterEndpoint}="+provider.Endpoint, "--timeout=4m")
	}
	q.eventually("cluster-1 to have 6 CPUs left", func() error { return q.resources(hub, provider.Name, "16", "6") })
	q.instructions(rome, provider)
	q.listed(url, certificates["rome"], "small", "large")
	for _, kind := range []string{"clusteradvertisements", "reservations"} {
		t.Log(q.do(hub, "kubectl", "get", kind, "-n", environment.Namespace))
	}
	if text := q.do(hub, "kubectl", "describe", "reservation", "impossible", "-n", environment.Namespace); !strings.Contains(text, "more than all nodes of the providers together have") {
		t.Errorf("kubectl describe does not say why it is impossible:\n%s", text)
	}

	q.do(hub, "kubectl", "delete", "reservation", "small", "-n", environment.Namespace, "--timeout=4m")
	q.eventually("cluster-1 to have 8 CPUs left", func() error { return q.resources(hub, provider.Name, "16", "8") })
}

// newQuickStart builds what the clusters are made of.
func newQuickStart(t *testing.T) *quickStart {
	t.Helper()
	root, err := binaries.Root()
	expect.NoError(t, err)
	minors, err := binaries.WantedMinors()
	expect.NoError(t, err)
	server, manager := binaries.At("kube-apiserver", minors.Others), binaries.At("kube-controller-manager", minors.Others)
	paths, err := binaries.Programs(t.Context(), t.Logf, "etcd", server, manager, "kubectl", "cert-manager")
	expect.NoError(t, err)
	module, version, err := binaries.ModuleDir(t.Context(), "github.com/cert-manager/cert-manager")
	expect.NoError(t, err)
	t.Logf("cert-manager %s, its controller as a process", version)
	return &quickStart{
		t: t, root: root, dir: t.TempDir(), paths: paths, certManagerModule: module,
		programs: cluster.Programs{Etcd: paths["etcd"], APIServer: paths[server], ControllerManager: paths[manager]},
	}
}

// cluster starts an API server.
func (q *quickStart) cluster(name string) *cluster.Cluster {
	q.t.Helper()
	c, err := cluster.Start(q.t.Context(), cluster.Options{Name: name, Dir: filepath.Join(q.dir, name), Programs: q.programs})
	expect.NoError(q.t, err)
	q.all = append(q.all, c)
	q.t.Cleanup(func() {
		if q.t.Failed() {
			for _, p := range c.Processes() {
				q.t.Logf("%s in %s:\n%s", p.Name(), name, p.Tail(15))
			}
		}
		c.Stop(5 * time.Second)
	})
	return c
}

// do runs a command in the project's root, as the user of a cluster, and returns its output.
func (q *quickStart) do(c *cluster.Cluster, command string, args ...string) string {
	q.t.Helper()
	path, prompt := command, "$"
	if known := q.paths[command]; known != "" {
		path = known
	}
	cmd := exec.CommandContext(q.t.Context(), path, args...)
	cmd.Dir = q.root
	if c != nil {
		cmd.Env, prompt = append(os.Environ(), "KUBECONFIG="+c.Kubeconfig, "KUBECACHEDIR="+filepath.Join(q.dir, "cache", c.Name)), c.Name+" $"
	}
	q.t.Log(prompt, command, strings.Join(args, " "))
	out, err := cmd.CombinedOutput()
	if err != nil {
		q.t.Fatalf("%s %s: %v\n%s", command, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// run starts a program in the background, as the user of a cluster.
func (q *quickStart) run(c *cluster.Cluster, name, path string, args ...string) {
	q.t.Helper()
	q.t.Log(c.Name, "$", name, strings.Join(args, " "))
	_, err := c.Run(process.Spec{Name: name, Path: path, Args: args, Env: []string{"KUBECONFIG=" + c.Kubeconfig}})
	expect.NoError(q.t, err)
}

// installCertManager does what cert-manager's manifest does, without its webhook.
func (q *quickStart) installCertManager(c *cluster.Cluster) {
	q.t.Helper()
	q.do(c, "kubectl", "apply", "--server-side", "-f", filepath.Join(q.certManagerModule, "deploy/crds"))
	q.do(c, "kubectl", "create", "namespace", "cert-manager")
	q.run(c, "cert-manager", q.paths["cert-manager"])
}

// mounted waits for the certificate of a Secret and writes its files, as a kubelet mounts them.
func (q *quickStart) mounted(c *cluster.Cluster, certificate, secretName string) (path string) {
	q.t.Helper()
	q.do(c, "kubectl", "wait", "-n", environment.Namespace, "certificate/"+certificate, "--for=condition=Ready", "--timeout=4m")
	var secret corev1.Secret
	expect.NoError(q.t, c.Client.Get(q.t.Context(), client.ObjectKey{Namespace: environment.Namespace, Name: secretName}, &secret))
	path = q.t.TempDir()
	for name, content := range secret.Data {
		expect.NoError(q.t, os.WriteFile(filepath.Join(path, name), content, 0o600))
	}
	return path
}

// freeAddress is a local address with a port that was free a moment ago.
func (q *quickStart) freeAddress() string {
	q.t.Helper()
	port, err := cluster.FreePort()
	expect.NoError(q.t, err)
	return cluster.Address(port)
}

// runBroker starts the broker with its certificate, and returns its URL.
func (q *quickStart) runBroker(hub *cluster.Cluster) (url string) {
	q.t.Helper()
	address := q.freeAddress()
	q.run(hub, "spillway-broker", filepath.Join(q.dir, "spillway-broker"), "--broker-interface=http", "--tls-cert-path="+q.mounted(hub, "broker-server-cert", "broker-server-tls"),
		"--listen="+address, "--metrics-bind-address=0", "--health-probe-bind-address="+q.freeAddress())
	return "https://" + address
}

// checkHealth is curl -k BROKER/healthz, which with a TLS before 1.2 fails.
func (q *quickStart) checkHealth(url string) {
	q.t.Helper()
	get := func(oldest, newest uint16) error {
		transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, MinVersion: oldest, MaxVersion: newest}}
		defer transport.CloseIdleConnections()
		response, err := (&http.Client{Transport: transport}).Get(url + "/healthz")
		if err != nil {
			return err
		}
		defer response.Body.Close()
		if response.StatusCode != http.StatusOK {
			return errors.New(response.Status)
		}
		return nil
	}
	q.eventually("the broker to be healthy", func() error { return get(tls.VersionTLS12, tls.VersionTLS13) })
	if err := get(tls.VersionTLS10, tls.VersionTLS11); err == nil || !strings.Contains(err.Error(), "protocol version") {
		q.t.Errorf("with TLS 1.1, the call returned %v", err)
	}
}

// agentCluster starts a cluster with the kinds, and a certificate with its name of the hub's CA.
func (q *quickStart) agentCluster(hub *cluster.Cluster, name string) *cluster.Cluster {
	q.t.Helper()
	c := q.cluster(name)
	q.do(c, "make", "install")
	q.installCertManager(c)
	files := q.t.TempDir()
	ca := filepath.Join(files, "ca-secret.yaml")
	expect.NoError(q.t, os.WriteFile(ca, []byte(q.do(hub, "kubectl", "get", "secret", "liqo-broker-ca-secret", "-n", "cert-manager", "-o", "yaml")), 0o600))
	q.do(c, "kubectl", "apply", "-f", ca)
	q.t.Logf("%s $ edit agent-certificate.yaml: commonName: %s", name, name)
	folder := filepath.Join(files, "certmanager")
	expect.NoError(q.t, os.CopyFS(folder, os.DirFS(filepath.Join(q.root, "charts/agent/examples/certmanager"))))
	certificate := filepath.Join(folder, "agent-certificate.yaml")
	text, err := os.ReadFile(certificate)
	expect.NoError(q.t, err)
	expect.NoError(q.t, os.WriteFile(certificate, []byte(strings.ReplaceAll(string(text), "commonName: cluster-1", "commonName: "+name)), 0o600))
	q.do(c, "kubectl", "apply", "-k", folder)
	return c
}

// runAgent starts an agent, and returns the directory of its certificate. There is no Liqo, no chart has made
// what placeholders need, and by itself no agent publishes an address of the same machine only.
func (q *quickStart) runAgent(c *cluster.Cluster, url string) (certificate string) {
	q.t.Helper()
	certificate = q.mounted(c, "agent-client-cert", "agent-client-tls")
	q.run(c, "spillway-agent", filepath.Join(q.dir, "spillway-agent"), "--broker-transport=http", "--broker-url="+url, "--broker-cert-path="+certificate, "--cluster-id="+c.Name,
		"--health-probe-bind-address="+q.freeAddress(), "--metrics-bind-address=0", "--driver=direct", "--placeholders-namespace=", "--api-server-endpoint="+c.Endpoint)
	return certificate
}

// resources returns an error unless a cluster's advertisement has so many CPUs, and so many available.
func (q *quickStart) resources(hub *cluster.Cluster, name, capacity, available string) error {
	ad := &broker.ClusterAdvertisement{}
	if err := hub.Client.Get(context.Background(), client.ObjectKey{Namespace: environment.Namespace, Name: name}, ad); err != nil {
		return err
	}
	if have, left := cpuOf(ad.Spec.Resources.Capacity), cpuOf(ad.Status.Available); have.String() != capacity || left.String() != available {
		return fmt.Errorf("it has %s CPUs, and %s available", have, left)
	}
	return nil
}

// instructions waits until both sides have been given theirs, in namespace default.
func (q *quickStart) instructions(consumer, provider *cluster.Cluster) {
	q.t.Helper()
	q.eventually("the provider's instructions", func() error {
		var list broker.ProviderInstructionList
		if err := provider.Client.List(context.Background(), &list, client.InNamespace("default")); err != nil {
			return err
		}
		for _, in := range list.Items {
			if in.Spec.RequesterClusterID != consumer.Name || !in.Status.Enforced {
				return fmt.Errorf("%s: %+v", in.Name, in.Status.Conditions)
			}
		}
		if len(list.Items) != 2 {
			return fmt.Errorf("there are %d", len(list.Items))
		}
		return nil
	})
	q.eventually("the requester's instructions", func() error {
		var list broker.ReservationInstructionList
		if err := consumer.Client.List(context.Background(), &list, client.InNamespace("default")); err != nil {
			return err
		}
		cpus := map[string]bool{}
		for _, in := range list.Items {
			if in.Spec.TargetClusterID != provider.Name || in.Spec.ExpiresAt == nil {
				return fmt.Errorf("%s: %+v", in.Name, in.Spec)
			}
			cpus[in.Spec.RequestedCPU.String()+" "+in.Spec.RequestedMemory.String()] = true
		}
		if len(cpus) != 2 || !cpus["2 4Gi"] || !cpus["8 15Gi"] {
			return fmt.Errorf("they have %v", cpus)
		}
		return nil
	})
}

// listed gets a cluster's reservations as the original's agents poll them.
func (q *quickStart) listed(url, certificate string, names ...string) {
	q.t.Helper()
	pair, err := tls.LoadX509KeyPair(filepath.Join(certificate, "tls.crt"), filepath.Join(certificate, "tls.key"))
	expect.NoError(q.t, err)
	ca, err := os.ReadFile(filepath.Join(certificate, "ca.crt"))
	expect.NoError(q.t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}}
	defer transport.CloseIdleConnections()
	response, err := (&http.Client{Transport: transport}).Get(url + protocol.PathReservations)
	expect.NoError(q.t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	expect.NoError(q.t, err)
	if response.StatusCode != http.StatusOK || !json.Valid(text) {
		q.t.Fatalf("%s: %s", response.Status, text)
	}
	for _, name := range names {
		if !strings.Contains(string(text), `"`+name+`"`) {
			q.t.Errorf("%s is not among them: %s", name, text)
		}
	}
}

// eventually waits for ok, and fails early when a process ended.
func (q *quickStart) eventually(what string, ok func() error) {
	q.t.Helper()
	expect.EventuallyWithin(q.t, answer, what, func() (bool, string) {
		for _, c := range q.all {
			expect.NoError(q.t, c.Err())
		}
		err := ok()
		return err == nil, fmt.Sprint(err)
	})
}
