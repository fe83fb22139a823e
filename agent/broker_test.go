package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// TestWithTheBroker runs two agents with the real broker, each with an API server
// of its own. There is no Liqo, so the test ends where the clusters would peer: with
// a hold that the provider has accepted, sealed messages on their way, and
// everything released.
func TestWithTheBroker(t *testing.T) {
	ctx := t.Context()
	crds := liqoCRDs(t)
	hubConfig, romeConfig, parisConfig := controlplane.Start(t), controlplane.Start(t, crds), controlplane.Start(t, crds)
	hub, rome, paris := newClient(t, hubConfig), newClient(t, romeConfig), newClient(t, parisConfig)
	createNode(t, paris)
	reservation := newReservation(t, rome, 2)
	agent, url, ended := startBroker(t, hubConfig)
	// condition checks the status of a condition and that its message contains a text.
	condition := func(kind string, status metav1.ConditionStatus, text string) error {
		if err := rome.Get(ctx, client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return err
		}
		c := meta.FindStatusCondition(reservation.Status.Conditions, kind)
		if c == nil || c.Status != status || !strings.Contains(c.Message, text) {
			return fmt.Errorf("want %s %s with %q, have %+v", kind, status, text, c)
		}
		return nil
	}

	agent(romeConfig, "rome", false)
	eventually(t, ended, "the Reservation to be queued without a provider", func() error {
		return condition(broker.ConditionQueued, metav1.ConditionTrue, "No cluster except rome has sent an advertisement")
	})
	eventually(t, ended, "spillway-agent decision to print why no cluster is chosen", func() error {
		var out strings.Builder
		err := printDecision(ctx, func() (*rest.Config, error) { return romeConfig, nil }, []string{"--broker-url=" + url, "--namespace=default", client.ObjectKeyFromObject(reservation).String()}, &out)
		if text := out.String(); err != nil || !strings.HasPrefix(text, "CLUSTER") {
			return fmt.Errorf("%v: %s", err, text)
		}
		return nil
	})
	agent(parisConfig, "paris", true)
	eventually(t, ended, "paris to accept the hold", func() error {
		if err := condition(broker.ConditionProviderAccepted, metav1.ConditionTrue, "paris"); err != nil {
			return err
		}
		if a := reservation.Status.Allocations; len(a) != 1 || a[0].Cluster != "paris" || !a[0].Accepted || a[0].Endpoint != parisConfig.Host {
			return fmt.Errorf("have %+v", a)
		}
		return nil
	})
	id := protocol.ReservationID("rome", reservation.UID)
	eventually(t, ended, "rome's instruction", func() error {
		return rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: id + "-paris"}, &broker.ReservationInstruction{})
	})
	eventually(t, ended, "paris to handle rome's first message", func() error {
		return paris.Get(ctx, client.ObjectKey{Name: "liqo-tenant-rome"}, &corev1.Namespace{})
	})

	expect.NoError(t, rome.Delete(ctx, reservation))
	deleted := func(what string, c client.Client, object client.Object, namespace, name string) {
		t.Helper()
		eventually(t, ended, "deletion of "+what, func() error {
			if err := c.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, object); client.IgnoreNotFound(err) != nil || err == nil {
				return fmt.Errorf("%s still exists: %+v, %v", name, object, err)
			}
			return nil
		})
	}
	deleted("the Reservation", rome, reservation, reservation.Namespace, reservation.Name)
	deleted("rome's instruction", rome, &broker.ReservationInstruction{}, "default", id+"-paris")
	deleted("paris's instruction", paris, &broker.ProviderInstruction{}, "default", id)
	deleted("the broker's copy", hub, &broker.Reservation{}, "default", id)
}

// createNode creates a node with 4 CPUs.
func createNode(t *testing.T, c client.Client) {
	t.Helper()
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "big", Labels: map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"}}}
	expect.NoError(t, c.Create(t.Context(), node))
	capacity := expect.Resources("cpu", "4", "memory", "8Gi", "pods", "110")
	node.Status = corev1.NodeStatus{Capacity: capacity, Allocatable: capacity, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	expect.NoError(t, c.Status().Update(t.Context(), node))
	// New nodes are tainted until a controller, which does not run here, removes it.
	node.Spec.Taints = nil
	expect.NoError(t, c.Update(t.Context(), node))
	createPriorityClass(t, c)
}

// createPriorityClass creates the chart's PriorityClass of guests.
func createPriorityClass(t *testing.T, c client.Client) {
	t.Helper()
	expect.NoError(t, c.Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: guest.PriorityClass}, PreemptionPolicy: ptr.To(corev1.PreemptNever)}))
}

