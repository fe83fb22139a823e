package reservation_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
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

// While others are being stored, an unchanged advertisement is accepted without being stored,
// and is stored with a later beat. A changed one is stored all the same.
func rewritesWait(e *env) {
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
	id := func(i int) string { return fmt.Sprintf("cluster-%d", i) }
	for i := range others {
		p.advertise(e.spec(id(i), "1"))
	}
	p.advertise(e.spec("paris", "1"))
	p.advertise(e.spec("berlin", "1"))
	before := e.ad("paris").Spec.Sequence
	e.clock.Step(5 * time.Minute)
	blocks.Store(true)
	var stored errgroup.Group
	for i := range others {
		spec := e.spec(id(i), "1")
		stored.Go(func() error { return p.StoreAdvertisement(e.Context(), spec) })
	}
	for range others {
		<-slow
	}
	p.advertise(e.spec("paris", "1"))
	if now := e.ad("paris").Spec.Sequence; now != before {
		e.Errorf("an unchanged advertisement was stored while %d others were", others)
	}
	p.advertise(e.spec("berlin", "2"))
	if now := e.ad("berlin").Spec.Resources.Allocatable.CPU.String(); now != "2" {
		e.Errorf("a changed advertisement was not stored while %d others were: %s CPUs", others, now)
	}
	close(release)
	expect.NoError(e, stored.Wait())
	p.advertise(e.spec("paris", "1"))
	if now := e.ad("paris").Spec.Sequence; now == before {
		e.Errorf("the advertisement was not stored once there was room")
	}
}
