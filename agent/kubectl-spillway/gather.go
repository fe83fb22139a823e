package main

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// maxPods is how many pods of a workload or a gang are read, maxEvents how many events of a pod.
const (
	maxPods   = 2000
	maxEvents = 500
)

// guesses are the types of a name without a type, in this order.
var guesses = []string{"pods", "deployments.apps", "statefulsets.apps", "jobs.batch", "reservations." + broker.Group}

// observe reads all that an explanation is made from.
func (o *options) observe(r *reader, argument string) (*explain.Observed, error) {
	namespace, err := o.namespace()
	if err != nil {
		return nil, err
	}
	asked, err := o.find(r, namespace, argument)
	if err != nil {
		return nil, err
	}
	observed := &explain.Observed{System: o.system, Asked: explain.Object{Kind: asked.GetKind(), Namespace: namespace, Name: asked.GetName()}}
	var reservations broker.ReservationList
	var policies broker.OverflowPolicyList
	var instructions broker.ReservationInstructionList
	var nodes corev1.NodeList
	r.list(explain.Reservations, &reservations, client.InNamespace(namespace))
	r.list(explain.Policies, &policies)
	r.list(explain.Instructions, &instructions, client.InNamespace(o.system))
	r.list(explain.Nodes, &nodes, client.HasLabels{broker.LabelProvider})
	ns := &corev1.Namespace{}
	if r.get(explain.Namespaces, ns, "", namespace) {
		observed.Namespace = ns
	}
	if asked.GroupVersionKind().GroupKind() != broker.GroupVersion.WithKind("Reservation").GroupKind() {
		if err := o.observePods(r, asked, observed); err != nil {
			return nil, err
		}
	}
	observed.Unreadable = r.wait()
	if err := r.err(o); err != nil {
		return nil, err
	}
	observed.Reservations, observed.Policies, observed.Instructions, observed.Nodes = reservations.Items, policies.Items, instructions.Items, nodes.Items
	if observed.Pod != nil {
		o.observeOwner(r, observed)
		observed.Unreadable = r.wait()
	}
	return observed, nil
}

// find reads the object that an argument names: TYPE/NAME, or a name of one of the types guessed.
func (o *options) find(r *reader, namespace, argument string) (*unstructured.Unstructured, error) {
	kind, name, typed := strings.Cut(argument, "/")
	kinds := []string{kind}
	if !typed {
		kinds, name = guesses, argument
	}
	if name == "" || kind == "" || strings.Contains(name, "/") {
		return nil, fmt.Errorf("%q is neither a name nor TYPE/NAME, such as deployment/web", argument)
	}
	var denied []string
	for _, kind := range kinds {
		object, err := o.read(r, namespace, kind, name)
		switch {
		case err == nil:
			return object, nil
		case apierrors.IsForbidden(err):
			denied = append(denied, "get "+kind+" in namespace "+namespace)
		case meta.IsNoMatchError(err) && typed:
			return nil, fmt.Errorf("%s has no type %q", o.cluster(), kind)
		case !apierrors.IsNotFound(err) && !meta.IsNoMatchError(err):
			return nil, fmt.Errorf("reading %s %s/%s from %s: %w", kind, namespace, name, o.cluster(), err)
		}
	}
	if len(denied) > 0 {
		return nil, fmt.Errorf("%q was not found in namespace %s, and you may not %s", argument, namespace, strings.Join(denied, ", "))
	}
	if typed {
		return nil, fmt.Errorf("%s %q does not exist in namespace %s", kind, name, namespace)
	}
	return nil, fmt.Errorf("namespace %s has no pod, Deployment, StatefulSet, Job or Reservation %q", namespace, name)
}

// read reads an object of a type as kubectl names them.
func (o *options) read(r *reader, namespace, kind, name string) (*unstructured.Unstructured, error) {
	gvk, err := o.kindOf(kind)
	if err != nil {
		return nil, err
	}
	object := &unstructured.Unstructured{}
	object.SetGroupVersionKind(gvk)
	return object, r.Get(r.ctx, client.ObjectKey{Namespace: namespace, Name: name}, object)
}

// kindOf returns the kind of a type, which may be a short name, or have a version or group.
func (o *options) kindOf(resource string) (schema.GroupVersionKind, error) {
	mapper, err := o.flags.ToRESTMapper()
	if err != nil {
		return schema.GroupVersionKind{}, err
	}
	full, group := schema.ParseResourceArg(strings.ToLower(resource))
	if full != nil {
		if gvk, err := mapper.KindFor(*full); err == nil {
			return gvk, nil
		}
	}
	return mapper.KindFor(group.WithVersion(""))
}

