package main

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

func TestFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "hub")
	o, err := parse([]string{"--tls-san=a.test, 192.0.2.1", "--tls-san", "b.test,2001:db8::1"})
	expect.NoError(t, err)
	if o.Namespace != "hub" || !slices.Equal(o.names, []string{"a.test", "192.0.2.1", "b.test", "2001:db8::1"}) {
		t.Fatalf("got %+v", o)
	}
	for _, arguments := range [][]string{{"--broker-interface=pigeon"}, {"something"}, {"--tls-san=[2001:db8::1]"}, {"--tls-san=a.test:8443"}, {"--tls-san=https://a.test"}} {
		if _, err := parse(arguments); err == nil {
			t.Errorf("%v was accepted", arguments)
		}
	}
}

// The table of flags in ARCHITECTURE.md has each flag with its default, and no other. Those of
// the log are controller-runtime's.
func TestFlagsAreDocumented(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	text, err := os.ReadFile("../ARCHITECTURE.md")
	expect.NoError(t, err)
	documented := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| `?([^ |`]*)`? \\|").FindAllStringSubmatch(string(text), -1) {
		documented[row[1]] = row[2]
	}
	var o options
	o.flags().VisitAll(func(f *flag.Flag) {
		if strings.HasPrefix(f.Name, "zap-") {
			return
		}
		if value, ok := documented[f.Name]; !ok || value != f.DefValue {
			t.Errorf("--%s with default %q is documented: %t, with default %q", f.Name, f.DefValue, ok, value)
		}
		delete(documented, f.Name)
	})
	for name := range documented {
		t.Errorf("--%s is documented, and does not exist", name)
	}
}

// TestRun runs the broker until it is ready, which it is once it leads, and stops it. A typo in the
// BrokerConfig that the API server once accepted does not stop it: it goes on with the defaults.
func TestRun(t *testing.T) {
	config := controlplane.StartBare(t)
	controlplane.InstallCRDsWithoutRules(t, config)
	c, err := client.New(config, client.Options{})
	expect.NoError(t, err)
	typo := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"staleAfter": "1d"}}}
	typo.SetGroupVersionKind(broker.GroupVersion.WithKind("BrokerConfig"))
	typo.SetNamespace("default")
	typo.SetName("default")
	expect.NoError(t, c.Create(t.Context(), typo))
	port, err := cluster.FreePort()
	expect.NoError(t, err)
	probes := cluster.Address(port)
	// With a lease that a busy machine does not lose.
	o, err := parse([]string{"--namespace=default", "--listen=127.0.0.1:0", "--metrics-bind-address=0", "--health-probe-bind-address=" + probes,
		"--leader-elect", "--leader-elect-lease-duration=60s", "--leader-elect-renew-deadline=50s"})
	expect.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, config, o) }()
	expect.Eventually(t, "the broker to be ready", func() (bool, string) {
		select {
		case err := <-ended:
			t.Fatalf("the broker ended: %v", err)
		default:
		}
		response, err := http.Get("http://" + probes + "/readyz")
		if err != nil {
			return false, err.Error()
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK, response.Status
	})
	expect.Eventually(t, "an event about the BrokerConfig", func() (bool, string) {
		var list eventsv1.EventList
		err := c.List(t.Context(), &list, client.InNamespace("default"))
		return slices.ContainsFunc(list.Items, func(e eventsv1.Event) bool {
			return e.Reason == "NotDecodable" && e.Regarding.UID == typo.GetUID() && strings.Contains(e.Note, `unknown unit "d" in duration "1d"`)
		}), fmt.Sprint(err, list.Items)
	})
	cancel()
	select {
	case err := <-ended:
		expect.NoError(t, err)
	case <-time.After(expect.Deadline):
		t.Fatal("the broker did not stop")
	}
}
