package main

import (
	"cmp"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/connrotation"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/manifests"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	systemNamespace = "spillway-system"
	// configNamespace is where the chart lets the agent and this program share
	// Secrets.
	configNamespace = "spillway-virtual-nodes"
	podNamespace    = "shop"
	guestNamespace  = "spillway-guests-rome"
	providerID      = "paris"
	nodeName        = "spillway-paris"
	account         = "spillway-virtual-node"
	// runProgram is the environment variable that makes the test binary run main.
	runProgram = "SPILLWAY_TEST_VIRTUAL_NODE"
)

func TestMain(m *testing.M) {
	if os.Getenv(runProgram) != "" {
		main()
		os.Exit(0)
	}
	controlplane.Main(m)
}

// environment is the program as a process, with the access that the agent's chart
// grants: in rome, the consumer, and in paris, the provider. The test acts as both
// agents, schedulers and kubelets.
type environment struct {
	suite       *testing.T
	adminConfig *rest.Config
	rome, paris kubernetes.Interface
	// scheduler may bind pods to virtual nodes; the admin may not.
	scheduler kubernetes.Interface
	proxy     *proxy
	// home is in front of rome's API server.
	home       *homeProxy
	connection nodeconfig.Connection
	kubeconfig string
	process    *exec.Cmd
	logFile    string
}

func newEnvironment(t *testing.T) *environment {
	t.Helper()
	e := &environment{suite: t, logFile: filepath.Join(t.TempDir(), "log"), adminConfig: controlplane.Start(t)}
	t.Cleanup(e.logTail)
	parisConfig := controlplane.Start(t)
	e.rome, e.paris = kubernetes.NewForConfigOrDie(e.adminConfig), kubernetes.NewForConfigOrDie(parisConfig)
	schedulerConfig := rest.CopyConfig(e.adminConfig)
	schedulerConfig.Impersonate.UserName = "system:serviceaccount:" + systemNamespace + ":spillway-scheduler"
	e.scheduler = kubernetes.NewForConfigOrDie(schedulerConfig)
	installChart(t, e.adminConfig, "rome")
	installChart(t, parisConfig, providerID)
	createNamespace(t, e.rome, podNamespace, map[string]string{"broker.fluidos.eu/virtual-node": "true"})
	bindRole(t, e.rome, podNamespace, "spillway-virtual-node-namespace", systemNamespace)
	createNamespace(t, e.paris, guestNamespace, map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: "rome", "pod-security.kubernetes.io/enforce": "baseline"})
	createAccount(t, e.paris, guestNamespace, account)
	bindRole(t, e.paris, guestNamespace, "spillway-direct-guest", guestNamespace)
	createQuota(t, e.paris)

	u, err := url.Parse(parisConfig.Host)
	expect.NoError(t, err)
	e.proxy = startProxy(t, u.Host)
	e.connection = nodeconfig.Connection{
		Endpoint: "https://" + e.proxy.address, CA: parisConfig.CAData, Namespace: guestNamespace, Token: createToken(t, e.paris, guestNamespace, account), Expires: time.Now().Add(time.Hour),
	}
	e.home = startHomeProxy(t, e.adminConfig)
	e.kubeconfig = writeKubeconfig(t, e.home.config, &clientcmdapi.AuthInfo{Token: createToken(t, e.rome, systemNamespace, account)})
	return e
}

func createNamespace(t *testing.T, client kubernetes.Interface, name string, labels map[string]string) {
	t.Helper()
	_, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	createAccount(t, client, name, "default")
}

func createAccount(t *testing.T, client kubernetes.Interface, namespace, name string) {
	t.Helper()
	_, err := client.CoreV1().ServiceAccounts(namespace).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	expect.NoError(t, err)
}

func createToken(t *testing.T, client kubernetes.Interface, namespace, name string) string {
	t.Helper()
	token, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), name, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600)}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	return token.Status.Token
}

func bindRole(t *testing.T, client kubernetes.Interface, namespace, role, accountNamespace string) {
	t.Helper()
	_, err := client.RbacV1().RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: accountNamespace, Name: account}},
	}, metav1.CreateOptions{})
	expect.NoError(t, err)
}

