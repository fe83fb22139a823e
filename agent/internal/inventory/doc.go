// Package inventory computes what this cluster has: its eligible nodes, their
// classes and free shapes, and the guests that run on them.
//
// A Tracker follows nodes, pods and namespaces. Only Ready, uncordoned
// nodes count that are not virtual, and only pods that are bound to them, or that wait for one
// of them, as a DaemonSet's pods do. Guests are reported for each consumer and never as
// allocated, because the broker charges them to their holds.
package inventory
