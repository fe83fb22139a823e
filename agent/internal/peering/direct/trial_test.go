package direct

import (
	"testing"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTrialNamespace: the namespace for guests exists before the consumer peers, is its
// namespace from then on, and is removed if it never does.
func TestTrialNamespace(t *testing.T) {
	paris := newClient(t, controlplane.StartBare(t))
	p, err := NewProvider(Options{
		Options: session.Options{Client: paris, ClusterID: "paris", Log: testr.New(t), ServiceAccount: types.NamespacedName{Namespace: "spillway-system", Name: "spillway-agent"}},
		CA:      func() ([]byte, error) { return nil, nil }, AgentRole: "spillway-agent-guests",
	})
	expect.NoError(t, err)
	ctx := t.Context()
	trial := func(consumer string) *corev1.Namespace {
		t.Helper()
		name, progress, err := p.EnsureTrialNamespace(ctx, consumer)
		expect.NoError(t, err)
		namespace := &corev1.Namespace{}
		expect.NoError(t, paris.Get(ctx, client.ObjectKey{Name: "spillway-guests-" + consumer}, namespace))
		if name != namespace.Name || !progress.Done {
			t.Errorf("guests of %s are tried in %q: %+v", consumer, name, progress)
		}
		if namespaces, err := p.GuestNamespaces(ctx, consumer); err != nil || len(namespaces) > 0 {
			t.Errorf("before the peering, the guests of %s have namespaces %v, %v", consumer, namespaces, err)
		}
		return namespace
	}
	namespace := trial("rome")
	if again := trial("rome"); again.UID != namespace.UID || again.Labels["pod-security.kubernetes.io/enforce"] != "restricted" {
		t.Errorf("the namespace is made again: %+v", again)
	}

	if peered, refusal, err := p.ensureNamespace(ctx, "rome", 7); err != nil || refusal != nil || peered.UID != namespace.UID {
		t.Fatalf("peering: %+v, %+v, %v", peered, refusal, err)
	}
	expect.NoError(t, p.RemoveTrialNamespace(ctx, "rome"))
	if namespaces, err := p.GuestNamespaces(ctx, "rome"); err != nil || len(namespaces) != 1 {
		t.Errorf("with a peering, the guests of rome have namespaces %v, %v", namespaces, err)
	}

	trial("berlin")
	if consumers, err := p.Consumers(ctx); err != nil || len(consumers) != 2 {
		t.Errorf("the consumers are %v, %v", consumers, err)
	}
	expect.NoError(t, p.RemoveTrialNamespace(ctx, "berlin"))
	removed := &corev1.Namespace{}
	if err := paris.Get(ctx, client.ObjectKey{Name: "spillway-guests-berlin"}, removed); err != nil || removed.DeletionTimestamp.IsZero() {
		t.Errorf("the namespace is not deleted: %+v, %v", removed, err)
	}
	if _, progress, err := p.EnsureTrialNamespace(ctx, "berlin"); err != nil || progress.Reason != session.ReasonTerminating {
		t.Errorf("while it is being deleted: %+v, %v", progress, err)
	}
	expect.NoError(t, p.RemoveTrialNamespace(ctx, "berlin"))
	expect.NoError(t, p.RemoveTrialNamespace(ctx, "oslo"))
}