func createQuota(t *testing.T, client kubernetes.Interface) {
	t.Helper()
	hard := expect.Resources("requests.cpu", "4", "requests.memory", "4Gi", "requests.ephemeral-storage", "0", "pods", "20", "limits.memory", "16Gi")
	quotas := client.CoreV1().ResourceQuotas(guestNamespace)
	quota, err := quotas.Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "spillway-guests"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	// No controller of quotas is running.
	quota.Status.Hard, quota.Status.Used = hard, expect.Resources("requests.cpu", "0", "requests.memory", "0", "requests.ephemeral-storage", "0", "pods", "0", "limits.memory", "0")
	_, err = quotas.UpdateStatus(t.Context(), quota, metav1.UpdateOptions{})
	expect.NoError(t, err)
}

// installChart installs the agent's chart, for its roles and policies.
func installChart(t *testing.T, config *rest.Config, clusterID string) {
	t.Helper()
	var flags []string
	for _, value := range []string{
		"clusterID=" + clusterID, "driver=direct", "broker.url=https://broker.example.org:8443",
		"broker.caHash=sha256:" + strings.Repeat("0123456789abcdef", 4), "join.token=secret", "apiServer.endpoint=" + config.Host,
	} {
		flags = append(flags, "--set", value)
	}
	objects, err := manifests.Chart(t.Context(), "agent", flags...)
	expect.NoError(t, err)
	api, err := client.New(config, client.Options{})
	expect.NoError(t, err)
	expect.NoError(t, manifests.Apply(t.Context(), api, objects))
}

func writeKubeconfig(t *testing.T, config *rest.Config, user *clientcmdapi.AuthInfo) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": user},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "c",
	}, path))
	return path
}

