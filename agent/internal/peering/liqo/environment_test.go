package liqo_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/consumer"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/provider"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// environment is two clusters with API servers of their own and a simulated Liqo:
// rome is the consumer, paris the provider.
type environment struct {
	contract.Relay[*consumer.Driver, *watched]
	t           *testing.T
	rome, paris client.Client
	simulated   *simulation
}

var _ contract.Environment = (*environment)(nil)

func (e *environment) ConsumerClient() client.Client { return e.rome }

// Refused implements contract.Environment: its name at the provider is taken.
func (e *environment) Refused() string { return "taken" }

// watched is a provider that answers ResourceSlices when they change, as with the watch of
// SetupWithManager.
type watched struct {
	*provider.Provider
	// mu makes changed apply what was granted last.
	mu      sync.Mutex
	changed func(context.Context) error
}

func (w *watched) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (progress peering.Progress, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changed = func(ctx context.Context) error {
		_, err := w.Provider.EnsureGrant(ctx, consumer, total, pods)
		return err
	}
	return w.Provider.EnsureGrant(ctx, consumer, total, pods)
}

// apply applies what is granted, after a change of the consumer's objects.
func (w *watched) apply(ctx context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.changed == nil {
		return nil
	}
	return w.changed(ctx)
}

// start runs both sides with the given options, without any memory.
func (e *environment) start(c consumer.Options, p provider.Options) {
	e.t.Helper()
	driver, err := consumer.New(c)
	expect.NoError(e.t, err)
	side, err := provider.New(p)
	expect.NoError(e.t, err)
	e.Start(e.t, driver, &watched{Provider: side})
}

func (e *environment) Restart() {
	e.t.Helper()
	driver, side := e.Sides()
	e.start(driver.Options, side.Options)
}

func newEnvironment(t *testing.T) *environment {
	crds := liqotest.CRDs(t)
	e := &environment{t: t, rome: liqotest.NewClient(t, controlplane.Start(t, crds)), paris: liqotest.NewClient(t, controlplane.Start(t, crds))}
	options := liqo.Options{
		Options: session.Options{
			Client: e.rome, ClusterID: "rome", Messenger: e, Clock: &e.Clock, Log: testr.New(t),
			ServiceAccount: types.NamespacedName{Namespace: "spillway-system", Name: "spillway-agent"},
			ResendAfter:    100 * time.Millisecond, UnreachableAfter: contract.UnreachableAfter,
		},
		PodCIDRs: []string{"10.0.0.0/16", "fd00::/64"}, TenantRole: "spillway-liqo-tenant",
	}
	rome := consumer.Options{Options: options, NamespaceRole: "spillway-agent-namespace", StuckAfter: time.Second}
	options.Client, options.ClusterID = e.paris, "paris"
	e.start(rome, provider.Options{Options: options, GuestsRole: "spillway-agent-guests"})

	for _, name := range []string{"liqo", "shop", "tools", "own", e.Refused()} {
		e.create(e.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	e.create(e.paris, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: e.Refused() + "-rome"}})
	e.create(e.rome, keySecret(t, newEd25519(t)))
	e.create(e.rome, &offloadingv1beta1.VkOptionsTemplate{
		ObjectMeta: metav1.ObjectMeta{Namespace: "liqo", Name: "virtual-kubelet-default"},
		Spec: offloadingv1beta1.VkOptionsTemplateSpec{
			ContainerImage: "virtual-kubelet", ExtraArgs: []string{"--enable-apiserver-support=true", "--other"},
			ReflectorsConfig: map[string]offloadingv1beta1.ReflectorConfig{"secret": {NumWorkers: 3, Type: offloadingv1beta1.DenyList}, "pod": {NumWorkers: 10}},
		},
	})

	e.simulated = &simulation{t: t, rome: e.rome, paris: e.paris}
	e.Repeat(t, e.simulated.step)
	return e
}

// watch answers ResourceSlices as the watch of SetupWithManager does.
func (e *environment) watch() {
	t := e.t
	e.Repeat(t, func(ctx context.Context) {
		_, side := e.Sides()
		if err := side.apply(ctx); err != nil && ctx.Err() == nil {
			t.Logf("applying the grant: %v", err)
		}
	})
}

