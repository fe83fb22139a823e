package histories

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// hub is an API server with two broker processes, of which one leads.
type hub struct {
	// api reads and writes at the API server, and not through a gateway.
	api     client.Client
	service *service
	brokers [2]*replica
}

// newHub starts everything and waits until a broker leads. With blind gateways, the
// ledger is written without compare-and-swap.
func newHub(t *testing.T, blind bool, flags ...string) *hub {
	t.Helper()
	ctrl.SetLogger(logr.Discard())
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	h := &hub{}
	var err error
	h.api, err = client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	expect.NoError(t, h.api.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}}))
	dir := t.TempDir()
	expect.NoError(t, binaries.Own(t.Context(), t.Logf, dir, "./broker"))
	ledgers := &sync.RWMutex{}
	for i := range h.brokers {
		gateway, err := newGateway(config, ledgers, blind)
		expect.NoError(t, err)
		h.brokers[i] = newReplica(t, fmt.Sprint("broker-", i), dir, gateway, flags)
	}
	h.service, err = newService(h.brokers[:])
	expect.NoError(t, err)
	// Before the API server stops, and with the brokers' end.
	t.Cleanup(func() {
		h.service.stop()
		for _, b := range h.brokers {
			b.stop(t)
		}
	})
	h.awaitLeader(t, nil)
	return h
}

// awaitLeader waits until a broker leads, another one than that if it is not nil, and
// returns it.
func (h *hub) awaitLeader(t *testing.T, than *replica) *replica {
	t.Helper()
	var leader *replica
	expect.EventuallyWithin(t, patience, "a broker to lead", func() (bool, string) {
		leader = h.service.leader()
		return leader != nil && leader != than, fmt.Sprintf("%s\n%s", h.brokers[0].tail(), h.brokers[1].tail())
	})
	return leader
}

// replica is a broker that is started again whenever its process ends, as a kubelet does.
type replica struct {
	name    string
	gateway *gateway
	flags   []string
	spec    process.Spec

	mu      sync.Mutex
	process *process.Process
	// address of the REST API, and probes the URL of the health probes.
	address, probes string
	// starts is how often it was started.
	starts  int
	stopped bool
	ended   chan struct{}
}

func newReplica(t *testing.T, name, dir string, g *gateway, flags []string) *replica {
	t.Helper()
	kubeconfig := filepath.Join(dir, name+".kubeconfig")
	access := clientcmdapi.NewConfig()
	access.Clusters["hub"] = &clientcmdapi.Cluster{Server: g.url}
	access.Contexts["hub"] = &clientcmdapi.Context{Cluster: "hub"}
	access.CurrentContext = "hub"
	expect.NoError(t, clientcmd.WriteToFile(*access, kubeconfig))
	r := &replica{name: name, gateway: g, flags: flags, ended: make(chan struct{})}
	r.spec = process.Spec{Name: name, Path: filepath.Join(dir, "broker"), Dir: dir, LogDir: dir, Env: []string{"KUBECONFIG=" + kubeconfig}}
	expect.NoError(t, r.start())
	go r.supervise(t)
	return r
}

// start starts the broker on ports that are free: another program may have those of
// before.
func (r *replica) start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.stopped {
		return nil
	}
	var addresses [2]string
	for i := range addresses {
		port, err := cluster.FreePort()
		if err != nil {
			return err
		}
		addresses[i] = cluster.Address(port)
	}
	r.address, r.probes = addresses[0], "http://"+addresses[1]
	r.spec.Args = append([]string{"--namespace=" + broker.SystemNamespace, "--listen=" + addresses[0], "--health-probe-bind-address=" + addresses[1],
		"--metrics-bind-address=0", "--leader-elect", "--zap-log-level=error"}, r.flags...)
	started, err := process.Start(r.spec)
	if err == nil {
		r.process = started
		r.starts++
	}
	return err
}

// supervise starts the broker whenever it has ended.
func (r *replica) supervise(t *testing.T) {
	defer close(r.ended)
	for {
		current, _ := r.current()
		<-current.Done()
		if r.isStopped() {
			return
		}
		if err := r.start(); err != nil {
			t.Errorf("starting %s again: %v", r.name, err)
			return
		}
	}
}

// current is the running process, and how often one was started.
func (r *replica) current() (*process.Process, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.process, r.starts
}

func (r *replica) isStopped() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stopped
}

// signal sends a signal to the process.
func (r *replica) signal(t *testing.T, signal syscall.Signal) {
	t.Helper()
	current, _ := r.current()
	expect.NoError(t, syscall.Kill(current.Pid(), signal))
}

// stop ends the broker for good. It prints the end of its log if the test has failed.
func (r *replica) stop(t *testing.T) {
	r.mu.Lock()
	r.stopped = true
	current := r.process
	r.mu.Unlock()
	current.Kill()
	<-r.ended
	if t.Failed() {
		t.Logf("the log of %s ends with:\n%s", r.name, r.tail())
	}
}

// log is all that the broker has written.
func (r *replica) log(t *testing.T) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(r.spec.LogDir, r.name+".log"))
	expect.NoError(t, err)
	return string(content)
}

func (r *replica) tail() string { return process.Tail(r.spec.LogDir+"/"+r.name+".log", 15) }

func (r *replica) addresses() (rest, probes string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.address, r.probes
}

// ready reports whether the broker says that it leads.
func (r *replica) ready() bool {
	_, probes := r.addresses()
	response, err := (&http.Client{Timeout: time.Second}).Get(probes + "/readyz")
	if err != nil {
		return false
	}
	defer response.Body.Close()
	return response.StatusCode == http.StatusOK
}

// service forwards connections to the broker that is ready, as a Service does, and
// closes those to one that is no longer. A process that is stopped still reads the
// requests that were on their way when it goes on.
type service struct {
	url      string
	listener net.Listener
	replicas []*replica
	cancel   context.CancelFunc

	mu      sync.Mutex
	backend *replica
	open    map[net.Conn]struct{}
}

func newService(replicas []*replica) (*service, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &service{url: "https://" + listener.Addr().String(), listener: listener, replicas: replicas, open: map[net.Conn]struct{}{}}
	ctx, cancel := context.WithCancel(context.Background())
	s.cancel = cancel
	go s.probe(ctx)
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go s.forward(connection)
		}
	}()
	return s, nil
}

func (s *service) stop() {
	s.cancel()
	_ = s.listener.Close()
	s.use(nil)
}

// probe finds the broker that is ready. As long as it is, it remains the backend.
func (s *service) probe(ctx context.Context) {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if backend := s.leader(); backend != nil {
			if backend.ready() {
				continue
			}
			s.use(nil)
		}
		for _, r := range s.replicas {
			if r.ready() {
				s.use(r)
				break
			}
		}
	}
}

// use changes the backend and closes the connections to the last one.
func (s *service) use(r *replica) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.backend = r
	for connection := range s.open {
		_ = connection.Close()
	}
	clear(s.open)
}

// leader is the broker that is ready; nil if none is.
func (s *service) leader() *replica {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.backend
}

func (s *service) forward(from net.Conn) {
	defer from.Close()
	backend := s.leader()
	if backend == nil {
		return
	}
	address, _ := backend.addresses()
	to, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	defer to.Close()
	s.mu.Lock()
	if s.backend != backend {
		s.mu.Unlock()
		return
	}
	s.open[from] = struct{}{}
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.open, from)
	}()
	go func() {
		_, _ = io.Copy(to, from)
		_ = to.Close()
		_ = from.Close()
	}()
	_, _ = io.Copy(from, to)
}
