package stepwise

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"sync"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/config"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/recorder"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/conversion"

	"github.com/spillway-dev/spillway/e2e/simulation/memory"
)

// Program is one process: a manager with the controllers that are added to it.
type Program struct {
	// Name of the process, unique among those that run.
	Name string

	server *memory.Server
	scheme *runtime.Scheme
	gate   *Gate
	cached client.Client
	live   client.Client
	cache  *snapshots

	runnables []manager.Runnable
	// queues are added by the controllers' own goroutines, and so is failed.
	mu      sync.Mutex
	queues  []*queue
	failed  error
	elected chan struct{}
	leads   bool
	ctx     context.Context
	cancel  context.CancelFunc
	// killed is guarded by the gate's lock.
	killed bool
}

var _ manager.Manager = &Program{}

// Options of a Program.
type Options struct {
	Name   string
	Server *memory.Server
	Scheme *runtime.Scheme
	Gate   *Gate
	// Writes, if set, wraps the client of all writes and live reads.
	Writes func(client.Client) client.Client
	// Live, if set, replaces the reader of live reads. cached reads the cache.
	Live func(live, cached client.Reader) client.Reader
}

// NewProgram returns a process without controllers.
func NewProgram(o Options) *Program {
	p := &Program{Name: o.Name, server: o.Server, scheme: o.Scheme, gate: o.Gate, elected: make(chan struct{})}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.cache = newSnapshots(p)
	direct := o.Server.Client()
	if o.Writes != nil {
		direct = o.Writes(direct)
	}
	gated := &gated{Client: direct, program: p}
	p.live, p.cached = gated, &cachedClient{Client: gated, cache: p.cache}
	if o.Live != nil {
		p.live = &readerClient{Client: gated, reader: o.Live(gated, p.cache)}
	}
	return p
}

// Run starts what needs no leader election. Lead starts the rest.
func (p *Program) Run() { p.start(false) }

// Lead makes the program the leader.
func (p *Program) Lead() {
	if !p.leads {
		p.leads = true
		close(p.elected)
		p.start(true)
	}
}

// Leads reports whether the program is the leader.
func (p *Program) Leads() bool { return p.leads }

// Failed is the error with which the program wants to end; nil if it goes on.
func (p *Program) Failed() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failed
}

// Context ends when the program is killed.
func (p *Program) Context() context.Context { return p.ctx }

func (p *Program) start(leader bool) {
	for _, runnable := range p.runnables {
		election, ok := runnable.(manager.LeaderElectionRunnable)
		if (!ok || election.NeedLeaderElection()) == leader {
			go func() {
				if err := runnable.Start(p.ctx); err != nil && p.ctx.Err() == nil {
					p.mu.Lock()
					defer p.mu.Unlock()
					p.failed = errors.Join(p.failed, fmt.Errorf("%T ended: %w", runnable, err))
				}
			}()
		}
	}
}

// Kill ends the program as kill -9 does: what it has not done yet never happens.
func (p *Program) Kill() {
	p.cache.stop()
	// Before its calls are refused: what they return is not an answer of the program.
	p.cancel()
	p.gate.kill(p)
}

// Steps lists what may happen next: a watch event arrives, or a controller takes a
// request from its queue.
func (p *Program) Steps() []Step {
	p.mu.Lock()
	queues := slices.Clone(p.queues)
	p.mu.Unlock()
	steps := p.cache.steps(nil)
	for _, q := range queues {
		steps = q.steps(steps)
	}
	return steps
}

// Add implements manager.Manager. Controllers get a queue that the scheduler controls.
func (p *Program) Add(runnable manager.Runnable) error {
	inner := runnable
	if wrapped, ok := runnable.(interface{ Unwrap() manager.Runnable }); ok {
		inner = wrapped.Unwrap()
	}
	if v := reflect.ValueOf(inner); v.Kind() == reflect.Pointer && v.Elem().Kind() == reflect.Struct {
		if field := v.Elem().FieldByName("NewQueue"); field.IsValid() {
			field.Set(reflect.ValueOf(func(name string, limiter workqueue.TypedRateLimiter[reconcile.Request]) workqueue.TypedRateLimitingInterface[reconcile.Request] {
				q := newQueue(p.Name+" "+name, limiter)
				p.mu.Lock()
				defer p.mu.Unlock()
				p.queues = append(p.queues, q)
				return q
			}))
		}
	}
	p.runnables = append(p.runnables, runnable)
	return nil
}

// Elected implements manager.Manager.
func (p *Program) Elected() <-chan struct{} { return p.elected }

// GetClient implements manager.Manager: reads are from the cache.
func (p *Program) GetClient() client.Client { return p.cached }

// GetAPIReader implements manager.Manager: reads are from the server.
func (p *Program) GetAPIReader() client.Reader { return p.live }

// LiveClient reads and writes at the server.
func (p *Program) LiveClient() client.Client { return p.live }

// GetCache implements manager.Manager.
func (p *Program) GetCache() cache.Cache { return p.cache }

// GetFieldIndexer implements manager.Manager.
func (p *Program) GetFieldIndexer() client.FieldIndexer { return p.cache }

// GetScheme implements manager.Manager.
func (p *Program) GetScheme() *runtime.Scheme { return p.scheme }

// GetEventRecorder implements manager.Manager. Events are dropped.
func (p *Program) GetEventRecorder(string) recorder.EventRecorder { return noEvents{} }

// GetLogger implements manager.Manager.
func (p *Program) GetLogger() logr.Logger { return logr.Discard() }

// GetControllerOptions implements manager.Manager.
func (p *Program) GetControllerOptions() config.Controller {
	return config.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false), Logger: logr.Discard()}
}

// AddMetricsServerExtraHandler implements manager.Manager.
func (p *Program) AddMetricsServerExtraHandler(string, http.Handler) error { return nil }

// AddHealthzCheck implements manager.Manager.
func (p *Program) AddHealthzCheck(string, healthz.Checker) error { return nil }

// AddReadyzCheck implements manager.Manager.
func (p *Program) AddReadyzCheck(string, healthz.Checker) error { return nil }

// Start implements manager.Manager.
func (p *Program) Start(ctx context.Context) error {
	p.Run()
	p.Lead()
	<-ctx.Done()
	return nil
}

// GetHTTPClient implements manager.Manager.
func (p *Program) GetHTTPClient() *http.Client { panic("a program without network has no HTTP client") }

// GetConfig implements manager.Manager.
func (p *Program) GetConfig() *rest.Config { panic("a program without network has no REST config") }

// GetRESTMapper implements manager.Manager.
func (p *Program) GetRESTMapper() meta.RESTMapper { return p.live.RESTMapper() }

// GetWebhookServer implements manager.Manager.
func (p *Program) GetWebhookServer() webhook.Server {
	panic("a program without network has no webhooks")
}

// GetEventRecorderFor implements manager.Manager.
func (p *Program) GetEventRecorderFor(string) record.EventRecorder {
	panic("use GetEventRecorder")
}

// GetConverterRegistry implements manager.Manager.
func (p *Program) GetConverterRegistry() conversion.Registry {
	panic("a program without network has no webhooks")
}

type noEvents struct{}

func (noEvents) Eventf(runtime.Object, runtime.Object, string, string, string, string, ...any) {}

func (noEvents) AnnotatedEventf(runtime.Object, runtime.Object, map[string]string, string, string, string, string, ...any) {
}
