package reservation_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Of clusters that were stored in the same second and repeat their advertisements, each is
// stored once in each period, and few are at the same time.
func rewritesAreSpread(e *env) {
	const (
		clusters, periods    = 150, 2
		period, beat, window = 300, 30, 10 // seconds
		// share is the mean of the writes in a window.
		share = clusters * window / period
	)
	var writes atomic.Int32
	count := func(object client.Object) {
		if _, other := object.(*broker.ClusterRegistration); !other {
			writes.Add(1)
		}
	}
	p := e.start(&interceptor.Funcs{
		Update: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.UpdateOption) error {
			count(object)
			return c.Update(ctx, object, options...)
		},
		Patch: func(ctx context.Context, c client.WithWatch, object client.Object, patch client.Patch, options ...client.PatchOption) error {
			count(object)
			return c.Patch(ctx, object, patch, options...)
		},
	})
	spec := e.spec("", "1")
	id := func(i int) string { return fmt.Sprintf("cluster-%d", i) }
	advertise := func(i int) {
		e.Helper()
		const digest = 1
		spec.ClusterID, spec.Timestamp = id(i), metav1.Time{Time: e.clock.Now()}
		spec.Sequence++
		known, err := p.RepeatAdvertisement(e.Context(), spec.ClusterID, digest, spec.Sequence, spec.Timestamp)
		expect.NoError(e, err)
		if !known {
			p.advertise(*spec.DeepCopy())
			p.Remember(spec.ClusterID, spec, digest)
		}
	}
	for i := range clusters {
		advertise(i)
	}
	writes.Store(0)
	total := 0
	var perSecond []int
	for second := range periods * period {
		e.clock.Step(time.Second)
		for i := second % beat; i < clusters; i += beat {
			advertise(i)
		}
		p.rewritten()
		perSecond = append(perSecond, int(writes.Swap(0)))
		total += perSecond[second]
		together := 0
		for _, n := range perSecond[max(0, len(perSecond)-window):] {
			together += n
		}
		if together > 3*share {
			e.Fatalf("%d of %d advertisements are written within %d s at second %d, want about %d", together, clusters, window, second, share)
		}
	}
	// The last beat of a cluster may be before the end of the last period.
	if total > clusters*periods || total < clusters*(periods-1) {
		e.Errorf("%d writes in %d periods of %d clusters", total, periods, clusters)
	}
	for i := range clusters {
		ad := e.ad(id(i))
		if age := e.clock.Since(ad.Spec.Timestamp.Time); age > (period+beat)*time.Second || !ad.Status.Active || ad.Status.ObservedGeneration != ad.Generation {
			e.Errorf("%s: the stored advertisement is %s old, active %t, of generation %d for %d", ad.Name, age, ad.Status.Active, ad.Status.ObservedGeneration, ad.Generation)
		}
	}
}

// While an advertisement is stored, its spec before its status, the account is left to that
// write.
func accountLeftToWrite(e *env) {
	reached, release := make(chan struct{}), make(chan struct{})
	var gate sync.Once
	var armed atomic.Bool
	p := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, object client.Object, options ...client.SubResourceUpdateOption) error {
			if armed.Load() {
				gate.Do(func() {
					close(reached)
					<-release
				})
			}
			return c.SubResource(sub).Update(ctx, object, options...)
		},
	})
	p.advertise(e.spec("paris", "1"))
	e.eventually("the account to be up to date", func() error {
		if ad := e.ad("paris"); !ad.Status.Active || ad.Status.ObservedGeneration != ad.Generation || p.Busy("paris") {
			return fmt.Errorf("the status is %+v", ad.Status)
		}
		return nil
	})
	armed.Store(true)
	stored := make(chan error, 1)
	go func() { stored <- p.StoreAdvertisement(e.Context(), e.spec("paris", "2")) }()
	<-reached
	ctx, cancel := context.WithTimeout(e.Context(), expect.Deadline)
	defer cancel()
	result, err := p.ReconcileAdvertisement(ctx, "paris")
	close(release)
	if err != nil || result.RequeueAfter <= 0 {
		e.Errorf("the account waits for the write of the advertisement: %+v, %v", result, err)
	}
	expect.NoError(e, <-stored)
	if ad := e.ad("paris"); ad.Status.Available.CPU.String() != "2" || ad.Status.ObservedGeneration != ad.Generation {
		e.Errorf("the account is %+v of generation %d", ad.Status, ad.Generation)
	}
}

// rewritten waits until no unchanged advertisement waits to be stored, or is being stored.
func (p *process) rewritten() {
	p.Helper()
	p.eventually("all advertisements to be stored", func() error {
		if waiting, storing := p.Rewriting(); waiting+storing > 0 {
			return fmt.Errorf("%d wait, %d are being stored", waiting, storing)
		}
		return nil
	})
}

