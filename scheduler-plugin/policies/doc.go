// Package policies says in the status of OverflowPolicies to which namespaces they apply, what the
// Reservations of these request, and why one applies to none. What is said is decided on a value that
// has all policies and namespaces; a status is written when it changes, at most once in 10 s.
package policies
