// Package owners looks up the controllers of objects of any kind, such as JobSets, so that
// the root owner of a pod can be found. The scheduler and the agent use it, with the same
// kinds: both must find the same root owner. A look-up reads the metadata of one object, in
// the background; results are kept for some time.
package owners
