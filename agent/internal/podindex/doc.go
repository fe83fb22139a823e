// Package podindex knows the consumer's pods that are on virtual nodes or may get one, in
// groups of those that count in the same way: how many are on a node, what they request
// together, and which of them a Reservation serves. An event of a pod costs the same however
// many pods there are.
package podindex
