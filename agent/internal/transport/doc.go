// Package transport is the port to the broker (BrokerCommunicator), and gives the agent's
// controllers a local copy of what the broker streams (Mirror), independent of the wire. The
// implementations are in child packages: mtls for REST over mutual TLS, transporttest in memory.
// Each consumer of a connection declares what it needs of it.
package transport
