// Package history is what is known of Reservations after they have ended: for whom they were,
// which providers gave how much for how long, why these, and what it cost. A Meter adds up
// capacity over time from what the ledgers show; a Store answers questions about it. It is pure.
package history
