package main

import (
	"context"
	"errors"
	"fmt"
	"net"
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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/identity"
	"github.com/spillway-dev/spillway/agent/internal/peering/sealing"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
)

func TestFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "agents")
	o, err := parse(nil)
	if err != nil {
		t.Fatal(err)
	}
	if o.transport != "" || o.advertisementName != "cluster-advertisement" || o.advertisementNamespace != "default" || o.instructionNamespace != "default" ||
		o.advertisementInterval != 30*time.Second || o.namespace != "agents" || o.driver != "liqo" || o.leaderElect || o.metrics != ":8080" || o.probes != ":8081" ||
		!o.lending.Enabled || o.cost != nil || o.releaseGrace != 30*time.Second || o.peeringIdleTime != 10*time.Minute || o.finishedPodRetention != 5*time.Minute {
		t.Errorf("defaults: %+v", o)
	}
	o, err = parse([]string{
		"--broker-transport=http", "--broker-url=https://hub:8443", "--lend-headroom=cpu=500m, memory=1Gi", "--lend-consumers=rome,oslo",
		"--cost-cpu=0.02", "--advertisement-namespace=here", "--peer-fingerprints=paris=sha256:" + strings.Repeat("ab", 32),
	})
	if err != nil {
		t.Fatal(err)
	}
	if cpu := o.headroom[corev1.ResourceCPU]; cpu.String() != "500m" || len(o.headroom) != 2 || !slices.Equal(o.lending.Consumers, []string{"rome", "oslo"}) ||
		o.cost == nil || o.cost.CPUCost != "0.02" || o.cost.Currency != "EUR" || o.instructionNamespace != "here" || o.fingerprints["paris"] == "" {
		t.Errorf("got %+v", o)
	}
	for _, wrong := range [][]string{
		{"--broker-transport=kubernetes"}, {"--broker-transport=carrier-pigeon"}, {"--broker-transport=http"}, {"--driver=magic"}, {"--driver=direct", "--guest-token-ttl=1m"}, {"--cluster-id=Rome"},
		{"--lend-headroom=cpu"}, {"--lend-headroom=cpu=much"}, {"--lend-headroom=cpu=-1"}, {"--cost-cpu=-1"}, {"--cost-cpu=1", "--cost-currency=euro"},
		{"--peer-fingerprints=paris"}, {"--advertisement-requeue-interval=0s"}, {"something"},
	} {
		if _, err := parse(wrong); err == nil {
			t.Errorf("%v was taken", wrong)
		}
	}
}

// TestRun starts the whole agent as main does, with a broker that does not
// answer, and stops it.
func TestRun(t *testing.T) {
	config := controlplane.Start(t, liqoCRDs(t))
	c := newClient(t, config)
	wish := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "wish"},
		Spec:       broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 1}}},
	}
	if err := c.Create(t.Context(), wish); err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("token"), 0o600); err != nil {
		t.Fatal(err)
	}
	probes := freeAddress(t)
	for name, arguments := range map[string][]string{
		"with a broker": {"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-ca-hash=sha256:00", "--join-token-file=" + token, "--leader-elect"},
		"without":       nil,
	} {
		t.Run(name, func(t *testing.T) {
			o, err := parse(append(arguments, "--namespace=default", "--metrics-bind-address=0", "--health-probe-bind-address="+probes))
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			ended := make(chan error, 1)
			go func() { ended <- run(ctx, config, o) }()
			eventually(t, ended, "it lives", func() error { return probe("http://" + probes + "/healthz") })
			if o.transport != "" {
				eventually(t, ended, "it keeps its keys", func() error {
					for _, name := range []string{identity.Secret, sealing.KeySecret} {
						if err := c.Get(ctx, client.ObjectKey{Namespace: "default", Name: name}, &corev1.Secret{}); err != nil {
							return err
						}
					}
					return nil
				})
				eventually(t, ended, "it says why it is not ready", func() error {
					var events eventsv1.EventList
					if err := c.List(ctx, &events); err != nil {
						return err
					}
					if !slices.ContainsFunc(events.Items, func(e eventsv1.Event) bool {
						return e.Reason == "NoIdentity" && strings.Contains(e.Note, "joining the broker at https://127.0.0.1:1")
					}) {
						return errors.New("no event")
					}
					return nil
				})
				eventually(t, ended, "its controllers run", func() error {
					if err := c.Get(ctx, client.ObjectKeyFromObject(wish), wish); err != nil {
						return err
					}
					reported := meta.FindStatusCondition(wish.Status.Conditions, broker.ConditionReported)
					if reported == nil || reported.Status != metav1.ConditionFalse || !strings.Contains(reported.Message, "no identity for the broker yet") {
						return fmt.Errorf("have %+v", reported)
					}
					return nil
				})
				if err := probe("http://" + probes + "/readyz"); err == nil {
					t.Error("ready without an identity")
				}
			}
			cancel()
			select {
			case err := <-ended:
				if err != nil {
					t.Fatalf("it ended with: %v", err)
				}
			case <-time.After(30 * time.Second):
				t.Fatal("it did not end")
			}
		})
	}
	t.Run("the cluster's ID", func(t *testing.T) {
		if err := c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: metav1.NamespaceSystem}}); client.IgnoreAlreadyExists(err) != nil {
			t.Fatal(err)
		}
		if id, err := findClusterID(t.Context(), c, options{}); err != nil || len(id) != 36 {
			t.Errorf("have %q, %v", id, err)
		}
		if id, err := findClusterID(t.Context(), c, options{clusterID: "rome"}); err != nil || id != "rome" {
			t.Errorf("have %q, %v", id, err)
		}
	})
}

// TestDirectNeedsNoLiqo starts the agent in a cluster that knows nothing of Liqo.
func TestDirectNeedsNoLiqo(t *testing.T) {
	config := controlplane.Start(t)
	c := newClient(t, config)
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("token"), 0o600); err != nil {
		t.Fatal(err)
	}
	wish := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "wish"},
		Spec:       broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 1}}},
	}
	if err := c.Create(t.Context(), wish); err != nil {
		t.Fatal(err)
	}
	probes := freeAddress(t)
	ended := start(t, build(t, "agent"), config,
		"--broker-transport=http", "--broker-url=https://127.0.0.1:1", "--broker-ca-hash=sha256:00", "--join-token-file="+token, "--cluster-id=rome",
		"--driver=direct", "--link-namespace=links", "--guest-allow-egress-to=10.0.0.0/8", "--health-probe-bind-address="+probes)
	eventually(t, ended, "it lives", func() error { return probe("http://" + probes + "/healthz") })
	eventually(t, ended, "its controllers run", func() error {
		if err := c.Get(t.Context(), client.ObjectKeyFromObject(wish), wish); err != nil {
			return err
		}
		if meta.FindStatusCondition(wish.Status.Conditions, broker.ConditionReported) == nil {
			return errors.New("nobody looked at the reservation yet")
		}
		return nil
	})
}

func eventually(t *testing.T, ended <-chan error, what string, ok func() error) {
	t.Helper()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(2 * time.Minute)
	for {
		err := ok()
		if err == nil {
			return
		}
		select {
		case <-tick.C:
		case err := <-ended:
			t.Fatalf("it ended before this: %s: %v", what, err)
		case <-deadline:
			t.Fatalf("%s: %v", what, err)
		}
	}
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

// freeAddress is one that nobody listened on a moment ago.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
