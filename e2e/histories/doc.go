// Package histories runs two broker processes against a real API server, kills and stops
// them while clusters request, change and release capacity over the REST API, and checks
// with porcupine that what all of them saw is what one ledger without faults could have
// shown. Everything is in its tests:
//
//	go test ./e2e/histories -operations=2000 -kills=20
//
// The consumers are clients of the REST API; the providers accept whatever the broker
// asks them to hold, so that nothing but its ledger prevents a promise from being made
// twice. A consumer's call is repeated until its outcome is known, so each operation in a
// history has one.
package histories
