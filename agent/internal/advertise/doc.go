// Package advertise publishes what this cluster can lend. The Publisher takes the
// inventory when nodes or pods change, and at aligned intervals, sends it to the
// broker, and keeps a copy in the cluster.
package advertise
