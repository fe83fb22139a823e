package vnode

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"
)

const (
	// probeEvery and probeTimeout make a provider's end known within some 15 s;
	// tolerated is how many failures in a row are put down to chance.
	probeEvery   = 3 * time.Second
	probeTimeout = 3 * time.Second
	tolerated    = 1
)

// Probe asks a provider now and then whether it is there and still lets this
// cluster in.
type Probe struct {
	Provider, Namespace string
	Client              kubernetes.Interface
	Clock               clock.Clock
	// Tell is told of every change, from one goroutine.
	Tell func(Health)
}

// Run probes until ctx ends.
func (p *Probe) Run(ctx context.Context) {
	var health Health
	failures := 0
	for known := false; ; {
		now := p.ask(ctx)
		if ctx.Err() != nil {
			return
		}
		if now.Ready {
			failures = 0
		} else {
			failures++
		}
		if certain := now.Ready || failures > tolerated; certain && (!known || now.Ready != health.Ready || now.Reason != health.Reason) {
			now.Since = health.Since
			if !known || now.Ready != health.Ready {
				now.Since = p.Clock.Now()
			}
			health, known = now, true
			p.Tell(health)
		}
		select {
		case <-ctx.Done():
			return
		case <-p.Clock.After(probeEvery):
		}
	}
}

// ask does so once. It asks for what it needs, not for what anybody may see: a
// revoked token must show.
func (p *Probe) ask(ctx context.Context) Health {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	_, err := p.Client.CoreV1().Pods(p.Namespace).List(ctx, metav1.ListOptions{Limit: 1, ResourceVersion: "0"})
	switch {
	case err == nil:
		return Health{Ready: true, Reason: "ProviderReachable", Message: p.Provider + " answers and lets this cluster run guests"}
	case apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err):
		return Health{Reason: "ProviderRefused", Message: fmt.Sprintf("%s no longer lets this cluster in: %v", p.Provider, err)}
	default:
		return Health{Reason: "ProviderUnreachable", Message: fmt.Sprintf("%s does not answer: %v; its guests may well run on", p.Provider, err)}
	}
}
