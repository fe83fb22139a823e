package scale

import (
	"context"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// counts of the crowd's pods: those with a node, and those that run at home and with
// providers.
type counts struct{ bound, home, away int }

func (c *counts) add(pod *corev1.Pod, n int) {
	if pod == nil || pod.Spec.NodeName == "" {
		return
	}
	c.bound += n
	switch {
	case pod.Status.Phase != corev1.PodRunning:
	case strings.HasPrefix(pod.Spec.NodeName, broker.VirtualNodePrefix):
		c.away += n
	default:
		c.home += n
	}
}

// counter counts the crowd's pods from a watch: listing ten thousand pods every few
// seconds would cost the measured API server more than it costs to start them.
type counter struct {
	mu   sync.Mutex
	pods map[types.UID]*corev1.Pod
	sum  counts
}

// startCounter returns when the watch has begun. It ends with ctx.
func startCounter(ctx context.Context, config *rest.Config) (*counter, error) {
	config = rest.CopyConfig(config)
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	set, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	c := &counter{pods: map[types.UID]*corev1.Pod{}}
	factory := informers.NewSharedInformerFactoryWithOptions(set, 0, informers.WithNamespace(crowd), informers.WithTransform(trim))
	informer := factory.Core().V1().Pods().Informer()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(object any) { c.observe(object, false) },
		UpdateFunc: func(_, object any) { c.observe(object, false) },
		DeleteFunc: func(object any) {
			if last, ok := object.(cache.DeletedFinalStateUnknown); ok {
				object = last.Obj
			}
			c.observe(object, true)
		},
	}); err != nil {
		return nil, err
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return nil, fmt.Errorf("watching the pods: %w", ctx.Err())
	}
	return c, nil
}

// trim keeps what is counted.
func trim(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion},
		Spec:       corev1.PodSpec{NodeName: pod.Spec.NodeName},
		Status:     corev1.PodStatus{Phase: pod.Status.Phase},
	}, nil
}

func (c *counter) observe(object any, deleted bool) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sum.add(c.pods[pod.UID], -1)
	if deleted {
		delete(c.pods, pod.UID)
		return
	}
	c.pods[pod.UID] = pod
	c.sum.add(pod, 1)
}

func (c *counter) now() counts {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.sum
}

// counters of clusters, by name.
type counters map[string]*counter

// now sums up. Pods of a provider's own run away from home, too.
func (c counters) now() (sum counts) {
	for name, each := range c {
		now := each.now()
		sum.bound += now.bound
		sum.away += now.away
		if name == consumer {
			sum.home += now.home
		} else {
			sum.away += now.home
		}
	}
	return sum
}
