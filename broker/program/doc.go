// Package program is the broker as it runs, but for its flags: main, the simulation and the
// benches all build it here. controllers.go lists what there is, over any manager; New adds
// the manager, the certificate authority and the listener of a process.
package program
