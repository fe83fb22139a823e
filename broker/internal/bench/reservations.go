package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	toolscache "k8s.io/client-go/tools/cache"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

func init() {
	for n, aims := range map[int]concurrentAims{10: {"none", "none", "none"}, 100: {"<= 1.5", "<= 4", "<= 4"}, 1000: {"<= 15", "none", "none"}} {
		name := fmt.Sprintf("concurrent_reservations_%d", n)
		benches[name] = onHub(func(ctx context.Context, h *hub) error { return concurrent(ctx, h, name, n, aims) })
	}
	benches["reservation_ms"] = onHub(alone)
	benches["durable_reservations_ratio"] = onHub(durable)
}

// observer sees on the API server when Reservations reach a phase.
type observer struct {
	mu     sync.Mutex
	at     map[broker.ReservationPhase]map[types.UID]time.Time
	change chan struct{}
}

// gone is the time after deletion, as a phase.
const gone broker.ReservationPhase = "gone"

func (h *hub) observe(ctx context.Context) (*observer, error) {
	reservations, err := cache.New(h.cluster.Admin, cache.Options{Scheme: h.api.Scheme(), DefaultNamespaces: map[string]cache.Config{namespace: {}}})
	if err != nil {
		return nil, err
	}
	o := &observer{at: map[broker.ReservationPhase]map[types.UID]time.Time{}, change: make(chan struct{}, 1)}
	informer, err := reservations.GetInformer(ctx, &broker.Reservation{}, cache.BlockUntilSynced(false))
	if err != nil {
		return nil, err
	}
	seen := func(object any) {
		reservation := object.(*broker.Reservation)
		o.mark(reservation.Status.Phase, reservation.UID)
		if reservation.Status.Phase == broker.ReservationActive {
			o.mark(broker.ReservationReserved, reservation.UID)
		}
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{
		AddFunc:    seen,
		UpdateFunc: func(_, object any) { seen(object) },
		DeleteFunc: func(object any) {
			if reservation, ok := object.(*broker.Reservation); ok {
				o.mark(gone, reservation.UID)
			}
		},
	}); err != nil {
		return nil, err
	}
	go func() { _ = reservations.Start(ctx) }()
	if !reservations.WaitForCacheSync(ctx) {
		return nil, errors.New("the cache of reservations did not sync")
	}
	return o, nil
}

func (o *observer) mark(phase broker.ReservationPhase, uid types.UID) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.at[phase] == nil {
		o.at[phase] = map[types.UID]time.Time{}
	}
	if _, known := o.at[phase][uid]; !known {
		o.at[phase][uid] = time.Now()
	}
	select {
	case o.change <- struct{}{}:
	default:
	}
}

// await waits until n Reservations have been in a phase, and returns when the last was.
func (o *observer) await(ctx context.Context, phase broker.ReservationPhase, n int) (last time.Time, err error) {
	for {
		o.mu.Lock()
		seen := len(o.at[phase])
		for _, at := range o.at[phase] {
			if at.After(last) {
				last = at
			}
		}
		o.mu.Unlock()
		if seen >= n {
			return last, nil
		}
		select {
		case <-o.change:
		case <-ctx.Done():
			return last, fmt.Errorf("%d of %d reservations were %s: %w", seen, n, phase, ctx.Err())
		}
	}
}

// request asks for one pod, and returns the reservation's ID.
func request(ctx context.Context, a *agent) (id string, err error) {
	uid := uuid.NewUUID()
	err = retry(ctx, func(ctx context.Context) error {
		view, err := a.client.PutReservation(ctx, protocol.ReservationRequest{
			SourceUID: uid, SourceNamespace: "default", SourceName: "pods", SourceGeneration: 1,
			Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 1, Requests: amounts("100m", "64Mi")}}},
		})
		id = view.ID
		return err
	})
	return id, err
}

