// Package manifests renders Spillway's charts as helm does and applies the result, where
// a release of helm is not needed: its program compiles in seconds, helm in a minute.
package manifests
