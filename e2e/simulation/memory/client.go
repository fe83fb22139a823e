package memory

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Client returns a client that reads and writes the server's state at once.
func (s *Server) Client() client.Client { return &direct{server: s} }

// direct implements the methods of client.Client that Spillway's programs call; the
// others panic.
type direct struct {
	client.Client
	server *Server
}

func (d *direct) Scheme() *runtime.Scheme { return d.server.scheme }

func (d *direct) GroupVersionKindFor(object runtime.Object) (schema.GroupVersionKind, error) {
	return apiutil.GVKForObject(object, d.server.scheme)
}

func (d *direct) Get(_ context.Context, key client.ObjectKey, object client.Object, _ ...client.GetOption) error {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	stored, err := d.server.get(key, object)
	if err != nil {
		return err
	}
	assign(object, stored)
	return nil
}

func (d *direct) List(_ context.Context, list client.ObjectList, options ...client.ListOption) error {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	list.SetResourceVersion(strconv.FormatInt(d.server.version, 10))
	metadata, only := list.(*metav1.PartialObjectMetadataList)
	if only {
		return d.metadata(metadata, options...)
	}
	return Select(list, sortedObjects(d.server.kindOf(list)), nil, options...)
}

// metadata lists the metadata of the kind that the list is for.
func (d *direct) metadata(list *metav1.PartialObjectMetadataList, options ...client.ListOption) error {
	typed, err := d.server.scheme.New(list.GroupVersionKind())
	if err != nil {
		return err
	}
	var objects []client.Object
	for _, object := range sortedObjects(d.server.kindOf(typed)) {
		objects = append(objects, &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Namespace: object.GetNamespace(), Name: object.GetName(), UID: object.GetUID(), ResourceVersion: object.GetResourceVersion(), Labels: object.GetLabels(),
		}})
	}
	return Select(list, objects, nil, options...)
}

func sortedObjects(k *kind) (objects []client.Object) {
	for _, key := range sortedKeys(k.objects) {
		objects = append(objects, k.objects[key])
	}
	return objects
}

// Select copies the objects that match the options into a list. matches reports
// whether an object has a value in an indexed field.
func Select(list client.ObjectList, objects []client.Object, matches func(object client.Object, field, value string) bool, options ...client.ListOption) error {
	var o client.ListOptions
	o.ApplyOptions(options)
	items := reflect.ValueOf(list).Elem().FieldByName("Items")
	items.SetZero()
	for _, object := range objects {
		if o.Namespace != "" && object.GetNamespace() != o.Namespace {
			continue
		}
		if o.LabelSelector != nil && !o.LabelSelector.Matches(labelSet(object.GetLabels())) {
			continue
		}
		if o.FieldSelector != nil && !fieldsMatch(o.FieldSelector, object, matches) {
			continue
		}
		if o.UnsafeDisableDeepCopy == nil || !*o.UnsafeDisableDeepCopy {
			object = object.DeepCopyObject().(client.Object)
		}
		items.Set(reflect.Append(items, reflect.ValueOf(object).Elem()))
	}
	return nil
}

type labelSet map[string]string

func (l labelSet) Has(label string) bool              { _, ok := l[label]; return ok }
func (l labelSet) Get(label string) string            { return l[label] }
func (l labelSet) Lookup(label string) (string, bool) { v, ok := l[label]; return v, ok }

func fieldsMatch(selector fields.Selector, object client.Object, matches func(client.Object, string, string) bool) bool {
	for _, requirement := range selector.Requirements() {
		switch {
		case requirement.Field == "metadata.name":
			if object.GetName() != requirement.Value {
				return false
			}
		case matches == nil || !matches(object, requirement.Field, requirement.Value):
			return false
		}
	}
	return true
}

func (d *direct) Create(_ context.Context, object client.Object, _ ...client.CreateOption) error {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	return d.server.create(object)
}

func (d *direct) Update(_ context.Context, object client.Object, _ ...client.UpdateOption) error {
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	return d.server.update(object, false)
}

func (d *direct) Delete(_ context.Context, object client.Object, options ...client.DeleteOption) error {
	var o client.DeleteOptions
	o.ApplyOptions(options)
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	return d.server.remove(object, o.Preconditions)
}

func (d *direct) Patch(_ context.Context, object client.Object, patch client.Patch, _ ...client.PatchOption) error {
	return d.patch(object, patch, false)
}

func (d *direct) Status() client.SubResourceWriter { return &status{direct: d} }

type status struct {
	client.SubResourceWriter
	*direct
}

func (s *status) Create(context.Context, client.Object, client.Object, ...client.SubResourceCreateOption) error {
	panic("status has no create")
}

func (s *status) Apply(context.Context, runtime.ApplyConfiguration, ...client.SubResourceApplyOption) error {
	panic("the server in memory does not apply")
}

func (s *status) Update(_ context.Context, object client.Object, _ ...client.SubResourceUpdateOption) error {
	s.server.mu.Lock()
	defer s.server.mu.Unlock()
	return s.server.update(object, true)
}

func (s *status) Patch(_ context.Context, object client.Object, patch client.Patch, _ ...client.SubResourcePatchOption) error {
	return s.direct.patch(object, patch, true)
}

// patch applies a merge patch. One with an optimistic lock changes exactly the version
// that it was computed from: it is an update, and needs no encoding.
func (d *direct) patch(object client.Object, patch client.Patch, statusOnly bool) error {
	if locked(patch) {
		d.server.mu.Lock()
		defer d.server.mu.Unlock()
		return d.server.update(object, statusOnly)
	}
	if patch.Type() != types.MergePatchType {
		panic(fmt.Sprintf("the server in memory does not apply a %s", patch.Type()))
	}
	data, err := patch.Data(object)
	if err != nil {
		return err
	}
	d.server.mu.Lock()
	defer d.server.mu.Unlock()
	before, err := d.server.get(client.ObjectKeyFromObject(object), object)
	if err != nil {
		return err
	}
	after := reflect.New(reflect.TypeOf(object).Elem()).Interface().(client.Object)
	if err := merge(before, data, after); err != nil {
		return err
	}
	if err := d.server.update(after, statusOnly); err != nil {
		return err
	}
	assign(object, after)
	return nil
}

// locked reports whether a patch has the optimistic lock of MergeFromWithOptimisticLock.
func locked(patch client.Patch) bool {
	v := reflect.ValueOf(patch)
	if v.Kind() != reflect.Pointer || v.Elem().Kind() != reflect.Struct {
		return false
	}
	options := v.Elem().FieldByName("opts")
	return options.IsValid() && options.FieldByName("OptimisticLock").Bool()
}

// merge decodes before with a JSON merge patch applied into after.
func merge(before client.Object, patch []byte, after client.Object) error {
	encoded, err := json.Marshal(before)
	if err != nil {
		return err
	}
	var target, changes any
	if err := json.Unmarshal(encoded, &target); err != nil {
		return err
	}
	if err := json.Unmarshal(patch, &changes); err != nil {
		return err
	}
	if encoded, err = json.Marshal(merged(target, changes)); err != nil {
		return err
	}
	return json.Unmarshal(encoded, after)
}

func merged(target, changes any) any {
	fields, ok := changes.(map[string]any)
	if !ok {
		return changes
	}
	object, ok := target.(map[string]any)
	if !ok {
		object = map[string]any{}
	}
	for name, value := range fields {
		if value == nil {
			delete(object, name)
		} else {
			object[name] = merged(object[name], value)
		}
	}
	return object
}
