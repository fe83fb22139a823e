package overflow_test

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
)

// hangingProxy stands between the scheduler and the API server.
type hangingProxy struct {
	// hangs: the bindings of pods whose name has the prefix "hang" are not answered. tried
	// is the number of these.
	hangs atomic.Bool
	tried atomic.Int32
}

// start starts the proxy, and makes the scheduler use it.
func (p *hangingProxy) start(c *testCluster) {
	c.t.Helper()
	target, err := url.Parse(c.config.Host)
	expect.NoError(c.t, err)
	transport, err := rest.TransportFor(c.config)
	expect.NoError(c.t, err)
	forward := &httputil.ReverseProxy{Transport: transport, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if p.hangs.Load() && strings.Contains(r.URL.Path, "/pods/hang") && strings.HasSuffix(r.URL.Path, "/binding") {
			p.tried.Add(1)
			_, _ = io.Copy(io.Discard, r.Body) // a server sees the end of a connection once it has read the request
			<-r.Context().Done()
			return
		}
		forward.ServeHTTP(w, r)
	}))
	c.t.Cleanup(server.Close) // after the scheduler has ended
	c.schedulerHost = server.URL
}

// expectTried waits until the scheduler has sent at least n bindings that hang.
func (p *hangingProxy) expectTried(c *testCluster, n int32) {
	c.t.Helper()
	expect.Eventually(c.t, "bindings that hang", func() (bool, string) {
		tried := p.tried.Load()
		return tried >= n, fmt.Sprintf("%d of %d", tried, n)
	})
}

// TestHangingBindings: the API server does not answer the bindings of some pods. The others
// are bound, and those are tried again: with their place, of which there is one.
func TestHangingBindings(t *testing.T) {
	t.Cleanup(overflow.SetBindingTimes(time.Second, 5*time.Second))
	c := startTestCluster(t)
	controlplane.InstallCRDs(t, c.config)
	proxy := &hangingProxy{}
	proxy.hangs.Store(true)
	proxy.start(c)
	c.namespace("shop", optIn)
	home := c.poolNode("shop", "1")
	c.startScheduler()
	const limit = 64 // bindings at a time
	for i := range limit {
		c.create(schedulerPod("shop", fmt.Sprint("hang-", i), "10m", inPool("shop")))
	}
	proxy.expectTried(c, limit)
	c.create(schedulerPod("shop", "web", "10m", inPool("shop")))
	c.expectPods("shop", "web", map[string]int{home: 1})

	c.namespace("away", optIn)
	virtual := c.virtualPoolNode("away", "10")
	c.app("away", "hang", "1", 1)
	r := c.expectReservation("away", "hang", 1)
	c.setStatus(r, grantedIn(r, "away", 1))
	c.expectMessage("away", "hang-0", "the API server has not answered within 5s")
	proxy.hangs.Store(false)
	c.expectPods("away", "hang", map[string]int{virtual: 1})
	c.expectPods("shop", "hang", map[string]int{home: limit})
}