// start runs the program until stop is called or the suite ends.
func (e *environment) start() {
	e.suite.Helper()
	binary, err := os.Executable()
	expect.NoError(e.suite, err)
	output, err := os.OpenFile(e.logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	expect.NoError(e.suite, err)
	defer output.Close()
	command := exec.Command(binary, "--kubeconfig="+e.kubeconfig, "--namespace="+configNamespace, "--kubelet-address=127.0.0.1", "--kubelet-port=0",
		"--metrics-bind-address=0", "--health-probe-bind-address=0", "--leader-elect")
	command.Env = append(os.Environ(), runProgram+"=1")
	command.Stdout, command.Stderr = output, output
	expect.NoError(e.suite, command.Start())
	e.process = command
	e.suite.Cleanup(func() {
		command.Process.Kill()
		command.Wait()
	})
}

// stop terminates the program, as a kubelet would.
func (e *environment) stop(t *testing.T) {
	t.Helper()
	expect.NoError(t, e.process.Process.Signal(syscall.SIGTERM))
	exited := make(chan error, 1)
	go func() { exited <- e.process.Wait() }()
	select {
	case err := <-exited:
		if err != nil {
			t.Errorf("the program exited with %v", err)
		}
	case <-time.After(expect.Deadline):
		t.Fatal("the program did not exit")
	}
}

// logTail logs the end of the program's log if the test failed.
func (e *environment) logTail() {
	if !e.suite.Failed() {
		return
	}
	data, err := os.ReadFile(e.logFile)
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	e.suite.Logf("log of the program (%v):\n%s", err, strings.Join(lines[max(0, len(lines)-15):], "\n"))
}

func (e *environment) pods() typedcorev1.PodInterface   { return e.rome.CoreV1().Pods(podNamespace) }
func (e *environment) guests() typedcorev1.PodInterface { return e.paris.CoreV1().Pods(guestNamespace) }

func capacity() corev1.ResourceList {
	return expect.Resources("cpu", "2", "memory", "2Gi", "pods", "10")
}

// writeConfig writes the Secret, as the agent would.
func (e *environment) writeConfig(t *testing.T, change func(*nodeconfig.Config)) {
	t.Helper()
	config := nodeconfig.Config{Provider: providerID, Connection: e.connection, Capacity: nodeconfig.Capacity{
		Resources:  capacity(),
		Labels:     map[string]string{"topology.kubernetes.io/zone": "paris-1"},
		Namespaces: []string{podNamespace},
	}}
	if change != nil {
		change(&config)
	}
	secret, err := config.Secret(configNamespace)
	expect.NoError(t, err)
	secrets := e.rome.CoreV1().Secrets(configNamespace)
	_, err = secrets.Update(t.Context(), secret, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = secrets.Create(t.Context(), secret, metav1.CreateOptions{})
	}
	expect.NoError(t, err)
}

func (e *environment) getNode(t *testing.T) (*corev1.Node, error) {
	return e.rome.CoreV1().Nodes().Get(t.Context(), nodeName, metav1.GetOptions{})
}

func (e *environment) mustGetNode(t *testing.T) *corev1.Node {
	t.Helper()
	node, err := e.getNode(t)
	expect.NoError(t, err)
	return node
}

func readyCondition(node *corev1.Node) corev1.NodeCondition {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// expectNode waits for the node to be Ready with exactly these resources.
func (e *environment) expectNode(t *testing.T, want corev1.ResourceList) {
	t.Helper()
	expect.Eventually(t, fmt.Sprintf("a node with %v", want), func() (bool, string) {
		node, err := e.getNode(t)
		return err == nil && readyCondition(node).Status == corev1.ConditionTrue &&
				equality.Semantic.DeepEqual(node.Status.Allocatable, want) && equality.Semantic.DeepEqual(node.Status.Capacity, want),
			fmt.Sprintf("%+v, allocatable %v, capacity %v, %v", readyCondition(node), node.Status.Allocatable, node.Status.Capacity, err)
	})
}

// expectReady waits for a status of the node's condition Ready, and a reason.
func (e *environment) expectReady(t *testing.T, status corev1.ConditionStatus, reason string) {
	t.Helper()
	expect.Eventually(t, fmt.Sprintf("node condition Ready=%s, %s", status, reason), func() (bool, string) {
		node, err := e.getNode(t)
		c := readyCondition(node)
		return c.Status == status && c.Reason == reason, fmt.Sprintf("%+v, %v", c, err)
	})
}

func (e *environment) expectNodeDeleted(t *testing.T) {
	t.Helper()
	expect.Eventually(t, "the deletion of the node", func() (bool, string) {
		_, err := e.getNode(t)
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// createPod creates a pod and binds it to the virtual node.
func (e *environment) createPod(t *testing.T, name string, policy ...corev1.RestartPolicy) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: podNamespace, Name: name}, Spec: corev1.PodSpec{
		RestartPolicy: cmp.Or(append(policy, corev1.RestartPolicyAlways)...),
		Tolerations:   []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpEqual, Value: providerID, Effect: corev1.TaintEffectNoSchedule}},
		Containers:    []corev1.Container{{Name: "main", Image: "image"}},
	}}
	created, err := e.pods().Create(t.Context(), pod, metav1.CreateOptions{})
	expect.NoError(t, err)
	// The policies let the program change only pods with the labels of the scheduler.
	bindPod(t, e.scheduler.CoreV1().Pods(podNamespace), name, nodeName, broker.LabelHold, broker.LabelShape)
	return created
}

func bindPod(t *testing.T, client typedcorev1.PodInterface, name, node string, labels ...string) {
	t.Helper()
	values := map[string]string{}
	for _, label := range labels {
		values[label] = "rome-1"
	}
	expect.NoError(t, client.Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: values}, Target: corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{}))
}

// run makes the guest of a pod run, and returns it.
func (e *environment) run(t *testing.T, pod *corev1.Pod) (guest *corev1.Pod) {
	t.Helper()
	expect.Eventually(t, "the guest of "+pod.Name, func() (bool, string) {
		var err error
		if guest, err = e.guests().Get(t.Context(), translate.GuestName(pod), metav1.GetOptions{}); err == nil {
			return true, ""
		}
		current, _ := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
		return false, fmt.Sprintf("%v; status of the pod: %+v", err, current.Status)
	})
	// A pod without a node would be deleted without a grace period.
	bindPod(t, e.guests(), guest.Name, "worker")
	updateStatus(t, e.guests(), guest.Name, func(status *corev1.PodStatus) {
		*status = corev1.PodStatus{
			Phase: corev1.PodRunning, StartTime: ptr.To(metav1.Now()), PodIP: "10.1.2.3", PodIPs: []corev1.PodIP{{IP: "10.1.2.3"}}, QOSClass: status.QOSClass,
			ContainerStatuses: []corev1.ContainerStatus{{Name: "main", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}}},
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		}
	})
	e.expectRunning(t, pod)
	return guest
}

