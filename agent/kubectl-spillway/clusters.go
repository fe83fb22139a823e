package main

import (
	"cmp"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func newClusters(o *options) *cobra.Command {
	hubContext := ""
	command := &cobra.Command{
		Use:   "clusters",
		Short: "List the clusters as this one sees them, or the hub",
		Long: `Lists the clusters that the one of the context sees: itself, and its providers, the clusters that have granted it
capacity. In the hub, or with --hub-context, it lists all clusters. Amounts are cores and memory; -o wide has all resources.

  STATE     Home: this cluster. SettingUp, Ready, NotReady or Cordoned: a provider, by its virtual node here.
            Active, Stale (the hub does not hear from it) or Consumer (it lends nothing): another one, in the hub.
  CAPACITY  what pods may use there in all
  LENT      what it has promised to others; of a provider, outside of the hub, what it has granted to this cluster
  USED      what pods of others request of that; of a provider, outside of the hub, those of this cluster
  FREE      what can be used still
  PRICE     of a core and a GiB for an hour; of a provider, outside of the hub, of all that it has granted`,
		Example: `  kubectl spillway clusters
  kubectl spillway clusters --hub-context=hub -o wide`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			var pods corev1.PodList
			r := newReader(command.Context(), c)
			r.list("pods", &pods, client.HasLabels{broker.LabelHold})
			observed, err := o.observeSystem(r)
			if err != nil {
				return err
			}
			var hub *health.Observed
			if hubContext != "" {
				there := o.in(hubContext)
				c, err := there.client()
				if err != nil {
					return err
				}
				r := newReader(command.Context(), c)
				var advertisements broker.ClusterAdvertisementList
				r.list(health.Advertisements, &advertisements, client.InNamespace(o.system))
				hub = &health.Observed{Now: observed.Now, Unreadable: r.wait()}
				if err := cmp.Or(r.err(there), there.forbidden(hub.Unreadable, health.Advertisements)); err != nil {
					return err
				}
				hub.Advertisements = advertisements.Items
			}
			table := health.Clusters(observed, pods.Items, hub)
			if err := o.forbidden(observed.Unreadable, health.Advertisements, explain.Nodes, explain.Instructions); err != nil && len(table.Clusters) == 0 {
				return err
			}
			return o.print(table, table.Text)
		},
	}
	command.Flags().StringVar(&hubContext, "hub-context", "", "Context of the hub, to read the advertisements of all clusters there.")
	if err := command.RegisterFlagCompletionFunc("hub-context", o.completeContexts); err != nil {
		panic(err) // no such flag
	}
	return command
}

// in returns options for another context of the same kubeconfig, as the same user if one is impersonated.
func (o *options) in(context string) *options {
	flags := genericclioptions.NewConfigFlags(true)
	flags.KubeConfig, flags.CacheDir, flags.Timeout, flags.Context = o.flags.KubeConfig, o.flags.CacheDir, o.flags.Timeout, &context
	flags.Impersonate, flags.ImpersonateGroup, flags.ImpersonateUID = o.flags.Impersonate, o.flags.ImpersonateGroup, o.flags.ImpersonateUID
	return &options{IOStreams: o.IOStreams, flags: flags, output: o.output, ascii: o.ascii, system: o.system}
}
