package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/ledger"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// counter counts what a broker does, such as its writes.
type counter struct {
	mu    sync.Mutex
	calls []string
}

// add counts a call before it is made.
func (c *counter) add(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, what)
}

// take returns the calls since the last time.
func (c *counter) take() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	calls := c.calls
	c.calls = nil
	return calls
}

// of returns how many calls there have been of one kind, and of all.
func (c *counter) of(what string) (of, all int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, call := range c.calls {
		if call == what {
			of++
		}
	}
	return of, len(c.calls)
}

// liveReads counts reads of the API server.
func (c *counter) liveReads() interceptor.Funcs {
	return interceptor.Funcs{
		Get: func(ctx context.Context, api client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
			c.add(fmt.Sprintf("get %T %s", o, key.Name))
			return api.Get(ctx, key, o, opts...)
		},
		List: func(ctx context.Context, api client.WithWatch, list client.ObjectList, opts ...client.ListOption) error {
			c.add(fmt.Sprintf("list %T", list))
			return api.List(ctx, list, opts...)
		},
	}
}

func (c *counter) funcs() *interceptor.Funcs {
	return &interceptor.Funcs{
		Create: func(ctx context.Context, api client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			c.add(fmt.Sprintf("create %T", o))
			return api.Create(ctx, o, opts...)
		},
		Update: func(ctx context.Context, api client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			c.add(fmt.Sprintf("update %T", o))
			return api.Update(ctx, o, opts...)
		},
		Patch: func(ctx context.Context, api client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			c.add(fmt.Sprintf("patch %T", o))
			return api.Patch(ctx, o, p, opts...)
		},
		SubResourceUpdate: func(ctx context.Context, api client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			c.add(fmt.Sprintf("update %T/%s", o, sub))
			return api.SubResource(sub).Update(ctx, o, opts...)
		},
	}
}

// A reservation that the server has created costs three writes until it is Reserved, and
// nine until it is gone, besides its creation and its deletion.
func writes(e *env) {
	count := &counter{}
	p := e.start(count.funcs())
	p.advertise(e.spec("paris", "1"))
	count.take()
	expectWrites := func(during string, want ...string) {
		e.Helper()
		if got := count.take(); strings.Join(got, ", ") != strings.Join(want, ", ") {
			e.Errorf("%s took %d writes instead of %d: %s", during, len(got), len(want), strings.Join(got, ", "))
		}
	}
	const ledger, status = "update *v1alpha1.ClusterAdvertisement/status", "update *v1alpha1.Reservation/status"
	e.request("r", 2, createdByBroker)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	expectWrites("placing", "update *v1alpha1.Reservation", ledger, status)
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	expectWrites("the provider's answer", ledger, status)
	// From an older version, it would have to write the next status twice.
	e.eventually("the broker to know what it has written", func() error {
		if version := e.get("r").ResourceVersion; !p.Knows("r", version) {
			return errors.New("it does not know version " + version)
		}
		return nil
	})
	p.use("r", "paris")
	e.expect("r", broker.ReservationActive, "2 of 2 pods in paris")
	e.expectCondition("r", broker.ConditionReady, true, "")
	expectWrites("the consumer's report", status)
	for _, object := range []client.Object{e.get("r"), e.ad("paris")} {
		if fields := object.GetManagedFields(); len(fields) > 0 {
			e.Errorf("the API server tracks %d sets of fields of %T", len(fields), object)
		}
	}
	expect.NoError(e, e.client.Delete(e.Context(), e.get("r")))
	e.expectPods("paris", "r", 0, 2, 0)
	p.answer("paris", "r", true, "")
	e.expectDeleted("r")
	expectWrites("the release", ledger, ledger, "update *v1alpha1.Reservation")
	e.expectEvents("r", "ReservationReleased", 1)

	e.request("queued", 20, createdByBroker, func(r *broker.Reservation) { r.Spec.MinAvailable = 20 })
	e.expectCondition("queued", broker.ConditionQueued, true, "")
	count.take()
	expect.NoError(e, e.client.Delete(e.Context(), e.get("queued")))
	e.expectDeleted("queued")
	expectWrites("the deletion of a queued one", "update *v1alpha1.Reservation")
	e.expectEvents("queued", "ReservationReleased", 1)
	p.expectNoLists()
}

