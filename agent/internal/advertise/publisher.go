package advertise

import (
	"context"
	"fmt"
	"hash/fnv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Options of a Publisher.
type Options struct {
	// Terms of lending, and who this cluster is.
	Terms inventory.Terms
	// Interval between two beats: an advertisement goes out on each, changed or
	// not.
	Interval time.Duration
	// Debounce is how long changes are gathered before measuring; 500 ms where 0.
	Debounce time.Duration
	// CopyName and CopyNamespace name the ClusterAdvertisement kept here for
	// people; none where CopyName is empty.
	CopyName, CopyNamespace string
	// Clock; the real one where nil.
	Clock clock.Clock
}

// Broker receives the advertisement.
type Broker interface {
	// PublishAdvertisement replaces this cluster's advertisement at the broker.
	PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error
}

// Publisher measures and publishes for as long as it leads.
type Publisher struct {
	Options
	cached client.Client
	live   client.Reader
	broker Broker
	dirty  chan struct{}
}

// New makes a Publisher.
func New(communicator Broker, options Options) *Publisher {
	if options.Debounce == 0 {
		options.Debounce = 500 * time.Millisecond
	}
	if options.Interval == 0 {
		options.Interval = 30 * time.Second
	}
	if options.Clock == nil {
		options.Clock = clock.RealClock{}
	}
	return &Publisher{Options: options, broker: communicator, dirty: make(chan struct{}, 1)}
}

// SetupWithManager has the manager run the Publisher, on its caches.
func (p *Publisher) SetupWithManager(mgr ctrl.Manager) error {
	p.cached, p.live = mgr.GetClient(), mgr.GetAPIReader()
	mark := toolscache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { p.mark() },
		UpdateFunc: func(before, after any) { p.markIfChanged(before, after) },
		DeleteFunc: func(any) { p.mark() },
	}
	for _, object := range []client.Object{&corev1.Node{}, &corev1.Pod{}, &corev1.Namespace{}} {
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

// NeedLeaderElection keeps two replicas from advertising at once.
func (p *Publisher) NeedLeaderElection() bool { return true }

func (p *Publisher) mark() {
	select {
	case p.dirty <- struct{}{}:
	default:
	}
}

// markIfChanged leaves out a kubelet's heartbeats and what does not move a pod.
func (p *Publisher) markIfChanged(before, after any) {
	switch after := after.(type) {
	case *corev1.Node:
		b := before.(*corev1.Node)
		if inventory.Lendable(b) == inventory.Lendable(after) &&
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
	}
	p.mark()
}

// Start publishes until ctx ends.
func (p *Publisher) Start(ctx context.Context) error {
	logger := log.FromContext(ctx).WithName("advertise")
	var (
		published *broker.ClusterAdvertisementSpec
		sequence  int64
		retry     time.Duration
	)
	for {
		now := p.Clock.Now()
		wait := NextBeat(now, p.Interval, p.Terms.ClusterID).Sub(now)
		if retry > 0 {
			wait = min(wait, retry)
		}
		timer := p.Clock.NewTimer(wait)
		onBeat := true
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil
		case <-timer.C():
		case <-p.dirty:
			timer.Stop()
			onBeat = retry > 0
			gather := p.Clock.NewTimer(p.Debounce)
			select {
			case <-ctx.Done():
				gather.Stop()
				return nil
			case <-gather.C():
			}
			select {
			case <-p.dirty:
			default:
			}
		}
		// Sequences must grow over restarts too, so they begin at the clock; if
		// that is ever set back, the broker takes the first larger one.
		sequence = max(sequence+1, p.Clock.Now().UnixMilli())
		spec, err := p.measure(ctx, sequence)
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			logger.Error(err, "Measuring failed")
			retry = nextRetry(retry)
			continue
		}
		if !onBeat && published != nil && unchanged(*published, spec) {
			continue
		}
		if err := p.publish(ctx, spec); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			retry = nextRetry(retry)
			logger.Error(err, "Publishing the advertisement failed", "retryIn", retry)
			continue
		}
		published, retry = &spec, 0
		logger.V(1).Info("Published", "sequence", sequence, "allocatable", spec.Resources.Allocatable.String(), "allocated", spec.Resources.Allocated.String())
		if err := p.keepCopy(ctx, spec); err != nil && ctx.Err() == nil {
			logger.Error(err, "Keeping a copy of the advertisement failed")
		}
	}
}

func nextRetry(retry time.Duration) time.Duration {
	return min(max(2*retry, 500*time.Millisecond), 10*time.Second)
}

// NextBeat is the next moment after now at which a cluster is due: a multiple
// of interval on the wall clock, and an offset of up to a tenth of it so that
// clusters do not all speak at once.
func NextBeat(now time.Time, interval time.Duration, clusterID string) time.Time {
	hash := fnv.New64a()
	hash.Write([]byte(clusterID))
	offset := time.Duration(hash.Sum64() % uint64(max(interval/10, 1)))
	beat := now.Truncate(interval).Add(offset)
	if !beat.After(now) {
		beat = beat.Add(interval)
	}
	return beat
}

func unchanged(a, b broker.ClusterAdvertisementSpec) bool {
	a.Sequence, a.Timestamp = b.Sequence, b.Timestamp
	return equality.Semantic.DeepEqual(a, b)
}

func (p *Publisher) measure(ctx context.Context, sequence int64) (broker.ClusterAdvertisementSpec, error) {
	none := broker.ClusterAdvertisementSpec{}
	cluster, err := inventory.Read(ctx, p.cached)
	if err != nil {
		return none, err
	}
	return inventory.Measure(inventory.Measurement{
		Terms:    p.Terms,
		Nodes:    cluster.Nodes,
		Pods:     cluster.Pods,
		GuestOf:  cluster.GuestOf,
		Now:      p.Clock.Now(),
		Sequence: sequence,
	}), nil
}

func (p *Publisher) publish(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return p.broker.PublishAdvertisement(ctx, *spec.DeepCopy())
}

func (p *Publisher) keepCopy(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
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
