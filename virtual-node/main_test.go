package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	system   = "spillway-system"
	links    = "spillway-links"
	shop     = "shop"
	guests   = "spillway-guests-rome"
	paris    = "paris"
	nodeName = "spillway-paris"
	account  = "spillway-virtual-node"
	// asProgram has the test's own executable be the program.
	asProgram = "SPILLWAY_TEST_VIRTUAL_NODE"
)

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// world is rome, where the program runs as a process with the rights that the
// agent's chart gives it, and paris, which it may enter as the chart lets a
// consumer. The test plays the agents, and both clusters' schedulers and kubelets.
type world struct {
	*testing.T
	// whole is the test that the steps are of: what runs, runs till its end.
	whole       *testing.T
	admin       *rest.Config
	rome, paris kubernetes.Interface
	// scheduler is rome's, the only one that may bind to virtual nodes.
	scheduler  kubernetes.Interface
	road       *road
	connection nodeconfig.Connection
	kubeconfig string
	process    *exec.Cmd
	log        string
}

func (w *world) must(_ any, err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// within repeats a check until it passes.
func (w *world) within(limit time.Duration, what string, check func() error) {
	w.Helper()
	var last error
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if last = check(); last == nil {
			return
		}
	}
	w.Fatalf("not within %s: %s: %v\n%s", limit, what, last, w.tail())
}

func (w *world) tail() string {
	data, err := os.ReadFile(w.log)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	return "the program says:\n" + strings.Join(lines[max(0, len(lines)-15):], "\n")
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, whole: t, log: filepath.Join(t.TempDir(), "log")}
	w.admin = controlplane.Start(t)
	parisConfig := controlplane.Start(t)
	w.rome, w.paris = kubernetes.NewForConfigOrDie(w.admin), kubernetes.NewForConfigOrDie(parisConfig)
	scheduler := rest.CopyConfig(w.admin)
	scheduler.Impersonate.UserName = "system:serviceaccount:" + system + ":spillway-scheduler"
	w.scheduler = kubernetes.NewForConfigOrDie(scheduler)
	install(t, w.admin, "rome")
	install(t, parisConfig, paris)
	makeNamespace := func(c kubernetes.Interface, name string, labels map[string]string) {
		w.must(c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{}))
		w.must(c.CoreV1().ServiceAccounts(name).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}))
	}
	makeNamespace(w.rome, shop, nil)
	bind(w, w.rome, shop, "spillway-virtual-node-namespace", system)
	makeNamespace(w.paris, guests, map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelGuestsOf: "rome", "pod-security.kubernetes.io/enforce": "baseline"})
	w.must(w.paris.CoreV1().ServiceAccounts(guests).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}))
	bind(w, w.paris, guests, "spillway-direct-guest", guests)
	hard := corev1.ResourceList{}
	used := corev1.ResourceList{}
	for name, amount := range map[corev1.ResourceName]string{"requests.cpu": "4", "requests.memory": "4Gi", "requests.ephemeral-storage": "0", "pods": "20"} {
		hard[name], used[name] = resource.MustParse(amount), resource.MustParse("0")
	}
	quota, err := w.paris.CoreV1().ResourceQuotas(guests).Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "spillway-guests"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{})
	w.must(quota, err)
	// No controller runs here that would fill it in.
	quota.Status.Hard, quota.Status.Used = hard, used
	w.must(w.paris.CoreV1().ResourceQuotas(guests).UpdateStatus(t.Context(), quota, metav1.UpdateOptions{}))

	u, err := url.Parse(parisConfig.Host)
	w.must(u, err)
	w.road = openRoad(t, u.Host)
	w.connection = nodeconfig.Connection{
		Endpoint: "https://" + w.road.address(), CA: parisConfig.CAData, Namespace: guests, Token: w.token(w.paris, guests), Expires: time.Now().Add(time.Hour),
	}
	w.kubeconfig = writeKubeconfig(t, w.admin, &clientcmdapi.AuthInfo{Token: w.token(w.rome, system)})
	return w
}

