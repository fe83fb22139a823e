// Package limits bounds what one caller may use of the broker: the rate of its calls, those
// that are in progress at the same time, and its open connections. What a cluster uses is
// never at the expense of another one, and what is known of callers is bounded, too: who
// calls is not authenticated yet.
package limits
