// Package explain says why a pod or a Reservation is where it is: as a list of steps, from the
// opt-in of the namespace to the guest at its provider, and what to do about the first that is not
// as it has to be.
//
// Explain is a pure function of what a caller could observe. What it could not read is a part of
// that value, so that the answer says which permission is missing instead of something wrong.
package explain
