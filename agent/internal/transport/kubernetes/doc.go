// Package kubernetes is the agent's connection to the broker through the hub's API server: the
// agent writes and watches objects in the namespace that the broker has made for its cluster, with
// the permissions of a ServiceAccount there. Package objects has what they say.
package kubernetes
