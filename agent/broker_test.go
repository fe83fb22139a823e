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
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// TestWithTheBroker has two agents join the real broker, each with an API server
// of its own. There is no Liqo, so the story ends where the clusters would link:
// with a hold that the provider has accepted, sealed messages on their way, and
// everything given back.
func TestWithTheBroker(t *testing.T) {
	ctx := t.Context()
	crds := liqoCRDs(t)
	hubConfig, romeConfig, parisConfig := controlplane.Start(t), controlplane.Start(t, crds), controlplane.Start(t, crds)
	hub, rome, paris := newClient(t, hubConfig), newClient(t, romeConfig), newClient(t, parisConfig)
	address := freeAddress(t)
	ended := start(t, build(t, "broker"), hubConfig, "--listen="+address, "--tls-san=127.0.0.1", "--health-probe-bind-address="+freeAddress(t))

	var ca corev1.ConfigMap
	var token corev1.Secret
	eventually(t, ended, "the broker has a CA and a token", func() error {
		return errors.Join(hub.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-broker-ca"}, &ca),
			hub.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-join-token"}, &token))
	})
	tokenFile := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(tokenFile, token.Data["token"], 0o600); err != nil {
		t.Fatal(err)
	}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "big", Labels: map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"}}}
	if err := paris.Create(ctx, node); err != nil {
		t.Fatal(err)
	}
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110")}
	node.Status = corev1.NodeStatus{Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	if err := paris.Status().Update(ctx, node); err != nil {
		t.Fatal(err)
	}
	// New nodes are tainted until a controller, which is not here, has seen them.
	node.Spec.Taints = nil
	if err := paris.Update(ctx, node); err != nil {
		t.Fatal(err)
	}

	wish := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "wish"}, Spec: broker.ReservationSpec{
		PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m")})}},
	}}
	if err := rome.Create(ctx, wish); err != nil {
		t.Fatal(err)
	}
	program := build(t, "agent")
	agent := func(config *rest.Config, id string, lend bool) {
		start(t, program, config, "--broker-transport=http", "--broker-url=https://"+address, "--broker-ca-hash="+ca.Data["caHash"], "--join-token-file="+tokenFile,
			"--cluster-id="+id, "--health-probe-bind-address="+freeAddress(t), "--api-server-endpoint="+config.Host, fmt.Sprintf("--lend-enabled=%t", lend))
	}
	says := func(kind string, status metav1.ConditionStatus, text string) func() error {
		return func() error {
			if err := rome.Get(ctx, client.ObjectKeyFromObject(wish), wish); err != nil {
				return err
			}
			c := meta.FindStatusCondition(wish.Status.Conditions, kind)
			if c == nil || c.Status != status || !strings.Contains(c.Message, text) {
				return fmt.Errorf("want %s %s with %q, have %+v", kind, status, text, c)
			}
			return nil
		}
	}

	agent(romeConfig, "rome", false)
	eventually(t, ended, "nobody can help yet", says(broker.ConditionQueued, metav1.ConditionTrue, "No cluster except rome has sent an advertisement"))
	agent(parisConfig, "paris", true)
	eventually(t, ended, "paris accepts", func() error {
		if err := says(broker.ConditionProviderAccepted, metav1.ConditionTrue, "paris")(); err != nil {
			return err
		}
		if a := wish.Status.Allocations; len(a) != 1 || a[0].Cluster != "paris" || !a[0].Accepted || a[0].Endpoint != parisConfig.Host {
			return fmt.Errorf("have %+v", a)
		}
		return nil
	})
	id := protocol.ReservationID("rome", wish.UID)
	eventually(t, ended, "rome is told to use it", func() error {
		return rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: id + "-paris"}, &broker.ReservationInstruction{})
	})
	eventually(t, ended, "paris has opened rome's first message", func() error {
		return paris.Get(ctx, client.ObjectKey{Name: "liqo-tenant-rome"}, &corev1.Namespace{})
	})

	if err := rome.Delete(ctx, wish); err != nil {
		t.Fatal(err)
	}
	gone := func(c client.Client, object client.Object, name string) func() error {
		return func() error {
			if err := c.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, object); client.IgnoreNotFound(err) != nil || err == nil {
				return fmt.Errorf("%s is still there: %+v, %v", name, object, err)
			}
			return nil
		}
	}
	eventually(t, ended, "nothing is left in rome", gone(rome, wish, wish.Name))
	eventually(t, ended, "nothing is left in rome", gone(rome, &broker.ReservationInstruction{}, id+"-paris"))
	eventually(t, ended, "nothing is left in paris", gone(paris, &broker.ProviderInstruction{}, id))
	eventually(t, ended, "nothing is left at the broker", gone(hub, &broker.Reservation{}, id))
}

func newClient(t *testing.T, config *rest.Config) client.Client {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		t.Fatal(err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// liqoCRDs is the directory of Liqo's CRDs in its module.
func liqoCRDs(t *testing.T) string {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}/deployments/liqo/charts/liqo-crds/crds", "github.com/liqotech/liqo").Output()
	if err != nil {
		t.Fatalf("looking for Liqo's CRDs: %v", err)
	}
	return strings.TrimSpace(string(dir))
}

// build makes one of the project's programs.
func build(t *testing.T, name string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "spillway-"+name)
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "github.com/spillway-dev/spillway/"+name).CombinedOutput(); err != nil {
		t.Fatalf("building %s: %v\n%s", name, err, out)
	}
	return program
}

// start runs a program beside an API server for the life of a test.
func start(t *testing.T, program string, config *rest.Config, arguments ...string) (ended <-chan error) {
	t.Helper()
	dir := t.TempDir()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	access := clientcmdapi.NewConfig()
	access.Clusters["it"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	access.AuthInfos["admin"] = &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
	access.Contexts["it"] = &clientcmdapi.Context{Cluster: "it", AuthInfo: "admin"}
	access.CurrentContext = "it"
	if err := clientcmd.WriteToFile(*access, kubeconfig); err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	command := exec.Command(program, append(arguments, "--namespace=default", "--metrics-bind-address=0")...)
	command.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig)
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- command.Wait() }()
	t.Cleanup(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s %v ended with: %v", filepath.Base(program), arguments, err)
			}
		case <-time.After(30 * time.Second):
			t.Errorf("%s %v did not end", filepath.Base(program), arguments)
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
