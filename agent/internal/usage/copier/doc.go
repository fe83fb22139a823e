// Package copier copies what the broker knows of this cluster's usage to ConfigMap spillway-usage, every
// ten minutes on the leader, so that kubectl spillway usage works with the permissions of its caller.
package copier
