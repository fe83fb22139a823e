// Package health says whether Spillway works in a cluster, as steps like those of package explain:
// Status what runs and waits now, Check what was installed and configured. Clusters lists the clusters.
//
// All are pure functions of what a caller could observe.
package health
