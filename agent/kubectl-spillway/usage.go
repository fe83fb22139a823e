package main

import (
	"fmt"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/usage"
)

// outputCSV is a format of usage only.
const outputCSV = "csv"

func newUsage(o *options) *cobra.Command {
	by, all := "day", false
	command := &cobra.Command{
		Use:   "usage",
		Short: "Show what pods were given in other clusters, and what it cost",
		Long: `Shows what the pods of a namespace were given in other clusters and what it cost: a row for each owner, such as a
Deployment, and day of the last 31; with --by=month, for each of the last 13 months. -o csv is for spreadsheets.

  CPU-H, GIB-H  hours of a core, and of a GiB of memory, that providers kept for the pods
  USED          what the pods requested of that, as the provider counts it
  COST          of what was kept, at the prices of the providers
  SAVED         by how much that is below the reference prices of the hub; - if it has none

The agent copies it from the broker to ConfigMap ` + usage.Name + ` every ten minutes.`,
		Example: `  kubectl spillway usage -n shop
  kubectl spillway usage --all-namespaces --by=month -o csv`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		// That of the root refuses csv.
		PersistentPreRunE: func(command *cobra.Command, arguments []string) error {
			if o.output == outputCSV {
				return nil
			}
			return command.Root().PersistentPreRunE(command, arguments)
		},
		RunE: func(command *cobra.Command, _ []string) error {
			if by != "day" && by != "month" {
				return fmt.Errorf("--by=%q is neither day nor month", by)
			}
			selection := usage.Selection{Monthly: by == "month"}
			if !all {
				namespace, err := o.namespace()
				if err != nil {
					return err
				}
				selection.Namespace = namespace
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			var copied corev1.ConfigMap
			err = c.Get(command.Context(), client.ObjectKey{Namespace: o.system, Name: usage.Name}, &copied)
			switch {
			case apierrors.IsForbidden(err):
				return fmt.Errorf("you may not get configmaps %s in namespace %s", usage.Name, o.system)
			case apierrors.IsNotFound(err):
				return fmt.Errorf("%s has no ConfigMap %s/%s: the broker keeps no history, or the agent has not asked it yet", o.cluster(), o.system, usage.Name)
			case err != nil:
				return fmt.Errorf("reading ConfigMap %s/%s from %s: %w", o.system, usage.Name, o.cluster(), err)
			}
			content, err := usage.Decode(copied.Data[usage.Key])
			if err != nil {
				return err
			}
			table := usage.Of(content, selection)
			if o.output != outputCSV {
				return o.print(table, table.Text)
			}
			text, err := table.CSV()
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(o.Out, text)
			return err
		},
	}
	command.Flags().StringVar(&by, "by", by, "Period of a row: day or month.")
	command.Flags().BoolVarP(&all, "all-namespaces", "A", false, "Show all namespaces.")
	return command
}