func updateStatus(t *testing.T, client typedcorev1.PodInterface, name string, change func(*corev1.PodStatus)) {
	t.Helper()
	expect.Eventually(t, "an update of the status of "+name, func() (bool, string) {
		pod, err := client.Get(t.Context(), name, metav1.GetOptions{})
		if err == nil {
			change(&pod.Status)
			_, err = client.UpdateStatus(t.Context(), pod, metav1.UpdateOptions{})
		}
		return err == nil, fmt.Sprint(err)
	})
}

func (e *environment) expectRunning(t *testing.T, pod *corev1.Pod) {
	t.Helper()
	expect.Eventually(t, pod.Name+" running", func() (bool, string) {
		current, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
		return current.Status.Phase == corev1.PodRunning, fmt.Sprintf("%+v, %v", current.Status, err)
	})
}

// endGuest deletes a terminating guest, as its kubelet would.
func (e *environment) endGuest(t *testing.T, name string) {
	t.Helper()
	expect.NoError(t, e.guests().Delete(t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
}

// TestProgram is the life of one virtual node. Each step continues from the one
// before.
func TestProgram(t *testing.T) {
	e := newEnvironment(t)
	e.start()
	e.writeConfig(t, nil)
	e.expectNode(t, capacity())
	for _, step := range []struct {
		name string
		test func(*testing.T)
	}{
		{"node", e.testNode},
		{"capacity", e.testCapacity},
		{"kubelet API access", e.testKubeletAccess},
		{"unreachable provider", e.testUnreachableProvider},
		{"token renewal", e.testTokenRenewal},
		{"refused token", e.testRefusedToken},
		{"requests to this cluster", e.testHomeRequests},
		{"restart", e.testRestart},
		{"long grace period", e.testLongGracePeriod},
		{"unmanaged node", e.testUnmanagedNode},
		{"drain", e.testDrain},
	} {
		if !t.Run(step.name, step.test) {
			return
		}
	}
}

func (e *environment) testNode(t *testing.T) {
	node := e.mustGetNode(t)
	for key, want := range map[string]string{
		broker.LabelProvider: providerID, broker.LabelNodeType: broker.NodeTypeVirtual, broker.LabelManagedBy: broker.ManagedBySpillway,
		corev1.LabelNodeExcludeBalancers: "true", corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64", corev1.LabelTopologyZone: "paris-1",
	} {
		if node.Labels[key] != want {
			t.Errorf("label %s is %q, want %q", key, node.Labels[key], want)
		}
	}
	if value, domain := node.Labels[corev1.LabelHostname]; domain {
		t.Errorf("pods of this cluster spread over the node: it has label %s=%s", corev1.LabelHostname, value)
	}
	want := corev1.Taint{Key: broker.TaintOverflow, Value: providerID, Effect: corev1.TaintEffectNoSchedule}
	if !slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.MatchTaint(&want) && taint.Value == want.Value }) {
		t.Errorf("got taints %v, want %v", node.Spec.Taints, want)
	}
	expect.Eventually(t, "a lease", func() (bool, string) {
		lease, err := e.rome.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(t.Context(), nodeName, metav1.GetOptions{})
		return err == nil && lease.Spec.RenewTime != nil && lease.Spec.HolderIdentity != nil && lease.Labels[broker.LabelProvider] == providerID, fmt.Sprintf("%+v, %v", lease, err)
	})
}

func (e *environment) testCapacity(t *testing.T) {
	larger := expect.Resources("cpu", "4", "memory", "2Gi", "nvidia.com/gpu", "1", "pods", "12")
	e.writeConfig(t, func(c *nodeconfig.Config) { c.Capacity.Resources = larger })
	e.expectNode(t, larger)
	parked := expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0")
	patch := func(unschedulable bool) {
		t.Helper()
		_, err := e.rome.CoreV1().Nodes().Patch(t.Context(), nodeName, types.MergePatchType, fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, unschedulable), metav1.PatchOptions{})
		expect.NoError(t, err)
	}
	patch(true)
	e.writeConfig(t, func(c *nodeconfig.Config) { c.Capacity = nodeconfig.Capacity{Resources: parked} })
	e.expectNode(t, parked)
	if !e.mustGetNode(t).Spec.Unschedulable {
		t.Error("the administrator's cordon was undone")
	}
	patch(false)
	if zone, ok := e.mustGetNode(t).Labels[corev1.LabelTopologyZone]; ok {
		t.Errorf("the node still has the removed label of zone %s", zone)
	}
	e.writeConfig(t, nil)
	e.expectNode(t, capacity())
}

