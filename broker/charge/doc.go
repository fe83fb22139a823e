// Package charge answers which hold a pod or its guest uses: Of by what is known of the pod, which
// at the provider is its label only, and Usage by what is left of each promise. It is pure.
//
// The scheduler's pools do not use Usage: whether one more pod may come in depends on the nodes that
// it selects and the taints that it tolerates, and is answered in each scheduling cycle, from counts
// that are kept.
package charge
