// Package recorder writes the history of Reservations. Where the leader of the brokers runs, it looks
// at the ledgers that have changed once a second, and at all of them every five minutes, and has a
// database keep what history.Meter counts. A Reservation that has ended disappears from the hub only
// after its record was written, or after the deadline of a database that does not answer.
package recorder
