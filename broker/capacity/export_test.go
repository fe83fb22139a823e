package capacity

import broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"

// Slots are what is free now, for tests. The classes are numbered.
func (p *Packer) Slots() []Slot {
	var slots []Slot
	for at := 0; at < len(p.slots); at += p.width() {
		slot := p.slots[at : at+p.width()]
		figures := slot[len(p.layout.kinds):]
		if figures[rowNodes] > 0 {
			slots = append(slots, Slot{Class: &broker.NodeClass{Name: string(rune('a' + figures[rowClass]>>32))},
				Nodes: figures[rowNodes], Free: p.layout.vector(slot), Pods: figures[rowPods]})
		}
	}
	return slots
}
