package timings

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// steps of an overflow, as watches of the API servers show them: the time of each since the
// creation of the Deployment.
type steps struct {
	// requested: the Reservation exists. accepted: the provider has agreed, with the proof if
	// it has placeholders. peered, ready: the peering, and the virtual node with the capacity.
	requested, accepted, peered, ready time.Duration
	// bound: the pod is on the virtual node. guest: its guest is on a node of the provider.
	// running: the pod runs.
	bound, guest, running time.Duration
}

// order of the steps as they are printed.
var order = []struct {
	name string
	of   func(*steps) *time.Duration
}{
	{"requested", func(s *steps) *time.Duration { return &s.requested }},
	{"accepted", func(s *steps) *time.Duration { return &s.accepted }},
	{"peered", func(s *steps) *time.Duration { return &s.peered }},
	{"virtual node ready", func(s *steps) *time.Duration { return &s.ready }},
	{"bound", func(s *steps) *time.Duration { return &s.bound }},
	{"guest bound", func(s *steps) *time.Duration { return &s.guest }},
	{"running", func(s *steps) *time.Duration { return &s.running }},
}

func running(s steps) time.Duration { return s.running }

func (s steps) String() string {
	var all []string
	for _, step := range order {
		all = append(all, fmt.Sprintf("%s %.2f s", step.name, step.of(&s).Seconds()))
	}
	return strings.Join(all, ", ")
}

// medians of each step.
func medians(all []steps) (m steps) {
	for _, step := range order {
		*step.of(&m) = p50(all, func(s steps) time.Duration { return *step.of(&s) })
	}
	return m
}

func p50(all []steps, of func(steps) time.Duration) time.Duration { return at(all, 0.5, of) }

// at is the value that a share of all is not above.
func at(all []steps, share float64, of func(steps) time.Duration) time.Duration {
	var sorted []time.Duration
	for _, s := range all {
		sorted = append(sorted, of(s))
	}
	slices.Sort(sorted)
	return sorted[int(share*float64(len(sorted)-1))]
}

// overflow creates a Deployment of one pod in the namespace of a provider, and returns how long
// each step has taken once the pod runs there.
func (b *bench) overflow(ctx context.Context, provider, name string) (s steps, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	app := client.MatchingLabels{"app": name}
	var watches []<-chan watch.Event
	for _, w := range []struct {
		api     client.WithWatch
		list    client.ObjectList
		options []client.ListOption
	}{
		{b.home, &corev1.PodList{}, []client.ListOption{client.InNamespace(provider), app}},
		{b.home, &broker.ReservationList{}, []client.ListOption{client.InNamespace(provider)}},
		{b.p.Cluster(provider).Client, &corev1.PodList{}, []client.ListOption{client.InNamespace(broker.GuestNamespace(consumer)), app}},
	} {
		started, err := w.api.Watch(ctx, w.list, w.options...)
		if err != nil {
			return s, err
		}
		defer started.Stop()
		watches = append(watches, started.ResultChan())
	}
	start := time.Now()
	if err := b.home.Create(ctx, deployment(provider, name)); err != nil {
		return s, err
	}
	mark := func(step *time.Duration, is bool) {
		if is && *step == 0 {
			*step = time.Since(start)
		}
	}
	// A pod runs at home a moment after its guest is bound; the watches are not in step.
	for s.running == 0 || s.guest == 0 || s.ready == 0 {
		var event watch.Event
		var open bool
		select {
		case <-ctx.Done():
			return s, fmt.Errorf("the pod does not run: %s: %w", s, errors.Join(ctx.Err(), b.p.Err()))
		case event, open = <-watches[0]:
			if pod, ok := event.Object.(*corev1.Pod); ok {
				mark(&s.bound, pod.Spec.NodeName == broker.VirtualNodeName(provider))
				mark(&s.running, s.bound > 0 && pod.Status.Phase == corev1.PodRunning)
			}
		case event, open = <-watches[1]:
			if r, ok := event.Object.(*broker.Reservation); ok && belongsTo(r, name) {
				mark(&s.requested, true)
				mark(&s.accepted, meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionProviderAccepted))
				mark(&s.peered, meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionPeered))
				mark(&s.ready, meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionVirtualNodeReady))
			}
		case event, open = <-watches[2]:
			if guest, ok := event.Object.(*corev1.Pod); ok {
				mark(&s.guest, guest.Spec.NodeName != "")
			}
		}
		if !open || event.Type == watch.Error {
			return s, fmt.Errorf("a watch has ended: %v", event.Object)
		}
	}
	return s, nil
}

// belongsTo reports whether a Reservation is that of a Deployment.
func belongsTo(r *broker.Reservation, deployment string) bool {
	return slices.ContainsFunc(r.OwnerReferences, func(owner metav1.OwnerReference) bool { return owner.Name == deployment })
}
