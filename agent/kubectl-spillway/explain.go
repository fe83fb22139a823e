package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/spillway-dev/spillway/agent/internal/explain"
)

func newExplain(o *options) *cobra.Command {
	fix := false
	command := &cobra.Command{
		Use:   "explain (POD | TYPE/NAME | TYPE NAME)",
		Short: "Say step by step why a pod waits, or where it runs",
		Long: `Says step by step why a pod waits or where it runs, and what to do about it. Of a workload, it explains
a pod that waits, or else one that runs in another cluster. A name without a type is that of a pod, or
else of a Deployment, StatefulSet, Job or Reservation.`,
		Example: `  kubectl spillway explain web-6d5f9c-x2x9k
  kubectl spillway explain deployment/web
  kubectl spillway explain reservation/web-1a2b3c4d -o yaml
  kubectl spillway explain web --fix`,
		Args:              cobra.RangeArgs(1, 2),
		ValidArgsFunction: o.completeObjects,
		RunE: func(command *cobra.Command, arguments []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			observed, err := o.observe(newReader(command.Context(), c), strings.Join(arguments, "/"))
			if err != nil {
				return err
			}
			e := explain.Explain(observed)
			if fix {
				_, err := fmt.Fprint(o.Out, e.Script())
				return err
			}
			return o.print(e, e.Text)
		},
	}
	command.Flags().BoolVar(&fix, "fix", false, "Print only the commands that mend it, and as comments those that need a decision first.")
	return command
}