// Unchanged advertisements take turns in being stored again: one that was due while others
// were being stored is next, whatever those that came later do, and without another beat. Its
// call does not wait. Changed ones are stored all the same.
func rewritesTakeTurns(e *env) {
	const others, later = 4, 8
	slow := make(chan string, others+later)
	release := make(chan struct{})
	var blocks atomic.Bool
	p := e.start(&interceptor.Funcs{
		Update: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.UpdateOption) error {
			if ad, ok := object.(*broker.ClusterAdvertisement); ok && blocks.Load() && ad.Name != "berlin" {
				slow <- ad.Name
				<-release
			}
			return c.Update(ctx, object, options...)
		},
	})
	free := sync.OnceFunc(func() { close(release) })
	e.Cleanup(free)
	id := func(i int) string { return fmt.Sprintf("cluster-%d", i) }
	for i := range others + later {
		p.advertise(e.spec(id(i), "1"))
	}
	p.advertise(e.spec("paris", "1"))
	p.advertise(e.spec("berlin", "1"))
	before := e.ad("paris").Spec.Sequence
	e.clock.Step(5 * time.Minute)
	blocks.Store(true)
	for i := range others {
		p.advertise(e.spec(id(i), "1"))
	}
	for range others {
		<-slow
	}
	p.advertise(e.spec("paris", "1"))
	last := e.spec("paris", "1")
	for i := range later {
		p.advertise(e.spec(id(others+i), "1"))
	}
	p.advertise(last)
	if now := e.ad("paris").Spec.Sequence; now != before {
		e.Errorf("an unchanged advertisement was stored while %d others were", others)
	}
	p.advertise(e.spec("berlin", "2"))
	if now := e.ad("berlin").Spec.Resources.Allocatable.CPU.String(); now != "2" {
		e.Errorf("a changed advertisement was not stored while %d others were: %s CPUs", others, now)
	}
	release <- struct{}{}
	if next := <-slow; next != "paris" {
		e.Errorf("%s is stored before paris, which was due first", next)
	}
	free()
	p.rewritten()
	if now := e.ad("paris").Spec.Sequence; now != last.Sequence {
		e.Errorf("sequence %d is stored, the last is %d", now, last.Sequence)
	}
}

// What waits to be stored again is not created when it is deleted, and does not replace a
// change.
func rewriteOfChanged(e *env) {
	const others = 4
	slow, release := make(chan struct{}, others), make(chan struct{})
	var blocks atomic.Bool
	p := e.start(&interceptor.Funcs{
		Update: func(ctx context.Context, c client.WithWatch, object client.Object, options ...client.UpdateOption) error {
			if ad, ok := object.(*broker.ClusterAdvertisement); ok && blocks.Load() && ad.Name != "paris" && ad.Name != "berlin" {
				slow <- struct{}{}
				<-release
			}
			return c.Update(ctx, object, options...)
		},
	})
	free := sync.OnceFunc(func() { close(release) })
	e.Cleanup(free)
	names := []string{"paris", "berlin"}
	for i := range others {
		names = append(names, fmt.Sprintf("cluster-%d", i))
	}
	for _, name := range names {
		p.advertise(e.spec(name, "1"))
	}
	e.clock.Step(5 * time.Minute)
	blocks.Store(true)
	for _, name := range names[2:] {
		p.advertise(e.spec(name, "1"))
	}
	for range others {
		<-slow
	}
	p.advertise(e.spec("paris", "1"))
	p.advertise(e.spec("berlin", "1"))
	changed := e.spec("paris", "2")
	p.advertise(changed)
	expect.NoError(e, e.client.Delete(e.Context(), e.ad("berlin")))
	free()
	p.rewritten()
	if ad := e.ad("paris"); ad.Spec.Sequence != changed.Sequence || ad.Spec.Resources.Allocatable.CPU.String() != "2" {
		e.Errorf("stored is sequence %d with %s CPUs, want %d with 2", ad.Spec.Sequence, ad.Spec.Resources.Allocatable.CPU.String(), changed.Sequence)
	}
	if err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: "berlin"}, &broker.ClusterAdvertisement{}); !apierrors.IsNotFound(err) {
		e.Errorf("the deleted advertisement is there again: %v", err)
	}
}

// A broker that is alone rarely stores what has not changed. The cluster is active as long
// as it advertises, also at the next broker, and is given up when it is silent.
func rewritesAlone(e *env) {
	alone := func(o *reservation.Options) { o.Alone = true }
	p := e.start(nil, alone)
	first := e.spec("paris", "1")
	p.advertise(first)
	e.request("r", 2)
	e.expectPods("paris", "r", 2, 0, 0)
	p.answer("paris", "r", true, "")
	const beat, hour = 30 * time.Second, time.Hour
	stored := map[int64]bool{}
	for range hour / beat {
		e.clock.Step(beat)
		p.advertise(e.spec("paris", "1"))
		p.advertise(e.spec("rome", "0"))
		p.rewritten()
		stored[e.ad("paris").Spec.Sequence] = true
	}
	delete(stored, first.Sequence)
	if len(stored) < 1 || len(stored) > 3 {
		e.Errorf("an advertisement without changes was stored %d times in an hour, want about 2", len(stored))
	}
	e.expectPods("paris", "r", 2, 0, 2)
	p.stop()
	next := e.start(nil, alone)
	reconcile := func() (requeued bool) {
		e.Helper()
		result, err := next.ReconcileAdvertisement(e.Context(), "paris")
		expect.NoError(e, err)
		return result.RequeueAfter > 0
	}
	// From then on, it waits for paris.
	expect.Eventually(e, "the next broker to know paris", func() (bool, string) { return reconcile(), "it does not" })
	for range 9 {
		e.clock.Step(time.Minute)
		next.advertise(e.spec("rome", "0"))
	}
	reconcile()
	if ad := e.ad("paris"); !ad.Status.Active {
		e.Errorf("the next broker takes paris for silent too early: %+v", ad.Status.Conditions)
	}
	e.clock.Step(2 * time.Minute)
	next.advertise(e.spec("rome", "0"))
	e.eventually("paris to be inactive", func() error {
		reconcile()
		if ad := e.ad("paris"); ad.Status.Active {
			return fmt.Errorf("its conditions are %+v", ad.Status.Conditions)
		}
		return nil
	})
}
