package server

import (
	"context"
	"crypto/tls"
)

// Insider is a cluster that another interface of this process has authenticated: calls with a
// context of As are its calls.
type Insider struct {
	Cluster string
	// Admitted returns why the cluster may not use the broker, nil if it may.
	Admitted func(ctx context.Context) error
}

type insiderKey struct{}

// As returns a context for calls of Handler within this process.
func As(ctx context.Context, insider Insider) context.Context {
	return context.WithValue(ctx, insiderKey{}, insider)
}

// insiders authenticates them, and all others as before.
type insiders struct{ Identity }

// Certified implements Identity. An insider has no key: its limits are its own all the same.
func (i insiders) Certified(ctx context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error) {
	if insider, ok := ctx.Value(insiderKey{}).(Insider); ok {
		return insider.Cluster, "cluster/" + insider.Cluster, nil
	}
	return i.Identity.Certified(ctx, state)
}

// Authenticate implements Identity.
func (i insiders) Authenticate(ctx context.Context, state *tls.ConnectionState) (clusterID string, err error) {
	if insider, ok := ctx.Value(insiderKey{}).(Insider); ok {
		return insider.Cluster, insider.Admitted(ctx)
	}
	return i.Identity.Authenticate(ctx, state)
}
