// Package timings measures how long a pod that overflows takes from the creation of its
// Deployment until it runs: over a cold peering and over a warm one, with a provider that
// holds capacity with placeholders and with one that only accounts for it.
package timings

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/bench/figures"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// Names of the figures. One run prints all of them.
const (
	Warm     = "overflow_warm_seconds"
	Cold     = "overflow_cold_seconds"
	HoldCost = "hold_cost_ratio"
)

// Names lists them.
var Names = []string{Warm, Cold, HoldCost}

// Options of a run.
type Options struct {
	// Out takes the figures, Log progress.
	Out io.Writer
	Log environment.Log
	// Cold and Warm are how many overflows to each of the two providers are measured.
	Cold, Warm int
	// Deadline for everything.
	Deadline time.Duration
}

// Defaults are the bench's numbers.
func Defaults() Options { return Options{Cold: 10, Warm: 20, Deadline: 45 * time.Minute} }

// holdCost is how much longer a warm overflow may take with placeholders than without.
const holdCost = 300 * time.Millisecond

// The consumer, and the providers by what they do to hold capacity. The pods of the namespace
// with the name of a provider overflow to that one only.
const (
	consumer     = "home"
	placeholders = "placeholders"
	accounting   = "accounting"
)

var providers = []string{placeholders, accounting}

// members are the clusters. No pod fits at home. The nodes of the providers have room for all.
func members() []environment.Member {
	nodes := func(prefix string, count int, cpu string) []environment.NodeGroup {
		return []environment.NodeGroup{{Prefix: prefix, Count: count, Resources: resources(cpu, "8Gi")}}
	}
	return []environment.Member{
		{Name: consumer, Overflows: true, Nodes: nodes("home", 1, "100m"), Values: []string{"lend.enabled=false"}},
		{Name: placeholders, Nodes: nodes("node", 10, "4")},
		{Name: accounting, Nodes: nodes("node", 10, "4"), AgentFlags: map[string]string{"placeholders-namespace": ""}},
	}
}

func resources(cpu, memory string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)}
}

// Run measures, and prints the figures.
func Run(ctx context.Context, o Options) (err error) {
	if o.Cold < 1 || o.Warm < 1 {
		return errors.New("the bench needs at least one cold and one warm overflow")
	}
	// The short timings are those for which what is unused remains: no overflow waits for one
	// of them, but the peerings go when they are to be cold.
	p, err := environment.Start(ctx, environment.Options{Members: members(), Log: o.Log})
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, p.Logs(8))
		}
		err = errors.Join(err, p.Stop())
	}()
	ctx, cancel := context.WithTimeout(ctx, o.Deadline)
	defer cancel()
	b := &bench{o: o, p: p, home: p.Cluster(consumer).Client}
	for _, provider := range providers {
		if err := b.pin(ctx, provider); err != nil {
			return err
		}
	}
	cold, err := b.cold(ctx)
	if err != nil {
		return err
	}
	warm, err := b.warm(ctx)
	if err != nil {
		return err
	}
	report(o, cold, warm)
	return nil
}

// bench is a run.
type bench struct {
	o    Options
	p    *environment.Playground
	home client.WithWatch
	// made counts the Deployments.
	made int
}

// pin makes the pods of a provider's namespace overflow to no other provider.
func (b *bench) pin(ctx context.Context, provider string) error {
	others := slices.DeleteFunc(slices.Clone(providers), func(other string) bool { return other == provider })
	return errors.Join(
		b.home.Create(ctx, &broker.OverflowPolicy{
			ObjectMeta: metav1.ObjectMeta{Name: provider},
			Spec: broker.OverflowPolicySpec{
				NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{corev1.LabelMetadataName: provider}},
				Placement:         &broker.Placement{ExcludeClusters: others},
			},
		}),
		b.home.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: provider, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}))
}

// cold measures overflows to providers without a peering. The first round is not counted:
// caches fill and connections open.
func (b *bench) cold(ctx context.Context) (map[string][]steps, error) {
	measured := map[string][]steps{}
	for round := range b.o.Cold + 1 {
		if err := b.await(ctx, "everything of the former overflows is gone", b.nothingIsLeft); err != nil {
			return nil, err
		}
		if err := b.round(ctx, "cold", round, measured); err != nil {
			return nil, err
		}
		if err := b.clear(ctx); err != nil {
			return nil, err
		}
	}
	return measured, nil
}

// warm measures further overflows to providers where a pod runs already: peering and virtual
// node are there, and grow by another grant. The first round is not counted.
func (b *bench) warm(ctx context.Context) (map[string][]steps, error) {
	for _, provider := range providers {
		if _, err := b.overflow(ctx, provider, stays); err != nil {
			return nil, err
		}
	}
	measured := map[string][]steps{}
	for round := range b.o.Warm + 1 {
		if err := b.await(ctx, "the grants of the former overflows are released", b.onlyOneGrantEach); err != nil {
			return nil, err
		}
		if err := b.round(ctx, "warm", round, measured); err != nil {
			return nil, err
		}
		if err := b.clear(ctx); err != nil {
			return nil, err
		}
	}
	return measured, nil
}

// round measures an overflow to each provider, one after the other, in alternating order.
func (b *bench) round(ctx context.Context, kind string, round int, measured map[string][]steps) error {
	order := slices.Clone(providers)
	if round%2 == 1 {
		slices.Reverse(order)
	}
	for _, provider := range order {
		b.made++
		s, err := b.overflow(ctx, provider, fmt.Sprintf("timed-%d", b.made))
		if err != nil {
			return fmt.Errorf("%s overflow to %s: %w", kind, provider, err)
		}
		b.o.Log("%s %2d, %-12s  %s", kind, round, provider, s)
		if round > 0 {
			measured[provider] = append(measured[provider], s)
		}
	}
	return nil
}

