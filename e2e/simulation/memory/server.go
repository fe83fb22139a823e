// Package memory is an API server in memory with the semantics that Spillway's
// programs rely on: resource versions and conflicts, generations, UIDs, finalizers,
// preconditions, the status subresource, merge patches, and a log of changes for
// watches. Objects are copied, not encoded. It does not validate.
package memory

import (
	"errors"
	"fmt"
	"hash/fnv"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"
)

// Change is one entry of a kind's log. Its objects must not be changed.
type Change struct {
	Type watch.EventType
	// Old is nil for an added object, New is the last state of a deleted one.
	Old, New client.Object
}

// Server is an API server. Its methods are safe for concurrent use.
type Server struct {
	name   string
	scheme *runtime.Scheme
	now    func() time.Time

	mu      sync.Mutex
	version int64
	uids    int64
	kinds   map[reflect.Type]*kind
	lists   map[reflect.Type]*kind
	// writes counts the changes by kind and object.
	writes map[string]int
}

// kind is all objects of one kind.
type kind struct {
	name     string
	resource schema.GroupResource
	// status is whether the kind has the status subresource.
	status  bool
	objects map[types.NamespacedName]client.Object
	log     []Change
}

// NewServer returns an empty server for the given kinds. name is part of its UIDs.
func NewServer(name string, scheme *runtime.Scheme, now func() time.Time, kinds ...client.Object) (*Server, error) {
	s := &Server{name: name, scheme: scheme, now: now, version: 1, kinds: map[reflect.Type]*kind{}, lists: map[reflect.Type]*kind{}, writes: map[string]int{}}
	for _, object := range kinds {
		gvk, err := apiutil.GVKForObject(object, scheme)
		if err != nil {
			return nil, err
		}
		list, err := scheme.New(gvk.GroupVersion().WithKind(gvk.Kind + "List"))
		if err != nil {
			return nil, err
		}
		t := reflect.TypeOf(object)
		_, status := t.Elem().FieldByName("Status")
		k := &kind{
			name:     gvk.Kind,
			resource: schema.GroupResource{Group: gvk.Group, Resource: strings.ToLower(gvk.Kind) + "s"},
			status:   status,
			objects:  map[types.NamespacedName]client.Object{},
		}
		s.kinds[t], s.lists[reflect.TypeOf(list)] = k, k
	}
	return s, nil
}

func (s *Server) kindOf(object runtime.Object) *kind {
	if k, ok := s.kinds[reflect.TypeOf(object)]; ok {
		return k
	}
	if k, ok := s.lists[reflect.TypeOf(object)]; ok {
		return k
	}
	panic(fmt.Sprintf("%s does not serve %T", s.name, object))
}

// Version changes with every write.
func (s *Server) Version() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.version
}

// Writes is the number of changes so far, by kind and name.
func (s *Server) Writes() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make(map[string]int, len(s.writes))
	for key, n := range s.writes {
		out[key] = n
	}
	return out
}

// Count is the number of objects of a kind.
func (s *Server) Count(of client.Object) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kindOf(of).objects)
}

// Backup is the state of a server at one time.
type Backup struct {
	version int64
	objects map[*kind]map[types.NamespacedName]client.Object
}

// Backup returns the current state.
func (s *Server) Backup() *Backup {
	s.mu.Lock()
	defer s.mu.Unlock()
	b := &Backup{version: s.version, objects: map[*kind]map[types.NamespacedName]client.Object{}}
	for _, k := range s.kinds {
		b.objects[k] = copyMap(k.objects)
	}
	return b
}

// Restore returns to an earlier state, with its resource versions. Logs end: watches
// must be opened again. UIDs are not used twice.
func (s *Server) Restore(b *Backup) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version = b.version
	for _, k := range s.kinds {
		k.objects, k.log = copyMap(b.objects[k]), nil
	}
}

func copyMap(from map[types.NamespacedName]client.Object) map[types.NamespacedName]client.Object {
	to := make(map[types.NamespacedName]client.Object, len(from))
	for key, object := range from {
		to[key] = object
	}
	return to
}

