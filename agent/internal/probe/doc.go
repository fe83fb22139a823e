// Package probe finds out what no object of a cluster says: the API server's version, clock and kinds,
// the permissions of programs, whether new pods are steered, and which addresses answer this machine.
package probe
