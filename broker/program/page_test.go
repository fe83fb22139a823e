package program_test

import (
	"testing"

	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestBrokerWithoutPage: a certificate of the page that is not there keeps no broker from running.
func TestBrokerWithoutPage(t *testing.T) {
	b, err := program.New(t.Context(), controlplane.Start(t), program.Options{
		Namespace: namespace, Listen: "127.0.0.1:0", Metrics: "0", Probes: "0", CatchUp: program.DefaultCatchUp, Page: ":0", PageCertPath: t.TempDir(),
	})
	expect.NoError(t, err)
	if b.PageAddress != nil {
		t.Errorf("there is a page at %s", b.PageAddress)
	}
}
