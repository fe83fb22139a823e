// Package capacity is the arithmetic of capacity: amounts as vectors, the algebra
// of what is held, and the one packer of pods into free capacity, which the
// broker uses to choose a provider and the provider to accept a hold. It is pure.
package capacity
