// Package acceptance says in the status of the BrokerConfigs in the broker's namespace whether the
// broker uses them, and which value has no effect.
package acceptance