// expectNoLists expects that the broker has listed nothing at the API server, except for its
// caches.
func (p *process) expectNoLists() {
	p.Helper()
	for _, read := range p.reads.take() {
		if strings.HasPrefix(read, "list ") {
			p.Error(read)
		}
	}
}

// A provider that refuses costs one round, and no more than that for all Reservations of the
// same shape. Each of these is written and reported once.
func refusingProvider(e *env) {
	const n = 10
	writes := &counter{}
	p := e.start(writes.funcs())
	p.advertise(e.spec("paris", "10"))
	writes.take()
	refusals := 0
	for i := range n {
		name := fmt.Sprint("r", i)
		e.request(name, 1)
		e.eventually(name+" to be queued", func() error {
			if hold := e.hold("paris", name); hold != nil && !ledger.Pending(*hold).Empty() {
				p.answer("paris", name, false, "full")
				refusals++
			}
			if r := e.get(name); !meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued) || !strings.Contains(message(r, broker.ConditionQueued), "full") {
				return fmt.Errorf("it is not: %+v", r.Status)
			}
			return nil
		})
	}
	if refusals != 1 {
		e.Errorf("it was asked %d times", refusals)
	}
	e.eventually("an event for each that is queued", func() error {
		if queued, all := p.events.of("ReservationQueued"); queued != n {
			return fmt.Errorf("there are %d of %d", queued, all)
		}
		return nil
	})
	// Besides those: that the first one was placed and refused.
	if _, all := p.events.of(""); all > n+2 {
		e.Errorf("%d events: %s", all, strings.Join(p.events.take(), ", "))
	}
	// The placement, and the refusal.
	if ledgers, _ := writes.of("update *v1alpha1.ClusterAdvertisement/status"); ledgers > 4 {
		e.Errorf("%d writes of the ledger", ledgers)
	}
	p.expectNoLists()
}

// What comes while a ledger is written is written together. What does not fit fails alone.
func groupCommit(e *env) {
	const fit, requests = 20, 25
	var ledgerWrites atomic.Int32
	release := make(chan struct{})
	p := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, api client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if ad, ok := o.(*broker.ClusterAdvertisement); ok && len(ad.Status.Holds) > 0 {
				ledgerWrites.Add(1)
				<-release
			}
			return api.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	p.advertise(e.spec("paris", fmt.Sprintf("%dm", 100*fit)))
	for i := range requests {
		e.request(fmt.Sprint("r", i), 1)
	}
	e.eventually("the first write to be under way, and all others to wait for it", func() error {
		waiting, _ := p.Committer.Waiting("paris")
		if writes := ledgerWrites.Load(); writes != 1 || waiting != requests-1 {
			return fmt.Errorf("%d writes, %d changes wait", writes, waiting)
		}
		return nil
	})
	close(release)
	e.eventually("every Reservation to be placed or queued", func() error {
		placed := 0
		for i := range requests {
			r := e.get(fmt.Sprint("r", i))
			switch {
			case r.Status.Phase == broker.ReservationReserved:
				placed++
			case message(r, broker.ConditionQueued) == "":
				return fmt.Errorf("%s is %s", r.Name, r.Status.Phase)
			}
		}
		if placed != fit {
			return fmt.Errorf("%d are placed", placed)
		}
		return nil
	})
	if n := len(e.ad("paris").Status.Holds); n != fit {
		e.Errorf("paris has %d holds", n)
	}
	// The first one, and then all others at once.
	if n := ledgerWrites.Load(); n > 3 {
		e.Errorf("%d holds took %d writes of the ledger", fit, n)
	}
}

