// Package gang knows which pods are to run together: it watches what describes gangs (PodGroups and
// Workloads), keeps pods back until that is known, and remembers which of them wait in Permit until
// the others have places.
package gang
