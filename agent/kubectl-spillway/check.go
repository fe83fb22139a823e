package main

import (
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/discovery"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

func newCheck(o *options) *cobra.Command {
	pre := false
	command := &cobra.Command{
		Use:   "check",
		Short: "Check the installation: versions, CRDs, permissions, webhook, certificates, network",
		Long: `Checks how Spillway was installed in this cluster, with what to do about each thing that is wrong. With --pre, it
checks whether it can be installed: the version of Kubernetes, and your permissions. Exit codes are those of status.`,
		Example: `  kubectl spillway check --pre && helm install …
  kubectl spillway check -o yaml`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			installation, err := o.observeInstallation(newReader(command.Context(), c), pre)
			if err != nil {
				return err
			}
			return o.report(health.Check(installation, pre))
		},
	}
	command.Flags().BoolVar(&pre, "pre", false, "Check before an installation.")
	return command
}

// observeInstallation reads what Check is made from.
func (o *options) observeInstallation(r *reader, pre bool) (*health.Installation, error) {
	in := &health.Installation{}
	if err := o.observeServer(in); err != nil {
		return nil, err
	}
	if pre {
		in.Permissions = review(r, "", preconditions, o.system)
		return in, nil
	}
	var webhooks admissionv1.MutatingWebhookConfigurationList
	var endpoints discoveryv1.EndpointSliceList
	var policies networkingv1.NetworkPolicyList
	var namespaces corev1.NamespaceList
	r.list(health.Webhooks, &webhooks)
	r.list(health.EndpointSlices, &endpoints, client.InNamespace(o.system))
	r.list(health.NetworkPolicies, &policies, client.InNamespace(o.system))
	r.list(explain.Namespaces, &namespaces, client.MatchingLabels{broker.LabelOverflow: broker.OverflowEnabled})
	secret := &corev1.Secret{}
	if r.get(health.Secrets, secret, o.system, health.IdentitySecret) {
		in.Identity = secret
	}
	observed, err := o.observeSystem(r)
	if err != nil && r.missing == nil {
		return nil, err
	}
	if observed == nil { // what is missing is a step
		observed = &health.Observed{System: o.system, Unreadable: r.denied}
	}
	in.Observed = *observed
	in.Webhooks, in.EndpointSlices, in.NetworkPolicies, in.OptedIn = webhooks.Items, endpoints.Items, policies.Items, len(namespaces.Items)
	for _, d := range in.Deployments {
		if needs := needed[d.Name]; len(needs) > 0 {
			in.Permissions = append(in.Permissions, review(r, d.Name, needs, o.system)...)
		}
	}
	return in, nil
}

// observeServer reads the version of the API server and which of Spillway's kinds it serves, which
// everyone may.
func (o *options) observeServer(in *health.Installation) error {
	config, err := o.flags.ToRESTConfig()
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	server, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return fmt.Errorf("connecting to the API server: %w", err)
	}
	minor, err := compatibility.Of(server)
	if err != nil {
		return fmt.Errorf("reading from %s: %w", o.cluster(), err)
	}
	in.Version, in.VersionProblem = minor.String(), minor.Problem()
	resources, err := server.ServerResourcesForGroupVersion(broker.GroupVersion.String())
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("reading from %s: %w", o.cluster(), err)
	}
	if resources != nil {
		for _, resource := range resources.APIResources {
			if !strings.Contains(resource.Name, "/") && !slices.Contains(in.Kinds, resource.Kind) {
				in.Kinds = append(in.Kinds, resource.Kind)
			}
		}
	}
	return nil
}

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

// review asks the API server whether a program, or without a name the caller, has permissions.
func review(r *reader, program string, needs []need, system string) []health.Permission {
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
				err = r.Create(r.ctx, own)
				all[i].Allowed = own.Status.Allowed
			} else {
				other := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{ResourceAttributes: attributes, User: "system:serviceaccount:" + system + ":" + program,
					Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + system, "system:authenticated"}}}
				err = r.Create(r.ctx, other)
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