// A ledger with the maximum of holds takes no other one, and says so.
func fullLedger(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "2"))
	e.eventually("the ledger to be full", func() error {
		ad := e.ad("paris")
		ad.Status.Holds = nil
		for i := range ledger.MaxHolds {
			name := fmt.Sprint("other-", i)
			ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
				ReservationUID: types.UID(name), ReservationName: name, Requester: "oslo", Attempt: 1,
				Unconfirmed: &broker.HeldCapacity{Totals: cpu("1m")},
			})
		}
		return e.client.Status().Update(e.Context(), ad)
	})
	e.request("r", 1)
	e.expectRejection("r", "paris", "LedgerFull", "maximum of 1100 holds")
	e.eventually("a hold to be dropped", func() error {
		ad := e.ad("paris")
		ad.Status.Holds = ad.Status.Holds[1:]
		return e.client.Status().Update(e.Context(), ad)
	})
	p.advertise(e.spec("paris", "2100m"))
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
}

// A ledger that the API server refuses because of its size is not chosen again as long as
// it does not change, and the Reservation is placed elsewhere.
func unwritableLedger(e *env) {
	var refused atomic.Int32
	p := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, api client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if ad, ok := o.(*broker.ClusterAdvertisement); ok && ad.Name == "paris" && len(ad.Status.Holds) > 0 {
				refused.Add(1)
				ad = ad.DeepCopy()
				ad.Status.Holds[0].ReservationName = strings.Repeat("x", 1600<<10)
				o = ad
			}
			return api.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	p.advertise(e.spec("paris", "9")) // the better score
	p.advertise(e.spec("berlin", "2"))
	e.request("r", 1)
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in berlin")
	if n := refused.Load(); n != 1 {
		e.Errorf("the ledger was written %d times", n)
	}
	e.request("pinned", 1, func(r *broker.Reservation) { r.Spec.TargetClusterID = "paris" })
	e.expectRejection("pinned", "paris", "LedgerFull", "because of its size")
}

// An advertisement that leaves too little of the object to what the cluster holds is refused.
func largeAdvertisement(e *env) {
	p := e.start(nil)
	spec := e.spec("paris", "1")
	spec.NodeClasses[0].Labels = map[string]string{"long": strings.Repeat("x", ledger.MaxAdvertisementBytes+ledger.MaxBytes)}
	err := p.StoreAdvertisement(e.Context(), spec)
	if !protocol.HasCode(err, protocol.CodeTooLarge) || !strings.Contains(err.Error(), "the maximum beside what the cluster holds is 1507328") {
		e.Errorf("it is answered with %v", err)
	}
}

// Another broker writes the ledger first: the change is applied to what it wrote.
func writtenByAnother(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("mine", 2)
	e.expect("mine", broker.ReservationReserved, "2 of 2 pods in paris")
	var once sync.Once
	second := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, api client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if _, ok := o.(*broker.ClusterAdvertisement); ok {
				once.Do(func() {
					e.eventually("the other write", func() error {
						ad := e.ad("paris")
						ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
							ReservationUID: "other", ReservationName: "other", Requester: "oslo", Attempt: 1,
							Unconfirmed: &broker.HeldCapacity{Totals: cpu("300m")},
						})
						return e.client.Status().Update(ctx, ad)
					})
				})
			}
			return api.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	hold := e.hold("paris", "mine")
	expect.NoError(e, second.ApplyProviderAck(e.Context(), "paris", "mine", protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Accepted: true}))
	e.expectPods("paris", "mine", 2, 0, 2)
	e.eventually("both changes in the account", func() error {
		if ad := e.ad("paris"); ad.Status.Reserved.CPU.String() != "500m" || len(ad.Status.Holds) != 2 {
			return errors.New("reserved is " + ad.Status.Reserved.CPU.String())
		}
		return nil
	})
}
