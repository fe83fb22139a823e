package node

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/broker/events"
)

// An unreachable provider is reported within about 15 s.
const (
	probeInterval = 3 * time.Second
	probeTimeout  = 3 * time.Second
	// failureThreshold is the number of consecutive failures that make a provider
	// not ready.
	failureThreshold = 2
)

// Prober checks periodically that a provider is reachable and authorizes this
// cluster.
type Prober struct {
	Provider string
	// Namespace of the guests at the provider.
	Namespace string
	// Client of the provider.
	Client kubernetes.Interface
	Clock  clock.Clock
	// Report is called with the first result and with each change, sequentially.
	Report func(Health)
}

// Run probes until ctx ends.
func (p *Prober) Run(ctx context.Context) {
	var reported *Health
	failures := 0
	for {
		result := p.probe(ctx)
		if ctx.Err() != nil {
			return
		}
		if result.Ready {
			failures = 0
		} else {
			failures++
		}
		certain := result.Ready || failures >= failureThreshold
		if certain && (reported == nil || result.Ready != reported.Ready || result.Reason != reported.Reason) {
			if reported != nil && result.Ready == reported.Ready {
				result.Since = reported.Since
			} else {
				result.Since = p.Clock.Now()
			}
			reported = &result
			p.Report(result)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.Clock.After(probeInterval):
		}
	}
}

// maxReason is how much of the provider's answer is repeated in the Node's condition.
const maxReason = 1024

// probed is the name of a guest that does not exist.
const probed = "spillway-probe"

// probe reads a guest rather than calling /healthz, which every client may: the result
// must show whether the token is still accepted. The API server answers from its cache, at
// a cost that does not grow with the guests: a list from the cache has no limit.
func (p *Prober) probe(ctx context.Context) Health {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	_, err := p.Client.CoreV1().Pods(p.Namespace).Get(ctx, probed, metav1.GetOptions{ResourceVersion: "0"})
	switch {
	case err == nil || apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse): // not of a proxy
		return Health{Ready: true, Reason: reasonProviderReachable, Message: fmt.Sprintf("Provider %s is reachable and authorizes this cluster.", p.Provider)}
	case apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err):
		return Health{Reason: reasonAccessDenied, Message: fmt.Sprintf("Provider %s no longer authorizes this cluster: %s", p.Provider, events.TruncateTo(err.Error(), maxReason))}
	default:
		return Health{Reason: reasonProviderUnreachable, Message: fmt.Sprintf("Provider %s is unreachable; its guests may still be running: %s", p.Provider, events.TruncateTo(err.Error(), maxReason))}
	}
}
