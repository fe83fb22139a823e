package reservation

import "testing"

// Of a ledger that was deleted, nothing is remembered.
func TestLinesOfADeletedLedgerAreDropped(t *testing.T) {
	h := newHub(t)
	h.advertise("paris", "1")
	var lines auditLines
	h.uncertain.expect(&lines, "paris", "uid", 1, func() { t.Error("the line is logged") })
	h.AdvertisementChanged(h.store.advertisement("paris"), nil)
	if n := len(h.uncertain.lines); n > 0 {
		t.Errorf("the lines of %d ledgers are remembered", n)
	}
	h.uncertain.settle(&lines, nil)
}
