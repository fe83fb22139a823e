package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/spf13/cobra"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// lookAgainAfter is the interval at which --wait looks.
const lookAgainAfter = 2 * time.Second

func newStatus(o *options) *cobra.Command {
	wait := time.Duration(0)
	command := &cobra.Command{
		Use:   "status",
		Short: "Say whether Spillway works here: agent, hub, scheduler, peers, queue",
		Long: `Says whether Spillway works in the cluster of the context, by what runs there now:

  Home       the agent, and what the cluster has itself
  Hub        whether the broker, which runs in the hub, hears from this cluster; in the hub, from which ones it does
  Scheduler  whether pods can overflow
  Peers      the other clusters whose capacity this one uses, or has used lately, each with a virtual node
  Queue      the Reservations: those that wait for capacity, and for how long

Exits with 0 if all is well, as far as you may see it, 1 if not, and 2 if nothing is known. That Reservations wait for
capacity is well. Verb check looks at the installation.`,
		Example: `  kubectl spillway status
  kubectl spillway status --wait=2m && kubectl apply -f job.yaml`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			report, err := o.status(command.Context(), c)
			for until := time.Now().Add(wait); wait > 0 && (err != nil || !report.Well) && time.Now().Before(until); {
				select {
				case <-command.Context().Done():
					return errors.New("interrupted")
				case <-time.After(lookAgainAfter):
				}
				report, err = o.status(command.Context(), c)
			}
			if err != nil {
				return err
			}
			return o.report(report)
		},
	}
	command.Flags().DurationVar(&wait, "wait", 0, "Wait until all is well, at most so long; 5m without a value.")
	command.Flags().Lookup("wait").NoOptDefVal = "5m"
	return command
}

// report prints a report: its error is whether all is well.
func (o *options) report(report health.Report) error {
	if !report.Known() {
		if err := o.forbidden(report.Unreadable, health.Deployments, health.Leases); err != nil {
			return err
		}
		return fmt.Errorf("nothing is known of Spillway in %s", o.cluster())
	}
	if err := o.print(report, report.Text); err != nil {
		return err
	}
	if !report.Well {
		return errNo
	}
	return nil
}

// status reads the state of Spillway: one list of each kind.
func (o *options) status(ctx context.Context, c client.Client) (health.Report, error) {
	observed, err := o.observeSystem(newReader(ctx, c))
	if err != nil {
		return health.Report{}, err
	}
	return health.Status(observed), nil
}

// observeSystem reads what Status and Clusters are made from.
func (o *options) observeSystem(r *reader) (*health.Observed, error) {
	var deployments appsv1.DeploymentList
	var leases coordinationv1.LeaseList
	var advertisements broker.ClusterAdvertisementList
	var instructions broker.ReservationInstructionList
	var reservations broker.ReservationList
	var nodes corev1.NodeList
	r.list(health.Deployments, &deployments, client.InNamespace(o.system))
	r.list(health.Leases, &leases, client.InNamespace(o.system))
	r.list(health.Advertisements, &advertisements, client.InNamespace(o.system))
	r.list(explain.Instructions, &instructions, client.InNamespace(o.system))
	r.list(explain.Reservations, &reservations)
	r.list(explain.Nodes, &nodes, client.HasLabels{broker.LabelProvider})
	unreadable := r.wait()
	if err := r.err(o); err != nil {
		return nil, err
	}
	if len(instructions.Items) == 0 { // where only the broker is, there is no such kind
		unreadable = slices.DeleteFunc(unreadable, func(u explain.Unreadable) bool { return u.What == explain.Instructions && u.Permission == "" })
	}
	return &health.Observed{
		Now: time.Now(), System: o.system, Deployments: deployments.Items, Leases: leases.Items, Advertisements: advertisements.Items,
		Instructions: instructions.Items, Reservations: reservations.Items, Nodes: nodes.Items, Unreadable: unreadable,
	}, nil
}
