package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Defaults of the two benchmarks. A pod that is created, bound and deleted costs API server,
// etcd and scheduler some 10 ms of CPU. On two cores, a run stays within a quarter of an hour
// with as many pods in each of the 120 and 60 arms; with scheduler_perf's 5,000 (-pods=5000) it
// takes an hour, and half an hour.
const (
	taxPods              = 1000
	taxUnderOverflowPods = 2000
	taxPairs             = 20
)

// withDefaults returns the options with defaults for the numbers that are not set.
func (o options) withDefaults(pods, pairs int) options {
	if o.pods == 0 {
		o.pods = pods
	}
	if o.pairs == 0 {
		o.pairs = pairs
	}
	return o
}

// tax compares the rates at which pods that fit in this cluster are bound, with and
// without the plugin.
func tax(ctx context.Context, h *home, o options) error {
	o = o.withDefaults(taxPods, taxPairs)
	worst := 0.0
	for i, l := range []load{basic(o.pods), extended(o.pods)} {
		ratio, err := compare(ctx, h, l, o.pairs, nil)
		if err != nil {
			return err
		}
		if i == 0 || ratio < worst {
			worst = ratio
		}
	}
	lines.Time("scheduler_tax", worst, "ratio", ">= 0.98")
	return nil
}

// perSecond is how many pods overflow while others are scheduled.
const perSecond = 5

// taxUnderOverflow does the same while some pods overflow, because the nodes of this cluster
// are nearly full. Without the plugin, as many more pods fit in this cluster.
func taxUnderOverflow(ctx context.Context, h *home, o options) error {
	o = o.withDefaults(taxUnderOverflowPods, taxPairs)
	if o.pods > 4*o.nodes {
		return fmt.Errorf("%d nodes have no room for %d pods while others overflow: at most %d", o.nodes, o.pods, 4*o.nodes)
	}
	if err := h.fill(ctx, o.nodes); err != nil {
		return err
	}
	// The others are in the queue already.
	first := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "first"}, Value: 1, PreemptionPolicy: ptr.To(corev1.PreemptNever)}
	if err := h.api.Create(ctx, first); err != nil {
		return err
	}
	overflowed := 0
	ratio, err := compare(ctx, h, basic(o.pods), o.pairs, func(ctx context.Context, a arm) error {
		steady := overflowing(1 << 20)
		steady.every, steady.priorityClass = time.Second/perSecond, first.Name
		if !a.plugin {
			steady.requests = basic(1).requests
			return h.trickle(ctx, steady, 0)
		}
		failed := make(chan error, 1)
		go func() { failed <- h.play(0)(ctx) }()
		err := errors.Join(h.trickle(ctx, steady, 0), <-failed)
		if err != nil {
			return err
		}
		n, err := h.overflowed(context.WithoutCancel(ctx))
		if overflowed += n; err == nil && n == 0 {
			err = errors.New("no pod has overflowed")
		}
		return err
	})
	if err != nil {
		return err
	}
	fmt.Printf("%d pods overflowed beside %d pods of this cluster\n", overflowed, o.pairs*o.pods)
	lines.Time("scheduler_tax_under_overflow", ratio, "ratio", ">= 0.95")
	return nil
}

// overflowed counts the pods on the virtual node.
func (h *home) overflowed(ctx context.Context) (int, error) {
	pods, err := h.pods.CoreV1().Pods(overflowPods).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + broker.VirtualNodeName(provider)})
	if err != nil {
		return 0, err
	}
	return len(pods.Items), nil
}

// overflowing is a load that does not fit on a node of this cluster.
func overflowing(pods int) load {
	return load{name: "overflowing", namespace: overflowPods, pods: pods, podsOf: 100,
		requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1"), corev1.ResourceMemory: resource.MustParse("500Mi")}}
}

// trickle creates the pods of a load from one on, one by one, until ctx ends.
func (h *home) trickle(ctx context.Context, l load, first int) error {
	ticker := time.NewTicker(l.every)
	defer ticker.Stop()
	for i := first; i < l.pods; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		_, err := h.pods.CoreV1().Pods(l.namespace).Create(ctx, l.pod(i), metav1.CreateOptions{})
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

// compare binds a load in rounds of three arms: without the plugin, with it, and without
// it again as the control. The order of the arms changes from round to round. It returns
// the median of the ratios of the rates, and prints that of the pods for each second of
// the scheduler's CPU time.
func compare(ctx context.Context, h *home, l load, pairs int, during func(context.Context, arm) error) (float64, error) {
	var ratios, controls, cpuRatios, cpuControls []float64
	arms := []arm{plain, withPlugin, plainAgain}
	for round := range pairs {
		rates, cpu := map[arm]float64{}, map[arm]float64{}
		for i := range arms {
			a := arms[(round+i)%len(arms)]
			var beside func(context.Context) error
			if during != nil {
				beside = func(ctx context.Context) error { return during(ctx, a) }
			}
			if err := h.create(ctx, l); err != nil {
				return 0, err
			}
			r, err := h.bind(ctx, a, l, beside)
			h.stopScheduler()
			if err != nil {
				return 0, fmt.Errorf("%s: %w", a.name, err)
			}
			rates[a], cpu[a] = r.rate(), r.cpu
			for _, namespace := range []string{homePods, overflowPods} {
				if err := h.clear(ctx, namespace); err != nil {
					return 0, err
				}
			}
		}
		ratios, controls = append(ratios, rates[withPlugin]/rates[plain]), append(controls, rates[plainAgain]/rates[plain])
		cpuRatios, cpuControls = append(cpuRatios, cpu[plain]/cpu[withPlugin]), append(cpuControls, cpu[plain]/cpu[plainAgain])
		fmt.Printf("%s %d: %.0f pods/s without the plugin, %.0f with it, %.0f without it again\n", l.name, round+1, rates[plain], rates[withPlugin], rates[plainAgain])
	}
	fmt.Printf("%s: ratio %s; control %s\n", l.name, quartiles(ratios), quartiles(controls))
	fmt.Printf("%s, by the scheduler's CPU time: ratio %s; control %s\n", l.name, quartiles(cpuRatios), quartiles(cpuControls))
	return quantile(ratios, 0.5), nil
}

func quartiles(values []float64) string {
	return fmt.Sprintf("%.3f (quartiles %.3f to %.3f)", quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75))
}

// quantile interpolates between the two nearest values.
func quantile(values []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	below := int(at)
	above := min(below+1, len(sorted)-1)
	return sorted[below] + (at-float64(below))*(sorted[above]-sorted[below])
}
