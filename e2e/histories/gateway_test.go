package histories

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"regexp"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// ledgerPath is the path of the write of a ledger.
var ledgerPath = regexp.MustCompile(`/clusteradvertisements/([^/]+)/status$`)

// gateway is between one broker and the API server. It can delay a write of a ledger on
// its way. A blind one leaves out compare-and-swap: each write of a ledger is made on
// whatever version there is.
type gateway struct {
	url       string
	target    *url.URL
	transport http.RoundTripper
	proxy     *httputil.ReverseProxy
	blind     bool
	// ledgers is locked while no broker's ledger writes may pass.
	ledgers *sync.RWMutex
	watches watches

	mu    sync.Mutex
	armed *delayed
}

// delayed is a write that waits in a gateway.
type delayed struct {
	// provider whose ledger it writes, and the holds in it; known once arrived is closed.
	provider string
	holds    map[types.UID]bool
	arrived  chan struct{}
	// release lets it go on; done is closed when the API server has responded with status.
	release, done chan struct{}
	status        int
}

func newGateway(config *rest.Config, ledgers *sync.RWMutex, blind bool) (*gateway, error) {
	transport, err := rest.TransportFor(config)
	if err != nil {
		return nil, err
	}
	base := config.Host
	if !strings.Contains(base, "://") {
		base = "https://" + base
	}
	target, err := url.Parse(base)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	g := &gateway{url: "http://" + listener.Addr().String(), target: target, transport: transport, blind: blind, ledgers: ledgers}
	g.proxy = &httputil.ReverseProxy{
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:      transport,
		FlushInterval:  -1,
		ModifyResponse: g.watches.modify,
		// A broker that is killed leaves its requests.
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}
	go func() { _ = http.Serve(listener, g) }()
	return g, nil
}

// delayNext delays the next write of a ledger.
func (g *gateway) delayNext() *delayed {
	d := &delayed{arrived: make(chan struct{}), release: make(chan struct{}), done: make(chan struct{}), holds: map[types.UID]bool{}}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed = d
	return d
}

// take returns the delay that waits for a write, once.
func (g *gateway) take() *delayed {
	g.mu.Lock()
	defer g.mu.Unlock()
	d := g.armed
	g.armed = nil
	return d
}

// ServeHTTP implements http.Handler.
func (g *gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	match := ledgerPath.FindStringSubmatch(r.URL.Path)
	if r.Method != http.MethodPut || match == nil {
		g.proxy.ServeHTTP(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	d := g.take()
	if d != nil {
		var ad broker.ClusterAdvertisement
		if json.Unmarshal(body, &ad) == nil {
			for i := range ad.Status.Holds {
				d.holds[ad.Status.Holds[i].ReservationUID] = true
			}
		}
		d.provider = match[1]
		close(d.arrived)
		<-d.release
	} else {
		g.ledgers.RLock()
		defer g.ledgers.RUnlock()
	}
	// It is on its way: it arrives even if the broker ends meanwhile.
	status, header, response, err := g.write(context.WithoutCancel(r.Context()), r, body)
	if err != nil {
		status, response = http.StatusBadGateway, []byte(err.Error())
	}
	if d != nil {
		d.status = status
		close(d.done)
	}
	for name, values := range header {
		w.Header()[name] = values
	}
	w.WriteHeader(status)
	_, _ = w.Write(response)
}

// write sends a write of a ledger to the API server.
func (g *gateway) write(ctx context.Context, r *http.Request, body []byte) (status int, header http.Header, response []byte, err error) {
	for {
		sent := body
		if g.blind {
			if sent, err = g.onLatest(ctx, r, body); err != nil {
				return 0, nil, nil, err
			}
		}
		status, header, response, err = g.send(ctx, http.MethodPut, r.URL.Path, r, sent)
		if err != nil || !g.blind || status != http.StatusConflict {
			return status, header, response, err
		}
	}
}

// onLatest is the same content as an update of the version that is stored now.
func (g *gateway) onLatest(ctx context.Context, r *http.Request, body []byte) ([]byte, error) {
	status, _, stored, err := g.send(ctx, http.MethodGet, strings.TrimSuffix(r.URL.Path, "/status"), r, nil)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return body, nil
	}
	var latest, content struct {
		Metadata map[string]any `json:"metadata"`
	}
	var object map[string]any
	if err := json.Unmarshal(stored, &latest); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(body, &content); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(body, &object); err != nil {
		return nil, err
	}
	content.Metadata["resourceVersion"] = latest.Metadata["resourceVersion"]
	object["metadata"] = content.Metadata
	return json.Marshal(object)
}

func (g *gateway) send(ctx context.Context, method, path string, original *http.Request, body []byte) (int, http.Header, []byte, error) {
	target := *g.target
	target.Path = path
	request, err := http.NewRequestWithContext(ctx, method, target.String(), bytes.NewReader(body))
	if err != nil {
		return 0, nil, nil, err
	}
	request.Header.Set("Accept", "application/json")
	if method == http.MethodPut {
		request.Header.Set("Content-Type", original.Header.Get("Content-Type"))
	}
	response, err := g.transport.RoundTrip(request)
	if err != nil {
		return 0, nil, nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	response.Header.Del("Content-Length")
	return response.StatusCode, response.Header, content, err
}