func (w *world) token(c kubernetes.Interface, namespace string) string {
	w.Helper()
	made, err := c.CoreV1().ServiceAccounts(namespace).CreateToken(w.Context(), account, &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600)}}, metav1.CreateOptions{})
	w.must(made, err)
	return made.Status.Token
}

func bind(w *world, c kubernetes.Interface, namespace, role, accountNamespace string) {
	w.Helper()
	w.must(c.RbacV1().RoleBindings(namespace).Create(w.Context(), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: account},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: accountNamespace, Name: account}},
	}, metav1.CreateOptions{}))
}

// install puts the agent's chart onto an API server, for its roles and policies.
func install(t *testing.T, config *rest.Config, cluster string) {
	t.Helper()
	helm, err := binaries.Program(t.Context(), "helm", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"install", "spillway-agent", filepath.Join(root, "charts", "agent"), "--namespace", system, "--create-namespace",
		"--kubeconfig", writeKubeconfig(t, config, &clientcmdapi.AuthInfo{ClientCertificateData: config.CertData, ClientKeyData: config.KeyData})}
	for _, value := range []string{
		"clusterID=" + cluster, "driver=direct", "broker.url=https://broker.example.org:8443",
		"broker.caHash=sha256:" + strings.Repeat("0123456789abcdef", 4), "join.token=secret", "apiServer.endpoint=" + config.Host,
	} {
		args = append(args, "--set", value)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, helm, args...)
	scratch := t.TempDir()
	command.Env = append(os.Environ(), "HELM_CACHE_HOME="+scratch, "HELM_CONFIG_HOME="+scratch, "HELM_DATA_HOME="+scratch)
	if out, err := command.CombinedOutput(); err != nil {
		t.Fatalf("installing the chart: %v: %s", err, out)
	}
}

func writeKubeconfig(t *testing.T, config *rest.Config, who *clientcmdapi.AuthInfo) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(clientcmdapi.Config{
		Clusters:       map[string]*clientcmdapi.Cluster{"c": {Server: config.Host, CertificateAuthorityData: config.CAData}},
		AuthInfos:      map[string]*clientcmdapi.AuthInfo{"u": who},
		Contexts:       map[string]*clientcmdapi.Context{"c": {Cluster: "c", AuthInfo: "u"}},
		CurrentContext: "c",
	}, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// start runs the program.
func (w *world) start() {
	w.Helper()
	self, err := os.Executable()
	w.must(self, err)
	out, err := os.OpenFile(w.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	w.must(out, err)
	defer out.Close()
	command := exec.Command(self, "--kubeconfig="+w.kubeconfig, "--namespace="+links, "--kubelet-address=127.0.0.1", "--kubelet-port=0",
		"--metrics-bind-address=0", "--health-probe-bind-address=0", "--leader-elect")
	command.Env = append(os.Environ(), asProgram+"=1")
	command.Stdout, command.Stderr = out, out
	w.must(nil, command.Start())
	w.process = command
	w.whole.Cleanup(func() {
		command.Process.Kill()
		command.Wait()
		if w.whole.Failed() {
			w.whole.Log(w.tail())
		}
	})
}

// stop ends it, as a Deployment would.
func (w *world) stop() {
	w.Helper()
	w.must(nil, w.process.Process.Signal(syscall.SIGTERM))
	ended := make(chan error, 1)
	go func() { ended <- w.process.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			w.Errorf("the program ended with %v\n%s", err, w.tail())
		}
	case <-time.After(20 * time.Second):
		w.Fatalf("the program does not end\n%s", w.tail())
	}
}

// write stores the link, as the agent would.
func (w *world) write(change func(*nodeconfig.Config)) {
	w.Helper()
	l := nodeconfig.Config{Provider: paris, Connection: w.connection, Capacity: nodeconfig.Capacity{
		Resources:  corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("2Gi"), "pods": resource.MustParse("10")},
		Labels:     map[string]string{"topology.kubernetes.io/zone": "paris-1"},
		Namespaces: []string{shop},
	}}
	if change != nil {
		change(&l)
	}
	want, err := l.Secret(links)
	w.must(want, err)
	_, err = w.rome.CoreV1().Secrets(links).Update(w.Context(), want, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = w.rome.CoreV1().Secrets(links).Create(w.Context(), want, metav1.CreateOptions{})
	}
	w.must(nil, err)
}

