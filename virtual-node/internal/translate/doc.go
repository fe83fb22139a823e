// Package translate maps an overflowed pod to its guest at the provider (Pod),
// and the guest's status back to the pod (Status). The package is pure: it uses
// no client and no clock, and does not change its arguments.
package translate
