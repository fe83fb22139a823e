package provider

import (
	"cmp"
	"fmt"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Options of a Provider.
type Options struct {
	liqo.Options

	// GuestsRole names a ClusterRole that is bound to ServiceAccount in each namespace that
	// Liqo creates for guests. Empty: its permissions come from elsewhere.
	GuestsRole string
	// Networks that guests may exchange traffic with, besides the other guests of their
	// consumer and this cluster's DNS.
	Networks confine.Networks
	// PodSecurity is the Pod Security Standard that guests must comply with,
	// broker.PodSecurityRestricted if empty, or broker.PodSecurityBaseline.
	PodSecurity string
	// HandOver is whether guests wait for the place of a placeholder.
	HandOver bool
}

func (o *Options) complete() error {
	if err := o.Complete(); err != nil {
		return err
	}
	if err := o.Networks.Validate(); err != nil {
		return fmt.Errorf("liqo: networks for guests: %w", err)
	}
	o.PodSecurity = cmp.Or(o.PodSecurity, broker.PodSecurityRestricted)
	return nil
}
