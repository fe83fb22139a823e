package identity

import (
	"context"
	"crypto/x509"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// testMisses counts what the calls of a cluster cost that is not registered.
func (f *fixture) testMisses(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(f.now)
	counted := &countingClient{Client: f.api}
	a := &Authority{Options: Options{Client: counted, Cache: f.api, Namespace: namespace, Clock: clock, ClientValidity: time.Hour}, misses: newMisses(clock)}
	a.cas.Store(f.cas.Load())
	clusterKey := newKey(t)
	spki, err := x509.MarshalPKIXPublicKey(clusterKey.Public())
	expect.NoError(t, err)
	known := func() bool {
		t.Helper()
		err := a.admitted(t.Context(), "madrid", protocol.KeyFingerprint(spki))
		if err != nil && !protocol.HasCode(err, protocol.CodeUnauthorized) {
			t.Fatal(err)
		}
		return err == nil
	}
	for range 100 {
		if known() {
			t.Fatal("a cluster that has not joined is known")
		}
	}
	if counted.reads != 1 {
		t.Fatalf("100 calls cost %d reads", counted.reads)
	}
	clock.SetTime(f.now.Add(missPeriod + 1))
	if known() || counted.reads != 2 {
		t.Fatalf("want another read after %s, got %d", missPeriod, counted.reads)
	}
	// At the replica at which it joins, a cluster is known at once.
	_, err = a.Join(t.Context(), protocol.JoinRequest{ClusterID: "madrid", Token: f.token, CSR: newCSR(t, clusterKey, named("madrid"))})
	expect.NoError(t, err)
	if !known() {
		t.Fatal("a cluster that has just joined is not known")
	}
}

// countingClient counts the reads of registrations.
type countingClient struct {
	client.Client
	reads int
}

func (c *countingClient) Get(ctx context.Context, key client.ObjectKey, into client.Object, options ...client.GetOption) error {
	if _, registration := into.(*broker.ClusterRegistration); registration {
		c.reads++
	}
	return c.Client.Get(ctx, key, into, options...)
}