// perConsumer is how many reservations one consumer makes: within the burst that the
// broker allows it.
const perConsumer = 100

// concurrentAims are those until all reservations are Reserved and Active, and gone after
// their deletion.
type concurrentAims struct{ reserved, active, gone string }

// concurrent makes n reservations at once at one provider, waits until all are Active,
// and deletes them.
func concurrent(ctx context.Context, h *hub, name string, n int, aims concurrentAims) error {
	consumers := max(1, n/perConsumer)
	all, err := h.startAgents(ctx, consumers, 1, true)
	if err != nil {
		return err
	}
	observer, err := h.observe(ctx)
	if err != nil {
		return err
	}
	// That the agents join and advertise is no part of a reservation's life.
	if err := h.requests.settle(ctx); err != nil {
		return err
	}
	h.requests.forget()
	ids := make([]string, n)
	own, server, etcd := h.cpu()
	start := time.Now()
	put := func(do func(ctx context.Context, a *agent, i int) error) error {
		group, ctx := errgroup.WithContext(ctx)
		group.SetLimit(16 * consumers)
		for i := range n {
			group.Go(func() error { return do(ctx, all.consumers[i%consumers], i) })
		}
		return group.Wait()
	}
	if err := put(func(ctx context.Context, a *agent, i int) (err error) { ids[i], err = request(ctx, a); return err }); err != nil {
		return err
	}
	made := time.Since(start)
	reserved, err := observer.await(ctx, broker.ReservationReserved, n)
	if err != nil {
		return err
	}
	active, err := observer.await(ctx, broker.ReservationActive, n)
	if err != nil {
		return err
	}
	size, err := h.ledgerSize(ctx, all.providers[0].id)
	if err != nil {
		return err
	}
	deleted := time.Now()
	if err := put(func(ctx context.Context, a *agent, i int) error {
		return retry(ctx, func(ctx context.Context) error { return a.client.DeleteReservation(ctx, ids[i]) })
	}); err != nil {
		return err
	}
	end, err := observer.await(ctx, gone, n)
	if err != nil {
		return err
	}
	fmt.Printf("%d reservations of %d consumers at 1 provider, requested in %.2f s; the ledger had %d bytes\n", n, consumers, made.Seconds(), size)
	ownAfter, serverAfter, etcdAfter := h.cpu()
	fmt.Printf("CPU: broker and agents %.1f s, API server %.1f s, etcd %.1f s\n", ownAfter-own, serverAfter-server, etcdAfter-etcd)
	if err := h.requests.settle(ctx); err != nil {
		return err
	}
	writes := h.requests.print(n)
	lines.Time(name, reserved.Sub(start).Seconds(), "s", aims.reserved)
	lines.Time(name+"_active", active.Sub(start).Seconds(), "s", aims.active)
	lines.Time(name+"_gone", end.Sub(deleted).Seconds(), "s", aims.gone)
	lines.Count(name+"_writes", writes, "writes/reservation", 9)
	return all.stop()
}

// ledgerSize is the size of a provider's object.
func (h *hub) ledgerSize(ctx context.Context, cluster string) (int, error) {
	var ad broker.ClusterAdvertisement
	if err := h.api.Get(ctx, client.ObjectKey{Namespace: namespace, Name: cluster}, &ad); err != nil {
		return 0, err
	}
	encoded, err := json.Marshal(&ad)
	return len(encoded), err
}

