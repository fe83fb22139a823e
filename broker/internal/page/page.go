package page

import (
	"context"
	"crypto/tls"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"golang.org/x/net/netutil"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/internal/page/view"
	"github.com/spillway-dev/spillway/broker/internal/server/limits"
	"github.com/spillway-dev/spillway/broker/internal/store"
)

const (
	// maxConnections is the number of open connections, maxOfAddress that of one address.
	maxConnections, maxOfAddress = 512, 128
	// maxStreams is the number of streams of one session, maxStreamsOfUser that of one user.
	maxStreams, maxStreamsOfUser = 16, 128
	// maxReviews is how many tokens are reviewed at the same time for who signs in.
	maxReviews = 8
	// maxViews is how many views are made at the same time: placements go on beside them. waitTimeout
	// is how long a further one waits, and maxDocument its size in bytes.
	// maxMade is how many are shared at the same time.
	maxViews, waitTimeout, maxDocument, maxMade = 2, 3 * time.Second, 4 << 20, 128
	// callTimeout is the timeout of a call, from reading to responding. Streams have none.
	callTimeout = 30 * time.Second
	// shutdownGrace is the time that calls have to finish when the broker stops.
	shutdownGrace = 2 * time.Second
	// maxForm is the size of a form in bytes: a token, and where to go then.
	maxForm = 32 << 10
)

// Options of a Page. All but Secure, History and Reference are required.
type Options struct {
	// Listener without TLS. The page closes it.
	Listener net.Listener
	// Secure is the configuration of TLS. Without one, the page answers only those who ask for a
	// name of their own machine, such as through kubectl port-forward.
	Secure *tls.Config
	// Namespace of the broker's objects.
	Namespace string
	Store     *store.Store
	Sessions  *session.Sessions
	// History is nil if none is kept. Reference are the prices that usage is compared with; nil for
	// none.
	History   history.Store
	Reference *broker.Cost
	// Ready is an error on a replica that is not the leader.
	Ready func() error
	Clock clock.WithTicker
	Log   logr.Logger
}

// Page is the page, a manager.Runnable.
type Page struct {
	Options
	// stopping ends the streams.
	stopping chan struct{}
	// signIns limit by address and token, requests by session, ofUsers by user.
	signIns, requests, ofUsers *limits.Rates
	// streams count by session, streamsOfUsers by user.
	streams, streamsOfUsers limits.InProgress
	// reviewing has an element for each token that is being reviewed to sign in, making has an element for each view that is being made, reading for each of the history.
	reviewing, making, reading chan struct{}

	mutex sync.Mutex
	// looked is the number of the store's events at lookedAt, made the views since then by their URLs.
	looked   uint64
	lookedAt time.Time
	made     map[string]any
}

// New returns a Page that does not serve yet.
func New(o Options) *Page {
	return &Page{
		Options: o, stopping: make(chan struct{}), making: make(chan struct{}, maxViews), reading: make(chan struct{}, maxViews),
		signIns:  limits.NewRates(o.Clock, limits.Always(1, 10)),
		requests: limits.NewRates(o.Clock, limits.Always(30, 100)), ofUsers: limits.NewRates(o.Clock, limits.Always(200, 600)),
		reviewing: make(chan struct{}, maxReviews),
	}
}

// NeedLeaderElection is false: a replica that is not the leader says so.
func (p *Page) NeedLeaderElection() bool { return false }

// Start serves until ctx ends, or it cannot: an error would end the broker.
func (p *Page) Start(ctx context.Context) error {
	server := &http.Server{
		Handler:           p.Handler(),
		ReadHeaderTimeout: 10 * time.Second,
		ReadTimeout:       callTimeout,
		WriteTimeout:      callTimeout,
		IdleTimeout:       10 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(connectionLog{p.Log}, "", 0),
	}
	listener := netutil.LimitListener(p.Listener, maxConnections)
	if p.Secure != nil {
		// Others than this machine reach it.
		listener = tls.NewListener(&byAddress{Listener: listener}, withoutClients(p.Secure))
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	p.Log.Info("Serving the page", "address", p.Listener.Addr().String(), "tls", p.Secure != nil)
	select {
	case err := <-served:
		// Clusters need the broker, not its page.
		p.Log.Error(err, "Failed to serve the page: there is none until the broker starts again")
		return nil
	case <-ctx.Done():
	}
	close(p.stopping)
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownGrace)
	defer cancel()
	if err := server.Shutdown(grace); err != nil {
		return server.Close()
	}
	return nil
}

// withoutClients is a configuration that asks for no client certificate: a browser would ask its user
// for one.
func withoutClients(config *tls.Config) *tls.Config {
	config = config.Clone()
	config.ClientAuth, config.ClientCAs, config.NextProtos = tls.NoClientCert, nil, []string{"http/1.1"}
	if for1 := config.GetConfigForClient; for1 != nil {
		config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
			now, err := for1(hello)
			if err != nil || now == nil {
				return now, err
			}
			return withoutClients(now), nil
		}
	}
	return config
}

// look looks whether there is something new, at most each lookEvery for all streams together. What they
// then ask for is made once.
func (p *Page) look() (events uint64, made map[string]any) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if now := p.Clock.Now(); now.Sub(p.lookedAt) >= lookEvery {
		p.looked, p.lookedAt, p.made = p.Store.Events(), now, map[string]any{}
	}
	return p.looked, p.made
}

// viewed is the view of a document, for all who may see it.
func (p *Page) viewed(r *http.Request, d document) (any, error) {
	if d.still {
		return d.view(p, r)
	}
	_, made := p.look()
	p.mutex.Lock()
	content := made[r.URL.RequestURI()]
	p.mutex.Unlock()
	if content != nil {
		return content, nil
	}
	content, err := d.view(p, r)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if content != nil && len(made) < maxMade {
		made[r.URL.RequestURI()] = content
	}
	return content, err
}

// snapshot is what the views are made of now.
func (p *Page) snapshot() view.Snapshot {
	s := view.Snapshot{
		Now: p.Clock.Now(), Clusters: p.Store.Advertisements(), Reservations: p.Store.Reservations(),
		Heard: map[string]time.Time{}, MaxPriority: p.Store.Settings().MaxPriority,
	}
	for _, ad := range s.Clusters {
		s.Heard[ad.Name] = p.Store.Receipt(ad.Name).At
	}
	return s
}

// connectionLog logs the errors of connections in net/http with low priority.
type connectionLog struct{ log logr.Logger }

func (c connectionLog) Write(line []byte) (int, error) {
	c.log.V(1).Info("Connection error", "message", strings.TrimSpace(string(line)))
	return len(line), nil
}