// stays is the name of the Deployments that stay while warm overflows are measured.
const stays = "stays"

// deployment of one pod.
func deployment(namespace, name string) *appsv1.Deployment {
	labels := map[string]string{"app": name}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](1), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{TerminationGracePeriodSeconds: ptr.To[int64](1), Containers: []corev1.Container{{
					Name: "main", Image: "registry.example.org/app:1", Args: []string{"serve"},
					Resources: corev1.ResourceRequirements{Requests: resources("500m", "64Mi")},
				}}},
			},
		},
	}
}

// clear deletes all Deployments but those that stay.
func (b *bench) clear(ctx context.Context) error {
	var list appsv1.DeploymentList
	if err := b.home.List(ctx, &list); err != nil {
		return err
	}
	for _, d := range list.Items {
		if d.Name == stays {
			continue
		}
		if err := b.home.Delete(ctx, &d, client.PropagationPolicy(metav1.DeletePropagationBackground)); err != nil {
			return err
		}
	}
	return nil
}

// nothingIsLeft returns an error while an object exists that was created because pods
// overflowed.
func (b *bench) nothingIsLeft(ctx context.Context) error {
	if err := b.left(ctx, 0); err != nil {
		return err
	}
	var nodes corev1.NodeList
	var configs corev1.SecretList
	if err := errors.Join(b.home.List(ctx, &nodes, client.HasLabels{broker.LabelProvider}),
		b.home.List(ctx, &configs, client.MatchingLabels{nodeconfig.LabelComponent: nodeconfig.Component})); err != nil {
		return err
	}
	if len(nodes.Items) > 0 || len(configs.Items) > 0 {
		return fmt.Errorf("%d virtual nodes and %d configurations of some exist", len(nodes.Items), len(configs.Items))
	}
	for _, provider := range providers {
		var guests corev1.NamespaceList
		if err := b.p.Cluster(provider).Client.List(ctx, &guests, client.HasLabels{broker.LabelGuestsOf}); err != nil {
			return err
		}
		if len(guests.Items) > 0 {
			return fmt.Errorf("namespace %s exists in %s", guests.Items[0].Name, provider)
		}
	}
	return nil
}

// onlyOneGrantEach returns an error while there are more grants than those of the Deployments
// that stay.
func (b *bench) onlyOneGrantEach(ctx context.Context) error { return b.left(ctx, 1) }

// left returns an error unless there is a number of grants of each provider.
func (b *bench) left(ctx context.Context, each int) error {
	var pods corev1.PodList
	var local, hub broker.ReservationList
	var instructions broker.ReservationInstructionList
	if err := errors.Join(b.home.List(ctx, &pods, client.HasLabels{"app"}), b.home.List(ctx, &local), b.home.List(ctx, &instructions),
		b.p.Cluster(environment.Hub).Client.List(ctx, &hub)); err != nil {
		return err
	}
	all := each * len(providers)
	if len(pods.Items) != all || len(local.Items) != all || len(hub.Items) != all || len(instructions.Items) != all {
		return fmt.Errorf("%d pods, %d Reservations (%d in the hub) and %d ReservationInstructions exist, want %d",
			len(pods.Items), len(local.Items), len(hub.Items), len(instructions.Items), all)
	}
	for _, provider := range providers {
		var orders broker.ProviderInstructionList
		if err := b.p.Cluster(provider).Client.List(ctx, &orders); err != nil {
			return err
		}
		if len(orders.Items) != each {
			return fmt.Errorf("%d ProviderInstructions exist in %s, want %d", len(orders.Items), provider, each)
		}
	}
	return nil
}

// patience is the deadline for one step, which takes half a minute at most on an idle machine.
const patience = 4 * time.Minute

// await waits until check returns nil.
func (b *bench) await(ctx context.Context, what string, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		if ended := b.p.Err(); ended != nil {
			return ended
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// report prints the figures.
func report(o Options, cold, warm map[string][]steps) {
	for _, kind := range []struct {
		name     string
		measured map[string][]steps
	}{{"cold", cold}, {"warm", warm}} {
		for _, provider := range providers {
			all := kind.measured[provider]
			fmt.Fprintf(o.Out, "%s, %-12s  p50 of %d: %s; from bound guest to running p50 %.2f s; running: fastest %.2f s, slowest %.2f s\n", kind.name, provider, len(all), medians(all),
				p50(all, func(s steps) time.Duration { return s.running - s.guest }).Seconds(), at(all, 0, running).Seconds(), at(all, 1, running).Seconds())
		}
	}
	with, without := p50(warm[placeholders], running), p50(warm[accounting], running)
	slower := max(p50(cold[accounting], running), with)
	print := figures.New(o.Out)
	print.Time(Warm, with.Seconds(), "s", fmt.Sprintf("<= %.2f, %.1f more than without placeholders", (without+holdCost).Seconds(), holdCost.Seconds()))
	print.Time(Cold, p50(cold[placeholders], running).Seconds(), "s", fmt.Sprintf("<= %.2f, the slower of peering without proof and proof over a warm peering", slower.Seconds()))
	print.Time(HoldCost, with.Seconds()/without.Seconds(), "ratio", fmt.Sprintf("<= %.2f, %.1f s", (without+holdCost).Seconds()/without.Seconds(), holdCost.Seconds()))
	print.Time("hold_cost_seconds", (with - without).Seconds(), "s", fmt.Sprintf("<= %.1f", holdCost.Seconds()))
}
