package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/identity"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// commandDecision is the argument that makes the program print a decision and exit.
const commandDecision = "decision"

// brokerURLVariable is the environment variable with the default of --broker-url of the
// command: the chart sets it in the agent's pods.
const brokerURLVariable = "SPILLWAY_BROKER_URL"

// certPathVariable is the same for --broker-cert-path.
const certPathVariable = "SPILLWAY_BROKER_CERT_PATH"

// decisionTimeout bounds the command: the broker compares all clusters.
const decisionTimeout = time.Minute

// printDecision prints why each cluster that lends to this one is not chosen for a Reservation
// of it, as a table: its status names only those that came closest. It asks the broker with the
// agent's certificate. access finds the cluster, once the arguments
// are known to be right.
func printDecision(ctx context.Context, access func() (*rest.Config, error), arguments []string, out io.Writer) error {
	flags := flag.NewFlagSet("spillway-agent "+commandDecision, flag.ContinueOnError)
	flags.SetOutput(out)
	flags.Usage = func() {
		fmt.Fprintf(out, "Usage: spillway-agent %s [flags] NAMESPACE/NAME\n\nPrints why the broker does not choose each of the clusters that lend to this one for a Reservation.\n\n", commandDecision)
		flags.PrintDefaults()
	}
	url := flags.String("broker-url", os.Getenv(brokerURLVariable), "URL of the broker, https://<host>[:<port>]. Defaults to $"+brokerURLVariable+".")
	certPath := flags.String("broker-cert-path", os.Getenv(certPathVariable), "Directory with tls.crt, tls.key and ca.crt, if the agent has not joined. Defaults to $"+certPathVariable+".")
	namespace := flags.String("namespace", defaultNamespace(), "Namespace of the agent's Secrets.")
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	of, name, found := strings.Cut(flags.Arg(0), "/")
	switch {
	case flags.NArg() != 1 || !found || of == "" || name == "":
		return errors.New("one argument is required, NAMESPACE/NAME of a Reservation")
	case *url == "":
		return errors.New("--broker-url is required")
	}
	ctx, cancel := context.WithTimeout(ctx, decisionTimeout)
	defer cancel()
	config, err := access()
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)); err != nil {
		return err
	}
	c, err := client.New(config, client.Options{Scheme: scheme})
	if err != nil {
		return fmt.Errorf("creating a client: %w", err)
	}
	var reservation broker.Reservation
	if err := c.Get(ctx, types.NamespacedName{Namespace: of, Name: name}, &reservation); err != nil {
		return fmt.Errorf("reading Reservation %s/%s: %w", of, name, err)
	}
	if reservation.Status.ID == "" {
		return fmt.Errorf("the broker has no copy of Reservation %s/%s yet: see its conditions", of, name)
	}
	tlsConfig, err := identity.Stored(ctx, c, *namespace, *certPath)
	if err != nil {
		return err
	}
	hub, err := protocol.NewClient(*url, tlsConfig, logr.Discard())
	if err != nil {
		return err
	}
	defer hub.Close()
	decision, err := hub.Decision(ctx, reservation.Status.ID)
	if err != nil {
		return fmt.Errorf("asking the broker: %w", err)
	}
	return writeDecision(out, decision, reservation.Spec.RequesterID)
}

// writeDecision writes a decision for a Reservation of a cluster as a table.
func writeDecision(out io.Writer, decision protocol.DecisionView, cluster string) error {
	table := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	fmt.Fprintln(table, "CLUSTER\tREASON\tMESSAGE")
	for _, r := range decision.Rejections {
		fmt.Fprintf(table, "%s\t%s\t%s\n", r.Cluster, r.Reason, r.Message)
	}
	for _, c := range decision.RejectionCounts {
		message := ""
		if c.Reason == capacity.ReasonConsumerNotAdmitted {
			message = capacity.NotAdmitted(c.Count, cluster)
		}
		fmt.Fprintf(table, "(%d more)\t%s\t%s\n", c.Count, c.Reason, message)
	}
	return table.Flush()
}