func (w *world) node() (*corev1.Node, error) {
	return w.rome.CoreV1().Nodes().Get(w.Context(), nodeName, metav1.GetOptions{})
}

func readiness(node *corev1.Node) corev1.NodeCondition {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c
		}
	}
	return corev1.NodeCondition{}
}

// carries waits for the Node to be ready and to carry exactly what is given.
func (w *world) carries(want corev1.ResourceList, parked bool) {
	w.Helper()
	w.within(60*time.Second, fmt.Sprintf("the node carries %v", want), func() error {
		node, err := w.node()
		switch {
		case err != nil:
			return err
		case readiness(node).Status != corev1.ConditionTrue:
			return fmt.Errorf("its readiness is %+v", readiness(node))
		case !equality.Semantic.DeepEqual(node.Status.Allocatable, want) || !equality.Semantic.DeepEqual(node.Status.Capacity, want):
			return fmt.Errorf("allocatable is %v, capacity %v", node.Status.Allocatable, node.Status.Capacity)
		case node.Spec.Unschedulable != parked:
			return fmt.Errorf("unschedulable is %t", node.Spec.Unschedulable)
		}
		return nil
	})
}

func (w *world) pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	w.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: name}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "image"}}}}
	for _, c := range change {
		c(p)
	}
	made, err := w.rome.CoreV1().Pods(shop).Create(w.Context(), p, metav1.CreateOptions{})
	w.must(made, err)
	w.must(nil, w.scheduler.CoreV1().Pods(shop).Bind(w.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeName},
	}, metav1.CreateOptions{}))
	return made
}

func (w *world) running(p *corev1.Pod) *corev1.Pod {
	w.Helper()
	var g *corev1.Pod
	w.within(60*time.Second, p.Name+" has a guest", func() (err error) {
		g, err = w.paris.CoreV1().Pods(guests).Get(w.Context(), guest.Name(p), metav1.GetOptions{})
		if err != nil {
			now, _ := w.rome.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
			err = fmt.Errorf("%w; at home its status is %+v", err, now.Status)
		}
		return err
	})
	// One that has no node is deleted without a grace period.
	w.must(nil, w.paris.CoreV1().Pods(guests).Bind(w.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: g.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: "worker"},
	}, metav1.CreateOptions{}))
	w.within(30*time.Second, "the guest's status is written", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), g.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		now.Status = corev1.PodStatus{
			Phase: corev1.PodRunning, StartTime: ptr.To(metav1.Now()), PodIP: "10.1.2.3", PodIPs: []corev1.PodIP{{IP: "10.1.2.3"}}, QOSClass: now.Status.QOSClass,
			ContainerStatuses: []corev1.ContainerStatus{{Name: "main", Ready: true, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}}}},
			Conditions:        []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}},
		}
		_, err = w.paris.CoreV1().Pods(guests).UpdateStatus(w.Context(), now, metav1.UpdateOptions{})
		return err
	})
	w.phase(p, corev1.PodRunning)
	return g
}

func (w *world) phase(p *corev1.Pod, want corev1.PodPhase) {
	w.Helper()
	w.within(60*time.Second, fmt.Sprintf("%s is %s", p.Name, want), func() error {
		now, err := w.rome.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
		if err == nil && now.Status.Phase != want {
			err = fmt.Errorf("it is %+v", now.Status)
		}
		return err
	})
}

func gone(err error) error {
	switch {
	case err == nil:
		return errors.New("it is still there")
	case apierrors.IsNotFound(err):
		return nil
	}
	return err
}

// TestProgram follows one virtual node through its life.
func TestProgram(t *testing.T) {
	w := newWorld(t)
	w.start()
	w.write(nil)
	two := corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("2Gi"), "pods": resource.MustParse("10")}
	w.carries(two, false)
	step := func(name string, f func(*world)) {
		if t.Failed() {
			return // each goes on from the one before
		}
		t.Run(name, func(t *testing.T) {
			inner := *w
			inner.T = t
			f(&inner)
			w.process, w.connection = inner.process, inner.connection
		})
	}
	step("the node is what is promised", isAsPromised)
	step("capacity follows the link", follows)
	step("the kubelet API knows who asks", guarded)
	step("a provider out of reach", unreachable)
	step("a new token", renewed)
	step("a refused token", refused)
	step("a restart", restarted)
	step("a long goodbye", lingers)
	step("a node of somebody else's", taken)
	step("the end", ends)
}

