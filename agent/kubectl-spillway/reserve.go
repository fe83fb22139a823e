package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// wanted are the flags of reserve.
type wanted struct {
	cpu, memory, gpu, cluster, selector, maxPrice string
	pods                                          int32
	duration, deadline, wait                      time.Duration
	regions                                       []string
	dryRun                                        bool
}

func newReserve(o *options) *cobra.Command {
	var w wanted
	command := &cobra.Command{
		Use:   "reserve NAME",
		Short: "Reserve capacity in advance, for pods of the namespace",
		Long: `Creates a Reservation: capacity in another cluster that pods of the namespace use without a request of their own. The
namespace has to be opted in.
With --pods, the amounts are those of each pod; otherwise they are a total, which pods of any size use.`,
		Example: `  kubectl spillway reserve warm --cpu=8 --memory=16Gi --duration=24h --wait
  kubectl spillway reserve batch --pods=10 --cpu=2 --memory=4Gi --selector=tier=batch --max-price="1.50 EUR"
  kubectl spillway reserve warm --cpu=8 --dry-run -o yaml`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, arguments []string) error {
			namespace, err := o.namespace()
			if err != nil {
				return err
			}
			r, err := w.reservation(namespace, arguments[0])
			if err != nil {
				return err
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			var how []client.CreateOption
			if w.dryRun {
				how = append(how, client.DryRunAll)
			}
			if err := c.Create(command.Context(), r, how...); err != nil {
				return o.refused("create", r, err)
			}
			r.SetGroupVersionKind(broker.GroupVersion.WithKind("Reservation")) // the client has removed it
			object, waits := o.output == outputJSON || o.output == outputYAML, !w.dryRun && w.wait > 0
			progress := o.Out
			if object { // all else is no part of it
				progress = o.ErrOut
			}
			if !object || waits {
				fmt.Fprintf(progress, "Reservation %s/%s created%s\n", namespace, r.Name, map[bool]string{true: " (dry run)"}[w.dryRun])
			}
			o.noteOptIn(command.Context(), progress, c, namespace)
			if waits {
				err = o.await(command.Context(), progress, c, r, w.wait)
			}
			if object && err == nil {
				r.SetGroupVersionKind(broker.GroupVersion.WithKind("Reservation"))
				err = o.print(r, nil)
			}
			return err
		},
	}
	flags := command.Flags()
	flags.StringVar(&w.cpu, "cpu", "", "Cores, such as 500m or 4.")
	flags.StringVar(&w.memory, "memory", "", "Memory, such as 8Gi.")
	flags.StringVar(&w.gpu, "gpu", "", "Number of nvidia.com/gpu devices.")
	flags.Int32Var(&w.pods, "pods", 0, "Number of pods that need these amounts each. A total if 0.")
	flags.StringVar(&w.cluster, "cluster", "", "The only cluster that may provide it.")
	flags.StringSliceVar(&w.regions, "region", nil, "Regions that the provider may be in.")
	flags.StringVarP(&w.selector, "selector", "l", "", "Label selector of the pods that may use it.")
	flags.StringVar(&w.maxPrice, "max-price", "", `Maximum price per hour of all of it, such as "1.50 EUR".`)
	flags.DurationVar(&w.duration, "duration", 0, "Duration of the lease, which starts again while pods use it.")
	flags.DurationVar(&w.deadline, "deadline", 0, "How long it may be queued.")
	flags.DurationVar(&w.wait, "wait", 0, "Wait until it can be used, at most so long; 5m without a value.")
	flags.Lookup("wait").NoOptDefVal = "5m"
	flags.BoolVar(&w.dryRun, "dry-run", false, "Let the API server check it, and create nothing.")
	return command
}

