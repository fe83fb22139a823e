// The spillway-scheduler command is kube-scheduler with the plugin Overflow, and
// the webhook that steers pods to it. It takes kube-scheduler's flags and
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

	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

func main() {
	os.Exit(cli.Run(newCommand()))
}

// steeringOptions are the flags of the webhook.
type steeringOptions struct {
	listen  string
	certDir string
}

func (o *steeringOptions) flags() *pflag.FlagSet {
	fs := pflag.NewFlagSet("steering", pflag.ContinueOnError)
	fs.StringVar(&o.listen, "steering-listen", ":9443", "Address on which the webhook is served that steers the pods of opted-in namespaces to this scheduler. Empty: it is not served.")
	fs.StringVar(&o.certDir, "steering-cert-dir", "/etc/spillway/steering", "Directory with the webhook's tls.crt and tls.key. They are read again when they change.")
	return fs
}

func newCommand() *cobra.Command {
	cmd := app.NewSchedulerCommand(app.WithPlugin(overflow.Name, overflow.New))
	cmd.Use = "spillway-scheduler"
	cmd.Long = "kube-scheduler with Spillway's plugin " + overflow.Name + ": pods that do not fit in this cluster get room in another.\n"

	var options steeringOptions
	flags := options.flags()
	cmd.Flags().AddFlagSet(flags)
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(c *cobra.Command, args []string) {
		help(c, args)
		fmt.Fprintf(c.OutOrStdout(), "\nSteering flags:\n\n%s", flags.FlagUsages())
	})

	schedule := cmd.RunE
	cmd.RunE = func(c *cobra.Command, args []string) error {
		if options.listen != "" {
			// Taken before anything starts, so that a port in use is seen at once.
			listener, err := net.Listen("tcp", options.listen)
			if err != nil {
				return fmt.Errorf("listening for the steering webhook: %w", err)
			}
			go serve(listener, options.certDir)
		}
		return schedule(c, args)
	}
	return cmd
}

// serve steers for as long as the process lives, in standby replicas too.
// Scheduling goes on without it.
func serve(listener net.Listener, certDir string) {
	log := klog.Background().WithName("steering")
	if err := steering.Serve(context.Background(), log, listener, certDir); err != nil {
		log.Error(err, "Steering ended")
	}
}
