package capacity

import (
	"cmp"
	"encoding/binary"
	"maps"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// layout is an order of resources, as by Kinds, in which amounts are written as plain
// numbers.
type layout struct {
	id    int
	kinds []corev1.ResourceName
}

// write writes amounts in the layout's order, without those that it does not have.
func (l *layout) write(v Vector) []int64 {
	out := make([]int64, len(l.kinds))
	for i, name := range l.kinds {
		out[i] = v[name]
	}
	return out
}

// has reports whether the layout has all resources of v of which there are any.
func (l *layout) has(v Vector) bool {
	for name, amount := range v {
		if amount > 0 && !slices.Contains(l.kinds, name) {
			return false
		}
	}
	return true
}

func (l *layout) vector(amounts []int64) Vector {
	v := make(Vector, len(l.kinds))
	for i, name := range l.kinds {
		v[name] = amounts[i]
	}
	return v
}

// nodeClass is what pods see of the nodes of a class.
type nodeClass struct {
	id int
	// node is the name of the only node, if there is only one.
	node   string
	labels map[string]string
	taints []corev1.Taint
}

func newNodeClass(id int, class *broker.NodeClass, node string) *nodeClass {
	c := &nodeClass{id: id, node: node, labels: class.Labels, taints: class.Taints}
	if _, ok := c.labels[corev1.LabelArchStable]; !ok && class.Arch != "" {
		c.labels = map[string]string{corev1.LabelArchStable: class.Arch}
		maps.Copy(c.labels, class.Labels)
	}
	return c
}

// Catalog numbers the node classes of many clusters, so that pods of one shape are
// compared only once with classes that are equal. It is safe for concurrent use.
type Catalog struct {
	mu      sync.Mutex
	classes map[string]*nodeClass
	layouts map[string]*layout
	// matches of shapes, by their key. A slice does not change any more.
	matches map[string][]match
}

// maxShapes is how many shapes a Catalog remembers.
const maxShapes = 512

// Len is how many different node classes the catalog has seen.
func (c *Catalog) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.classes)
}

func (c *Catalog) class(class *broker.NodeClass) *nodeClass {
	// Nothing in the key depends on the contents being valid: each text has its length
	// before it.
	var key []byte
	add := func(text string) {
		key = append(binary.AppendUvarint(key, uint64(len(text))), text...)
	}
	key = binary.AppendUvarint(key, uint64(len(class.Labels)))
	for _, name := range slices.Sorted(maps.Keys(class.Labels)) {
		add(name)
		add(class.Labels[name])
	}
	for _, taint := range class.Taints {
		add(taint.Key)
		add(taint.Value)
		add(string(taint.Effect))
	}
	add(class.Arch)

	c.mu.Lock()
	defer c.mu.Unlock()
	known, ok := c.classes[string(key)]
	if !ok {
		if c.classes == nil {
			c.classes = map[string]*nodeClass{}
		}
		known = newNodeClass(len(c.classes), class, "")
		c.classes[string(key)] = known
	}
	return known
}