// startBroker runs the broker and returns a function that runs an agent which joins
// it, and the broker's URL. Ended receives the broker's error when it ends.
func startBroker(t *testing.T, hubConfig *rest.Config) (agent func(restConfig *rest.Config, id string, lend bool, arguments ...string), url string, ended <-chan error) {
	t.Helper()
	// Only a program that is there uses its port soon: another one could get it meanwhile.
	hub, program, server := newClient(t, hubConfig), build(t, "agent"), build(t, "broker")
	address := freeAddress(t)
	ended = start(t, server, hubConfig, "--listen="+address, "--tls-san=127.0.0.1", "--health-probe-bind-address="+freeAddress(t))
	var ca corev1.ConfigMap
	var token corev1.Secret
	eventually(t, ended, "the broker's CA and join token", func() error {
		return errors.Join(hub.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "spillway-broker-ca"}, &ca),
			hub.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "spillway-join-token"}, &token))
	})
	url = "https://" + address
	tokenFile := writeToken(t, token.Data["token"])
	return func(restConfig *rest.Config, id string, lend bool, arguments ...string) {
		start(t, program, restConfig, append([]string{
			"--broker-transport=http", "--broker-url=" + url, "--broker-ca-hash=" + ca.Data["caHash"], "--join-token-file=" + tokenFile,
			"--cluster-id=" + id, "--health-probe-bind-address=" + freeAddress(t), "--api-server-endpoint=" + restConfig.Host, fmt.Sprintf("--lend-enabled=%t", lend),
			"--placeholders-namespace=", // no scheduler runs here
		}, arguments...)...)
	}, url, ended
}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	return c
}

// liqoCRDs returns the directory of the CRDs in Liqo's module.
func liqoCRDs(t *testing.T) string {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}/deployments/liqo/charts/liqo-crds/crds", "github.com/liqotech/liqo").Output()
	if err != nil {
		t.Fatalf("finding Liqo's CRDs: %v", err)
	}
	return strings.TrimSpace(string(dir))
}

// build builds one of the project's programs, without the race detector's cgo: that would compile
// all that it imports again.
func build(t *testing.T, name string) string {
	t.Helper()
	dir := t.TempDir()
	expect.NoError(t, binaries.Own(t.Context(), t.Logf, dir, "./"+name))
	return filepath.Join(dir, name)
}

// writeKubeconfig returns the path of a kubeconfig of an API server's admin.
func writeKubeconfig(t *testing.T, config *rest.Config) string {
	t.Helper()
	access := clientcmdapi.NewConfig()
	access.Clusters["cluster"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	access.AuthInfos["admin"] = &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
	access.Contexts["context"] = &clientcmdapi.Context{Cluster: "cluster", AuthInfo: "admin"}
	access.CurrentContext = "context"
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, clientcmd.WriteToFile(*access, kubeconfig))
	return kubeconfig
}

// start runs a program with a kubeconfig until the end of the test. Ended receives
// its error when it ends.
func start(t *testing.T, program string, config *rest.Config, arguments ...string) (ended <-chan error) {
	t.Helper()
	dir := t.TempDir()
	log, err := os.Create(filepath.Join(dir, "log"))
	expect.NoError(t, err)
	command := exec.Command(program, append([]string{"--namespace=default", "--metrics-bind-address=0"}, arguments...)...)
	command.Env = append(os.Environ(), "KUBECONFIG="+writeKubeconfig(t, config))
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	expect.NoError(t, command.Start())
	done := make(chan error, 1)
	go func() { done <- command.Wait() }()
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s %v ended with: %v", filepath.Base(program), arguments, err)
			}
		case <-time.After(expect.Deadline):
			t.Errorf("%s %v did not stop", filepath.Base(program), arguments)
			_ = command.Process.Kill()
		}
		_ = log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("the log of %s %v:\n%s", filepath.Base(program), arguments, text)
		}
	})
	return done
}
