// Package advertise measures what this cluster could lend and tells the broker.
//
// Measure is pure: nodes, pods and terms in, an advertisement's spec out. Only
// Ready, uncordoned, real nodes count, and only pods bound to them. Guests (pods
// that another cluster's overflow brought here) are reported by consumer and
// never as the cluster's own use, because the broker charges them to their
// holds. Publisher is the edge: it measures when nodes, pods or holds change and
// on wall-clock beats, publishes, and keeps a copy in the cluster for people.
package advertise
