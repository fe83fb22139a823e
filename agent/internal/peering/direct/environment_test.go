package direct

import (
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const virtualNodeNamespace = "spillway-virtual-nodes"

// environment is two clusters with API servers of their own: rome is the consumer,
// paris the provider.
type environment struct {
	contract.Relay[*Driver, *Provider]
	t                       *testing.T
	rome, paris             client.Client
	romeConfig, parisConfig *rest.Config
	simulated               *simulation
	options                 Options
}

var _ contract.Environment = (*environment)(nil)

func (e *environment) ConsumerClient() client.Client { return e.rome }

// Refused implements contract.Environment: its quota admits no RoleBinding.
func (e *environment) Refused() string { return "full" }

func (e *environment) Restart() {
	e.t.Helper()
	options := e.options
	options.Client, options.ClusterID = e.rome, "rome"
	driver, err := NewDriver(options)
	expect.NoError(e.t, err)
	options.Client, options.ClusterID = e.paris, "paris"
	provider, err := NewProvider(options)
	expect.NoError(e.t, err)
	e.Start(e.t, driver, provider)
}

func (e *environment) ExpectNothingLeft() {
	e.t.Helper()
	for cluster, c := range map[string]client.Client{"rome": e.rome, "paris": e.paris} {
		left, err := managedObjects(e.t.Context(), c)
		expect.NoError(e.t, err)
		if len(left) > 0 {
			e.t.Errorf("left in %s: %s", cluster, strings.Join(left, ", "))
		}
	}
}

func newClient(t testing.TB, config *rest.Config) client.Client {
	t.Helper()
	c, err := client.New(config, client.Options{Scheme: clientgoscheme.Scheme})
	expect.NoError(t, err)
	return c
}

func newEnvironment(t *testing.T) *environment {
	e := &environment{t: t, romeConfig: controlplane.StartBare(t), parisConfig: controlplane.StartBare(t)}
	e.rome, e.paris = newClient(t, e.romeConfig), newClient(t, e.parisConfig)
	e.options = Options{
		Options: session.Options{
			Messenger: e, Clock: &e.Clock, Log: testr.New(t), ServiceAccount: types.NamespacedName{Namespace: "spillway-system", Name: "spillway-agent"},
			ResendAfter: 100 * time.Millisecond, UnreachableAfter: contract.UnreachableAfter,
		},
		VirtualNodeNamespace: virtualNodeNamespace, AgentRole: "spillway-agent-guests", StaleAfter: 10 * time.Second,
		Endpoint: e.parisConfig.Host, CA: func() ([]byte, error) { return e.parisConfig.CAData, nil },
		Networks: confine.Networks{EgressTo: []string{"10.0.0.0/8"}}, PodSecurity: "restricted",
	}
	e.Restart()
	for _, name := range []string{"shop", "tools", e.Refused(), virtualNodeNamespace} {
		e.create(e.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	none := expect.Resources("count/rolebindings.rbac.authorization.k8s.io", "0")
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: e.Refused(), Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: none}}
	e.create(e.rome, quota)
	quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
	expect.NoError(t, e.rome.Status().Update(t.Context(), quota))
	e.simulated = &simulation{t: t, rome: e.rome, paris: e.paris}
	e.Repeat(t, e.simulated.step)
	return e
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

func (e *environment) capacity(capacity peering.Capacity) func() (peering.Progress, error) {
	return func() (peering.Progress, error) {
		return e.Driver().EnsureCapacity(e.t.Context(), contract.Paris, capacity)
	}
}

func (e *environment) teardown() (peering.Progress, error) {
	return e.Driver().Teardown(e.t.Context(), contract.Paris)
}

func (e *environment) grant(total corev1.ResourceList, pods int32) {
	e.t.Helper()
	expect.Eventually(e.t, "the grant", func() (bool, string) {
		progress, err := e.ProviderSide().EnsureGrant(e.t.Context(), "rome", total, pods)
		expect.NoError(e.t, err)
		return progress.Done, progress.Message
	})
}

// stored is the peering as virtual-node reads it.
func (e *environment) stored() nodeconfig.Config {
	e.t.Helper()
	var secret corev1.Secret
	expect.NoError(e.t, e.rome.Get(e.t.Context(), client.ObjectKey{Namespace: virtualNodeNamespace, Name: nodeconfig.SecretName("paris")}, &secret))
	config, err := nodeconfig.FromSecret(&secret)
	expect.NoError(e.t, err)
	return config
}

// as is a client of the provider with a peering's token.
func (e *environment) as(connection nodeconfig.Connection) client.Client {
	e.t.Helper()
	return newClient(e.t, &rest.Config{Host: connection.Endpoint, BearerToken: connection.Token, TLSClientConfig: rest.TLSClientConfig{CAData: connection.CA}})
}

// TestContract runs the contract of all drivers on two real API servers.
func TestContract(t *testing.T) {
	contract.Test(t, newEnvironment(t))
}
