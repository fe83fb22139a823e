package advertise

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/instruction"
	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	spillwayevents "github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Options of a Publisher.
type Options struct {
	// Terms of the advertisement, and the identity of this cluster.
	Terms inventory.Terms
	// Recognizer of guests and virtual nodes.
	Recognizer inventory.Recognizer
	// Tariff of the resources: the prices of the Terms are those of the time of the measurement.
	Tariff Tariff
	// Prices names a ConfigMap with a tariff to use instead, which need not exist; none where
	// empty.
	Prices types.NamespacedName
	// Interval between two beats, above 0. An advertisement is sent when it has changed, and
	// its digest on each beat.
	Interval time.Duration
	// Debounce is how long changes are collected before measuring; 500 ms where 0.
	Debounce time.Duration
	// CopyName and CopyNamespace name the ClusterAdvertisement in this cluster that
	// users can read; there is none where CopyName is empty.
	CopyName, CopyNamespace string
	// Inventory has nodes and pods.
	Inventory *inventory.Tracker
	// Unlisted returns the holds that the broker does not list; none where nil.
	Unlisted func(ctx context.Context) ([]broker.UnlistedHold, error)
	// Unreachable returns the providers that this cluster cannot connect to; none where nil.
	Unreachable func() []string
	// Latencies returns those of the providers that it uses; none where nil.
	Latencies func() []broker.ProviderLatency
	// Clock; the real one where nil.
	Clock clock.Clock
}

// Broker receives the advertisement.
type Broker interface {
	// PublishAdvertisement replaces this cluster's advertisement at the broker.
	PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error
	// Beat reports whether the broker has this cluster's advertisement as it is.
	Beat(ctx context.Context, beat protocol.Beat) (known bool, err error)
}

// Publisher measures and publishes as long as it is the leader.
type Publisher struct {
	Options
	cached   client.Client
	recorder events.EventRecorder
	live     client.Reader
	broker   Broker
	// dirty is written to when something has changed, due when an advertisement is to be
	// sent at once.
	dirty, due chan struct{}

	// published is the last advertisement that the broker accepted, priced the last tariff
	// that was valid, retryAfter the delay after a failure. Only Start uses them.
	published  *broker.ClusterAdvertisementSpec
	priced     Tariff
	sequence   int64
	retryAfter time.Duration
}

// Connections calls a function for each change of the mirror of what this cluster provides:
// one that is relisted is connected to the broker.
type Connections interface {
	Subscribe(changed func(transport.Change[protocol.ProviderView]))
}

// New makes a Publisher, which advertises at once whenever the broker is connected.
func New(communicator Broker, connections Connections, options Options) *Publisher {
	options.Debounce = cmp.Or(options.Debounce, 500*time.Millisecond)
	options.Clock = cmp.Or[clock.Clock](options.Clock, clock.RealClock{})
	p := &Publisher{Options: options, broker: communicator, priced: options.Tariff, dirty: make(chan struct{}, 1), due: make(chan struct{}, 1)}
	connections.Subscribe(func(change transport.Change[protocol.ProviderView]) {
		if change.Relisted {
			p.Connected()
		}
	})
	return p
}

// SetupWithManager adds the Publisher to the manager and watches nodes, pods, namespaces, the
// prices and what this cluster holds.
func (p *Publisher) SetupWithManager(mgr ctrl.Manager) error {
	p.cached, p.live, p.recorder = mgr.GetClient(), mgr.GetAPIReader(), spillwayevents.NewRecorder(mgr.GetEventRecorder("spillway-agent"))
	mark := toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { p.mark() },
		UpdateFunc: func(before, after any) { p.markIfChanged(before, after) },
		DeleteFunc: func(any) { p.mark() },
	}
	objects := []client.Object{&corev1.Node{}, &corev1.Pod{}, &corev1.Namespace{}}
	if p.Prices.Name != "" {
		objects = append(objects, &corev1.ConfigMap{})
	}
	if p.Unlisted != nil {
		objects = append(objects, &broker.ProviderInstruction{})
	}
	for _, object := range objects {
		informer, err := mgr.GetCache().GetInformer(context.Background(), object, cache.BlockUntilSynced(false))
		if err != nil {
			return fmt.Errorf("watching %T for the advertisement: %w", object, err)
		}
		if _, err := informer.AddEventHandler(mark); err != nil {
			return fmt.Errorf("watching %T for the advertisement: %w", object, err)
		}
	}
	return mgr.Add(p)
}

func (p *Publisher) mark() { signal(p.dirty) }

// Connected makes the Publisher send a beat at once, because the broker may be one that
// has not heard of this cluster. It does not block.
func (p *Publisher) Connected() { signal(p.due) }

func signal(to chan<- struct{}) {
	select {
	case to <- struct{}{}:
	default:
	}
}

// markIfChanged ignores heartbeats of kubelets, changes of pods that do not change what they
// use, and of holds that do not change what is held.
func (p *Publisher) markIfChanged(before, after any) {
	switch after := after.(type) {
	case *corev1.Node:
		b := before.(*corev1.Node)
		if p.Recognizer.Eligible(b) == p.Recognizer.Eligible(after) &&
			equality.Semantic.DeepEqual(b.Labels, after.Labels) &&
			equality.Semantic.DeepEqual(b.Spec.Taints, after.Spec.Taints) &&
			equality.Semantic.DeepEqual(b.Status.Capacity, after.Status.Capacity) &&
			equality.Semantic.DeepEqual(b.Status.Allocatable, after.Status.Allocatable) {
			return
		}
	case *corev1.Pod:
		b := before.(*corev1.Pod)
		if b.Spec.NodeName == after.Spec.NodeName && inventory.Finished(b) == inventory.Finished(after) &&
			b.Generation == after.Generation && equality.Semantic.DeepEqual(b.Labels, after.Labels) {
			return
		}
	case *broker.ProviderInstruction:
		if equality.Semantic.DeepEqual(instruction.Held(before.(*broker.ProviderInstruction)), instruction.Held(after)) {
			return
		}
	}
	p.mark()
}

