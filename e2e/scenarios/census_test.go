//go:build e2e

package scenarios

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
)

// uncounted kinds change without any action of Spillway.
var uncounted = map[string]string{
	"events":         "a record of what happened, kept for an hour",
	"leases":         "renewed and replaced by the leader",
	"endpointslices": "follow their Service's pods",
	"endpoints":      "follow their Service's pods",
	// The controller manager removes answered requests after an hour; Liqo's
	// handshake leaves one, which carries no right.
	"certificatesigningrequests": "answered requests are kept for an hour by Kubernetes itself",
}

// census counts every object of every listable kind in all four clusters, by
// kind, name and UID.
func census(ctx context.Context, t *testing.T) map[string]bool {
	t.Helper()
	seen := map[string]bool{}
	for _, r := range everywhere {
		lists, err := r.discovery.ServerPreferredResources()
		if err != nil && !discovery.IsGroupDiscoveryFailedError(err) {
			t.Fatalf("discovery in %s: %v", r.Name, err)
		}
		for _, list := range lists {
			gv, err := schema.ParseGroupVersion(list.GroupVersion)
			if err != nil {
				t.Fatal(err)
			}
			for _, kind := range list.APIResources {
				if gv.Group == "metrics.k8s.io" {
					continue // measurements of pods and nodes, which are counted themselves
				}
				if _, skip := uncounted[kind.Name]; skip || !slices.Contains(kind.Verbs, "list") || strings.Contains(kind.Name, "/") {
					continue
				}
				objects, err := r.metadata.Resource(gv.WithResource(kind.Name)).List(ctx, metav1.ListOptions{})
				if err != nil {
					t.Fatalf("listing %s in %s: %v", kind.Name, r.Name, err)
				}
				for _, o := range objects.Items {
					seen[fmt.Sprintf("%s %s.%s %s/%s %s", r.Name, kind.Name, gv.Group, o.Namespace, o.Name, o.UID)] = true
				}
			}
		}
	}
	return seen
}

// compare lists what one census has more than another.
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

// keptWarm reports whether an object belongs to a peering that is kept for a
// while after its last use: its own objects and the parked virtual node.
func keptWarm(object string) bool {
	for _, mark := range []string{
		"liqo-tenant-",                      // tenant namespaces and all in them
		"spillway-paris", "spillway-berlin", // the parked node with its kubelet, lease, accounts
		"foreignclusters.core.liqo.io",
		"tenants.authentication.liqo.io",
		"liqo-nonce",
		"spillway-guests-",        // the direct driver's namespaces for guests and all in them,
		"spillway-direct-",        // its virtual node configurations,
		"/spillway-virtual-node ", // and the permission to read what the pods refer to
	} {
		if strings.Contains(object, mark) {
			return true
		}
	}
	return false
}
