// Program kubectl-spillway is a plugin of kubectl: why a pod waits or where it runs, what state
// Spillway is in, and which clusters there are.
//
// Each verb gathers what it needs with the permissions of the caller, lets a pure package conclude
// from that value, and prints the result. What may not be read is named; the rest goes on.
package main
