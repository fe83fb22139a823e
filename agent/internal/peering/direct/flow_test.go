package direct

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

const linkNamespace = "spillway-virtual-nodes"

// world is two clusters with API servers of their own: rome consumes, paris
// lends.
type world struct {
	t          *testing.T
	home, away client.Client
	homeConfig *rest.Config
	awayConfig *rest.Config
	played     *played
	options    Options
	cut, lossy atomic.Bool
	sent       atomic.Int64
	answering  sync.WaitGroup
	mu         sync.Mutex
	driver     *Driver
	lender     *Provider
	holdsNot   atomic.Bool
	clock      *adjusted
}

var paris = peering.Peer{ClusterID: "paris"}

var _ contract.World = (*world)(nil)

func (w *world) Consumer() string       { return "rome" }
func (w *world) Provider() peering.Peer { return paris }
func (w *world) Lossy(lossy bool)       { w.lossy.Store(lossy) }
func (w *world) Cut(cut bool)           { w.cut.Store(cut) }
func (w *world) Home() client.Client    { return w.home }
func (w *world) Namespaces() [2]string  { return [2]string{"shop", "tools"} }

func (w *world) Driver() peering.Driver         { return w.sideDriver() }
func (w *world) ProviderSide() peering.Provider { return w.sideLender() }

func (w *world) sideDriver() *Driver {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.driver
}

func (w *world) sideLender() *Provider {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.lender
}

// Send relays a message and its answer, or loses them.
func (w *world) Send(ctx context.Context, peer peering.Peer, raw []byte) error {
	n := w.sent.Add(1)
	if w.cut.Load() || w.lossy.Load() && n%2 == 1 {
		return nil
	}
	w.answering.Go(func() {
		reply, err := w.sideLender().Handle(context.WithoutCancel(ctx), peering.Peer{ClusterID: "rome", Holds: !w.holdsNot.Load()}, raw)
		if err != nil {
			w.t.Logf("handling a message: %v", err)
		}
		if reply != nil {
			w.sideDriver().Receive(peer.ClusterID, reply)
		}
	})
	return nil
}

func (w *world) Restart() {
	w.t.Helper()
	w.answering.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	options, err := w.options, error(nil)
	options.Client, options.ClusterID = w.home, "rome"
	if w.driver, err = NewDriver(options); err != nil {
		w.t.Fatal(err)
	}
	options.Client, options.ClusterID = w.away, "paris"
	if w.lender, err = NewProvider(options); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) NothingIsLeft() {
	w.t.Helper()
	for where, c := range map[string]client.Client{"rome": w.home, "paris": w.away} {
		found, err := left(w.t.Context(), c)
		if err != nil {
			w.t.Fatal(err)
		}
		if len(found) > 0 {
			w.t.Errorf("left in %s: %s", where, strings.Join(found, ", "))
		}
	}
}

func newClient(t testing.TB, config *rest.Config) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, clock: &adjusted{}, homeConfig: controlplane.StartBare(t), awayConfig: controlplane.StartBare(t)}
	w.home, w.away = newClient(t, w.homeConfig), newClient(t, w.awayConfig)
	w.options = Options{
		Messenger: w, Clock: w.clock, Log: testr.New(t), LinkNamespace: linkNamespace, AgentRole: "spillway-agent-guests",
		ServiceAccount: types.NamespacedName{Namespace: "spillway-system", Name: "spillway-agent"},
		Endpoint:       w.awayConfig.Host, CA: func() ([]byte, error) { return w.awayConfig.CAData, nil },
		AllowEgressTo: []string{"10.0.0.0/8"},
		ResendAfter:   100 * time.Millisecond, StaleAfter: 10 * time.Second, UnreachableAfter: 10 * time.Second,
	}
	w.Restart()
	for _, name := range []string{"shop", "tools", linkNamespace} {
		w.create(w.home, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	w.played = &played{t: t, home: w.home, away: w.away}
	ctx, stop := context.WithCancel(context.Background())
	var playing sync.WaitGroup
	playing.Go(func() { w.played.run(ctx) })
	t.Cleanup(func() { stop(); playing.Wait(); w.answering.Wait() })
	return w
}

func (w *world) create(c client.Client, object client.Object) {
	w.t.Helper()
	if err := c.Create(w.t.Context(), object); err != nil {
		w.t.Fatal(err)
	}
}

// eventually waits until a condition holds, which it says no more about by "".
func (w *world) eventually(what string, lacks func() string) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		why := lacks()
		if why == "" {
			return
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			w.t.Fatalf("%s: %s", what, why)
		}
	}
}

func list(pairs ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		out[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return out
}

// TestContract holds both sides, on two real API servers, to what every driver
// promises.
func TestContract(t *testing.T) {
	t.Parallel()
	contract.Test(t, newWorld(t))
}
