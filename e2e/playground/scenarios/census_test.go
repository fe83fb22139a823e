package scenarios_test

import (
	"context"
	"fmt"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// uncounted kinds change without any action of Spillway, or are records of it.
var uncounted = []string{"events", "leases", "endpointslices", "endpoints"}

// census counts the objects of all kinds in all clusters, by kind, name and UID.
func (s *playgroundTest) census() map[string]bool {
	s.t.Helper()
	seen := map[string]bool{}
	for _, c := range s.p.Clusters() {
		lists, err := c.Set.Discovery().ServerPreferredResources()
		expect.NoError(s.t, err)
		all, err := metadata.NewForConfig(c.Admin)
		expect.NoError(s.t, err)
		for _, list := range lists {
			gv, err := schema.ParseGroupVersion(list.GroupVersion)
			expect.NoError(s.t, err)
			for _, kind := range list.APIResources {
				if slices.Contains(uncounted, kind.Name) || !slices.Contains(kind.Verbs, "list") || strings.Contains(kind.Name, "/") {
					continue
				}
				objects, err := all.Resource(gv.WithResource(kind.Name)).List(context.Background(), metav1.ListOptions{})
				expect.NoError(s.t, err)
				for _, o := range objects.Items {
					seen[fmt.Sprintf("%s %s.%s %s/%s %s", c.Name, kind.Name, gv.Group, o.Namespace, o.Name, o.UID)] = true
				}
			}
		}
	}
	return seen
}

// compare lists what one census has more than another, and less.
func compare(before, after map[string]bool) (added, missing []string) {
	for o := range after {
		if !before[o] {
			added = append(added, o)
		}
	}
	for o := range before {
		if !after[o] {
			missing = append(missing, o)
		}
	}
	slices.Sort(added)
	slices.Sort(missing)
	return added, missing
}

// differs returns an error if the census is not as before, but for objects that may exist.
func (s *playgroundTest) differs(before map[string]bool, may func(object string) bool) error {
	added, missing := compare(before, s.census())
	if added = slices.DeleteFunc(added, may); len(added)+len(missing) > 0 {
		return fmt.Errorf("more: %v; less: %v", added, missing)
	}
	return nil
}

// keptWarm reports whether an object belongs to a peering, which is kept for a while after its
// last use: the parked virtual node, its configuration and permissions, the guests' namespace.
func keptWarm(object string) bool {
	return slices.ContainsFunc([]string{"spillway-paris", "spillway-berlin", "spillway-guests-", "spillway-direct-", "/spillway-virtual-node "}, func(mark string) bool {
		return strings.Contains(object, mark)
	})
}
