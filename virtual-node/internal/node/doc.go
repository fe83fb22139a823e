// Package node keeps one virtual node: Controller registers the Node object and
// its lease and updates them, Desired computes the object, and Prober checks that
// the provider is reachable and authorizes this cluster.
package node
