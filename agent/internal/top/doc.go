// Package top shows what happens now: clusters with what they lend, which cluster uses which, what
// waits, and what it costs in an hour.
//
// Of is a pure function of what was observed, and View one of that, a size and a style. Model shows
// it on a terminal, again whenever it is sent another one.
package top
