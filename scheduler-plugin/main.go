// The spillway-scheduler command is kube-scheduler with the plugin Overflow, and
// the webhook that assigns pods to it. It takes kube-scheduler's flags and
// configuration (see package overflow for an example).
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // metrics of the API client
	_ "k8s.io/component-base/metrics/prometheus/version"  // the build's version as a metric
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/cmd/kube-scheduler/app"
	"k8s.io/utils/clock"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/overflow"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

func main() {
	command, err := newCommand(clock.RealClock{}, serveSteering)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(cli.Run(command))
}

// newCommand returns the command, which calls serve in a goroutine of its own before it
// schedules. It can be called once in a process.
func newCommand(clock clock.PassiveClock, serve func(address, certDir string, options steering.Options)) (*cobra.Command, error) {
	if err := overflow.OverrideFeatures(); err != nil {
		return nil, err
	}
	leader, server := steering.NewLeader(clock), &compatibility.Server{}
	var lease types.NamespacedName
	cmd := app.NewSchedulerCommand(app.WithPlugin(overflow.Name, func(ctx context.Context, args runtime.Object, handle framework.Handle) (framework.Plugin, error) {
		host, err := os.Hostname()
		if err != nil {
			return nil, fmt.Errorf("reading the host name: %w", err)
		}
		if lease.Name != "" {
			// The plugin has the only client of the process. A second profile starts a
			// second watch, which is harmless.
			go leader.Watch(ctx, handle.ClientSet(), lease.Namespace, lease.Name)
			go tellUnsupported(ctx, handle, server.Minor().Problem(), types.NamespacedName{Namespace: lease.Namespace, Name: host})
		}
		return overflow.New(ctx, args, handle, server.Minor(), func() bool { return leader.LeadsOn(host) })
	}))
	cmd.Use = "spillway-scheduler"
	cmd.Long = "kube-scheduler with Spillway's plugin " + overflow.Name + ": it requests capacity in other clusters for pods that do not fit in this one.\n"

	flags := pflag.NewFlagSet("steering", pflag.ContinueOnError)
	address := flags.String("steering-listen", ":9443", "Bind address of the admission webhook that assigns the pods of opted-in namespaces to this scheduler. Empty disables it.")
	certDir := flags.String("steering-cert-dir", "/etc/spillway/steering", "Directory with tls.crt and tls.key of the steering webhook, reloaded when they change.")
	leaseName := flags.String("steering-lease", "", "Lease of this scheduler, as namespace/name. While no replica holds it, pods are left to the cluster's own scheduler. Empty disables the check.")
	name := flags.String("steering-scheduler-name", broker.SchedulerName, "Profile of this scheduler that pods are assigned to.")
	tolerations := flags.StringArray("steering-toleration", nil, "Toleration, as key=value:effect, that pods need on virtual nodes beside the one for Spillway's taint. Can be repeated.")
	cmd.Flags().AddFlagSet(flags)
	help := cmd.HelpFunc()
	cmd.SetHelpFunc(func(c *cobra.Command, args []string) {
		help(c, args)
		fmt.Fprintf(c.OutOrStdout(), "\nSteering flags:\n\n%s", flags.FlagUsages())
	})

	schedule, setVersion := cmd.RunE, cmd.PersistentPreRunE
	cmd.PersistentPreRunE = nil // called once the API server was asked
	cmd.RunE = func(c *cobra.Command, args []string) error {
		verflag.PrintAndExitIfRequested()
		options, err := steeringOptions(*tolerations)
		if err != nil {
			return err
		}
		options.SchedulerName, options.NotReady = *name, notReady(c.Flags(), server)
		if *leaseName != "" {
			namespace, name, ok := strings.Cut(*leaseName, "/")
			if !ok || namespace == "" || name == "" {
				return fmt.Errorf("--steering-lease: want namespace/name, got %q", *leaseName)
			}
			lease, options.Leads = types.NamespacedName{Namespace: namespace, Name: name}, leader.Leads
		}
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
			go serve(*address, *certDir, options)
		}
		if err := emulate(c.Context(), c.Flags(), server); err != nil {
			return err
		}
		if err := setVersion(c, args); err != nil {
			return err
		}
		return schedule(c, args)
	}
	return cmd, nil
}

// steeringOptions parses the tolerations of the webhook's options.
func steeringOptions(tolerations []string) (options steering.Options, err error) {
	for _, text := range tolerations {
		key, rest, ok := strings.Cut(text, "=")
		value, effect, also := strings.Cut(rest, ":")
		if !ok || !also || key == "" || effect == "" {
			return options, fmt.Errorf("--steering-toleration: want key=value:effect, got %q", text)
		}
		t := corev1.Toleration{Key: key, Operator: corev1.TolerationOpEqual, Value: value, Effect: corev1.TaintEffect(effect)}
		if len(demand.AddedTolerations([]corev1.Toleration{{Key: broker.TaintOverflow}, t})) < 2 {
			return options, fmt.Errorf("--steering-toleration: want effect NoExecute, got %q: those of other effects count as the author's", text)
		}
		options.Tolerations = append(options.Tolerations, t)
	}
	return options, nil
}

// serveSteering serves the steering webhook until the process exits, in standby
// replicas too. Scheduling does not depend on it.
func serveSteering(address, certDir string, options steering.Options) {
	log := klog.Background().WithName("steering")
	ctrllog.SetLogger(log)
	if err := steering.Serve(context.Background(), address, certDir, options); err != nil {
		log.Error(err, "Steering webhook stopped")
	}
}