// getKubelet sends a request to the node's kubelet API, and returns the status
// code.
func (e *environment) getKubelet(t *testing.T, path string, certificates []tls.Certificate, token string) int {
	t.Helper()
	node := e.mustGetNode(t)
	var address string
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			address = a.Address
		}
	}
	// The certificate is self-signed.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates}}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, fmt.Sprintf("https://%s:%d%s", address, node.Status.DaemonEndpoints.KubeletEndpoint.Port, path), nil)
	expect.NoError(t, err)
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := (&http.Client{Transport: transport, Timeout: expect.Deadline}).Do(request)
	expect.NoError(t, err)
	defer response.Body.Close()
	io.Copy(io.Discard, io.LimitReader(response.Body, 1<<20))
	return response.StatusCode
}

func (e *environment) testKubeletAccess(t *testing.T) {
	admin, err := tls.X509KeyPair(e.adminConfig.CertData, e.adminConfig.KeyData)
	expect.NoError(t, err)
	unauthorized := createToken(t, e.rome, podNamespace, "default")
	logs := "/containerLogs/" + podNamespace + "/unknown/main"
	for _, path := range []string{"/pods", "/metrics/resource", "/stats/summary", logs, "/exec/" + podNamespace + "/unknown/main?command=true&output=1", "/portForward/" + podNamespace + "/unknown"} {
		for user, c := range map[string]struct {
			token string
			want  int
		}{
			"without credentials": {"", http.StatusUnauthorized},
			"with invalid token":  {"a.b.c", http.StatusUnauthorized},
			"without access":      {unauthorized, http.StatusForbidden},
		} {
			if code := e.getKubelet(t, path, nil, c.token); code != c.want {
				t.Errorf("GET %s %s: got %d, want %d", path, user, code, c.want)
			}
		}
	}
	for path, want := range map[string]int{"/pods": 200, "/metrics/resource": 200, "/stats/summary": 200, logs: 404} {
		if code := e.getKubelet(t, path, []tls.Certificate{admin}, ""); code != want {
			t.Errorf("GET %s as administrator: got %d, want %d", path, code, want)
		}
	}
}

