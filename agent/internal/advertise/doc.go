// Package advertise publishes the capacity that this cluster offers. The Publisher
// measures the inventory when nodes, pods or holds change, and at aligned intervals, sends
// the advertisement to the broker when it has changed, and keeps a copy in the cluster. At
// the intervals, it sends a beat: the digest of the advertisement, which is sent again if
// the broker has another one.
package advertise