// alone makes one reservation after the other, and measures each.
func alone(ctx context.Context, h *hub) error {
	const n = 30
	all, err := h.startAgents(ctx, 1, 1, true)
	if err != nil {
		return err
	}
	observer, err := h.observe(ctx)
	if err != nil {
		return err
	}
	var reserved, delivered, active []time.Duration
	for i := range n {
		start := time.Now()
		if _, err := request(ctx, all.consumers[0]); err != nil {
			return err
		}
		if _, err := observer.await(ctx, broker.ReservationActive, i+1); err != nil {
			return err
		}
		observer.mu.Lock()
		for uid, at := range observer.at[broker.ReservationActive] {
			if at.Before(start) {
				continue
			}
			active = append(active, at.Sub(start))
			reserved = append(reserved, observer.at[broker.ReservationReserved][uid].Sub(start))
			last := time.Time{}
			for _, a := range []*agent{all.consumers[0], all.providers[0]} {
				a.mu.Lock()
				if at := a.delivered[uid]; at.After(last) {
					last = at
				}
				a.mu.Unlock()
			}
			delivered = append(delivered, last.Sub(start))
		}
		observer.mu.Unlock()
	}
	ms := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2].Microseconds()) / 1000
	}
	fmt.Printf("medians of %d, one after the other: until Reserved, until consumer and provider have been notified, until Active\n", n)
	lines.Time("reservation_ms", ms(reserved), "ms", "<= 40")
	lines.Time("reservation_ms_delivered", ms(delivered), "ms", "<= 80")
	lines.Time("reservation_ms_active", ms(active), "ms", "none")
	if err := life(ctx, h, all.consumers[0], observer, n); err != nil {
		return err
	}
	return all.stop()
}

// life prints the writes of one more reservation, from the request until it is gone, after
// so many that are Active.
func life(ctx context.Context, h *hub, consumer *agent, observer *observer, before int) error {
	if err := h.requests.settle(ctx); err != nil {
		return err
	}
	h.requests.take()
	id, err := request(ctx, consumer)
	if err != nil {
		return err
	}
	if _, err := observer.await(ctx, broker.ReservationActive, before+1); err != nil {
		return err
	}
	if err := retry(ctx, func(ctx context.Context) error { return consumer.client.DeleteReservation(ctx, id) }); err != nil {
		return err
	}
	if _, err := observer.await(ctx, gone, 1); err != nil {
		return err
	}
	if err := h.requests.settle(ctx); err != nil {
		return err
	}
	fmt.Println("the hub's writes for one reservation, from its request until it is gone, and when each began:")
	writes, own := h.requests.take(), 0
	for _, w := range writes {
		fmt.Printf("%8.1f ms %s\n", float64(w.at.Sub(writes[0].at).Microseconds())/1000, w.what)
		// The consumer's calls are one write each, whatever the broker does.
		requested := w.what == "POST /reservations" || w.what == "DELETE /reservations/*"
		if !requested && !strings.Contains(w.what, "/events") {
			own++
		}
	}
	fmt.Println("counted are the broker's own: without events, and without the creation and the deletion that the consumer requests")
	lines.Count("reservation_writes", float64(own), "writes", 9)
	return nil
}

// durable compares the rate at which reservations become Reserved with the rate at which
// the bare API server stores objects of the same size.
func durable(ctx context.Context, h *hub) error {
	const n = 300
	bare := time.Now()
	group, writing := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range n {
		group.Go(func() error {
			return h.api.Create(writing, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("bare-", i)},
				Data:       map[string]string{"data": strings.Repeat("x", 2048)},
			})
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	writes := float64(n) / time.Since(bare).Seconds()
	all, err := h.startAgents(ctx, n/perConsumer, 1, false)
	if err != nil {
		return err
	}
	observer, err := h.observe(ctx)
	if err != nil {
		return err
	}
	start := time.Now()
	group, requesting := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range n {
		group.Go(func() error { _, err := request(requesting, all.consumers[i%len(all.consumers)]); return err })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	last, err := observer.await(ctx, broker.ReservationReserved, n)
	if err != nil {
		return err
	}
	rate := float64(n) / last.Sub(start).Seconds()
	fmt.Printf("the bare API server stored %.0f objects a second, the broker made %.0f reservations a second Reserved, with 16 callers each\n", writes, rate)
	lines.Time("durable_reservations_ratio", rate/writes, "ratio", "none")
	return all.stop()
}
