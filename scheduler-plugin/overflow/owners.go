package overflow

import (
	"context"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/owners"
)

// ownerCache looks up the controllers of owners. ReplicaSets and StatefulSets are the
// scheduler's own informers; of Jobs, which it does not watch, only names, UIDs and owners
// are kept. Those of the argument ownerKinds are read one by one.
type ownerCache struct {
	// informers by kind.
	informers map[string]cache.SharedIndexInformer
	jobs      cache.SharedIndexInformer
	others    *owners.Lookup
}

func newOwnerCache(log klog.Logger, config *rest.Config, handle framework.Handle, kinds []owners.Kind) (*ownerCache, error) {
	others, err := owners.New(log, clock.RealClock{}, config, kinds)
	if err != nil {
		return nil, err
	}
	client, err := metadata.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client for metadata: %w", err)
	}
	jobs := metadatainformer.NewFilteredMetadataInformer(client, batchv1.SchemeGroupVersion.WithResource("jobs"), metav1.NamespaceAll, 0, cache.Indexers{}, nil).Informer()
	if err := jobs.SetTransform(keepOwners); err != nil {
		return nil, fmt.Errorf("watching Jobs: %w", err)
	}
	apps := handle.SharedInformerFactory().Apps().V1()
	return &ownerCache{jobs: jobs, others: others, informers: map[string]cache.SharedIndexInformer{
		"ReplicaSet": apps.ReplicaSets().Informer(), "StatefulSet": apps.StatefulSets().Informer(), "Job": jobs,
	}}, nil
}

// keepOwners drops what find does not read.
func keepOwners(obj any) (any, error) {
	if o, ok := obj.(*metav1.PartialObjectMetadata); ok {
		o.ObjectMeta = metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion, OwnerReferences: o.OwnerReferences}
	}
	return obj, nil
}

// watch calls added for each new owner.
func (o *ownerCache) watch(added func()) error {
	for kind, informer := range o.informers {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(any) { added() }}); err != nil {
			return fmt.Errorf("watching %ss: %w", kind, err)
		}
	}
	return nil
}

// run runs the informer of Jobs and the look-ups until ctx ends. resolved is called after
// each of these.
func (o *ownerCache) run(ctx context.Context, resolved func()) {
	go o.others.Run(ctx, resolved)
	o.jobs.RunWithContext(ctx)
}

// find implements findOwner.
func (o *ownerCache) find(namespace string, ref metav1.OwnerReference) (controller *metav1.OwnerReference, found, refused bool) {
	kind, ok := demand.Resolvable(ref)
	if !ok {
		return o.others.Find(namespace, ref)
	}
	obj, exists, err := o.informers[kind.Kind].GetIndexer().GetByKey(namespace + "/" + ref.Name)
	if err != nil || !exists {
		return nil, false, false
	}
	owner, ok := obj.(metav1.Object)
	if !ok || owner.GetUID() != ref.UID {
		return nil, false, false
	}
	return metav1.GetControllerOfNoCopy(owner), true, false
}