func isAsPromised(w *world) {
	node, err := w.node()
	w.must(node, err)
	for key, want := range map[string]string{
		broker.LabelProvider: paris, broker.LabelNodeType: broker.NodeTypeVirtual, broker.LabelManagedBy: broker.ManagedBySpillway,
		corev1.LabelHostname: nodeName, corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64", corev1.LabelTopologyZone: "paris-1",
	} {
		if node.Labels[key] != want {
			w.Errorf("label %s is %q, want %q", key, node.Labels[key], want)
		}
	}
	taint := corev1.Taint{Key: broker.TaintOverflow, Value: paris, Effect: corev1.TaintEffectNoSchedule}
	if !slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&taint) && t.Value == taint.Value }) {
		w.Errorf("taints are %v, want %v among them", node.Spec.Taints, taint)
	}
	w.within(30*time.Second, "a lease", func() error {
		lease, err := w.rome.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(w.Context(), nodeName, metav1.GetOptions{})
		if err == nil && (lease.Spec.RenewTime == nil || lease.Spec.HolderIdentity == nil) {
			err = fmt.Errorf("its spec is %+v", lease.Spec)
		}
		return err
	})
}

func follows(w *world) {
	four := corev1.ResourceList{"cpu": resource.MustParse("4"), "memory": resource.MustParse("2Gi"), "nvidia.com/gpu": resource.MustParse("1"), "pods": resource.MustParse("12")}
	w.write(func(l *nodeconfig.Config) { l.Capacity.Resources = four })
	w.carries(four, false)
	parked := corev1.ResourceList{"cpu": resource.MustParse("1m"), "memory": resource.MustParse("1Mi"), "pods": resource.MustParse("0")}
	w.write(func(l *nodeconfig.Config) { l.Capacity = nodeconfig.Capacity{Resources: parked, Parked: true} })
	w.carries(parked, true)
	node, err := w.node()
	w.must(node, err)
	if zone, ok := node.Labels[corev1.LabelTopologyZone]; ok {
		w.Errorf("the label of a zone that is no longer asked for is still there: %s", zone)
	}
	w.write(nil)
	w.carries(corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("2Gi"), "pods": resource.MustParse("10")}, false)
}

// ask makes a request to the node's kubelet API and returns the answer's code.
func (w *world) ask(path string, certificate []tls.Certificate, bearer string) int {
	w.Helper()
	node, err := w.node()
	w.must(node, err)
	var address string
	for _, a := range node.Status.Addresses {
		if a.Type == corev1.NodeInternalIP {
			address = a.Address
		}
	}
	// The certificate is self-signed, and API servers do not check it by default.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificate}}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(w.Context(), 60*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("https://%s:%d%s", address, node.Status.DaemonEndpoints.KubeletEndpoint.Port, path), nil)
	w.must(request, err)
	if bearer != "" {
		request.Header.Set("Authorization", "Bearer "+bearer)
	}
	answer, err := (&http.Client{Transport: transport}).Do(request)
	w.must(answer, err)
	defer answer.Body.Close()
	io.Copy(io.Discard, io.LimitReader(answer.Body, 1<<20))
	return answer.StatusCode
}

