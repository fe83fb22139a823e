// Package program is the agent as it runs, but for its flags, its driver and its connection to
// the broker: main, the simulation and the benches all build it here. controllers.go lists what
// there is, over any manager; NewManager is the manager of a process.
package program
