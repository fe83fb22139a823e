// Package usage is what a cluster's pods were given in other clusters, and what that cost, as the agent
// copies it from the broker to a ConfigMap: who may read that needs no certificate of the cluster. It
// does no I/O.
package usage
