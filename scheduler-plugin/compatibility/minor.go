// Package compatibility says which minors of Kubernetes one build of Spillway runs on, and which
// of them an API server is.
package compatibility

import (
	"fmt"

	"k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/discovery"
)

// Minor is a minor of Kubernetes 1, such as 37.
type Minor int

// Oldest and Newest are the minors of the API servers that Spillway runs on. The charts check
// the same ones. Newest is the version of kube-scheduler in the build.
const Oldest, Newest Minor = 35, 37

// String returns the version as 1.37.
func (m Minor) String() string { return fmt.Sprintf("1.%d", int(m)) }

// Emulated is the supported minor that is nearest.
func (m Minor) Emulated() Minor { return min(max(m, Oldest), Newest) }

// Problem says why Spillway does not run well on a minor, and what to do; "" if it does.
func (m Minor) Problem() string {
	what := fmt.Sprintf("this build of Spillway supports Kubernetes %s to %s, and the cluster has %s", Oldest, Newest, m)
	switch {
	case m < Oldest:
		return what + ": upgrade the cluster"
	case m > Newest:
		return what + ": upgrade Spillway"
	}
	return ""
}

// Of asks an API server for its minor.
func Of(server discovery.ServerVersionInterface) (Minor, error) {
	info, err := server.ServerVersion()
	if err != nil {
		return 0, fmt.Errorf("asking the API server for its version: %w", err)
	}
	v, err := version.ParseGeneric(info.GitVersion)
	if err != nil || v.Major() != 1 {
		return 0, fmt.Errorf("the API server has version %q, want one of Kubernetes 1 (%w)", info.GitVersion, err)
	}
	return Minor(v.Minor()), nil
}
