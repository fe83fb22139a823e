package main

import (
	"context"
	"fmt"
	"slices"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/e2e/bench/figures"
)

// round has pods that are bound in this cluster, and as many that overflow.
type round struct{ home, overflow result }

// burst binds pods in this cluster and, with played providers, as many in another one, in
// alternating order. The nodes of this cluster are nearly full.
func burst(ctx context.Context, h *home, o options) error {
	o = o.withDefaults(1000, 5)
	if err := h.fill(ctx, o.nodes); err != nil {
		return err
	}
	small := basic(o.pods)
	small.requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("10Mi")}
	var rounds []round
	for i := range o.pairs {
		var r round
		both := []func() error{
			func() (err error) { r.home, err = h.count(ctx, small, "", nil); return err },
			func() (err error) {
				r.overflow, err = h.count(ctx, overflowing(o.pods), o.profile, h.play(o.grantAfter))
				return err
			},
		}
		if i%2 == 1 {
			slices.Reverse(both)
		}
		for _, bind := range both {
			if err := bind(); err != nil {
				return fmt.Errorf("round %d: %w", i+1, err)
			}
		}
		fmt.Printf("round %d: %.0f pods/s in this cluster, %.0f pods/s that overflow, ratio %.3f\n", i+1, r.home.rate(), r.overflow.rate(), r.ratio())
		rounds = append(rounds, r)
	}
	reportBurst(lines, rounds)
	return nil
}

func (r round) ratio() float64 { return r.overflow.rate() / r.home.rate() }

// reportBurst prints the medians of the rates, and the means of what was counted.
func reportBurst(lines *figures.Printer, rounds []round) {
	var rates, ratios []float64
	var writes, attempts float64
	for _, r := range rounds {
		rates, ratios = append(rates, r.overflow.rate()), append(ratios, r.ratio())
		writes, attempts = writes+r.overflow.writes, attempts+r.overflow.attempts
	}
	lines.Time("overflow_burst", quantile(rates, 0.5), "pods/s", "none")
	lines.Time("overflow_burst_ratio", quantile(ratios, 0.5), "ratio", ">= 0.5")
	lines.Count("writes_per_overflow_pod", writes/float64(len(rounds)), "writes", 5)
	lines.Count("attempts_per_overflow_pod", attempts/float64(len(rounds)), "attempts", 2.2)
}

// fill leaves half a core on each node of this cluster.
func (h *home) fill(ctx context.Context, nodes int) error {
	l := load{name: "filler", namespace: fillers, pods: nodes, podsOf: nodes, requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("31500m")}}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range nodes {
		group.Go(func() error {
			pod := l.pod(i)
			pod.Spec.NodeName = fmt.Sprintf("node-%d", i)
			_, err := h.pods.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
			return err
		})
	}
	return group.Wait()
}

// count binds a load with the plugin, counts writes and attempts, and prints them.
func (h *home) count(ctx context.Context, l load, profile string, during func(context.Context) error) (r result, err error) {
	if err := h.create(ctx, l); err != nil {
		return r, err
	}
	if err := h.pods.EventsV1().Events(l.namespace).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
		return r, err
	}
	before, err := h.schedulerWrites(ctx)
	if err != nil {
		return r, err
	}
	profiled := make(chan error, 1)
	r, err = h.bind(ctx, withPlugin, l, func(ctx context.Context) error {
		if profile != "" {
			go func() { profiled <- h.profileTo(context.WithoutCancel(ctx), profile) }()
		}
		if during == nil {
			return nil
		}
		return during(ctx)
	})
	if err != nil {
		return r, err
	}
	defer h.stopScheduler()
	if profile != "" {
		if err := <-profiled; err != nil {
			return r, err
		}
	}
	tried, err := h.attempts(ctx)
	if err != nil {
		return r, err
	}
	written, err := h.settledWrites(ctx)
	if err != nil {
		return r, err
	}
	written = written.Minus(before)
	events, err := h.events(ctx, l.namespace)
	if err != nil {
		return r, err
	}
	r.writes, r.attempts = written.Sum()/float64(l.pods), tried.Sum()/float64(l.pods)
	fmt.Printf("%s: %d pods in %.1f s, %.0f pods/s, %.1f CPU-s of the scheduler; for each pod %.2f attempts and %.2f writes:\n", l.name, r.bound, r.took.Seconds(), r.rate(), r.cpu, r.attempts, r.writes)
	printFor(l.pods, tried)
	printFor(l.pods, written)
	printFor(l.pods, events)
	return r, h.clear(ctx, l.namespace)
}
