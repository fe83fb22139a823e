// Package whatif says what would become of a manifest: which of its pods may overflow, what would be
// requested for them, and what the broker would decide, with the score of each cluster.
//
// Run is a pure function of what a caller could read here and in the hub. It asks for nothing, and
// answers one request after the other, as if each had got what it would get.
package whatif
