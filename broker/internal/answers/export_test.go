package answers

const MaxEntries = maxEntries

// Len is the number of entries that are kept of a provider.
func (m *Memory) Len(cluster string) int {
	m.mutex.Lock()
	defer m.mutex.Unlock()
	return len(m.entries[cluster])
}
