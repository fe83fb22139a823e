package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/e2e/expect"
)

const (
	// writers is the number of pods that are created, and of guests that start, at a time.
	writers = 8
	// startAfter is how long a guest is pending.
	startAfter = time.Second
)

// load creates pods on the virtual node, as a scheduler leaves them, and is the scheduler
// and the kubelets of the provider.
type load struct {
	set  kubernetes.Interface
	pods int
}

func newLoad(config *rest.Config, pods int) *load {
	config.QPS = -1
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	return &load{set: kubernetes.NewForConfigOrDie(config), pods: pods}
}

type guest struct {
	name string
	seen time.Time
}

// run returns when all pods run.
func (l *load) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	pending := make(chan guest, l.pods)
	group.Go(func() error {
		defer close(pending)
		seen := map[types.UID]bool{}
		return l.follow(ctx, guestNamespace, func(p *corev1.Pod) (done bool) {
			if !seen[p.UID] {
				seen[p.UID] = true
				pending <- guest{p.Name, time.Now()}
			}
			return len(seen) == l.pods
		})
	})
	group.Go(func() error {
		running := map[types.UID]bool{}
		return l.follow(ctx, podNamespace, func(p *corev1.Pod) (done bool) {
			if p.Status.Phase == corev1.PodRunning {
				running[p.UID] = true
			}
			return len(running) == l.pods
		})
	})
	for w := range writers {
		group.Go(func() error { return l.create(ctx, w) })
		group.Go(func() error { return l.start(ctx, pending) })
	}
	return group.Wait()
}

// follow calls each with the pods of a namespace and their changes, until it returns true.
func (l *load) follow(ctx context.Context, namespace string, each func(*corev1.Pod) (done bool)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	factory := informers.NewSharedInformerFactoryWithOptions(l.set, 0, informers.WithNamespace(namespace))
	next := func(object any) {
		if ctx.Err() == nil && each(object.(*corev1.Pod)) {
			cancel(errDone)
		}
	}
	if _, err := factory.Core().V1().Pods().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: next, UpdateFunc: func(_, object any) { next(object) },
	}); err != nil {
		return err
	}
	factory.Start(ctx.Done())
	<-ctx.Done()
	factory.Shutdown()
	if err := context.Cause(ctx); !errors.Is(err, errDone) {
		return err
	}
	return nil
}

var errDone = errors.New("done")

// create creates every so many of the pods, from the first-th on.
func (l *load) create(ctx context.Context, first int) error {
	for i := first; i < l.pods; i += writers {
		name := fmt.Sprintf("crowd-%d", i%10)
		labels := map[string]string{"app": name, "pod-template-hash": "5d4f8c7b9"}
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: podNamespace, Name: fmt.Sprintf("%s-5d4f8c7b9-%05d", name, i), Labels: labels,
				OwnerReferences: []metav1.OwnerReference{{
					APIVersion: "apps/v1", Kind: "ReplicaSet", Name: name + "-5d4f8c7b9", UID: types.UID("00000000-0000-0000-0000-00000000000" + fmt.Sprint(i%10)), Controller: ptr.To(true),
				}},
			},
			Spec: corev1.PodSpec{
				NodeName: nodeName,
				Tolerations: []corev1.Toleration{
					{Key: "broker.fluidos.eu/overflow", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule},
					{Key: corev1.TaintNodeNotReady, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](300)},
					{Key: corev1.TaintNodeUnreachable, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: ptr.To[int64](300)},
				},
				Containers: []corev1.Container{{
					Name: "main", Image: "registry.example.org/app:1", Args: []string{"serve"},
					Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1", "memory", "1Gi")},
				}},
			},
		}
		if _, err := l.set.CoreV1().Pods(podNamespace).Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("creating a pod: %w", err)
		}
	}
	return nil
}

// start binds guests and runs them.
func (l *load) start(ctx context.Context, pending <-chan guest) error {
	guests := l.set.CoreV1().Pods(guestNamespace)
	for g := range pending {
		if err := guests.Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: g.name}, Target: corev1.ObjectReference{Kind: "Node", Name: "worker"}}, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("binding a guest: %w", err)
		}
		select {
		case <-time.After(time.Until(g.seen.Add(startAfter))):
		case <-ctx.Done():
			return ctx.Err()
		}
		current, err := guests.Get(ctx, g.name, metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("reading a guest: %w", err)
		}
		current.Status = runningStatus(current)
		if _, err := guests.UpdateStatus(ctx, current, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("starting a guest: %w", err)
		}
	}
	return nil
}

// runningStatus is what a kubelet reports of a pod that runs.
func runningStatus(p *corev1.Pod) corev1.PodStatus {
	now := metav1.Now()
	status := corev1.PodStatus{
		Phase: corev1.PodRunning, QOSClass: p.Status.QOSClass, StartTime: &now,
		HostIP: "192.0.2.7", HostIPs: []corev1.HostIP{{IP: "192.0.2.7"}}, PodIP: "10.1.2.3", PodIPs: []corev1.PodIP{{IP: "10.1.2.3"}},
		ContainerStatuses: []corev1.ContainerStatus{{
			Name: "main", Image: p.Spec.Containers[0].Image, Ready: true, Started: ptr.To(true),
			ImageID:     "registry.example.org/app@sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
			ContainerID: "containerd://60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752",
			State:       corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}},
		}},
	}
	for _, kind := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: kind, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	return status
}
