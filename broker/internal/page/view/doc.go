// Package view has what the broker's page shows, as values for its templates: clusters, who runs
// where, the queue, a Reservation with all that happened to it, and what has ended. It is pure.
// What other clusters wrote is in these values as it is: the templates escape it.
package view