func guarded(w *world) {
	admin, err := tls.X509KeyPair(w.admin.CertData, w.admin.KeyData)
	w.must(admin, err)
	paths := []string{"/pods", "/metrics/resource", "/stats/summary", "/containerLogs/" + shop + "/nobody/main", "/exec/" + shop + "/nobody/main?command=true&output=1", "/portForward/" + shop + "/nobody"}
	nobodys, err := w.rome.CoreV1().ServiceAccounts(shop).CreateToken(w.Context(), "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	w.must(nobodys, err)
	for _, path := range paths {
		if code := w.ask(path, nil, ""); code != http.StatusUnauthorized {
			w.Errorf("%s answers nobody in particular with %d", path, code)
		}
		if code := w.ask(path, nil, "a.b.c"); code != http.StatusUnauthorized {
			w.Errorf("%s answers a made-up token with %d", path, code)
		}
		if code := w.ask(path, nil, nobodys.Status.Token); code != http.StatusForbidden {
			w.Errorf("%s answers somebody without rights with %d", path, code)
		}
	}
	for path, want := range map[string]int{"/pods": 200, "/metrics/resource": 200, "/stats/summary": 200, "/containerLogs/" + shop + "/nobody/main": 404} {
		if code := w.ask(path, []tls.Certificate{admin}, ""); code != want {
			w.Errorf("%s answers an administrator with %d, want %d", path, code, want)
		}
	}
}

func unreachable(w *world) {
	p := w.pod("stays")
	w.running(p)
	cut := time.Now()
	w.road.close()
	w.within(60*time.Second, "the node is not ready", func() error {
		node, err := w.node()
		if c := readiness(node); err == nil && (c.Status != corev1.ConditionFalse || c.Reason != "ProviderUnreachable") {
			err = fmt.Errorf("its readiness is %+v", c)
		}
		return err
	})
	w.Logf("the node was not ready %s after its provider was cut off", time.Since(cut).Round(100*time.Millisecond))
	// As the node lifecycle controller does with the pods of such a node.
	marked := w.marks(p, corev1.ConditionFalse)
	waits := w.pod("waits", func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever })
	w.within(30*time.Second, "the pod is looked at again", func() error {
		now, err := w.rome.CoreV1().Pods(shop).Patch(w.Context(), p.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"looked-at":"again"}}}`), metav1.PatchOptions{})
		if err != nil {
			return err
		}
		if since := time.Since(marked); since < 3*time.Second {
			return fmt.Errorf("only %s ago it was marked", since)
		}
		if c := conditionOf(now, corev1.PodReady); c.Status != corev1.ConditionFalse {
			w.Fatalf("a pod that is out of reach calls itself ready: %+v", c)
		}
		return nil
	})
	w.road.open()
	mended := time.Now()
	w.running(waits)
	w.within(60*time.Second, "the node is ready", func() error {
		node, err := w.node()
		if c := readiness(node); err == nil && c.Status != corev1.ConditionTrue {
			err = fmt.Errorf("its readiness is %+v", c)
		}
		return err
	})
	w.Logf("all was well %s after its return", time.Since(mended).Round(100*time.Millisecond))
	w.within(30*time.Second, "the pod is ready again", func() error {
		now, err := w.rome.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
		if c := conditionOf(now, corev1.PodReady); err == nil && c.Status != corev1.ConditionTrue {
			err = fmt.Errorf("it is %+v", c)
		}
		return err
	})
	w.phase(p, corev1.PodRunning)
}

// marks writes a pod's readiness, and returns when.
func (w *world) marks(p *corev1.Pod, ready corev1.ConditionStatus) time.Time {
	w.Helper()
	w.within(30*time.Second, "its readiness is written", func() error {
		now, err := w.rome.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for i := range now.Status.Conditions {
			if now.Status.Conditions[i].Type == corev1.PodReady {
				now.Status.Conditions[i].Status = ready
			}
		}
		_, err = w.rome.CoreV1().Pods(shop).UpdateStatus(w.Context(), now, metav1.UpdateOptions{})
		return err
	})
	return time.Now()
}

func conditionOf(pod *corev1.Pod, kind corev1.PodConditionType) corev1.PodCondition {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c
		}
	}
	return corev1.PodCondition{}
}

// A new token is taken over; the one before is of no use any more.
func renewed(w *world) {
	w.must(nil, w.paris.CoreV1().ServiceAccounts(guests).Delete(w.Context(), account, metav1.DeleteOptions{}))
	w.must(w.paris.CoreV1().ServiceAccounts(guests).Create(w.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: account}}, metav1.CreateOptions{}))
	w.connection.Token = w.token(w.paris, guests)
	w.write(nil)
	w.running(w.pod("after-renewal"))
}

func refused(w *world) {
	right := w.connection
	w.connection.Token = "not.a.token"
	w.write(nil)
	w.within(60*time.Second, "the node says that it is refused", func() error {
		node, err := w.node()
		if c := readiness(node); err == nil && (c.Status != corev1.ConditionFalse || c.Reason != "ProviderRefused") {
			err = fmt.Errorf("its readiness is %+v", c)
		}
		return err
	})
	for _, name := range []string{"stays", "waits", "after-renewal"} {
		now, err := w.rome.CoreV1().Pods(shop).Get(w.Context(), name, metav1.GetOptions{})
		w.must(now, err)
		if now.Status.Phase != corev1.PodRunning {
			w.Errorf("%s is %s while its provider refuses", name, now.Status.Phase)
		}
	}
	w.connection = right
	w.write(nil)
	w.running(w.pod("after-refusal"))
}

func restarted(w *world) {
	w.carries(corev1.ResourceList{"cpu": resource.MustParse("2"), "memory": resource.MustParse("2Gi"), "pods": resource.MustParse("10")}, false)
	before, err := w.node()
	w.must(before, err)
	list, err := w.paris.CoreV1().Pods(guests).List(w.Context(), metav1.ListOptions{})
	w.must(list, err)
	w.stop()
	during, err := w.node()
	w.must(during, err)
	changes, err := w.rome.CoreV1().Nodes().Watch(w.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + nodeName, ResourceVersion: during.ResourceVersion})
	w.must(changes, err)
	defer changes.Stop()
	w.start()
	w.running(w.pod("after-restart"))
	now, err := w.node()
	w.must(now, err)
	if now.UID != before.UID || now.Status.DaemonEndpoints != before.Status.DaemonEndpoints {
		w.Errorf("the node was made anew (%s, %s) or moved (%+v, %+v)", before.UID, now.UID, before.Status.DaemonEndpoints, now.Status.DaemonEndpoints)
	}
	// Each probe of the provider that changes nothing writes nothing, so all that
	// the start wrote comes at once.
	seen, quiet := 0, time.After(2*time.Second)
	for more := true; more; {
		select {
		case e := <-changes.ResultChan():
			if node, ok := e.Object.(*corev1.Node); ok && readiness(node).Status != corev1.ConditionTrue {
				w.Errorf("a restart made the node unready: %+v", readiness(node))
				more = false
			}
			seen++
		case <-quiet:
			more = false
		}
	}
	w.Logf("the restart changed the node %d times", seen)
	for i := range list.Items {
		kept, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), list.Items[i].Name, metav1.GetOptions{})
		if err != nil || kept.UID != list.Items[i].UID || kept.DeletionTimestamp != nil {
			w.Errorf("guest %s did not live through the restart (%v)", list.Items[i].Name, err)
		}
	}
}

// A pod goes when its guest does, however long that takes.
func lingers(w *world) {
	p := w.pod("lingers")
	g := w.running(p)
	w.must(nil, w.rome.CoreV1().Pods(shop).Delete(w.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](60)}))
	w.within(30*time.Second, "the guest is asked to end, in the time that the pod was given", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), g.Name, metav1.GetOptions{})
		if err == nil && (now.DeletionTimestamp == nil || ptr.Deref(now.DeletionGracePeriodSeconds, 0) != 60) {
			err = fmt.Errorf("its end is to be at %v, after %v s", now.DeletionTimestamp, now.DeletionGracePeriodSeconds)
		}
		return err
	})
	// As long as it takes for whoever asks ever more rarely to be late.
	for until := time.Now().Add(14 * time.Second); time.Now().Before(until); time.Sleep(500 * time.Millisecond) {
		w.must(w.rome.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{}))
	}
	w.must(nil, w.paris.CoreV1().Pods(guests).Delete(w.Context(), g.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	w.within(10*time.Second, "the pod is gone", func() error {
		_, err := w.rome.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
		return gone(err)
	})
}

// A Node of the right name that is not ours is left alone.
func taken(w *world) {
	foreign := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: broker.VirtualNodeName("berlin"), Labels: map[string]string{"mine": "yes"}}}
	foreign, err := w.rome.CoreV1().Nodes().Create(w.Context(), foreign, metav1.CreateOptions{})
	w.must(foreign, err)
	berlin, err := nodeconfig.Config{Provider: "berlin", Connection: w.connection, Capacity: nodeconfig.Capacity{Resources: corev1.ResourceList{"cpu": resource.MustParse("1")}}}.Secret(links)
	w.must(berlin, err)
	w.must(w.rome.CoreV1().Secrets(links).Create(w.Context(), berlin, metav1.CreateOptions{}))
	w.within(60*time.Second, "people are told", func() error {
		list, err := w.rome.EventsV1().Events("").List(w.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Regarding.Name == berlin.Name && strings.Contains(e.Note, "did not make") {
				return nil
			}
		}
		return fmt.Errorf("none of %d events says so", len(list.Items))
	})
	w.must(nil, w.rome.CoreV1().Secrets(links).Delete(w.Context(), berlin.Name, metav1.DeleteOptions{}))
	now, err := w.rome.CoreV1().Nodes().Get(w.Context(), foreign.Name, metav1.GetOptions{})
	w.must(now, err)
	if now.UID != foreign.UID || len(now.Spec.Taints) != len(foreign.Spec.Taints) || now.Labels["mine"] != "yes" || now.Labels[broker.LabelProvider] != "" {
		w.Errorf("somebody else's node was changed: %+v", now)
	}
}

func ends(w *world) {
	node, err := w.node()
	w.must(node, err)
	w.write(func(l *nodeconfig.Config) { l.Terminating = true })
	late := w.pod("late")
	w.within(60*time.Second, "the guests are asked to end", func() error {
		list, err := w.paris.CoreV1().Pods(guests).List(w.Context(), metav1.ListOptions{})
		for i := range list.Items {
			if list.Items[i].DeletionTimestamp == nil {
				err = errors.Join(err, fmt.Errorf("%s is not", list.Items[i].Name))
			}
		}
		return err
	})
	if _, err := w.node(); err != nil {
		w.Errorf("the node went before its pods: %v", err)
	}
	list, err := w.paris.CoreV1().Pods(guests).List(w.Context(), metav1.ListOptions{})
	w.must(list, err)
	for _, g := range list.Items {
		// Their kubelet is done with them.
		w.must(nil, w.paris.CoreV1().Pods(guests).Delete(w.Context(), g.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	}
	w.within(60*time.Second, "the node is gone", func() error {
		_, err := w.node()
		return gone(err)
	})
	pods, err := w.rome.CoreV1().Pods(shop).List(w.Context(), metav1.ListOptions{})
	w.must(pods, err)
	for _, p := range pods.Items {
		w.Errorf("pod %s is left", p.Name)
	}
	if _, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), guest.Name(late), metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		w.Errorf("a pod was begun on a node that ends (%v)", err)
	}
	w.must(nil, w.rome.CoreV1().Secrets(links).Delete(w.Context(), nodeconfig.SecretName(paris), metav1.DeleteOptions{}))
	w.within(30*time.Second, "no node comes back", func() error {
		_, err := w.node()
		return gone(err)
	})
}

// road is the way to a server, and can be closed.
type road struct {
	listener net.Listener
	target   string

	mu     sync.Mutex
	closed bool
	conns  map[net.Conn]bool
}

func openRoad(t *testing.T, target string) *road {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &road{listener: listener, target: target, conns: map[net.Conn]bool{}}
	t.Cleanup(func() {
		listener.Close()
		r.close()
	})
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go r.carry(c)
		}
	}()
	return r
}

func (r *road) address() string { return r.listener.Addr().String() }

func (r *road) carry(c net.Conn) {
	defer c.Close()
	there, err := net.Dial("tcp", r.target)
	if err != nil {
		return
	}
	defer there.Close()
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	r.conns[c], r.conns[there] = true, true
	r.mu.Unlock()
	go func() {
		io.Copy(there, c)
		there.Close()
	}()
	io.Copy(c, there)
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
	delete(r.conns, there)
}

func (r *road) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for c := range r.conns {
		c.Close()
	}
}

func (r *road) open() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = false
}
