// Package request asks for capacity in other clusters: it gathers what pending pods need,
// decides what to request within the OverflowPolicy of their namespace, and writes that as
// Reservations. The pods have events of it.
package request
