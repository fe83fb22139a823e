package probe

import (
	"context"
	"strings"
	"sync"

	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// need is a permission; in the namespace of Spillway if it is local.
type need struct {
	verb, group, resource string
	local                 bool
}

func (n need) String() string {
	return n.verb + " " + strings.TrimSuffix(n.resource+"."+n.group, ".")
}

// needed are permissions without which a program does nothing; preconditions those to install one.
var (
	needed = map[string][]need{
		health.Broker: {{"update", broker.Group, "clusteradvertisements/status", true}, {"update", broker.Group, "reservations/status", true}},
		health.Agent: {{"list", "", "nodes", false}, {"create", "", "pods/eviction", false}, {"patch", broker.Group, "reservations/status", false},
			{"create", broker.Group, "reservationinstructions", true}, {"create", broker.Group, "providerinstructions", true}},
		health.Scheduler: {{"create", broker.Group, "reservations", false}, {"list", broker.Group, "overflowpolicies", false}, {"create", "", "pods/binding", false}},
	}
	preconditions = []need{
		{"create", "", "namespaces", false}, {"create", "apiextensions.k8s.io", "customresourcedefinitions", false},
		{"create", "rbac.authorization.k8s.io", "clusterroles", false}, {"create", "rbac.authorization.k8s.io", "clusterrolebindings", false},
		{"escalate", "rbac.authorization.k8s.io", "clusterroles", false}, {"bind", "rbac.authorization.k8s.io", "clusterroles", false},
		{"create", "admissionregistration.k8s.io", "mutatingwebhookconfigurations", false}, {"create", "admissionregistration.k8s.io", "validatingadmissionpolicies", false},
		{"create", "scheduling.k8s.io", "priorityclasses", false}, {"create", "flowcontrol.apiserver.k8s.io", "flowschemas", false},
		{"create", "apps", "deployments", true}, {"create", "", "secrets", true}, {"create", "", "services", true},
	}
)

// Preconditions asks whether the caller may install Spillway in a namespace.
func Preconditions(ctx context.Context, c client.Client, system string) []health.Permission {
	return review(ctx, c, "", preconditions, system)
}

// Needed asks whether a program of a namespace may do what it does; of another program it asks nothing.
func Needed(ctx context.Context, c client.Client, program, system string) []health.Permission {
	return review(ctx, c, program, needed[program], system)
}

// review asks the API server whether a program, or without a name the caller, has permissions.
func review(ctx context.Context, c client.Client, program string, needs []need, system string) []health.Permission {
	all := make([]health.Permission, len(needs))
	var running sync.WaitGroup
	for i, n := range needs {
		running.Go(func() {
			attributes := &authorizationv1.ResourceAttributes{Verb: n.verb, Group: n.group}
			attributes.Resource, attributes.Subresource, _ = strings.Cut(n.resource, "/")
			if n.local {
				attributes.Namespace = system
			}
			all[i] = health.Permission{Who: program, What: n.String()}
			var err error
			if program == "" {
				own := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: attributes}}
				err = c.Create(ctx, own)
				all[i].Allowed = own.Status.Allowed
			} else {
				other := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{ResourceAttributes: attributes, User: "system:serviceaccount:" + system + ":" + program,
					Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + system, "system:authenticated"}}}
				err = c.Create(ctx, other)
				all[i].Allowed = other.Status.Allowed
			}
			if apierrors.IsForbidden(err) {
				all[i].Unknown = "you may not create subjectaccessreviews.authorization.k8s.io"
			} else if err != nil {
				all[i].Unknown = err.Error()
			}
		})
	}
	running.Wait()
	return all
}
