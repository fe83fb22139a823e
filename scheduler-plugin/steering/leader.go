package steering

import (
	"context"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
)

const (
	// leasePeriod is how often the Lease is read.
	leasePeriod = 2 * time.Second
	// defaultLeaseDuration is that of a Lease that states none.
	defaultLeaseDuration = 15 * time.Second
)

// Leader observes the Lease of the scheduler. A replica leads while the Lease changes:
// its times are not compared with this machine's clock. A Lease that was released
// counts for the duration it had, in which another replica acquires it. Safe for
// concurrent use.
type Leader struct {
	clock clock.PassiveClock

	mu sync.Mutex
	// resourceVersion and duration are those of the Lease when it was last seen to
	// change, at seenAt.
	resourceVersion string
	holder          string
	duration        time.Duration
	seenAt          time.Time
	// renewed: it was seen to change, and is not only what a former process has left.
	renewed bool
}

// NewLeader returns a Leader that has not observed the Lease: until then, and for
// the duration of a Lease, a replica is taken to lead.
func NewLeader(clock clock.PassiveClock) *Leader {
	return &Leader{clock: clock, duration: defaultLeaseDuration, seenAt: clock.Now()}
}

// Observe records the Lease as just read; nil if there is none.
func (l *Leader) Observe(lease *coordinationv1.Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if lease == nil || lease.ResourceVersion == l.resourceVersion {
		return
	}
	l.renewed = l.resourceVersion != ""
	l.resourceVersion, l.seenAt = lease.ResourceVersion, l.clock.Now()
	if l.holder = ptr.Deref(lease.Spec.HolderIdentity, ""); l.holder == "" {
		return // client-go states a second when it releases one
	}
	l.duration = defaultLeaseDuration
	if seconds := ptr.Deref(lease.Spec.LeaseDurationSeconds, 0); seconds > 0 {
		l.duration = time.Duration(seconds) * time.Second
	}
}

// Leads reports whether the Lease has changed within its duration.
func (l *Leader) Leads() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.clock.Since(l.seenAt) <= l.duration
}

// LeadsOn reports whether a replica leads whose identity begins with a host name, as
// kube-scheduler makes it: in a pod, this replica, if it has written the Lease since this
// process observes it. A container that has restarted finds the Lease of the process before.
func (l *Leader) LeadsOn(host string) bool {
	leads := l.Leads()
	l.mu.Lock()
	defer l.mu.Unlock()
	return leads && l.renewed && host != "" && strings.HasPrefix(l.holder, host+"_")
}

// Watch reads a Lease until ctx ends. A Lease that cannot be read says nothing; why is logged once
// a minute.
func (l *Leader) Watch(ctx context.Context, client kubernetes.Interface, namespace, name string) {
	var loggedAt time.Time
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		ctx, cancel := context.WithTimeout(ctx, 5*leasePeriod)
		defer cancel()
		lease, err := client.CoordinationV1().Leases(namespace).Get(ctx, name, metav1.GetOptions{})
		switch {
		case err == nil:
			l.Observe(lease)
		case apierrors.IsNotFound(err):
			l.Observe(nil)
		case l.clock.Since(loggedAt) >= time.Minute:
			loggedAt = l.clock.Now()
			klog.FromContext(ctx).Error(err, "Failed to read the Lease of the scheduler; pods are not steered to it while it is not known to lead", "lease", klog.KRef(namespace, name))
		}
	}, leasePeriod)
}
