package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/identity"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

func TestFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "agents")
	o, err := parse(nil)
	expect.NoError(t, err)
	if o.transport != "" || o.advertisementName != "cluster-advertisement" || o.advertisementNamespace != "default" || o.instructionNamespace != "default" ||
		o.advertisementInterval != 30*time.Second || o.namespace != "agents" || o.driver != "liqo" || o.placeholders.Namespace != "spillway-holds" || o.leaderElect || o.metrics != ":8080" || o.probes != ":8081" ||
		!o.lending.Enabled || o.lending.PodSecurity != "restricted" || o.tariff.Base.CPUCost != "" || o.schedulerName != "spillway-scheduler" || o.releaseGrace != 30*time.Second || o.peeringIdleTime != 10*time.Minute || o.finishedPodRetention != 5*time.Minute {
		t.Errorf("the defaults are %+v", o)
	}
	o, err = parse([]string{
		"--broker-transport=http", "--broker-url=https://hub:8443", "--lend-headroom=cpu=500m, memory=1Gi", "--lend-consumers=rome,oslo",
		"--cost-cpu=0.02", `--cost-rates=[{"days":["Sat"],"cpu":0.01}]`, "--advertisement-namespace=here", "--peer-fingerprints=paris=sha256:" + strings.Repeat("ab", 32),
	})
	expect.NoError(t, err)
	if cpu := o.headroom[corev1.ResourceCPU]; cpu.String() != "500m" || len(o.headroom) != 2 || !slices.Equal(o.lending.Consumers, []string{"rome", "oslo"}) ||
		o.tariff.Base.CPUCost != "0.02" || o.tariff.Base.Currency != "EUR" || len(o.tariff.Rates) != 1 || o.instructionNamespace != "here" || o.fingerprints["paris"] == "" {
		t.Errorf("got %+v", o)
	}
	if o, err = parse([]string{"--lend-enabled=false"}); err != nil || o.placeholders.Namespace != "" {
		t.Errorf("with --lend-enabled=false got %+v, %v", o, err)
	}
	if o, err = parse([]string{"--scheduler-name=none"}); err != nil || o.schedulerName != "" {
		t.Errorf("with --scheduler-name=none got %+v, %v", o, err)
	}
	if o, err = parse([]string{"--broker-kubeconfig=hub", "--api-server-endpoint=https://[2001:db8::1]:6443"}); err != nil || o.transport != transportKubernetes {
		t.Errorf("with --broker-kubeconfig got %+v, %v", o, err)
	}
	for _, invalid := range [][]string{
		{"--broker-transport=kubernetes"}, {"--broker-transport=carrier-pigeon"}, {"--broker-transport=http"}, {"--broker-poll-interval=30s"}, {"--driver=magic"}, {"--guests-pod-security=privileged"}, {"--placeholders-timeout=0s"}, {"--driver=direct", "--direct-token-ttl=1m"}, {"--cluster-id=Rome"}, {"--api-server-endpoint=https://2001:db8::1:6443"}, {"--api-server-endpoint=192.0.2.1:6443"},
		{"--liqo-pod-cidrs=10.0.0.0/33"}, {"--provider-networks=300.0.0.0/8"}, {"--guests-allow-ingress-from=10.0.0.1/8"},
		{"--lend-headroom=cpu"}, {"--lend-headroom=cpu=much"}, {"--lend-headroom=cpu=-1"}, {"--cost-cpu=-1"}, {"--cost-cpu=1", "--cost-currency=euro"}, {"--cost-rates=cheap"}, {`--cost-rates=[{"timeZone":"Mars","cpu":"1"}]`},
		{"--peer-fingerprints=paris"}, {"--advertisement-requeue-interval=0s"}, {"something"},
	} {
		if _, err := parse(invalid); err == nil {
			t.Errorf("%v was accepted", invalid)
		}
	}
}

// TestDecisionUsage: the usage, and what is wrong with the arguments, are printed also where
// there is no cluster.
func TestDecisionUsage(t *testing.T) {
	noCluster := func() (*rest.Config, error) { return nil, errors.New("no cluster") }
	t.Setenv(brokerURLVariable, "")
	for want, arguments := range map[string][]string{
		"Usage: spillway-agent decision": {"-help"},
		"NAMESPACE/NAME":                 {"web"},
		"--broker-url is required":       {"shop/web"},
		"no cluster":                     {"--broker-url=https://hub:8443", "shop/web"},
	} {
		var out strings.Builder
		err := printDecision(t.Context(), noCluster, arguments, &out)
		if err == nil || !strings.Contains(out.String()+err.Error(), want) {
			t.Errorf("%v: want %q, got %v and %q", arguments, want, err, out.String())
		}
	}
}

// newReservation creates a Reservation for pods that each request half a CPU.
func newReservation(t *testing.T, c client.Client, pods int32) *broker.Reservation {
	t.Helper()
	// The namespace of the programs is for the Reservations of a hub.
	expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}))
	reservation := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "capacity"},
		Spec:       broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: pods, Requests: broker.FromList(expect.Resources("cpu", "500m"))}}},
	}
	expect.NoError(t, c.Create(t.Context(), reservation))
	return reservation
}