// Watch returns the current objects of a kind and the position of its log.
func (s *Server) Watch(of client.Object) (objects []client.Object, position int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kindOf(of)
	for _, key := range sortedKeys(k.objects) {
		objects = append(objects, k.objects[key])
	}
	return objects, len(k.log)
}

// Changes returns the log of a kind from a position.
func (s *Server) Changes(of client.Object, position int) []Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kindOf(of).log[position:]
}

// Pending is the number of changes after a position.
func (s *Server) Pending(of client.Object, position int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.kindOf(of).log) - position
}

func sortedKeys(objects map[types.NamespacedName]client.Object) []types.NamespacedName {
	keys := make([]types.NamespacedName, 0, len(objects))
	for key := range objects {
		keys = append(keys, key)
	}
	slices.SortFunc(keys, func(a, b types.NamespacedName) int {
		if c := strings.Compare(a.Namespace, b.Namespace); c != 0 {
			return c
		}
		return strings.Compare(a.Name, b.Name)
	})
	return keys
}

// get returns the stored object, which must not be changed.
func (s *Server) get(key types.NamespacedName, of client.Object) (client.Object, error) {
	k := s.kindOf(of)
	stored, ok := k.objects[key]
	if !ok {
		return nil, apierrors.NewNotFound(k.resource, key.Name)
	}
	return stored, nil
}

// create stores a new object and copies the result into object.
func (s *Server) create(object client.Object) error {
	k := s.kindOf(object)
	key := client.ObjectKeyFromObject(object)
	if object.GetResourceVersion() != "" {
		return errors.New("resourceVersion should not be set on objects to be created")
	}
	if _, exists := k.objects[key]; exists {
		return apierrors.NewAlreadyExists(k.resource, key.Name)
	}
	stored := object.DeepCopyObject().(client.Object)
	if k.status {
		status := statusOf(stored)
		status.Set(reflect.Zero(status.Type()))
	}
	s.uids++
	stored.SetUID(s.uid())
	stored.SetCreationTimestamp(metav1.NewTime(s.now()))
	stored.SetGeneration(1)
	stored.SetDeletionTimestamp(nil)
	stored.SetManagedFields(nil)
	s.put(k, key, Change{Type: watch.Added, New: stored})
	assign(object, stored)
	return nil
}

// uid is the next UID of the server.
func (s *Server) uid() types.UID {
	h := fnv.New32a()
	h.Write([]byte(s.name))
	return types.UID(fmt.Sprintf("%08x-0000-4000-8000-%012x", h.Sum32(), s.uids))
}

// put records a change with the next resource version.
func (s *Server) put(k *kind, key types.NamespacedName, change Change) {
	truncateTimes(reflect.ValueOf(change.New))
	s.version++
	change.New.SetResourceVersion(strconv.FormatInt(s.version, 10))
	if change.Type == watch.Deleted {
		delete(k.objects, key)
	} else {
		k.objects[key] = change.New
	}
	k.log = append(k.log, change)
	s.writes[k.name+"/"+key.Name]++
}

// update replaces all of an object but its status, or its status only.
func (s *Server) update(object client.Object, statusOnly bool) error {
	k := s.kindOf(object)
	key := client.ObjectKeyFromObject(object)
	before, err := s.get(key, object)
	if err != nil {
		return err
	}
	if version := object.GetResourceVersion(); version != "" && version != before.GetResourceVersion() {
		return apierrors.NewConflict(k.resource, key.Name, fmt.Errorf("the object has been modified; please apply your changes to the latest version and try again"))
	}
	if uid := object.GetUID(); uid != "" && uid != before.GetUID() {
		return apierrors.NewConflict(k.resource, key.Name, fmt.Errorf("precondition failed: UID in precondition: %s, UID in object meta: %s", uid, before.GetUID()))
	}
	after := s.merged(k, before, object, statusOnly)
	if err := checkFinalizers(k, before, after); err != nil {
		return err
	}
	switch {
	case before.GetDeletionTimestamp() != nil && len(after.GetFinalizers()) == 0:
		s.put(k, key, Change{Type: watch.Deleted, Old: before, New: after})
	case equality.Semantic.DeepEqual(before, after):
		after = before
	default:
		s.put(k, key, Change{Type: watch.Modified, Old: before, New: after})
	}
	assign(object, after)
	return nil
}

