package reservation_test

import (
	"errors"
	"testing"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestRepeatedAdvertisement: what is known to be stored is not stored again, and what is
// not known, or has changed since, is.
func TestRepeatedAdvertisement(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	e := newEnv(t, controlplane.Start(t))
	p := e.start(nil)
	spec := e.spec("paris", "1")
	repeat := func(digest uint64, sequence int64) (known bool, err error) {
		return p.RepeatAdvertisement(e.Context(), "paris", digest, sequence, metav1.Time{Time: e.clock.Now()})
	}
	expectKnown := func(what string, digest uint64, want bool) {
		t.Helper()
		spec.Sequence++
		if known, err := repeat(digest, spec.Sequence); known != want || err != nil {
			t.Errorf("%s: known %v, %v", what, known, err)
		}
	}
	expectKnown("before the first", 1, false)
	p.advertise(spec)
	expectKnown("not remembered", 1, false)
	p.Remember("paris", spec, 1)
	expectKnown("remembered", 1, true)
	expectKnown("another content", 2, false)
	var outdated *protocol.OutdatedError
	if known, err := repeat(1, spec.Sequence-5); !known || !errors.As(err, &outdated) {
		t.Errorf("an older one: known %v, %v", known, err)
	}
	other := spec
	other.EndpointURL = "https://elsewhere.test"
	p.Remember("paris", other, 3)
	expectKnown("what is not stored", 3, false)
	ad := e.ad("paris")
	ad.Spec.EndpointURL = other.EndpointURL
	expect.NoError(t, e.client.Update(e.Context(), ad))
	expect.Eventually(t, "the change by another to be seen", func() (bool, string) {
		spec.Sequence++
		known, err := repeat(1, spec.Sequence)
		return !known && err == nil, "it is not"
	})
	spec.Sequence++
	p.advertise(spec)
	p.Remember("paris", spec, 1)
	expectKnown("stored again", 1, true)
}
