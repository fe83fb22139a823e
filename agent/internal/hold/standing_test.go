package hold_test

import (
	"context"
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// slowProvider enforces a changed grant some time after EnsureGrant, as a quota that
// a controller has to count does.
type slowProvider struct {
	peering.Provider
	env *env

	mu     sync.Mutex
	grants map[string]string
	calls  int
}

func (p *slowProvider) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	p.mu.Lock()
	p.calls++
	want := fmt.Sprint(broker.FromList(total), pods)
	late := p.grants[consumer] != want
	p.grants[consumer] = want
	p.mu.Unlock()
	if late {
		p.env.reconciler.Enqueue(consumer)
		return peering.Waiting("QuotaPending", "waiting for the quota"), nil
	}
	return p.Provider.EnsureGrant(ctx, consumer, total, pods)
}

// TestStandingHolds: a hold that is granted is left alone while other holds of its
// consumer come, and a hold costs two patches.
func TestStandingHolds(t *testing.T) {
	var slow *slowProvider
	e := start(t, func(e *env, p peering.Provider) peering.Provider {
		slow = &slowProvider{Provider: p, env: e, grants: map[string]string{}}
		return slow
	})
	e.node("a", expect.Resources("cpu", "50", "memory", "50Gi"))
	const holds = 50
	stop := e.watchStanding()
	for i := range holds {
		name := fmt.Sprintf("r%02d", i)
		e.hold(name, "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "100m"))))
		if i%5 == 4 {
			e.decided(name, 1, verdict.ReasonAccepted, "Holding 1 pods", 1)
		}
	}
	for i := range holds {
		e.decided(fmt.Sprintf("r%02d", i), 1, verdict.ReasonAccepted, "Holding 1 pods", 1)
	}
	if broken := stop(); len(broken) > 0 {
		t.Errorf("holds that were granted read enforced=false: %v", broken)
	}
	if n := e.patches.Load(); n > 2*holds {
		t.Errorf("%d patches for %d holds, want at most %d", n, holds, 2*holds)
	}

	// What is settled costs neither a patch nor a call of the driver.
	slow.mu.Lock()
	calls := slow.calls
	slow.mu.Unlock()
	patches := e.patches.Load()
	in, _ := e.get("r00")
	expect.NoError(t, e.Patch(t.Context(), in, client.RawPatch(types.MergePatchType, []byte(`{"metadata":{"labels":{"touched":"yes"}}}`))))
	e.hold("b00", "berlin", 1, pods(set("pods", 1, expect.Resources("cpu", "100m"))))
	e.decided("b00", 1, verdict.ReasonAccepted, "Holding 1 pods", 1)
	slow.mu.Lock()
	defer slow.mu.Unlock()
	if slow.calls-calls > 2 || e.patches.Load()-patches > 2 {
		t.Errorf("one more hold of another consumer cost %d calls of the driver and %d patches, want 2 and 2", slow.calls-calls, e.patches.Load()-patches)
	}
}

// watchStanding follows the instructions; the returned function ends that and lists
// those that were enforced and are not any more.
func (e *env) watchStanding() (stop func() []string) {
	e.Helper()
	watching, err := client.NewWithWatch(e.config, client.Options{Scheme: e.Scheme()})
	expect.NoError(e, err)
	watch, err := watching.Watch(e.Context(), &broker.ProviderInstructionList{}, client.InNamespace(namespace))
	expect.NoError(e, err)
	enforced, broken := map[string]bool{}, []string{}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for event := range watch.ResultChan() {
			if in, ok := event.Object.(*broker.ProviderInstruction); ok {
				if enforced[in.Name] && !in.Status.Enforced {
					broken = append(broken, in.Name)
				}
				enforced[in.Name] = in.Status.Enforced
			}
		}
	}()
	return func() []string {
		watch.Stop()
		<-done
		return broken
	}
}
