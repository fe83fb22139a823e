// The spillway-scheduler command is kube-scheduler with the plugin Overflow, and
// the webhook that assigns pods to it. It takes kube-scheduler's flags and
// configuration (see package overflow for an example).
package main

import (
	"context"
	"fmt"
	"net"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of the API client
	_ "k8s.io/component-base/metrics/prometheus/version"  // the build's version as a metric
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

func main() {
	os.Exit(cli.Run(newCommand()))
}

func newCommand() *cobra.Command {
	cmd := app.NewSchedulerCommand(app.WithPlugin(overflow.Name, overflow.New))
	cmd.Use = "spillway-scheduler"
	cmd.Long = "kube-scheduler with Spillway's plugin " + overflow.Name + ": it requests capacity in other clusters for pods that do not fit in this one.\n"

	flags := pflag.NewFlagSet("steering", pflag.ContinueOnError)
	address := flags.String("steering-listen", ":9443", "Bind address of the admission webhook that assigns the pods of opted-in namespaces to this scheduler. Empty disables it.")
	certDir := flags.String("steering-cert-dir", "/etc/spillway/steering", "Directory with tls.crt and tls.key of the steering webhook, reloaded when they change.")
	cmd.Flags().AddFlagSet(flags)
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(c *cobra.Command, args []string) {
		help(c, args)
		fmt.Fprintf(c.OutOrStdout(), "\nSteering flags:\n\n%s", flags.FlagUsages())
	})

	schedule := cmd.RunE
	cmd.RunE = func(c *cobra.Command, args []string) error {
		if *address != "" {
			// An address that is invalid or in use ends the program: without steering,
			// pods would stay with the cluster's scheduler and never overflow.
			listener, err := net.Listen("tcp", *address)
			if err != nil {
				return fmt.Errorf("listening for the steering webhook: %w", err)
			}
			if err := listener.Close(); err != nil {
				return fmt.Errorf("listening for the steering webhook: %w", err)
			}
			go serveSteering(*address, *certDir)
		}
		return schedule(c, args)
	}
	return cmd
}

// serveSteering serves the steering webhook until the process exits, in standby
// replicas too. Scheduling does not depend on it.
func serveSteering(address, certDir string) {
	log := klog.Background().WithName("steering")
	ctrllog.SetLogger(log)
	if err := steering.Serve(context.Background(), address, certDir); err != nil {
		log.Error(err, "Steering webhook stopped")
	}
}
