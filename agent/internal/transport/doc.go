// Package transport gives the agent's controllers a local copy of what the
// broker streams (Mirror), independent of the wire. The clients of the broker
// are in child packages: mtls for REST over mutual TLS, transporttest in memory.
// Each consumer of a client declares the interface that it needs.
package transport
