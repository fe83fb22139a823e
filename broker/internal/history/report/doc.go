// Package report answers calls for history and usage: what their parameters select, within bounds, and
// the result as JSON or CSV. A caller gets what is its own.
package report
