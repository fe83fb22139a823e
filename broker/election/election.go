// Package election has the leader election of the agent and of spillway-virtual-node.
package election

import (
	"net"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
)

// The durations are longer than usual: the new leader of a cluster with one replica is the same
// program that was restarted, which costs more than the wait for an API server that is overloaded.
// A leader that is stopped in order gives its Lease up, so that only a crash takes so long to be
// noticed: less than the 50 s after which Kubernetes marks a Node as not Ready.
const leaseDuration, renewDeadline, retryPeriod = 30 * time.Second, 20 * time.Second, 4 * time.Second

// Options returns the options of a manager that takes part in an election by a Lease, if enabled.
func Options(config *rest.Config, enabled bool, namespace, lease string) ctrl.Options {
	return ctrl.Options{
		LeaderElection:                enabled,
		LeaderElectionID:              lease,
		LeaderElectionNamespace:       namespace,
		LeaderElectionReleaseOnCancel: true,
		LeaderElectionConfig:          apart(config),
		LeaseDuration:                 ptr.To(leaseDuration),
		RenewDeadline:                 ptr.To(renewDeadline),
		RetryPeriod:                   ptr.To(retryPeriod),
	}
}

// apart is config with a connection and a rate limit of its own: a renewal of the Lease must not
// wait behind what else the program sends and receives.
func apart(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.RateLimiter, config.QPS, config.Burst = nil, 5, 10
	if config.Dial == nil {
		// client-go shares the connections of equal configurations.
		config.Dial = (&net.Dialer{Timeout: renewDeadline / 2, KeepAlive: renewDeadline}).DialContext
	}
	return config
}
