package capacity

// Slots are what is free now, for tests.
func (p *Packer) Slots() []Slot { return p.slots }
