package main

import (
	"fmt"

	"github.com/spf13/cobra"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	"github.com/spillway-dev/spillway/agent/internal/probe"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func newCheck(o *options) *cobra.Command {
	pre := false
	command := &cobra.Command{
		Use:   "check",
		Short: "Check the installation: versions, CRDs, permissions, webhook, clocks, certificates, network",
		Long: `Checks how Spillway was installed in this cluster, with what to do about each thing that is wrong. Whether the
broker and the providers answer is asked from this machine, too; what counts is what the agent reports.
Whether new pods are steered to Spillway's scheduler is tried by a dry run, which creates nothing. With --pre, it checks
whether it can be installed: the version of Kubernetes, and your permissions. Exit codes are those of status.`,
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
	config, err := o.flags.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	if err := probe.Server(config, in); err != nil {
		return nil, fmt.Errorf("reading from %s: %w", o.cluster(), err)
	}
	if pre {
		in.Permissions = probe.Preconditions(r.ctx, r, o.system)
		return in, nil
	}
	var webhooks admissionv1.MutatingWebhookConfigurationList
	var endpoints discoveryv1.EndpointSliceList
	var policies networkingv1.NetworkPolicyList
	var namespaces corev1.NamespaceList
	var plugins appsv1.DaemonSetList
	r.list(health.Webhooks, &webhooks)
	r.list(health.EndpointSlices, &endpoints, client.InNamespace(o.system))
	r.list(health.NetworkPolicies, &policies, client.InNamespace(o.system))
	r.list(health.DaemonSets, &plugins, client.InNamespace("kube-system"))
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
	if webhook := in.Steering(); webhook != nil {
		in.Trial = probe.Steering(r.ctx, r, webhook, namespaces.Items)
	}
	for _, d := range in.Deployments {
		in.Permissions = append(in.Permissions, probe.Needed(r.ctx, r, d.Name, o.system)...)
	}
	in.NetworkPlugins = plugins.Items
	in.Endpoints = probe.Endpoints(r.ctx, in.Addresses())
	return in, nil
}