// reservation returns the Reservation that is wanted.
func (w *wanted) reservation(namespace, name string) (*broker.Reservation, error) {
	list := corev1.ResourceList{}
	for _, part := range []struct {
		flag, value string
		name        corev1.ResourceName
	}{{"cpu", w.cpu, corev1.ResourceCPU}, {"memory", w.memory, corev1.ResourceMemory}, {"gpu", w.gpu, broker.ResourceGPU}} {
		if part.value == "" {
			continue
		}
		amount, err := resource.ParseQuantity(part.value)
		if err != nil {
			return nil, fmt.Errorf("--%s %q is not an amount, such as 4 or 8Gi", part.flag, part.value)
		}
		list[part.name] = amount
	}
	if len(list) == 0 {
		return nil, errors.New("set at least one of --cpu, --memory and --gpu")
	}
	if w.pods < 0 {
		return nil, fmt.Errorf("--pods=%d must be 1 or more, or 0 for a total", w.pods)
	}
	r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: broker.ReservationSpec{TargetClusterID: w.cluster}}
	r.SetGroupVersionKind(broker.GroupVersion.WithKind("Reservation"))
	amounts := broker.FromList(list)
	if r.Spec.RequestedResources = &amounts; w.pods > 0 {
		r.Spec.RequestedResources, r.Spec.PodSets = nil, []broker.PodSet{{Name: demand.PodSetName, Count: w.pods, Requests: amounts}}
	}
	if w.selector != "" {
		selector, err := metav1.ParseToLabelSelector(w.selector)
		if err != nil {
			return nil, fmt.Errorf("--selector %q: %w", w.selector, err)
		}
		r.Spec.PodSelector = selector
	}
	if w.maxPrice != "" {
		price, currency, ok := strings.Cut(w.maxPrice, " ")
		if !ok {
			return nil, fmt.Errorf(`--max-price %q has no currency: write it as "1.50 EUR"`, w.maxPrice)
		}
		r.Spec.Budget = &broker.Budget{MaxPricePerHour: price, Currency: currency}
	}
	if len(w.regions) > 0 {
		r.Spec.Placement = &broker.Placement{Regions: w.regions}
	}
	if w.duration > 0 {
		r.Spec.Duration = &metav1.Duration{Duration: w.duration}
	}
	if w.deadline > 0 {
		r.Spec.Deadline = &metav1.Duration{Duration: w.deadline}
	}
	return r, nil
}

// noteOptIn says if a namespace is not opted in, as far as the caller may see it.
func (o *options) noteOptIn(ctx context.Context, out io.Writer, c client.Client, name string) {
	var namespace corev1.Namespace
	if c.Get(ctx, client.ObjectKey{Name: name}, &namespace) == nil && namespace.Labels[broker.LabelOverflow] != broker.OverflowEnabled {
		fmt.Fprintf(out, "Namespace %s is not opted in, so that its pods do not use the Reservation. Opt in, and create the pods again: %s\n", name, explain.OptIn(name))
	}
}

// await waits until a Reservation can be used, and prints what it waits for.
func (o *options) await(ctx context.Context, out io.Writer, c client.Client, r *broker.Reservation, atMost time.Duration) error {
	said := ""
	done, err := o.poll(ctx, atMost, func() (bool, error) {
		if err := c.Get(ctx, client.ObjectKeyFromObject(r), r); err != nil {
			return false, o.refused("get", r, err)
		}
		status := r.EffectiveStatus()
		ready := meta.FindStatusCondition(status.Conditions, broker.ConditionReady)
		now := "waiting for the agent"
		if ready != nil {
			now = string(status.Phase) + ": " + ready.Message
		}
		if now != said {
			fmt.Fprintln(out, text.Line(now, maxError))
			said = now
		}
		ended := status.Phase == broker.ReservationFailed || status.Phase == broker.ReservationReleased
		if ended {
			return false, errNo
		}
		// The broker hears last that it can be used, and says the phase.
		return ready != nil && ready.Status == metav1.ConditionTrue && status.Phase == broker.ReservationActive, nil
	})
	if err == nil && !done {
		fmt.Fprintf(out, "It cannot be used after %s: kubectl spillway explain -n %s reservation/%s\n", atMost, r.Namespace, r.Name)
		return errNo
	}
	return err
}

// poll asks at intervals until the answer is yes, or the time is over.
func (o *options) poll(ctx context.Context, atMost time.Duration, ask func() (bool, error)) (bool, error) {
	for until := time.Now().Add(atMost); ; {
		if done, err := ask(); done || err != nil || time.Now().After(until) {
			return done, err
		}
		select {
		case <-ctx.Done():
			return false, errors.New("interrupted")
		case <-time.After(min(lookAgainAfter, atMost)):
		}
	}
}

