// Package limits bounds what one caller may use of the broker: the rate of its calls, those
// that are in progress at the same time, and its open connections. What it
// remembers of callers is bounded, too: they are limited before they are authenticated.
package limits
