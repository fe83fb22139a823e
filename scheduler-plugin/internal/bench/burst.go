package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"

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
	away := overflowing(o.pods)
	away.every = o.every
	var rounds []round
	for i := range o.pairs {
		var r round
		both := []func() error{
			func() (err error) { r.home, err = h.count(ctx, small, "", nil); return err },
			func() (err error) {
				r.overflow, err = h.count(ctx, away, o.profile, h.play(o.grantAfter))
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
		fmt.Printf("round %d: %.0f pods/s in this cluster, %.0f pods/s that overflow, ratio %.3f, by CPU time %.3f\n", i+1, r.home.rate(), r.overflow.rate(), r.ratio(), r.cpuRatio())
		rounds = append(rounds, r)
	}
	reportBurst(lines, rounds)
	return nil
}

func (r round) ratio() float64 { return r.overflow.rate() / r.home.rate() }

// cpuRatio is the ratio of the rates at which a machine without other work binds pods, if both
// are limited by its CPUs.
func (r round) cpuRatio() float64 {
	return (r.home.cpu + r.home.servers) / (r.overflow.cpu + r.overflow.servers)
}

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
	lines.CountEach("writes_per_overflow_pod", writes/float64(len(rounds)), "writes", 5)
	lines.CountEach("attempts_per_overflow_pod", attempts/float64(len(rounds)), "attempts", 2.2)
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

// arrive creates the pods of a load one by one, once the scheduler has tried the first one.
func (h *home) arrive(ctx context.Context, l load) error {
	pods := h.pods.CoreV1().Pods(l.namespace)
	pod, err := pods.Create(ctx, l.pod(0), metav1.CreateOptions{})
	if err != nil {
		return err
	}
	err = wait.PollUntilContextCancel(ctx, 20*time.Millisecond, true, func(ctx context.Context) (tried bool, err error) {
		pod, err := pods.Get(ctx, pod.Name, metav1.GetOptions{})
		return err == nil && (pod.Spec.NodeName != "" || len(pod.Status.Conditions) > 0), err
	})
	if err != nil {
		return fmt.Errorf("waiting for the first pod to be tried: %w", err)
	}
	return h.trickle(ctx, l, 1)
}

// count binds a load with the plugin, counts writes and attempts, and prints them.
func (h *home) count(ctx context.Context, l load, profile string, during func(context.Context) error) (r result, err error) {
	if l.every == 0 {
		if err := h.create(ctx, l); err != nil {
			return r, err
		}
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
		group, ctx := errgroup.WithContext(ctx)
		if l.every > 0 {
			group.Go(func() error { return h.arrive(ctx, l) })
		}
		if during != nil {
			group.Go(func() error { return during(ctx) })
		}
		return group.Wait()
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
	fmt.Printf("%s: %d pods in %.1f s, %.0f pods/s, %.1f CPU-s of the scheduler and %.1f of API server and etcd; for each pod %.2f attempts and %.2f writes:\n", l.name, r.bound, r.took.Seconds(), r.rate(), r.cpu, r.servers, r.attempts, r.writes)
	printFor(l.pods, tried)
	printFor(l.pods, written)
	printFor(l.pods, events)
	return r, h.clear(ctx, l.namespace)
}
