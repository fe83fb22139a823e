// Package returnhome decides which overflowed pod moves back to its own cluster, and when:
// one at a time, after a minimum stay, once the cluster has had room for it for a while.
// It takes observations and times as arguments, and evicts nothing itself.
package returnhome
