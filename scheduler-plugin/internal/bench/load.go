package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	watchtools "k8s.io/client-go/tools/watch"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// load is a number of pods of one kind. podsOf of them have the same owner.
type load struct {
	name, namespace string
	pods, podsOf    int
	requests        corev1.ResourceList
	// every is the time between pods that are created while the scheduler runs. If it is 0,
	// they exist before that starts.
	every time.Duration
	// priorityClass of the pods, empty for none.
	priorityClass string
}

// basic and extended are loads like those of the same names in scheduler_perf.
func basic(pods int) load {
	return load{name: "basic", namespace: homePods, pods: pods, podsOf: 100,
		requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("500Mi")}}
}

func extended(pods int) load {
	l := basic(pods)
	l.name, l.requests = "extended", maps.Clone(l.requests)
	l.requests[device] = resource.MustParse("1")
	return l
}

// pod returns pod i of a load, as the steering webhook leaves it. The scheduler does not
// read its owner.
func (l load) pod(i int) *corev1.Pod {
	owner := fmt.Sprintf("%s-%d", l.name, i/l.podsOf)
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: l.namespace, Name: fmt.Sprintf("%s-%d", l.name, i), OwnerReferences: []metav1.OwnerReference{{
			APIVersion: "example.com/v1", Kind: "Batch", Name: owner, UID: types.UID("uid-of-" + owner), Controller: ptr.To(true)}}},
		Spec: corev1.PodSpec{
			SchedulerName:                broker.SchedulerName,
			PriorityClassName:            l.priorityClass,
			AutomountServiceAccountToken: ptr.To(false),
			Tolerations:                  []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
			Containers: []corev1.Container{{Name: "main", Image: "none", Resources: corev1.ResourceRequirements{
				Requests: l.requests, Limits: l.limits()}}},
		},
	}
}

// limits are those of extended resources, which must equal the requests.
func (l load) limits() corev1.ResourceList {
	if amount, ok := l.requests[device]; ok {
		return corev1.ResourceList{device: amount}
	}
	return nil
}

// create creates the pods of a load.
func (h *home) create(ctx context.Context, l load) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	for i := range l.pods {
		group.Go(func() error {
			_, err := h.pods.CoreV1().Pods(l.namespace).Create(ctx, l.pod(i), metav1.CreateOptions{})
			return err
		})
	}
	return group.Wait()
}

// clear deletes the pods and Reservations of a namespace.
func (h *home) clear(ctx context.Context, namespace string) error {
	now := metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}
	if err := h.pods.CoreV1().Pods(namespace).DeleteCollection(ctx, now, metav1.ListOptions{}); err != nil {
		return fmt.Errorf("deleting the pods of %s: %w", namespace, err)
	}
	return h.deleteReservations(ctx, namespace)
}

// result is what one load took.
type result struct {
	bound int
	took  time.Duration
	// cpu is the scheduler's CPU time in seconds, and servers that of the API server and
	// etcd. Other work on the machine changes it less than the rate.
	cpu, servers float64
	// writes to the API server and scheduling attempts, for each pod.
	writes, attempts float64
}

// rate in pods a second.
func (r result) rate() float64 { return float64(r.bound) / r.took.Seconds() }

// limit of one load.
const limit = 10 * time.Minute

// bind starts a scheduler for pods that exist already, and waits until all of them are
// bound. The time is from the first one that the scheduler has tried to the last one that
// is bound, as seen in a watch.
func (h *home) bind(ctx context.Context, a arm, l load, during func(context.Context) error) (r result, err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	list, err := h.pods.CoreV1().Pods(l.namespace).List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return r, err
	}
	watcher, err := watchtools.NewRetryWatcherWithContext(ctx, list.ResourceVersion, &cache.ListWatch{
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			return h.pods.CoreV1().Pods(l.namespace).Watch(ctx, options)
		},
	})
	if err != nil {
		return r, err
	}
	defer watcher.Stop()
	if err := h.startScheduler(a); err != nil {
		return r, err
	}
	beside := make(chan error, 1)
	if during != nil {
		background, end := context.WithCancel(ctx)
		go func() { beside <- during(background) }()
		defer func() {
			end()
			err = errors.Join(err, <-beside)
		}()
	}
	var first time.Time
	var before, serversBefore time.Duration
	bound := map[types.UID]bool{}
	for len(bound) < l.pods {
		select {
		case <-ctx.Done():
			return r, fmt.Errorf("%d of %d pods were bound: %w", len(bound), l.pods, ctx.Err())
		case <-h.scheduler.Done():
			return r, fmt.Errorf("the scheduler has ended: %w", h.cluster.Err())
		case event, open := <-watcher.ResultChan():
			pod, ok := event.Object.(*corev1.Pod)
			if !open || !ok {
				return r, fmt.Errorf("the watch of pods has ended after %d pods: %v", len(bound), event.Object)
			}
			tried := pod.Spec.NodeName != "" || len(pod.Status.Conditions) > 0
			if tried && first.IsZero() {
				first = time.Now()
				before, serversBefore = process.CPUTime(h.scheduler.Pid()), h.serversTime()
			}
			if pod.Spec.NodeName != "" && !bound[pod.UID] {
				bound[pod.UID] = true
				r.bound, r.took = len(bound), time.Since(first)
			}
		}
	}
	r.cpu, r.servers = (process.CPUTime(h.scheduler.Pid()) - before).Seconds(), (h.serversTime() - serversBefore).Seconds()
	return r, nil
}

// serversTime is the CPU time of the API server and etcd.
func (h *home) serversTime() (total time.Duration) {
	for _, name := range []string{"kube-apiserver", "etcd"} {
		total += process.CPUTime(h.cluster.Process(name).Pid())
	}
	return total
}
