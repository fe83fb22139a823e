package controlplane

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// StartScheduler runs Kubernetes' own scheduler, with its defaults, on an API server
// until the test ends. It is the newest one, and behaves as that of the API server's minor.
func StartScheduler(t testing.TB, config *rest.Config) {
	t.Helper()
	minor, err := Minor()
	if err != nil {
		t.Fatal(err)
	}
	startComponent(t, config, "kube-scheduler", "--kube-api-qps=1000", "--kube-api-burst=2000", "--emulated-version="+minor)
}

// StartControllers runs controllers of Kubernetes, such as deployment-controller, on an API
// server until the test ends.
func StartControllers(t testing.TB, config *rest.Config, controllers ...string) {
	t.Helper()
	startComponent(t, config, "kube-controller-manager", "--controllers="+strings.Join(controllers, ","))
}

// startComponent runs a component of Kubernetes, of the API server's minor if it is a part of a
// playground's control plane.
func startComponent(t testing.TB, config *rest.Config, name string, args ...string) {
	t.Helper()
	minor, err := Minor()
	if err != nil {
		t.Fatal(err)
	}
	path, err := binaries.Program(t.Context(), binaries.At(name, minor), t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	access := clientcmdapi.NewConfig()
	access.Clusters["test"] = &clientcmdapi.Cluster{Server: config.Host, CertificateAuthorityData: config.CAData}
	access.AuthInfos["test"] = &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData}
	access.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	access.CurrentContext = "test"
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := clientcmd.WriteToFile(*access, kubeconfig); err != nil {
		t.Fatalf("writing a kubeconfig: %v", err)
	}
	component, err := process.Start(process.Spec{
		Name: name, Path: path, Dir: dir, LogDir: dir,
		Args: append([]string{"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--secure-port=0"}, args...),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the log of %s:\n%s", name, component.Tail(20))
		}
		component.Stop(5 * time.Second)
	})
}
