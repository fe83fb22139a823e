package main

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// figures of pods in this cluster, and of as many that overflow.
type figures struct{ home, overflow result }

// burst binds pods in this cluster and, with played providers, as many in another one.
// The nodes of this cluster are nearly full.
func burst(print func(figures)) func(context.Context, *home, options) error {
	return func(ctx context.Context, h *home, o options) (err error) {
		if o.pods == 0 {
			o.pods = 1000
		}
		if err := h.fill(ctx, o.nodes); err != nil {
			return err
		}
		var f figures
		small := basic(o.pods)
		small.requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("10Mi")}
		if f.home, err = h.count(ctx, small, "", nil); err != nil {
			return fmt.Errorf("in this cluster: %w", err)
		}
		if f.overflow, err = h.count(ctx, overflowing(o.pods), o.profile, h.play(o.grantAfter)); err != nil {
			return fmt.Errorf("in other clusters: %w", err)
		}
		print(f)
		return nil
	}
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
	r.writes, r.attempts = written.Sum()/float64(l.pods), tried.Sum()/float64(l.pods)
	fmt.Printf("%s: %d pods in %.1f s, %.0f pods/s, %.1f CPU-s of the scheduler; for each pod %.2f attempts and %.2f writes:\n", l.name, r.bound, r.took.Seconds(), r.rate(), r.cpu, r.attempts, r.writes)
	printFor(l.pods, tried)
	printFor(l.pods, written)
	return r, h.clear(ctx, l.namespace)
}
