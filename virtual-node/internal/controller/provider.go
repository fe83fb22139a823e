package controller

import (
	"bytes"
	"fmt"
	"net/http"
	"sync/atomic"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// provider is the connection to a provider's API server. Its token can change
// while clients and watches are in use.
type provider struct {
	connection atomic.Pointer[nodeconfig.Connection]
	config     *rest.Config
	client     kubernetes.Interface
}

func newProvider(c nodeconfig.Connection) (*provider, error) {
	p := &provider{}
	p.connection.Store(&c)
	p.config = &rest.Config{
		ContentConfig: protobuf, Host: c.Endpoint, TLSClientConfig: rest.TLSClientConfig{CAData: c.CA}, QPS: 100, Burst: 200, UserAgent: "spillway-virtual-node",
		// A provider does not write to the log of this program.
		WarningHandler: rest.NoWarnings{},
		WrapTransport:  func(next http.RoundTripper) http.RoundTripper { return authenticator{p, newBounded(next)} },
	}
	var err error
	if p.client, err = kubernetes.NewForConfig(p.config); err != nil {
		return nil, fmt.Errorf("creating a client for %s: %w", c.Endpoint, err)
	}
	return p, nil
}

// ProviderConfig implements part of kubelet.Guests.
func (p *provider) ProviderConfig() *rest.Config { return p.config }

// update replaces the token, and reports whether that is all that changed: else a
// new provider is needed.
func (p *provider) update(c nodeconfig.Connection) bool {
	current := p.connection.Load()
	if current.Endpoint != c.Endpoint || current.Namespace != c.Namespace || !bytes.Equal(current.CA, c.CA) {
		return false
	}
	p.connection.Store(&c)
	return true
}

// authenticator adds the current token to each request.
type authenticator struct {
	provider *provider
	next     http.RoundTripper
}

func (a authenticator) RoundTrip(request *http.Request) (*http.Response, error) {
	request = request.Clone(request.Context())
	request.Header.Set("Authorization", "Bearer "+a.provider.connection.Load().Token)
	return a.next.RoundTrip(request)
}
