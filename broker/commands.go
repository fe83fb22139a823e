package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/internal/tenant"
)

// commands are run instead of the broker. The hub is where its API server is.
var commands = map[string]func(ctx context.Context, hub func() (*rest.Config, error), arguments []string, out io.Writer) error{
	"invite":     invite,
	"kubeconfig": kubeconfig,
	"rotate-ca":  rotateCA,
}

// invite creates an invitation for a cluster, and prints its token, which is kept nowhere else.
func invite(ctx context.Context, hub func() (*rest.Config, error), arguments []string, out io.Writer) error {
	flags, namespace := commandFlags("invite [flags] <cluster ID>")
	ttl := flags.Duration("ttl", 24*time.Hour, "Time after which the token can be used no longer.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() != 1 || *ttl <= 0 {
		return errors.New("name one cluster ID, after the flags, and a --ttl above 0: spillway-broker invite --ttl=1h rome")
	}
	c, err := clientOf(hub)
	if err != nil {
		return err
	}
	token, err := identity.Invite(ctx, c, *namespace, flags.Arg(0), time.Now().Add(*ttl))
	if err != nil {
		return err
	}
	fmt.Fprintln(out, token)
	return nil
}

// kubeconfig approves a cluster, and prints access to its namespace.
func kubeconfig(ctx context.Context, hub func() (*rest.Config, error), arguments []string, out io.Writer) error {
	flags, namespace := commandFlags("kubeconfig [flags] <cluster ID>")
	ttl := flags.Duration("ttl", 30*24*time.Hour, "Time after which the access ends; the API server may shorten it.")
	server := flags.String("server", "", "URL at which the agent reaches the API server of the hub. Defaults to the one that this command uses.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() != 1 || *ttl < 10*time.Minute {
		return errors.New("name one cluster ID, after the flags, and a --ttl of 10m or more: spillway-broker kubeconfig --server=https://HUB:6443 rome")
	}
	c, err := clientOf(hub)
	if err != nil {
		return err
	}
	config, err := hub()
	if err != nil {
		return err
	}
	if err := tenant.Approve(ctx, c, *namespace, flags.Arg(0)); err != nil {
		return err
	}
	access, err := tenant.Kubeconfig(ctx, c, config, *server, flags.Arg(0), *ttl)
	if err != nil {
		return err
	}
	_, err = out.Write(access)
	return err
}

// rotateCA replaces the CA that signs certificates.
func rotateCA(ctx context.Context, hub func() (*rest.Config, error), arguments []string, out io.Writer) error {
	flags, namespace := commandFlags("rotate-ca [flags]")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	c, err := clientOf(hub)
	if err != nil {
		return err
	}
	if err := identity.Rotate(ctx, c, *namespace, clock.RealClock{}); err != nil {
		return err
	}
	fmt.Fprintln(out, "The broker uses the new CA within 10 seconds. Agents trust it by the one before.")
	return nil
}

func commandFlags(usage string) (flags *flag.FlagSet, namespace *string) {
	flags = flag.NewFlagSet("spillway-broker "+usage, flag.ContinueOnError)
	if kubeconfig := flag.Lookup("kubeconfig"); kubeconfig != nil {
		flags.Var(kubeconfig.Value, kubeconfig.Name, kubeconfig.Usage)
	}
	return flags, flags.String("namespace", defaultNamespace(), "Namespace of the broker's objects. Defaults to $POD_NAMESPACE if set.")
}

func clientOf(hub func() (*rest.Config, error)) (client.Client, error) {
	config, err := hub()
	if err != nil {
		return nil, fmt.Errorf("finding the API server (outside of a cluster, set --kubeconfig or KUBECONFIG): %w", err)
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return nil, err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return nil, fmt.Errorf("creating the client: %w", err)
	}
	return c, nil
}
