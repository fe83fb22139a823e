package stream

import (
	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/metrics"

	"github.com/spillway-dev/spillway/broker/protocol"
)

var streams = prometheus.NewGaugeVec(prometheus.GaugeOpts{
	Name: "broker_streams",
	Help: "Number of open watch streams, by role.",
}, []string{"role"})

func init() {
	metrics.Registry.MustRegister(streams)
	// So that they are there before the first stream.
	for _, role := range []protocol.Role{protocol.RoleRequester, protocol.RoleProvider, ""} {
		streams.WithLabelValues(streamLabel(role))
	}
}

func streamLabel(role protocol.Role) string {
	if role == "" {
		return "relay"
	}
	return string(role)
}
