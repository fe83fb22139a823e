package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/program"
)

// invite creates an invitation for a cluster, and prints its token, which is kept nowhere else.
func invite(ctx context.Context, hubOf func() (*rest.Config, error), arguments []string, out io.Writer) error {
	flags := flag.NewFlagSet("spillway-broker invite [flags] <cluster ID>", flag.ContinueOnError)
	if kubeconfig := flag.Lookup("kubeconfig"); kubeconfig != nil {
		flags.Var(kubeconfig.Value, kubeconfig.Name, kubeconfig.Usage)
	}
	namespace := flags.String("namespace", defaultNamespace(), "Namespace of the broker's objects. Defaults to $POD_NAMESPACE if set.")
	ttl := flags.Duration("ttl", 24*time.Hour, "Time after which the token can be used no longer.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() != 1 || *ttl <= 0 {
		return errors.New("name one cluster ID, after the flags, and a --ttl above 0: spillway-broker invite --ttl=1h rome")
	}
	config, err := hubOf()
	if err != nil {
		return fmt.Errorf("finding the API server (outside of a cluster, set --kubeconfig or KUBECONFIG): %w", err)
	}
	scheme := runtime.NewScheme()
	if err := broker.AddToScheme(scheme); err != nil {
		return err
	}
	hub, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("creating the client: %w", err)
	}
	token, err := program.Invite(ctx, hub, *namespace, flags.Arg(0), time.Now().Add(*ttl))
	if err != nil {
		return err
	}
	fmt.Fprintln(out, token)
	return nil
}
