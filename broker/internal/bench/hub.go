package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

const namespace = broker.SystemNamespace

// hub is an API server with a broker.
type hub struct {
	cluster  *cluster.Cluster
	dir      string
	api      client.Client
	url      string
	caHash   string
	token    string
	requests requests

	stopBroker func() error
}

// onHub is a bench that needs a hub.
func onHub(measure func(ctx context.Context, h *hub) error) func() error {
	return func() (err error) {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
		defer cancel()
		h, err := startHub(ctx)
		if err != nil {
			return err
		}
		defer func() {
			if err != nil {
				fmt.Fprintln(os.Stderr, h.logs())
			}
			err = errors.Join(err, h.stop())
		}()
		finish, err := profile()
		if err != nil {
			return err
		}
		defer finish()
		return measure(ctx, h)
	}
}

func startHub(ctx context.Context) (_ *hub, err error) {
	ctrl.SetLogger(logr.Discard())
	h := &hub{stopBroker: func() error { return nil }}
	defer func() {
		if err != nil {
			err = errors.Join(err, h.stop())
		}
	}()
	if h.dir, err = os.MkdirTemp("", "spillway-bench-"); err != nil {
		return h, err
	}
	if h.cluster, err = controlplane.Run(ctx, "hub", h.dir); err != nil {
		return h, err
	}
	h.api = h.cluster.Client
	if err := h.api.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}); err != nil {
		return h, err
	}
	return h, h.startBroker(ctx)
}

// startBroker runs what the broker's main function runs.
func (h *hub) startBroker(ctx context.Context) error {
	config := rest.CopyConfig(h.cluster.Admin)
	config.Wrap(h.requests.count)
	b, err := program.New(ctx, config, program.Options{Namespace: namespace, Listen: "127.0.0.1:0", Metrics: "0", Probes: "0", CatchUp: program.DefaultCatchUp})
	if err != nil {
		return err
	}
	secret := &corev1.Secret{}
	if err := h.api.Get(ctx, client.ObjectKey{Namespace: namespace, Name: identity.TokenName}, secret); err != nil {
		return err
	}
	h.url, h.caHash, h.token = "https://"+b.Address.String(), b.CAHash, string(secret.Data[identity.TokenKey])
	running, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- b.Start(running) }()
	h.stopBroker = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	if !b.GetCache().WaitForCacheSync(running) {
		return errors.New("the broker's cache did not sync")
	}
	return nil
}

// requests counts the broker's requests to the API server, by verb and resource.
type requests struct {
	mu sync.Mutex
	by map[string]int
	// pending are the writes without a response yet.
	pending int
	// list has the writes since it was emptied last, in order.
	list []write
}

// write is one request that is not a read.
type write struct {
	at   time.Time
	what string
}

func (r *requests) count(next http.RoundTripper) http.RoundTripper {
	return roundTripper(func(request *http.Request) (*http.Response, error) {
		_, path, _ := strings.Cut(request.URL.Path, "/namespaces/"+namespace)
		if parts := strings.Split(path, "/"); len(parts) > 2 {
			parts[2] = "*"
			path = strings.Join(parts, "/")
		}
		what := request.Method + " " + path
		if request.Method != http.MethodGet {
			r.begin(what)
			defer r.end()
		}
		response, err := next.RoundTrip(request)
		if err == nil {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.by == nil {
				r.by = map[string]int{}
			}
			r.by[what+" "+strconv.Itoa(response.StatusCode)]++
		}
		return response, err
	})
}

func (r *requests) begin(what string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending++
	r.list = append(r.list, write{time.Now(), what})
}

func (r *requests) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pending--
}

// settle waits until every write has its response: what a write has changed is seen before.
func (r *requests) settle(ctx context.Context) error {
	for {
		r.mu.Lock()
		pending := r.pending
		r.mu.Unlock()
		if pending == 0 {
			return nil
		}
		if err := wait(ctx, 10*time.Millisecond); err != nil {
			return fmt.Errorf("waiting for %d writes: %w", pending, err)
		}
	}
}

// forget lets the counts begin again, once all writes have their response.
func (r *requests) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.by, r.list = nil, nil
}

// take returns the writes since the last call, in order.
func (r *requests) take() []write {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.list
	r.list = nil
	return list
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// print prints the counts, and returns how many writes there are for each of n reservations,
// without events.
func (r *requests) print(n int) float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	writes := 0
	for _, what := range slices.Sorted(maps.Keys(r.by)) {
		fmt.Printf("%6d %s\n", r.by[what], what)
		if !strings.HasPrefix(what, http.MethodGet) && !strings.Contains(what, "/events") {
			writes += r.by[what]
		}
	}
	return float64(writes) / float64(n)
}

// stop ends what was started.
func (h *hub) stop() error {
	err := h.stopBroker()
	if h.cluster != nil {
		h.cluster.Stop(10 * time.Second)
	}
	return errors.Join(err, os.RemoveAll(h.dir))
}

// cpu is the CPU time that this process has used, and that of the API server and of etcd,
// in seconds.
func (h *hub) cpu() (own, server, etcd float64) {
	of := func(name string) float64 { return process.CPUTime(h.cluster.Process(name).Pid()).Seconds() }
	return process.CPUTime(os.Getpid()).Seconds(), of("kube-apiserver"), of("etcd")
}

// logs are the last lines of the API server's processes.
func (h *hub) logs() string {
	var logs []string
	for _, p := range h.cluster.Processes() {
		logs = append(logs, p.Name()+":\n"+p.Tail(20))
	}
	return strings.Join(logs, "\n")
}

// join gives an agent its client.
func (h *hub) join(ctx context.Context, id string) (*protocol.Client, error) {
	var pair func() (*tls.Certificate, error)
	var ca []byte
	// The broker may not be ready yet.
	err := retry(ctx, func(ctx context.Context) (err error) {
		pair, ca, err = issue(ctx, h.url, h.caHash, h.token, id)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("joining as %s: %w", id, err)
	}
	config, err := protocol.TLSConfig(ca, pair)
	if err != nil {
		return nil, err
	}
	return protocol.NewClient(h.url, config, logr.Discard())
}
