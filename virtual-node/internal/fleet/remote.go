package fleet

import (
	"fmt"
	"net/http"
	"sync/atomic"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// remote is how a provider's API server is reached. The token changes while
// clients and watches live on.
type remote struct {
	connection atomic.Pointer[nodeconfig.Connection]
	set        kubernetes.Interface
}

func newRemote(c nodeconfig.Connection) (*remote, error) {
	r := &remote{}
	r.connection.Store(&c)
	config := &rest.Config{
		Host: c.Endpoint, TLSClientConfig: rest.TLSClientConfig{CAData: c.CA}, QPS: 100, Burst: 200, UserAgent: "spillway-virtual-node",
		WrapTransport: func(next http.RoundTripper) http.RoundTripper { return bearer{r, next} },
	}
	var err error
	if r.set, err = kubernetes.NewForConfig(config); err != nil {
		return nil, fmt.Errorf("making a client for %s: %w", c.Endpoint, err)
	}
	return r, nil
}

// config is for one request, with the token of now.
func (r *remote) config() *rest.Config {
	c := r.connection.Load()
	return &rest.Config{
		Host: c.Endpoint, TLSClientConfig: rest.TLSClientConfig{CAData: c.CA}, QPS: 100, Burst: 200,
		UserAgent: "spillway-virtual-node", BearerToken: c.Token,
	}
}

// bearer adds the token of now to each request.
type bearer struct {
	remote *remote
	next   http.RoundTripper
}

func (b bearer) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+b.remote.connection.Load().Token)
	return b.next.RoundTrip(request)
}
