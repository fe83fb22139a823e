// Package exposition has the endpoint at which a program shows its metrics.
package exposition

import (
	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// Secure is the text of the flag --metrics-secure.
const Secure = "Serve metrics with TLS, to those only whom the API server lets get the path /metrics. The certificate is self-signed."

// Options returns the options of a manager's endpoint at an address. If it is secure, the API
// server authenticates and authorizes who reads it.
func Options(address string, secure bool) metricsserver.Options {
	options := metricsserver.Options{BindAddress: address, SecureServing: secure}
	if secure {
		options.FilterProvider = filters.WithAuthenticationAndAuthorization
	}
	return options
}
