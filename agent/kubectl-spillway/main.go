package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/badinput"
	"github.com/spillway-dev/spillway/agent/internal/top/terminal"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// Exit codes.
const (
	// exitNo: the answer is no, such as of status if something does not work.
	exitNo = 1
	// exitNoAnswer: the question cannot be answered, such as for missing permissions.
	exitNoAnswer = 2
)

// errNo is the error of a verb that has printed its answer, which is no.
var errNo = errors.New("no")

// shown are the flags of kubectl that help lists: kubectl options lists all.
var shown = []string{"as", "context", "kubeconfig", "namespace"}

// requestTimeout bounds each request unless --request-timeout is set.
const requestTimeout = 30 * time.Second

func init() { terminal.Restore() }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	quiet()
	os.Exit(run(ctx, os.Args[1:], genericclioptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}))
}

// quiet drops what libraries log: it is an error of the verb, too.
func quiet() {
	log.SetLogger(logr.Discard())
	klog.SetLogger(logr.Discard())
}

// run runs the program and returns its exit code.
func run(ctx context.Context, arguments []string, streams genericclioptions.IOStreams) (code int) {
	defer func() {
		if r := recover(); r != nil {
			code = fail(streams.ErrOut, fmt.Errorf("internal error, please report it: %v", r))
		}
	}()
	command := newCommand(streams)
	command.SetArgs(arguments)
	switch err := command.ExecuteContext(ctx); {
	case err == nil:
		return 0
	case errors.Is(err, errNo):
		return exitNo
	default:
		return fail(streams.ErrOut, err)
	}
}

// maxError is how much of an error is printed, in bytes.
const maxError = 2000

// fail prints an error as one line.
func fail(out io.Writer, err error) int {
	fmt.Fprintln(out, "error: "+text.Line(err.Error(), maxError))
	return exitNoAnswer
}

// options are those of all verbs.
type options struct {
	genericclioptions.IOStreams
	flags *genericclioptions.ConfigFlags
	// output is empty, wide, json or yaml.
	output string
	ascii  bool
	// system is the namespace of Spillway.
	system string
}

func newCommand(streams genericclioptions.IOStreams) *cobra.Command {
	o := &options{IOStreams: streams, flags: genericclioptions.NewConfigFlags(true)}
	command := &cobra.Command{
		Use:   "kubectl-spillway",
		Short: "Ask Spillway why a pod waits, where it runs, and what state it is in itself",
		Long: `Asks Spillway why a pod waits, where it runs, and what state it is in itself.

Every verb works with the permissions of the caller, and says which one is missing.
Exit codes: 0 the answer is good, 1 it is not, 2 there is no answer, such as for missing permissions.

It takes the other flags of kubectl, too: kubectl options lists them.`,
		Annotations:   map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl spillway"},
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          func(command *cobra.Command, _ []string) error { return command.Help() },
		PersistentPreRunE: func(command *cobra.Command, _ []string) error {
			if err := badinput.Durations(command.Flags()); err != nil {
				return err
			}
			switch o.output {
			case "", outputWide, outputJSON, outputYAML:
				return nil
			}
			return fmt.Errorf("-o %q is none of wide, json and yaml", o.output)
		},
	}
	command.CompletionOptions.HiddenDefaultCmd = true // kubectl completes: see kubectl_complete-spillway
	command.SetOut(streams.Out)
	command.SetErr(streams.ErrOut)
	flags := command.PersistentFlags()
	o.flags.AddFlags(flags)
	flags.VisitAll(func(f *pflag.Flag) { f.Hidden = !slices.Contains(shown, f.Name) })
	flags.StringVarP(&o.output, "output", "o", "", "Output format: wide, json or yaml.")
	flags.BoolVar(&o.ascii, "ascii", false, "Write no other characters than ASCII. The default where the locale is not UTF-8.")
	flags.StringVar(&o.system, "system-namespace", broker.SystemNamespace, "Namespace that Spillway is installed in.")
	o.complete(command)
	command.AddCommand(newExplain(o), newWhatIf(o), newTop(o), newUsage(o), newStatus(o), newClusters(o), newCheck(o),
		newReserve(o), newRelease(o), newCordon(o), newUncordon(o), newDrain(o))
	badinput.Explain(command)
	return command
}

// namespace is that of the flag or the context.
func (o *options) namespace() (string, error) {
	namespace, _, err := o.flags.ToRawKubeConfigLoader().Namespace()
	if err != nil {
		return "", fmt.Errorf("reading the kubeconfig: %w", err)
	}
	return namespace, nil
}

// client returns a client with the caller's permissions.
func (o *options) client() (client.Client, error) {
	config, err := o.flags.ToRESTConfig()
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	if config.Timeout == 0 {
		config.Timeout = requestTimeout
	}
	config.QPS, config.Burst = 50, 100
	config.WarningHandler = rest.NoWarnings{}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	mapper, err := o.flags.ToRESTMapper()
	if err != nil {
		return nil, fmt.Errorf("connecting to the API server: %w", err)
	}
	c, err := client.New(config, client.Options{Scheme: scheme, Mapper: mapper})
	if err != nil {
		return nil, fmt.Errorf("connecting to the API server: %w", err)
	}
	return c, nil
}

// cluster names the cluster that is asked, for messages.
func (o *options) cluster() string {
	if raw, err := o.flags.ToRawKubeConfigLoader().RawConfig(); err == nil {
		name := raw.CurrentContext
		if o.flags.Context != nil && *o.flags.Context != "" {
			name = *o.flags.Context
		}
		if name != "" {
			return "the cluster of context " + name
		}
	}
	return "the cluster"
}

// notInstalled is the error of a cluster that has no such kind.
func (o *options) notInstalled(err error) error {
	var missing *meta.NoKindMatchError
	kind := "Spillway's kinds"
	if errors.As(err, &missing) {
		kind = "kind " + missing.GroupKind.Kind
	}
	return fmt.Errorf("%s does not have %s: Spillway is not installed there, or its CRDs are older than this program (see charts/README.md)", o.cluster(), kind)
}
