// Package kubelet simulates the kubelets of a cluster: nodes become Ready and have
// heartbeats, pods start and end, and no container runs. There are no logs, no exec, no
// traffic, no probes and no volumes.
//
// A pod whose first container has exactly the arguments "work <duration>" ends after that
// time with exit code 0, whatever its restart policy. Any other runs until it is deleted.
package kubelet

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	coordinationv1 "k8s.io/client-go/applyconfigurations/coordination/v1"
	applymetav1 "k8s.io/client-go/applyconfigurations/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/utils/ptr"
)

// Simulated is the annotation of the nodes whose kubelet is simulated, with value "true".
// No other nodes are changed, in particular no virtual nodes.
const Simulated = "playground.broker.fluidos.eu/simulated"

// workers is how many objects are written at once: real kubelets do not wait for each other.
const workers = 16

// key of a pod, or of a node, which has no namespace.
type key struct{ namespace, name string }

type kubelets struct {
	client kubernetes.Interface
	lease  time.Duration
	nodes  corelisters.NodeLister
	pods   corelisters.PodLister
	queue  workqueue.TypedDelayingInterface[key]
	// addresses counts the addresses that pods were given.
	addresses atomic.Uint32
}

// Start starts the kubelets of all nodes with annotation Simulated. Each renews its lease
// when a quarter of it is over. Stop ends them and returns when they have ended.
func Start(config *rest.Config, lease time.Duration) (stop func(), err error) {
	config = rest.CopyConfig(config)
	config.ContentType = "application/vnd.kubernetes.protobuf"
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	factory := informers.NewSharedInformerFactory(client, 0)
	nodes, pods := factory.Core().V1().Nodes(), factory.Core().V1().Pods()
	k := &kubelets{client: client, lease: lease, nodes: nodes.Lister(), pods: pods.Lister(), queue: workqueue.NewTypedDelayingQueue[key]()}
	_, err = nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(added any) { k.nodeChanged(nil, added.(*corev1.Node)) },
		UpdateFunc: func(old, changed any) { k.nodeChanged(old.(*corev1.Node), changed.(*corev1.Node)) },
	})
	if err != nil {
		return nil, err
	}
	_, err = pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(added any) { k.podChanged(nil, added.(*corev1.Pod)) },
		UpdateFunc: func(old, changed any) { k.podChanged(old.(*corev1.Pod), changed.(*corev1.Pod)) },
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	factory.Start(ctx.Done())
	var working sync.WaitGroup
	for range workers {
		working.Go(func() { k.work(ctx) })
	}
	return func() {
		cancel()
		k.queue.ShutDown()
		working.Wait()
		factory.Shutdown()
	}, nil
}

func (k *kubelets) nodeChanged(old, node *corev1.Node) {
	if old == nil || !ready(node) {
		k.queue.Add(key{name: node.Name})
	}
}

func (k *kubelets) podChanged(old, pod *corev1.Pod) {
	object := key{pod.Namespace, pod.Name}
	switch {
	case pod.Spec.NodeName == "":
	case pod.DeletionTimestamp != nil || pod.Status.StartTime != nil:
		k.queue.Add(object)
	case old == nil || old.Spec.NodeName == "":
		// As long as a container takes to start whose image is there.
		k.queue.AddAfter(object, 300*time.Millisecond+rand.N(600*time.Millisecond))
	}
}

// work handles what is queued until the queue is shut down.
func (k *kubelets) work(ctx context.Context) {
	for {
		object, stopped := k.queue.Get()
		if stopped {
			return
		}
		reconcile := k.pod
		if object.namespace == "" {
			reconcile = k.node
		}
		// An object that is gone has its own events.
		if err := reconcile(ctx, object); err != nil && !apierrors.IsNotFound(err) {
			k.queue.AddAfter(object, time.Second)
		}
		k.queue.Done(object)
	}
}

// node makes a node Ready and renews its lease, again and again.
func (k *kubelets) node(ctx context.Context, object key) error {
	node, err := k.nodes.Get(object.name)
	if err != nil || node.Annotations[Simulated] != "true" {
		return err
	}
	lease := coordinationv1.Lease(node.Name, corev1.NamespaceNodeLease).
		WithOwnerReferences(applymetav1.OwnerReference().WithAPIVersion("v1").WithKind("Node").WithName(node.Name).WithUID(node.UID)).
		WithSpec(coordinationv1.LeaseSpec().WithHolderIdentity(node.Name).
			WithLeaseDurationSeconds(int32(k.lease.Seconds())).WithRenewTime(metav1.NowMicro()))
	options := metav1.ApplyOptions{FieldManager: "simulated-kubelet", Force: true}
	if _, err := k.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Apply(ctx, lease, options); err != nil {
		return retried(err)
	}
	if !ready(node) {
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID}, "status": nodeStatus(node)})
		if err != nil {
			return err
		}
		if _, err := k.client.CoreV1().Nodes().PatchStatus(ctx, node.Name, body); err != nil {
			return err
		}
	}
	k.queue.AddAfter(object, k.lease/4-rand.N(k.lease/50))
	return nil
}

// pod starts, ends or deletes a pod of a simulated node, if it is time.
func (k *kubelets) pod(ctx context.Context, object key) error {
	pod, err := k.pods.Pods(object.namespace).Get(object.name)
	if err != nil {
		return err
	}
	node, err := k.nodes.Get(pod.Spec.NodeName)
	if err != nil {
		return retried(err) // the pod was seen before its node
	}
	switch {
	case node.Annotations[Simulated] != "true":
		return nil
	case pod.DeletionTimestamp != nil:
		return k.remove(ctx, pod)
	case pod.Status.StartTime == nil:
		return k.writeStatus(ctx, pod, started(pod, k.address()))
	}
	after, works := workTime(pod)
	if pod.Status.Phase != corev1.PodRunning || !works {
		return nil
	}
	// The start is written without fractions of a second.
	if left := time.Until(pod.Status.StartTime.Add(time.Second + after)); left > 0 {
		k.queue.AddAfter(object, left)
		return nil
	}
	return k.writeStatus(ctx, pod, ended(pod, corev1.PodSucceeded, 0))
}

// remove deletes a pod that is terminating: its containers need no time to stop.
func (k *kubelets) remove(ctx context.Context, pod *corev1.Pod) error {
	if ptr.Deref(pod.DeletionGracePeriodSeconds, 0) == 0 {
		return nil // deleted already, and perhaps kept by a finalizer
	}
	// Controllers such as that of Jobs remove their finalizer from pods that have ended.
	if len(pod.Finalizers) > 0 && pod.Status.Phase == corev1.PodRunning {
		if err := k.writeStatus(ctx, pod, ended(pod, corev1.PodFailed, 143)); err != nil {
			return err
		}
	}
	return k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To(int64(0)), Preconditions: metav1.NewUIDPreconditions(string(pod.UID)),
	})
}

func (k *kubelets) writeStatus(ctx context.Context, pod *corev1.Pod, status corev1.PodStatus) error {
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": status})
	if err != nil {
		return err
	}
	_, err = k.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "status")
	return err
}

// address returns an address that no other pod of the cluster has.
func (k *kubelets) address() string {
	n := k.addresses.Add(1)
	return fmt.Sprintf("10.%d.%d.%d", 128+n>>16&127, n>>8&255, n&255)
}

// retried makes an error one that is retried, also if it says that an object is not found.
func retried(err error) error { return fmt.Errorf("retried: %v", err) }
