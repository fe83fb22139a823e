// Package database keeps the history of Reservations in SQLite, a file on a volume, or in
// PostgreSQL, with one schema. What has ended is never changed, and what has not only by a later
// count: a write may be repeated, and a former leader overwrites nothing.
package database