// merged is the object after an update, with the system's metadata and the part that
// the update cannot change taken from before.
func (s *Server) merged(k *kind, before, object client.Object, statusOnly bool) client.Object {
	if statusOnly {
		after := before.DeepCopyObject().(client.Object)
		statusOf(after).Set(statusOf(object.DeepCopyObject().(client.Object)))
		return after
	}
	after := object.DeepCopyObject().(client.Object)
	after.SetUID(before.GetUID())
	after.SetCreationTimestamp(before.GetCreationTimestamp())
	after.SetDeletionTimestamp(before.GetDeletionTimestamp())
	after.SetDeletionGracePeriodSeconds(before.GetDeletionGracePeriodSeconds())
	after.SetGeneration(before.GetGeneration())
	after.SetResourceVersion(before.GetResourceVersion())
	after.SetManagedFields(nil)
	if k.status {
		statusOf(after).Set(statusOf(before.DeepCopyObject().(client.Object)))
	}
	if !sameSpec(before, after) {
		after.SetGeneration(before.GetGeneration() + 1)
	}
	return after
}

func checkFinalizers(k *kind, before, after client.Object) error {
	if before.GetDeletionTimestamp() == nil {
		return nil
	}
	for _, finalizer := range after.GetFinalizers() {
		if !slices.Contains(before.GetFinalizers(), finalizer) {
			return apierrors.NewInvalid(schema.GroupKind{Group: k.resource.Group, Kind: k.name}, after.GetName(), nil)
		}
	}
	return nil
}

// sameSpec compares all that is neither metadata nor status.
func sameSpec(a, b client.Object) bool {
	left, right := reflect.ValueOf(a).Elem(), reflect.ValueOf(b).Elem()
	for i := range left.NumField() {
		switch left.Type().Field(i).Name {
		case "TypeMeta", "ObjectMeta", "Status":
		default:
			if !equality.Semantic.DeepEqual(left.Field(i).Interface(), right.Field(i).Interface()) {
				return false
			}
		}
	}
	return true
}

// remove deletes an object, or marks it as deleted while it has finalizers.
func (s *Server) remove(object client.Object, preconditions *metav1.Preconditions) error {
	k := s.kindOf(object)
	key := client.ObjectKeyFromObject(object)
	before, err := s.get(key, object)
	if err != nil {
		return err
	}
	if p := preconditions; p != nil {
		if p.UID != nil && *p.UID != before.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != before.GetResourceVersion() {
			return apierrors.NewConflict(k.resource, key.Name, fmt.Errorf("precondition failed"))
		}
	}
	after := before.DeepCopyObject().(client.Object)
	switch {
	case len(before.GetFinalizers()) == 0:
		s.put(k, key, Change{Type: watch.Deleted, Old: before, New: after})
	case before.GetDeletionTimestamp() == nil:
		now := metav1.NewTime(s.now())
		after.SetDeletionTimestamp(&now)
		after.SetDeletionGracePeriodSeconds(new(int64))
		after.SetGeneration(before.GetGeneration() + 1)
		s.put(k, key, Change{Type: watch.Modified, Old: before, New: after})
	}
	return nil
}

func statusOf(object client.Object) reflect.Value {
	return reflect.ValueOf(object).Elem().FieldByName("Status")
}

// assign copies a stored object into the caller's.
func assign(object, stored client.Object) {
	reflect.ValueOf(object).Elem().Set(reflect.ValueOf(stored.DeepCopyObject()).Elem())
}
