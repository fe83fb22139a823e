// Package handover plans which guests of a consumer take the places of which placeholders, and
// which of them must leave because nothing is held for them elsewhere. It reads and writes nothing.
package handover
