package controlplane

import (
	"path/filepath"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// StartScheduler runs Kubernetes' own scheduler, with its defaults, on an API server
// until the test ends.
func StartScheduler(t testing.TB, config *rest.Config) {
	t.Helper()
	path, err := binaries.Program(t.Context(), "kube-scheduler", t.Logf)
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
	scheduler, err := process.Start(process.Spec{
		Name: "kube-scheduler", Path: path, Dir: dir, LogDir: dir,
		Args: []string{"--kubeconfig=" + kubeconfig, "--leader-elect=false", "--secure-port=0", "--kube-api-qps=1000", "--kube-api-burst=2000"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of the scheduler's log:\n%s", scheduler.Tail(20))
		}
		scheduler.Stop(5 * time.Second)
	})
}
