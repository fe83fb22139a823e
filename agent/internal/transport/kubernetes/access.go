package kubernetes

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// readAgainAfter is for how long a token that was read is used: a mounted Secret changes within a
// minute or so.
const readAgainAfter = time.Minute

// Access is what a kubeconfig gives access to: an API server, and the namespace of its context. A
// token in it is read again, as client-go does with a token file.
func Access(path string) (hub *rest.Config, namespace string, err error) {
	access := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(&clientcmd.ClientConfigLoadingRules{ExplicitPath: path}, nil)
	if hub, err = access.ClientConfig(); err != nil {
		return nil, "", fmt.Errorf("reading --broker-kubeconfig: %w", err)
	}
	if namespace, _, err = access.Namespace(); err != nil {
		return nil, "", fmt.Errorf("reading --broker-kubeconfig: %w", err)
	}
	if hub.BearerToken != "" && hub.BearerTokenFile == "" {
		token := &token{path: path, last: hub.BearerToken, readAt: time.Now()}
		hub.BearerToken = ""
		hub.Wrap(func(next http.RoundTripper) http.RoundTripper { return &authorized{token: token, next: next} })
	}
	return hub, namespace, nil
}

// token is that of a kubeconfig.
type token struct {
	path string

	mu     sync.Mutex
	last   string
	readAt time.Time
}

// current is the token as it was read last: a file that cannot be read changes nothing.
func (t *token) current() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	if time.Since(t.readAt) >= readAgainAfter {
		t.readAt = time.Now()
		if config, err := clientcmd.BuildConfigFromFlags("", t.path); err == nil && config.BearerToken != "" {
			t.last = config.BearerToken
		}
	}
	return t.last
}

// authorized is a transport with a token.
type authorized struct {
	token *token
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (a *authorized) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+a.token.current())
	return a.next.RoundTrip(r)
}

// WrappedRoundTripper lets client-go find the transport.
func (a *authorized) WrappedRoundTripper() http.RoundTripper { return a.next }