func (c *Catalog) layout(kinds []corev1.ResourceName) *layout {
	var key []byte
	for _, name := range kinds {
		key = append(append(key, name...), 0)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known, ok := c.layouts[string(key)]
	if !ok {
		if c.layouts == nil {
			c.layouts = map[string]*layout{}
		}
		known = &layout{id: len(c.layouts), kinds: kinds}
		c.layouts[string(key)] = known
	}
	return known
}

// Room is the free capacity of a cluster's nodes in the form that packing is quick
// with. It is immutable.
type Room struct {
	catalog *Catalog
	layout  *layout
	// classes of the slots.
	classes []*nodeClass
	// slots, the fullest first, one row for each: what one node has free in the order
	// of the layout, and then the figures of row.
	slots []int64
}

// The figures in a slot's row after what is free.
const (
	// rowPods is how many more pods one node may run.
	rowPods = iota
	// rowClass is the order of the class's name (upper half) and the class's id.
	rowClass
	// rowNodes is how many nodes there are.
	rowNodes
	rowFigures
)

// Room prepares the free shapes of node classes. Other amounts of the same cluster
// can be compared with it if they have no resource besides those of the shapes and of
// also.
func (c *Catalog) Room(classes []broker.NodeClass, also ...Vector) *Room {
	slots := Slots(classes)
	known := make(map[*broker.NodeClass]*nodeClass, len(classes))
	for i := range classes {
		known[&classes[i]] = c.class(&classes[i])
	}
	kinds := Vector{}
	for _, v := range also {
		maps.Copy(kinds, v)
	}
	for i := range slots {
		maps.Copy(kinds, slots[i].Free)
	}
	return newRoom(c, c.layout(kinds.Kinds()), slots, known)
}

func newRoom(catalog *Catalog, l *layout, slots []Slot, classes map[*broker.NodeClass]*nodeClass) *Room {
	r := &Room{catalog: catalog, layout: l, slots: make([]int64, 0, len(slots)*(len(l.kinds)+rowFigures))}
	order := map[string]int64{}
	for _, slot := range slots {
		order[slot.Class.Name] = 0
	}
	for i, name := range slices.Sorted(maps.Keys(order)) {
		order[name] = int64(i)
	}
	slots = slices.Clone(slots)
	slices.SortStableFunc(slots, func(a, b Slot) int {
		return cmp.Or(compareBy(l.kinds, a.Free, b.Free), cmp.Compare(a.Pods, b.Pods), cmp.Compare(a.Class.Name, b.Class.Name))
	})
	seen := map[*nodeClass]bool{}
	for _, slot := range slots {
		class := classes[slot.Class]
		if !seen[class] {
			seen[class] = true
			r.classes = append(r.classes, class)
		}
		for _, name := range l.kinds {
			r.slots = append(r.slots, slot.Free[name])
		}
		r.slots = append(r.slots, slot.Pods, order[slot.Class.Name]<<32|int64(class.id), slot.Nodes)
	}
	return r
}

// Covers reports whether amounts can be compared with the room.
func (r *Room) Covers(amounts ...Vector) bool {
	return !slices.ContainsFunc(amounts, func(v Vector) bool { return !r.layout.has(v) })
}

// SameClasses reports whether node classes are the same, so that one Room is for both.
// It costs less than to make a Room.
func SameClasses(a, b []broker.NodeClass) bool {
	if len(a) > 0 && len(b) > 0 && &a[0] == &b[0] {
		return len(a) == len(b)
	}
	return slices.EqualFunc(a, b, func(a, b broker.NodeClass) bool {
		return a.Name == b.Name && a.Arch == b.Arch && maps.Equal(a.Labels, b.Labels) &&
			slices.EqualFunc(a.Taints, b.Taints, func(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }) &&
			slices.EqualFunc(a.FreeShapes, b.FreeShapes, func(a, b broker.FreeShape) bool {
				return a.Nodes == b.Nodes && a.Pods == b.Pods && sameAmounts(&a.Free, &b.Free)
			})
	})
}

func sameAmounts(a, b *broker.ResourceQuantities) bool {
	same := func(a, b *resource.Quantity) bool {
		if a == nil || b == nil {
			return a == b
		}
		// Cmp may write to its receiver, and others read this one.
		unshared := *a
		return unshared.Cmp(*b) == 0
	}
	return same(a.CPU, b.CPU) && same(a.Memory, b.Memory) && same(a.GPU, b.GPU) && same(a.Storage, b.Storage) &&
		maps.EqualFunc(a.Extended, b.Extended, func(a, b resource.Quantity) bool { return a.Cmp(b) == 0 })
}

// Amounts are written in the order of the room's resources.
func (r *Room) Amounts(v Vector) []int64 { return r.layout.write(v) }

// Less is the room without what is promised, see Packer.Reserve.
func (r *Room) Less(sets []broker.PodSet, total Vector) *Room {
	var p Packer
	p.Reset(r)
	p.Reserve(sets, total)
	return &Room{catalog: r.catalog, layout: r.layout, classes: r.classes, slots: p.slots}
}
