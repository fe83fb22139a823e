// Package inventory computes what this cluster has: its lendable nodes, their
// classes and free shapes, and the guests that run on them.
//
// Measure is a pure function of nodes, pods and terms. Only Ready, uncordoned,
// real nodes count, and only pods that are bound to them. Guests are reported
// for each consumer and never as the cluster's own use, because the broker
// charges them to their holds.
package inventory