// refused words why the API server has not done something.
func (o *options) refused(verb string, object client.Object, err error) error {
	kind := object.GetObjectKind().GroupVersionKind().Kind
	switch {
	case meta.IsNoMatchError(err):
		return o.notInstalled(err)
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%s %q does not exist", kind, object.GetName())
	case apierrors.IsForbidden(err) && !strings.Contains(err.Error(), "ValidatingAdmissionPolicy"):
		return fmt.Errorf("you may not %s %s %s: %w", verb, kind, client.ObjectKeyFromObject(object), err)
	}
	return fmt.Errorf("cannot %s %s %s: %w", verb, kind, client.ObjectKeyFromObject(object), err)
}

func newRelease(o *options) *cobra.Command {
	force, wait := false, time.Duration(0)
	command := &cobra.Command{
		Use:   "release NAME",
		Short: "End a Reservation that was made in advance",
		Long: `Deletes a Reservation that was made by hand. Pods that use it run on, and its capacity is released as they end.
Reservations of the scheduler end by themselves: deleting one needs --force, and capacity is requested again for pods
that still wait.`,
		Args: cobra.ExactArgs(1),
		ValidArgsFunction: func(command *cobra.Command, arguments []string, _ string) ([]string, cobra.ShellCompDirective) {
			if namespace, err := o.namespace(); err == nil && len(arguments) == 0 {
				return o.names(command, broker.GroupVersion.WithKind("Reservation"), namespace, ""), cobra.ShellCompDirectiveNoFileComp
			}
			return nil, cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(command *cobra.Command, arguments []string) error {
			namespace, err := o.namespace()
			if err != nil {
				return err
			}
			c, err := o.client()
			if err != nil {
				return err
			}
			r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: arguments[0]}}
			r.SetGroupVersionKind(broker.GroupVersion.WithKind("Reservation"))
			if err := c.Get(command.Context(), client.ObjectKeyFromObject(r), r); err != nil {
				return o.refused("get", r, err)
			}
			r.SetGroupVersionKind(broker.GroupVersion.WithKind("Reservation"))
			if _, scheduled := demand.KeyOfReservation(r); scheduled && !force {
				return fmt.Errorf("Reservation %s was made by the scheduler, and ends when no pod needs it: --force deletes it", r.Name)
			}
			if err := c.Delete(command.Context(), r, client.Preconditions{UID: &r.UID}); err != nil {
				return o.refused("delete", r, err)
			}
			fmt.Fprintf(o.Out, "Reservation %s/%s is being released\n", namespace, r.Name)
			if wait == 0 {
				return nil
			}
			return o.awaitRelease(command.Context(), c, r, wait)
		},
	}
	command.Flags().BoolVar(&force, "force", false, "Delete also one that the scheduler has made.")
	command.Flags().DurationVar(&wait, "wait", 0, "Wait until it is released, at most so long; 5m without a value.")
	command.Flags().Lookup("wait").NoOptDefVal = "5m"
	return command
}

// awaitRelease waits until a Reservation is gone, and prints what it waits for.
func (o *options) awaitRelease(ctx context.Context, c client.Client, r *broker.Reservation, atMost time.Duration) error {
	said := "" // what it said before is of no interest any more
	if ready := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionReady); ready != nil {
		said = ready.Message
	}
	done, err := o.poll(ctx, atMost, func() (bool, error) {
		current := &broker.Reservation{}
		if err := c.Get(ctx, client.ObjectKeyFromObject(r), current); apierrors.IsNotFound(err) || err == nil && current.UID != r.UID {
			return true, nil
		} else if err != nil {
			return false, o.refused("get", r, err)
		}
		if ready := meta.FindStatusCondition(current.Status.Conditions, broker.ConditionReady); ready != nil && ready.Message != said {
			said = ready.Message
			fmt.Fprintln(o.Out, text.Line(said, maxError))
		}
		return false, nil
	})
	if err == nil && !done {
		fmt.Fprintf(o.Out, "It is not released after %s\n", atMost)
		return errNo
	}
	if err == nil {
		fmt.Fprintln(o.Out, "Released")
	}
	return err
}
