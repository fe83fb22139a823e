package binaries

import (
	"fmt"
	"os"
	"slices"
	"strings"
)

// Supported are the minors of Kubernetes that a control plane can have, the oldest first.
func Supported() []string { return []string{minor(versions[v135]), minor(versions[v136]), newest()} }

func newest() string { return minor(KubernetesVersion) }

// Minors of Kubernetes, as 1.37: of consumers' clusters, and of the hub's and all others.
type Minors struct{ Consumers, Others string }

// Newest reports whether all clusters have the newest minor.
func (m Minors) Newest() bool { return m == Minors{newest(), newest()} }

// WantedMinors returns the minors that the environment variable KUBERNETES names: one for all
// clusters, or two as 1.35,1.37. The default is the newest.
func WantedMinors() (Minors, error) {
	value := os.Getenv("KUBERNETES")
	if value == "" {
		return Minors{newest(), newest()}, nil
	}
	list := strings.Split(value, ",")
	for _, m := range list {
		if !slices.Contains(Supported(), m) || len(list) > 2 {
			return Minors{}, fmt.Errorf("KUBERNETES=%s is not supported: use one of %s, or two of them as %s,%s, the first for consumers",
				value, strings.Join(Supported(), ", "), Supported()[0], newest())
		}
	}
	return Minors{list[0], list[len(list)-1]}, nil
}

// At returns the name of a program of a control plane of a minor.
func At(name, minor string) string {
	if _, ok := programs[name+"-"+minor]; ok {
		return name + "-" + minor
	}
	return name
}

// AtWantedMinors returns the names of programs, those of control planes at each minor that
// WantedMinors returns.
func AtWantedMinors(names ...string) ([]string, error) {
	wanted, err := WantedMinors()
	if err != nil {
		return nil, err
	}
	var all []string
	for _, name := range names {
		for _, m := range []string{wanted.Consumers, wanted.Others} {
			if at := At(name, m); !slices.Contains(all, at) {
				all = append(all, at)
			}
		}
	}
	return all, nil
}
