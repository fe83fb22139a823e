package reservation

import (
	"errors"
	"testing"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

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

// The change of which the answer was lost is tried again before the watch shows it. That this
// conflicts, or is computed again, says nothing of the first try: its line is logged, once.
func TestLineOfALostAnswerOutlivesARetry(t *testing.T) {
	for name, retry := range map[string]func(u *uncertain, of *auditLines, log func()){
		"a conflict": func(u *uncertain, of *auditLines, log func()) {
			u.expect(of, "paris", "uid", 2, log)
			u.settle(of, errOutdated)
		},
		"nothing left to do": func(u *uncertain, of *auditLines, log func()) {
			u.expect(of, "paris", "uid", 2, log)
			u.forget(of)
			u.settle(of, nil)
		},
		"success": func(u *uncertain, of *auditLines, log func()) {
			u.expect(of, "paris", "uid", 2, log)
			u.settle(of, nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHub(t)
			logged := 0
			log := func() { logged++ }
			var first, second auditLines
			h.uncertain.expect(&first, "paris", "uid", 2, log)
			h.uncertain.settle(&first, errors.New("the answer was lost"))
			retry(h.uncertain, &second, log)
			ad := &broker.ClusterAdvertisement{Status: broker.ClusterAdvertisementStatus{Holds: []broker.Hold{{ReservationUID: "uid", Attempt: 2}}}}
			ad.Name = "paris"
			for range 2 {
				h.uncertain.observe(ad)
			}
			if logged != 1 || len(h.uncertain.lines) > 0 {
				t.Errorf("the line is logged %d times, those of %d ledgers are remembered", logged, len(h.uncertain.lines))
			}
		})
	}
}