func writeToken(t *testing.T, token []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "token")
	expect.NoError(t, os.WriteFile(path, token, 0o600))
	return path
}

// TestRun runs the agent in this process, as main does, with a broker that is
// unreachable and without one, and stops it.
func TestRun(t *testing.T) {
	restConfig := controlplane.Start(t, liqoCRDs(t))
	c := newClient(t, restConfig)
	reservation := newReservation(t, c, 1)
	token := writeToken(t, []byte("token"))
	probes := freeAddress(t)
	for name, tc := range map[string]struct {
		arguments []string
		check     func(t *testing.T, ended <-chan error)
	}{
		"unreachable broker": {
			arguments: []string{"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-ca-hash=sha256:00", "--join-token-file=" + token, "--leader-elect"},
			check: func(t *testing.T, ended <-chan error) {
				checkUnreachableBroker(t, ended, c, reservation)
				if err := probe("http://" + probes + "/readyz"); err == nil {
					t.Error("ready without an identity")
				}
			},
		},
		"no broker": {check: func(*testing.T, <-chan error) {}},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := parse(append(tc.arguments, "--namespace=default", "--metrics-bind-address=0", "--health-probe-bind-address="+probes))
			expect.NoError(t, err)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- run(ctx, restConfig, o) }()
			eventually(t, ended, "the liveness probe", func() error { return probe("http://" + probes + "/healthz") })
			tc.check(t, ended)
			cancel()
			select {
			case err := <-ended:
				expect.NoError(t, err)
			case <-time.After(expect.Deadline):
				t.Fatal("the agent did not stop")
			}
		})
	}
	t.Run("the cluster's ID", func(t *testing.T) {
		err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}})
		expect.NoError(t, client.IgnoreAlreadyExists(err))
		if id, err := findClusterID(t.Context(), c, options{}); err != nil || len(id) != 36 {
			t.Errorf("have %q, %v", id, err)
		}
		if id, err := findClusterID(t.Context(), c, options{clusterID: "rome"}); err != nil || id != "rome" {
			t.Errorf("have %q, %v", id, err)
		}
	})
}

// checkUnreachableBroker checks what an agent does before it has joined: it stores
// its keys, reports why it has no identity, and runs its controllers.
func checkUnreachableBroker(t *testing.T, ended <-chan error, c client.Client, reservation *broker.Reservation) {
	t.Helper()
	ctx := t.Context()
	eventually(t, ended, "the agent's keys", func() error {
		for _, name := range []string{identity.Secret, sealing.KeySecret} {
			if err := c.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, &corev1.Secret{}); err != nil {
				return err
			}
		}
		return nil
	})
	eventually(t, ended, "an event about the missing identity", func() error {
		var events eventsv1.EventList
		if err := c.List(ctx, &events); err != nil {
			return err
		}
		if !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Reason == "IdentityUnavailable" && strings.Contains(e.Note, "joining the broker at https://127.0.0.1:1")
		}) {
			return errors.New("no event")
		}
		return nil
	})
	eventually(t, ended, "the controllers to run", func() error {
		if err := c.Get(ctx, client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return err
		}
		reported := meta.FindStatusCondition(reservation.Status.Conditions, broker.ConditionReported)
		if reported == nil || reported.Status != metav1.ConditionFalse || !strings.Contains(reported.Message, "no identity for the broker yet") {
			return fmt.Errorf("have %+v", reported)
		}
		return nil
	})
}

// TestDirectNeedsNoLiqo runs the agent in a cluster without Liqo's types.
// TestWithoutLiqo: the agent says what to do, and does not wait for types that do not come.
func TestWithoutLiqo(t *testing.T) {
	o, err := parse([]string{"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-cert-path=/nowhere", "--namespace=default", "--metrics-bind-address=0", "--health-probe-bind-address=0"})
	expect.NoError(t, err)
	if err := run(t.Context(), controlplane.Start(t), o); err == nil || !strings.Contains(err.Error(), "ForeignCluster.core.liqo.io: install Liqo first, or set --driver=direct") {
		t.Errorf("got %v", err)
	}
}

func TestDirectNeedsNoLiqo(t *testing.T) {
	restConfig := controlplane.Start(t)
	c := newClient(t, restConfig)
	reservation := newReservation(t, c, 1)
	probes := freeAddress(t)
	ended := start(t, build(t, "agent"), restConfig,
		"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-ca-hash=sha256:00", "--join-token-file="+writeToken(t, []byte("token")), "--cluster-id=rome",
		"--driver=direct", "--virtual-node-namespace=virtual-nodes", "--guests-allow-egress-to=10.0.0.0/8", "--health-probe-bind-address="+probes)
	eventually(t, ended, "the liveness probe", func() error { return probe("http://" + probes + "/healthz") })
	eventually(t, ended, "the controllers to run", func() error {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return err
		}
		if meta.FindStatusCondition(reservation.Status.Conditions, broker.ConditionReported) == nil {
			return errors.New("no condition Reported")
		}
		return nil
	})
}