func (e *environment) testUnreachableProvider(t *testing.T) {
	kept := e.createPod(t, "kept")
	e.run(t, kept)
	start := time.Now()
	e.proxy.disconnect()
	e.expectReady(t, corev1.ConditionFalse, "ProviderUnreachable")
	t.Logf("node not ready %s after the provider became unreachable", time.Since(start).Round(100*time.Millisecond))
	// The node lifecycle controller sets the readiness of pods on such a node.
	updateStatus(t, e.pods(), kept.Name, func(status *corev1.PodStatus) {
		for i := range status.Conditions {
			if status.Conditions[i].Type == corev1.PodReady {
				status.Conditions[i].Status = corev1.ConditionFalse
			}
		}
	})
	created := e.createPod(t, "created", corev1.RestartPolicyNever)
	// A change of the pod triggers a reconcile, which must not revert its readiness.
	expect.Consistently(t, 3*time.Second, "pod not ready", func() (bool, string) {
		current, err := e.pods().Patch(t.Context(), kept.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"changed":"yes"}}}`), metav1.PatchOptions{})
		return err == nil && podReady(current) == corev1.ConditionFalse, fmt.Sprintf("%+v, %v", current.Status, err)
	})
	e.proxy.reconnect()
	start = time.Now()
	e.run(t, created)
	e.expectReady(t, corev1.ConditionTrue, "ProviderReachable")
	t.Logf("node ready %s after the provider became reachable", time.Since(start).Round(100*time.Millisecond))
	expect.Eventually(t, "pod ready", func() (bool, string) {
		current, err := e.pods().Get(t.Context(), kept.Name, metav1.GetOptions{})
		return podReady(current) == corev1.ConditionTrue, fmt.Sprintf("%+v, %v", current.Status, err)
	})
	e.expectRunning(t, kept)
}

func podReady(pod *corev1.Pod) corev1.ConditionStatus {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status
		}
	}
	return corev1.ConditionUnknown
}

// testTokenRenewal replaces the token and invalidates the previous one.
func (e *environment) testTokenRenewal(t *testing.T) {
	expect.NoError(t, e.paris.CoreV1().ServiceAccounts(guestNamespace).Delete(t.Context(), account, metav1.DeleteOptions{}))
	createAccount(t, e.paris, guestNamespace, account)
	e.connection.Token = createToken(t, e.paris, guestNamespace, account)
	e.writeConfig(t, nil)
	e.run(t, e.createPod(t, "after-renewal"))
}

func (e *environment) testRefusedToken(t *testing.T) {
	valid := e.connection
	e.connection.Token = "not.a.token"
	e.writeConfig(t, nil)
	e.expectReady(t, corev1.ConditionFalse, "ProviderAccessDenied")
	for _, name := range []string{"kept", "created", "after-renewal"} {
		current, err := e.pods().Get(t.Context(), name, metav1.GetOptions{})
		expect.NoError(t, err)
		if current.Status.Phase != corev1.PodRunning {
			t.Errorf("%s is %s, want it unchanged", name, current.Status.Phase)
		}
	}
	e.connection = valid
	e.writeConfig(t, nil)
	e.run(t, e.createPod(t, "after-refusal"))
}

// testHomeRequests expects the program to speak protobuf with this cluster's API server, and
// to have one watch of the pods of its virtual node: one copy of each.
func (e *environment) testHomeRequests(t *testing.T) {
	for _, kind := range []string{"pods", "nodes", "leases", "secrets"} {
		if !e.home.has(kind) {
			t.Errorf("the proxy has seen no request for %s", kind)
		}
	}
	for _, request := range e.home.notProtobuf() {
		t.Errorf("%s is not protobuf", request)
	}
	expect.Eventually(t, "one watch of pods", func() (bool, string) {
		watches := e.home.podWatches.Load()
		return watches == 1, fmt.Sprintf("%d watches", watches)
	})
}

func (e *environment) testRestart(t *testing.T) {
	e.expectNode(t, capacity())
	before := e.mustGetNode(t)
	guests, err := e.guests().List(t.Context(), metav1.ListOptions{})
	expect.NoError(t, err)
	e.stop(t)
	watch, err := e.rome.CoreV1().Nodes().Watch(t.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + nodeName, ResourceVersion: e.mustGetNode(t).ResourceVersion})
	expect.NoError(t, err)
	defer watch.Stop()
	e.start()
	e.run(t, e.createPod(t, "after-restart"))
	if node := e.mustGetNode(t); node.UID != before.UID || node.Status.DaemonEndpoints != before.Status.DaemonEndpoints {
		t.Errorf("node and port changed from %s, %+v to %s, %+v", before.UID, before.Status.DaemonEndpoints, node.UID, node.Status.DaemonEndpoints)
	}
	// Successful probes do not write, so that all writes of the start come at once.
	writes := 0
	expect.Consistently(t, 2*time.Second, "node ready", func() (bool, string) {
		select {
		case event := <-watch.ResultChan():
			writes++
			node, ok := event.Object.(*corev1.Node)
			return ok && readyCondition(node).Status == corev1.ConditionTrue, fmt.Sprintf("%+v", event.Object)
		default:
			return true, ""
		}
	})
	t.Logf("the restart wrote the node %d times", writes)
	for _, guest := range guests.Items {
		current, err := e.guests().Get(t.Context(), guest.Name, metav1.GetOptions{})
		if err != nil || current.UID != guest.UID || current.DeletionTimestamp != nil {
			t.Errorf("guest %s did not survive the restart (%v)", guest.Name, err)
		}
	}
}

// testLongGracePeriod expects a terminating pod to exist as long as its guest.
func (e *environment) testLongGracePeriod(t *testing.T) {
	pod := e.createPod(t, "terminating")
	guest := e.run(t, pod)
	expect.NoError(t, e.pods().Delete(t.Context(), pod.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](60)}))
	expect.Eventually(t, "the deletion of the guest with the pod's grace period", func() (bool, string) {
		current, err := e.guests().Get(t.Context(), guest.Name, metav1.GetOptions{})
		return err == nil && current.DeletionTimestamp != nil && ptr.Deref(current.DeletionGracePeriodSeconds, 0) == 60, fmt.Sprintf("%+v, %v", current.ObjectMeta, err)
	})
	// Long enough for an exponential backoff to become longer than the deadline below.
	expect.Consistently(t, 30*time.Second, "the pod", func() (bool, string) {
		_, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
		return err == nil, fmt.Sprint(err)
	})
	e.endGuest(t, guest.Name)
	expect.EventuallyWithin(t, 25*time.Second, "the deletion of the pod", func() (bool, string) {
		_, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// testUnmanagedNode expects a Node that is not Spillway's to be left unchanged.
func (e *environment) testUnmanagedNode(t *testing.T) {
	const other = "berlin"
	node, err := e.rome.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName(other), Labels: map[string]string{"mine": "yes"}}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	e.writeConfig(t, func(c *nodeconfig.Config) { c.Provider = other })
	secret := nodeconfig.SecretName(other)
	expect.Eventually(t, "an Event VirtualNodeFailed", func() (bool, string) {
		list, err := e.rome.EventsV1().Events("").List(t.Context(), metav1.ListOptions{})
		expect.NoError(t, err)
		return slices.ContainsFunc(list.Items, func(event eventsv1.Event) bool {
			return event.Regarding.Name == secret && event.Reason == "VirtualNodeFailed" && strings.Contains(event.Note, "does not manage")
		}), fmt.Sprintf("%d other Events", len(list.Items))
	})
	expect.NoError(t, e.rome.CoreV1().Secrets(configNamespace).Delete(t.Context(), secret, metav1.DeleteOptions{}))
	current, err := e.rome.CoreV1().Nodes().Get(t.Context(), node.Name, metav1.GetOptions{})
	expect.NoError(t, err)
	if current.UID != node.UID || len(current.Spec.Taints) != len(node.Spec.Taints) || current.Labels["mine"] != "yes" || current.Labels[broker.LabelProvider] != "" {
		t.Errorf("the node was changed: %+v", current)
	}
}

func (e *environment) testDrain(t *testing.T) {
	remaining := e.run(t, e.createPod(t, "remaining"))
	e.writeConfig(t, func(c *nodeconfig.Config) { c.Terminating = true })
	expect.Eventually(t, "the deletion of the guests", func() (bool, string) {
		current, err := e.guests().Get(t.Context(), remaining.Name, metav1.GetOptions{})
		expect.NoError(t, err)
		return current.DeletionTimestamp != nil, "guest remaining is not terminating"
	})
	guests, err := e.guests().List(t.Context(), metav1.ListOptions{})
	expect.NoError(t, err)
	changes, err := e.guests().Watch(t.Context(), metav1.ListOptions{ResourceVersion: guests.ResourceVersion})
	expect.NoError(t, err)
	defer changes.Stop()
	late := e.createPod(t, "late")
	expect.Eventually(t, "the deletion of the pod that came late", func() (bool, string) {
		_, err := e.pods().Get(t.Context(), late.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
	e.mustGetNode(t)
	for _, guest := range guests.Items {
		if err := e.guests().Delete(t.Context(), guest.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil && !apierrors.IsNotFound(err) {
			t.Errorf("ending guest %s: %v", guest.Name, err)
		}
	}
	e.expectNodeDeleted(t)
	pods, err := e.pods().List(t.Context(), metav1.ListOptions{})
	expect.NoError(t, err)
	for _, pod := range pods.Items {
		t.Errorf("pod %s remains", pod.Name)
	}
	// The watch ends at the deletion of the last guest: all that was created is in it.
	for ended := false; !ended; {
		event := <-changes.ResultChan()
		guest, ok := event.Object.(*corev1.Pod)
		if !ok {
			t.Fatalf("the watch of guests ended with %+v", event)
		}
		if event.Type == watch.Added {
			t.Errorf("guest %s was created on a terminating node", guest.Name)
		}
		ended = event.Type == watch.Deleted && guest.UID == remaining.UID
	}
	expect.NoError(t, e.rome.CoreV1().Secrets(configNamespace).Delete(t.Context(), nodeconfig.SecretName(providerID), metav1.DeleteOptions{}))
	e.expectNodeDeleted(t)
}

// proxy forwards TCP connections to a server, and can cut them.
type proxy struct {
	address, target string
	dialer          *connrotation.Dialer
	cut             atomic.Bool
}

func startProxy(t *testing.T, target string) *proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	p := &proxy{address: listener.Addr().String(), target: target, dialer: connrotation.NewDialer((&net.Dialer{}).DialContext)}
	t.Cleanup(func() {
		listener.Close()
		p.disconnect()
	})
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			go p.forward(client)
		}
	}()
	return p
}

// forward copies in both directions until one side closes.
func (p *proxy) forward(client net.Conn) {
	defer client.Close()
	server, err := p.dialer.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer server.Close()
	if p.cut.Load() {
		return
	}
	go func() {
		io.Copy(server, client)
		server.Close()
	}()
	io.Copy(client, server)
}

func (p *proxy) disconnect() {
	p.cut.Store(true)
	p.dialer.CloseAll()
}

func (p *proxy) reconnect() { p.cut.Store(false) }

// homeProxy forwards what the program sends to this cluster's API server, and notes how.
type homeProxy struct {
	// config is for clients of the proxy; it has no credentials.
	config *rest.Config
	// podWatches is the number of open watches of pods.
	podWatches atomic.Int32

	mu sync.Mutex
	// encodings are those of the requests for objects, by verb and kind.
	encodings map[objectRequest]map[encoding]bool
}

type objectRequest struct{ method, kind string }

// encoding is the Accept header of a request, and its Content-Type.
type encoding struct{ accept, content string }

func startHomeProxy(t *testing.T, to *rest.Config) *homeProxy {
	t.Helper()
	target, err := url.Parse(to.Host)
	expect.NoError(t, err)
	transport, err := rest.TransportFor(rest.AnonymousClientConfig(to))
	expect.NoError(t, err)
	p := &homeProxy{encodings: map[objectRequest]map[encoding]bool{}}
	forward := &httputil.ReverseProxy{
		Transport: transport, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) },
		ErrorLog: log.New(io.Discard, "", 0), // the program ends its watches when it stops
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if kind := p.note(r); kind == "pods" && r.URL.Query().Get("watch") != "" {
			p.podWatches.Add(1)
			defer p.podWatches.Add(-1)
		}
		forward.ServeHTTP(w, r)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close) // after the program has ended
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	p.config = &rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{CAData: authority}}
	return p
}

// objectPath matches the paths of objects: what comes before is for discovery, which is in JSON.
var objectPath = regexp.MustCompile(`^/(?:api/v1|apis/[^/]+/[^/]+)/(?:namespaces/[^/]+/)?([^/]+)`)

// note returns the kind of the objects that a request is for; empty if it is for none.
func (p *homeProxy) note(r *http.Request) (kind string) {
	match := objectPath.FindStringSubmatch(r.URL.Path)
	if match == nil {
		return ""
	}
	request := objectRequest{r.Method, match[1]}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.encodings[request] == nil {
		p.encodings[request] = map[encoding]bool{}
	}
	p.encodings[request][encoding{r.Header.Get("Accept"), r.Header.Get("Content-Type")}] = true
	return request.kind
}

func (p *homeProxy) has(kind string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for request := range p.encodings {
		if request.kind == kind {
			return true
		}
	}
	return false
}

// notProtobuf describes the requests that accept something else before protobuf, or that
// send objects in another encoding. Patches have encodings of their own.
func (p *homeProxy) notProtobuf() (requests []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for request, encodings := range p.encodings {
		for e := range encodings {
			sendsObject := request.method == http.MethodPost || request.method == http.MethodPut
			if !strings.HasPrefix(e.accept, runtime.ContentTypeProtobuf) || sendsObject && e.content != runtime.ContentTypeProtobuf {
				requests = append(requests, fmt.Sprintf("%s of %s (Accept: %q, Content-Type: %q)", request.method, request.kind, e.accept, e.content))
			}
		}
	}
	return requests
}