// Start publishes until ctx ends.
func (p *Publisher) Start(ctx context.Context) error {
	logger := log.FromContext(ctx).WithName("advertise")
	for {
		onBeat, err := p.wait(ctx)
		if err == nil {
			err = p.step(ctx, onBeat)
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			p.retryAfter = min(max(2*p.retryAfter, 500*time.Millisecond), 10*time.Second)
			logger.Error(err, "Failed to publish the advertisement", "retryAfter", p.retryAfter)
		}
	}
}

// wait returns on the next beat, when the broker is connected, or after a failure on
// the next retry (onBeat), or earlier when something has changed.
func (p *Publisher) wait(ctx context.Context) (onBeat bool, err error) {
	now := p.Clock.Now()
	due := NextBeat(now, p.Interval, p.Terms.ClusterID).Sub(now)
	if p.retryAfter > 0 {
		due = min(due, p.retryAfter)
	}
	timer := p.Clock.NewTimer(due)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-timer.C():
		return true, nil
	case <-p.due:
		return true, nil
	case <-p.dirty:
	}
	debounce := p.Clock.NewTimer(p.Debounce)
	defer debounce.Stop()
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-debounce.C():
	case <-p.due:
		// What has changed may not be known yet to what measures it.
		p.mark()
		return true, nil
	}
	select {
	case <-p.dirty:
	default:
	}
	return p.retryAfter > 0, nil
}

// step measures, and publishes if something has changed, or on a beat if the broker has
// something else.
func (p *Publisher) step(ctx context.Context, onBeat bool) error {
	// Sequences must grow across restarts and replicas too, so they begin at the clock. If
	// it was set back, the broker says which sequence is the latest.
	p.sequence = max(p.sequence+1, p.Clock.Now().UnixMilli())
	spec, err := p.measure(ctx)
	if err != nil {
		return fmt.Errorf("measuring: %w", err)
	}
	same := p.published != nil && unchanged(*p.published, spec)
	if same && !onBeat {
		return nil
	}
	known, err := p.send(ctx, spec, same)
	if err != nil {
		if outdated := (*protocol.OutdatedError)(nil); errors.As(err, &outdated) {
			// The next measurement is later than the latest one.
			p.sequence = max(p.sequence, outdated.Latest)
		}
		return fmt.Errorf("sending: %w", err)
	}
	if !known {
		p.published = &spec
	}
	p.retryAfter = 0
	logger := log.FromContext(ctx).WithName("advertise")
	logger.V(1).Info("Published the advertisement", "sequence", spec.Sequence, "unchanged", known,
		"allocatable", spec.Resources.Allocatable.String(), "allocated", spec.Resources.Allocated.String())
	if err := p.writeCopy(ctx, spec); err != nil && ctx.Err() == nil {
		logger.Error(err, "Failed to write the local copy of the advertisement")
	}
	return nil
}

func (p *Publisher) measure(ctx context.Context) (spec broker.ClusterAdvertisementSpec, err error) {
	if err := p.Inventory.WaitSynced(ctx); err != nil {
		return spec, err
	}
	tariff, err := p.tariff(ctx)
	if err != nil {
		return spec, err
	}
	terms, now := p.Terms, p.Clock.Now()
	terms.Cost, terms.ClassCosts = tariff.At(now)
	spec = p.Inventory.Measure(terms, now, p.sequence)
	if p.Unreachable != nil {
		spec.Unreachable = p.Unreachable()
	}
	if p.Latencies != nil {
		spec.Latencies = p.Latencies()
	}
	if p.Unlisted != nil {
		spec.UnlistedHolds, err = p.Unlisted(ctx)
	}
	return spec, err
}

// NextBeat is the next time after now at which a cluster advertises: a multiple
// of interval on the wall clock, plus an offset of its own within the interval, so
// that the beats of all clusters are spread evenly.
func NextBeat(now time.Time, interval time.Duration, clusterID string) time.Time {
	hash := fnv.New64a()
	hash.Write([]byte(clusterID))
	offset := time.Duration(hash.Sum64() % uint64(max(interval, 1)))
	return now.Add(-offset).Truncate(interval).Add(interval + offset)
}

func unchanged(a, b broker.ClusterAdvertisementSpec) bool {
	a.Sequence, a.Timestamp = b.Sequence, b.Timestamp
	return equality.Semantic.DeepEqual(a, b)
}

// send sends a beat if the advertisement is the same as before, and the advertisement unless
// the broker knows it.
func (p *Publisher) send(ctx context.Context, spec broker.ClusterAdvertisementSpec, same bool) (known bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	if same {
		known, err = p.broker.Beat(ctx, protocol.Beat{Sequence: spec.Sequence, Digest: protocol.Digest(*p.published)})
	}
	if known || err != nil {
		return known, err
	}
	return false, p.broker.PublishAdvertisement(ctx, *spec.DeepCopy())
}

func (p *Publisher) writeCopy(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	if p.CopyName == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	current := &broker.ClusterAdvertisement{}
	err := p.live.Get(ctx, client.ObjectKey{Namespace: p.CopyNamespace, Name: p.CopyName}, current)
	if apierrors.IsNotFound(err) {
		return p.cached.Create(ctx, &broker.ClusterAdvertisement{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: p.CopyNamespace, Name: p.CopyName,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Spec: spec,
		})
	}
	if err != nil {
		return err
	}
	current.Spec = spec
	return p.cached.Update(ctx, current)
}
