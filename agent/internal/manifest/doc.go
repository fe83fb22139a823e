// Package manifest reads manifests, and lets the API server complete their pods without creating them.
package manifest