// observePods reads the pods of what is asked about, and chooses the one to explain.
func (o *options) observePods(r *reader, asked *unstructured.Unstructured, observed *explain.Observed) error {
	if asked.GroupVersionKind() == corev1.SchemeGroupVersion.WithKind("Pod") {
		observed.Pod = &corev1.Pod{}
		return runtime.DefaultUnstructuredConverter.FromUnstructured(asked.Object, observed.Pod)
	}
	var workload struct {
		Spec struct {
			Selector *metav1.LabelSelector   `json:"selector"`
			Template *corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(asked.Object, &workload)
	if err != nil || workload.Spec.Selector == nil || workload.Spec.Template == nil {
		return fmt.Errorf("a %s does not say which pods are its own: name one of its pods", asked.GetKind())
	}
	selector, err := metav1.LabelSelectorAsSelector(workload.Spec.Selector)
	if err != nil {
		return fmt.Errorf("the selector of %s: %w", observed.Asked, err)
	}
	var pods corev1.PodList
	options := []client.ListOption{client.InNamespace(asked.GetNamespace()), client.MatchingLabelsSelector{Selector: selector}, client.Limit(maxPods)}
	if err := r.List(r.ctx, &pods, options...); err != nil {
		if apierrors.IsForbidden(err) {
			return fmt.Errorf("you may not list pods in namespace %s", asked.GetNamespace())
		}
		return fmt.Errorf("listing the pods of %s: %w", observed.Asked, err)
	}
	observed.Siblings = pods.Items
	observed.Pod = explain.Choose(pods.Items)
	if observed.Pod == nil {
		template := workload.Spec.Template
		observed.Pod = &corev1.Pod{ObjectMeta: template.ObjectMeta, Spec: template.Spec}
		observed.Pod.Namespace, observed.Pod.Name = asked.GetNamespace(), asked.GetName()
		isController := true
		observed.Pod.OwnerReferences = []metav1.OwnerReference{{
			APIVersion: asked.GetAPIVersion(), Kind: asked.GetKind(), Name: asked.GetName(), UID: asked.GetUID(), Controller: &isController}}
	}
	return nil
}

// observeOwner reads whose the pod is, its gang and its events, and finds its Reservation.
func (o *options) observeOwner(r *reader, observed *explain.Observed) {
	pod := observed.Pod
	chain := map[types.UID]bool{demand.SharedOwner: true}
	resolve := func(namespace string, ref metav1.OwnerReference) (*metav1.OwnerReference, bool) {
		chain[ref.UID] = true
		owner := &metav1.PartialObjectMetadata{}
		owner.SetGroupVersionKind(schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind))
		if !r.get(explain.Owners, owner, namespace, ref.Name) {
			return nil, true // the last that is known
		}
		return metav1.GetControllerOf(owner), true
	}
	key, owner, _, _ := demand.KeyOf(pod, resolve)
	chain[owner.UID] = true
	if owner.UID != demand.SharedOwner {
		observed.Owner = &owner
	}
	observed.ReservationName = key.Name(owner.Name)
	// The scheduler may follow fewer kinds of controllers.
	of := key.OfReservation()
	for i := range observed.Reservations {
		if k, ok := demand.KeyOfReservation(&observed.Reservations[i]); ok && k.Shape == of.Shape && (k.OwnerUID == of.OwnerUID || chain[k.OwnerUID] && k.OwnerUID != demand.SharedOwner) {
			observed.ReservationName = observed.Reservations[i].Name
		}
	}
	o.observeGang(r, observed)
	if pod.UID != "" {
		var events corev1.EventList
		r.list(explain.Events, &events, client.InNamespace(pod.Namespace), client.MatchingFields{"involvedObject.uid": string(pod.UID)}, client.Limit(maxEvents))
		r.wait()
		observed.Events = explain.Latest(events.Items)
	}
}

// observeGang reads what describes the gang of the pod, and counts its pods.
func (o *options) observeGang(r *reader, observed *explain.Observed) {
	gang, ok := demand.GangOf(observed.Pod)
	if !ok {
		return
	}
	resource, name := "podgroups", gang.PodGroup
	if gang.Workload != "" {
		resource, name = "workloads", gang.Workload
	}
	g := &explain.Gang{Group: gang.String()}
	group, err := o.read(r, observed.Pod.Namespace, resource+"."+gang.API, name)
	switch {
	case meta.IsNoMatchError(err) && gang.API == demand.CoschedulingGangs:
		return // without the CRD, the label means nothing
	case apierrors.IsNotFound(err), meta.IsNoMatchError(err):
		g.Missing = true
	case err != nil:
		r.note("get", explain.PodGroups, observed.Pod.Namespace, err)
	default:
		g.Min = int32(min(explain.Minimum(group, gang), 1<<30))
	}
	var pods corev1.PodList
	err = r.List(r.ctx, &pods, client.InNamespace(observed.Pod.Namespace), client.Limit(maxPods))
	if !r.note("list", "pods", observed.Pod.Namespace, err) {
		g.Min = 0
	}
	for i := range pods.Items {
		pod := &pods.Items[i]
		if of, ok := demand.GangOf(pod); !ok || of != gang || pod.DeletionTimestamp != nil || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		if g.Members++; len(pod.Spec.SchedulingGates) == 0 {
			g.Ungated++
		}
	}
	observed.Gang = g
}
