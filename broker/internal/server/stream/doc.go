// Package stream is what an open watch stream still has to be sent. It is level-triggered: a
// Subscription has the IDs of the views that may have changed, and a Source compares these
// views with what was last sent. So no events are queued for a cluster that does not read.
package stream