// TestReservationThatCannotBeDecoded: a typo that the API server once accepted stops no other Reservation.
func TestReservationThatCannotBeDecoded(t *testing.T) {
	restConfig := controlplane.StartBare(t)
	controlplane.InstallCRDsWithoutRules(t, restConfig)
	c := newClient(t, restConfig)
	reservation := newReservation(t, c, 1)
	typo := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"duration": "1d", "requestedResources": map[string]any{"cpu": "1"}}}}
	typo.SetGroupVersionKind(broker.GroupVersion.WithKind("Reservation"))
	typo.SetNamespace("shop")
	typo.SetName("typo")
	expect.NoError(t, c.Create(t.Context(), typo))
	ended := start(t, build(t, "agent"), restConfig,
		"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-ca-hash=sha256:00", "--join-token-file="+writeToken(t, []byte("token")), "--cluster-id=rome",
		"--driver=direct", "--health-probe-bind-address="+freeAddress(t))
	eventually(t, ended, "the other Reservation to be reported", func() error {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return err
		}
		if meta.FindStatusCondition(reservation.Status.Conditions, broker.ConditionReported) == nil {
			return errors.New("no condition Reported")
		}
		return nil
	})
	eventually(t, ended, "an event about the typo", func() error {
		var events eventsv1.EventList
		if err := c.List(t.Context(), &events, client.InNamespace("shop")); err != nil {
			return err
		}
		if !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
			return e.Reason == "NotDecodable" && e.Regarding.Name == "typo" && strings.Contains(e.Note, `unknown unit "d" in duration "1d"`)
		}) {
			return fmt.Errorf("have %v", events.Items)
		}
		return nil
	})
}

// TestSchedulerName: the agent keeps what was requested for pending pods of the scheduler that
// --scheduler-name names, and of no other one.
func TestSchedulerName(t *testing.T) {
	restConfig := controlplane.Start(t)
	c := newClient(t, restConfig)
	for _, o := range []client.Object{
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}},
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: "shop"}},
	} {
		expect.NoError(t, c.Create(t.Context(), o))
	}
	pending := func(scheduler, cpu string) *broker.Reservation {
		t.Helper()
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: scheduler}, Spec: corev1.PodSpec{
			SchedulerName: scheduler,
			Containers:    []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", cpu)}}},
		}}
		expect.NoError(t, c.Create(t.Context(), pod))
		key, _, set, _ := demand.KeyOf(pod, nil)
		set.Count = 1
		reservation := &broker.Reservation{
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: scheduler, Labels: map[string]string{
				broker.LabelOwnerUID: string(key.OwnerUID), broker.LabelShape: key.Shape, broker.LabelManagedBy: broker.ManagedBySpillway,
			}},
			Spec: broker.ReservationSpec{PodSets: []broker.PodSet{set}},
		}
		expect.NoError(t, c.Create(t.Context(), reservation))
		return reservation
	}
	kept, unneeded := pending("own-scheduler", "1"), pending(broker.SchedulerName, "2")
	ended := start(t, build(t, "agent"), restConfig,
		"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-ca-hash=sha256:00", "--join-token-file="+writeToken(t, []byte("token")), "--cluster-id=rome",
		"--driver=direct", "--release-grace=1s", "--scheduler-name=own-scheduler", "--health-probe-bind-address="+freeAddress(t))
	deleted := func(reservation *broker.Reservation) bool {
		err := c.Get(t.Context(), client.ObjectKeyFromObject(reservation), reservation)
		expect.NoError(t, client.IgnoreNotFound(err))
		return err != nil || reservation.DeletionTimestamp != nil
	}
	eventually(t, ended, "the Reservation to be deleted that no pod needs", func() error {
		if !deleted(unneeded) {
			return errors.New("it is there")
		}
		return nil
	})
	expect.Consistently(t, 3*time.Second, "the other one to be kept", func() (bool, string) { return !deleted(kept), "it is deleted" })
}

// eventually waits until check returns nil, or ends the test when the program
// ends before.
func eventually(t *testing.T, ended <-chan error, what string, check func() error) {
	t.Helper()
	expect.EventuallyWithin(t, 2*time.Minute, what, func() (bool, string) {
		select {
		case err := <-ended:
			t.Fatalf("the program ended before %s: %v", what, err)
		default:
		}
		err := check()
		return err == nil, fmt.Sprint(err)
	})
}

func probe(url string) error {
	response, err := http.Get(url)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, response.Status)
	}
	return nil
}

// freeAddress returns a local address with a port that was free a moment ago.
func freeAddress(t *testing.T) string {
	t.Helper()
	port, err := cluster.FreePort()
	expect.NoError(t, err)
	return cluster.Address(port)
}
