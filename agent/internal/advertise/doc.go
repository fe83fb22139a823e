// Package advertise publishes the capacity that this cluster offers. The Publisher
// measures the inventory when nodes or pods change, and at aligned intervals, sends
// the advertisement to the broker, and keeps a copy in the cluster.
package advertise