func (e *environment) create(c client.Client, object client.Object) {
	e.t.Helper()
	expect.NoError(e.t, c.Create(e.t.Context(), object))
}

func (e *environment) until(reason string, step func() (peering.Progress, error)) peering.Progress {
	e.t.Helper()
	return contract.Until(e.t, reason, step)
}

func (e *environment) peering() (peering.Progress, error) {
	return e.Driver().EnsurePeering(e.t.Context(), contract.Paris)
}

// capacity waits until the progress has a reason, and all namespaces are mapped.
func (e *environment) capacity(reason string, capacity peering.Capacity) {
	e.t.Helper()
	e.until(reason, func() (peering.Progress, error) {
		progress, err := e.Driver().EnsureCapacity(e.t.Context(), contract.Paris, capacity)
		for _, why := range progress.Namespaces {
			progress.Reason, progress.Message = why.Reason, why.Message
		}
		return progress, err
	})
}

func (e *environment) grant(pods int32, total corev1.ResourceList) {
	e.t.Helper()
	expect.Eventually(e.t, "the grant", func() (bool, string) {
		progress, err := e.ProviderSide().EnsureGrant(e.t.Context(), "rome", total, pods)
		if apierrors.IsConflict(err) {
			return false, err.Error()
		}
		expect.NoError(e.t, err)
		return progress.Done, progress.Message
	})
}

func (e *environment) teardown() {
	e.t.Helper()
	e.until("Removed", func() (peering.Progress, error) { return e.Driver().Teardown(e.t.Context(), contract.Paris) })
}

func (e *environment) ExpectNothingLeft() {
	e.t.Helper()
	e.expectNothingLeft(e.rome, "rome")
	e.expectNothingLeft(e.paris, "paris")
}

// expectNothingLeft fails the test if a cluster has anything of a peering.
func (e *environment) expectNothingLeft(c client.Client, cluster string) {
	e.t.Helper()
	var left []string
	for list, selector := range map[client.ObjectList]client.ListOption{
		&authv1beta1.IdentityList{}: nil, &authv1beta1.ResourceSliceList{}: nil, &authv1beta1.TenantList{}: nil, &authv1beta1.RenewList{}: nil,
		&offloadingv1beta1.VirtualNodeList{}: nil, &offloadingv1beta1.NamespaceMapList{}: nil, &offloadingv1beta1.QuotaList{}: nil,
		&liqov1beta1.ForeignClusterList{}: nil, &corev1.NodeList{}: nil,
		&corev1.NamespaceList{}:                      client.HasLabels{consts.RemoteClusterID},
		&corev1.SecretList{}:                         client.HasLabels{consts.RemoteClusterID},
		&offloadingv1beta1.NamespaceOffloadingList{}: session.Managed,
	} {
		options := &client.ListOptions{}
		if selector != nil {
			selector.ApplyToList(options)
		}
		expect.NoError(e.t, c.List(e.t.Context(), list, options))
		expect.NoError(e.t, meta.EachListItem(list, func(item runtime.Object) error {
			left = append(left, fmt.Sprintf("%T %s", item, item.(client.Object).GetName()))
			return nil
		}))
	}
	if len(left) > 0 {
		slices.Sort(left)
		e.t.Errorf("left in %s: %s", cluster, strings.Join(left, ", "))
	}
}

// TestContract runs the contract of all drivers, and then lets both sides meet a
// cluster with another driver.
func TestContract(t *testing.T) {
	e := newEnvironment(t)
	e.watch()
	contract.Test(t, e)

	reply, err := e.ProviderSide().Handle(t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, []byte(`{"driver":"direct","kind":"Hello","session":7,"requestID":1}`))
	if other, ok := session.ReadsOnly(reply); err != nil || !ok || other != "liqo" {
		t.Errorf("the provider replies %q, %v", reply, err)
	}
	e.Disconnect(true)
	_, err = e.peering()
	expect.NoError(t, err)
	e.Reply(session.Unreadable("direct"))
	progress := e.until("DriverMismatch", e.peering)
	if !strings.HasPrefix(progress.Message, "provider paris uses driver direct, this cluster uses liqo") {
		t.Errorf("the consumer reports %q", progress.Message)
	}
}
