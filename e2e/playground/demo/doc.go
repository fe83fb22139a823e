// Package demo shows what Spillway does, on a playground, in six chapters. Each
// chapter performs an action and then observes the real API servers until it sees
// the outcome, or its deadline passes.
//
//	snapshot.go  the observed state, read from every API server
//	chapters.go  the actions and their outcomes
//	demo.go      runs the chapters
//	skew.go      runs the demo with different versions of Kubernetes
//	changes.go   describes what changed between two snapshots
//	view.go      the output: a live picture, or plain lines
package demo
