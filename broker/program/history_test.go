package program_test

import (
	"context"
	"crypto/tls"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrlconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const namespace = "default"

// stage is a hub with a real API server, whose broker keeps a history by a clock of the test.
type stage struct {
	*testing.T
	config   *rest.Config
	api      client.Client
	clock    *testclock.FakeClock
	path     string
	url      string
	sequence int64
	// history is that of the running broker, and stop stops it.
	history *program.History
	stop    func()
}

func newStage(t *testing.T) *stage {
	t.Helper()
	ctrl.SetLogger(logr.Discard())
	s := &stage{T: t, config: controlplane.Start(t), clock: testclock.NewFakeClock(time.Now()), path: filepath.Join(t.TempDir(), "history.db")}
	api, err := client.New(s.config, client.Options{Scheme: scheme(t)})
	expect.NoError(t, err)
	s.api = api
	for _, cluster := range []string{"rome", "paris", "berlin"} {
		expect.NoError(t, api.Create(t.Context(), &broker.ClusterRegistration{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: cluster}, Spec: broker.ClusterRegistrationSpec{ClusterID: cluster},
		}))
	}
	return s
}

func scheme(t *testing.T) *runtime.Scheme {
	t.Helper()
	all := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(all), broker.AddToScheme(all)))
	return all
}

// start runs a broker until stop is called, or the test ends.
func (s *stage) start(options program.HistoryOptions) {
	s.Helper()
	history, err := options.Open()
	expect.NoError(s, err)
	mgr, err := ctrl.NewManager(s.config, ctrl.Options{
		Scheme: scheme(s.T), Metrics: metricsserver.Options{BindAddress: "0"}, Logger: logr.Discard(),
		Cache:      cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}},
		Controller: ctrlconfig.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(s, err)
	calls, err := program.Add(mgr, program.Parts{
		Namespace: namespace, Identity: identity{}, CatchUp: program.DefaultCatchUp, Clock: s.clock, Workers: 8, History: history, Log: logr.Discard(),
	})
	expect.NoError(s, err)
	calls.Synced()
	server := httptest.NewUnstartedServer(calls.Handler())
	server.StartTLS()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	stopped := false
	s.url, s.history = server.URL, history
	s.stop = func() {
		if stopped {
			return
		}
		stopped = true
		server.CloseClientConnections()
		server.Close()
		cancel()
		expect.NoError(s, <-ended)
		if history != nil {
			expect.NoError(s, history.Database.Close())
		}
	}
	s.Cleanup(s.stop)
	expect.Eventually(s, "the broker answers", func() (bool, string) {
		status, body := s.get("rome", protocol.PathUsage)
		return status == http.StatusOK || history == nil && status == http.StatusNotFound, body
	})
}

func (s *stage) sqlite() program.HistoryOptions {
	return program.HistoryOptions{Path: s.path, Retention: program.DefaultRetention, ReferencePrices: "cpu=0.3,memory=0.1,currency=EUR"}
}

// identity authenticates a call by the server name of its connection.
type identity struct{}

func (identity) TLSConfig() *tls.Config { return nil }

func (identity) Join(context.Context, protocol.JoinRequest) (protocol.JoinResponse, error) {
	return protocol.JoinResponse{}, errors.New("all clusters have joined")
}

func (identity) Authenticate(_ context.Context, state *tls.ConnectionState) (string, error) {
	return state.ServerName, nil
}

func (identity) Certified(_ context.Context, state *tls.ConnectionState) (clusterID, fingerprint string, err error) {
	return state.ServerName, state.ServerName, nil
}

// transport is the connection of a cluster. The server of the test has no certificate of its own.
func transport(cluster string) *tls.Config {
	return &tls.Config{InsecureSkipVerify: true, ServerName: cluster}
}

func (s *stage) as(cluster string) *protocol.Client {
	s.Helper()
	c, err := protocol.NewClient(s.url, transport(cluster), logr.Discard())
	expect.NoError(s, err)
	s.Cleanup(c.Close)
	return c
}

// get is the response to a call of a cluster.
func (s *stage) get(cluster, path string) (status int, body string) {
	s.Helper()
	request, err := http.NewRequestWithContext(s.Context(), http.MethodGet, s.url+path, nil)
	expect.NoError(s, err)
	c := http.Client{Transport: &http.Transport{TLSClientConfig: transport(cluster), DisableKeepAlives: true}}
	response, err := c.Do(request)
	expect.NoError(s, err)
	content, err := io.ReadAll(response.Body)
	expect.NoError(s, err)
	expect.NoError(s, response.Body.Close())
	return response.StatusCode, string(content)
}

// items are those of a list of history or usage.
func items[T any](s *stage, cluster, path string) []T {
	s.Helper()
	status, body := s.get(cluster, path)
	var list struct {
		Items []T `json:"items"`
	}
	if err := json.Unmarshal([]byte(body), &list); err != nil || status != http.StatusOK {
		s.Fatalf("GET %s as %s: %d %s (%v)", path, cluster, status, body, err)
	}
	return list.Items
}

// advertise has a cluster advertise 10 cores and what rome's guests use there.
func (s *stage) advertise(cluster, used string) {
	s.Helper()
	s.sequence++
	all := broker.FromList(expect.Resources("cpu", "10", "memory", "20Gi"))
	spec := broker.ClusterAdvertisementSpec{
		ClusterID: cluster, EndpointURL: "https://" + cluster + ":6443", Lending: broker.Lending{Enabled: cluster != "rome"},
		Resources:   broker.AdvertisedResources{Capacity: all, Allocatable: all},
		NodeClasses: []broker.NodeClass{{Name: "std", FreeShapes: []broker.FreeShape{{Nodes: 1, Free: all, Pods: 100}}}},
		Cost:        &broker.Cost{CPUCost: "0.1", MemoryCost: "0.01", Currency: "EUR"},
		Timestamp:   metav1.Time{Time: s.clock.Now()}, Sequence: s.sequence,
	}
	if used != "" {
		spec.ObservedHolds = []broker.ObservedHold{{Requester: "rome", Used: broker.FromList(expect.Resources("cpu", used)), Pods: 1}}
	}
	_, err := s.as(cluster).PublishAdvertisement(s.Context(), spec)
	expect.NoError(s, err)
}

// reserve has rome ask for two pods of one core and a GiB, and paris grant them.
func (s *stage) reserve() protocol.ConsumerView {
	s.Helper()
	view, err := s.as("rome").PutReservation(s.Context(), protocol.ReservationRequest{
		SourceUID: uuid.NewUUID(), SourceNamespace: "shop", SourceName: "web-1", SourceGeneration: 1, SourceOwner: "Deployment/web",
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "1", "memory", "1Gi"))}}},
	})
	expect.NoError(s, err)
	s.answer(view.ID, false)
	return view
}

// answer has paris accept what it is asked for, or confirm the release.
func (s *stage) answer(id string, release bool) {
	s.Helper()
	expect.EventuallyWithin(s, time.Minute, "paris is asked", func() (bool, string) {
		view, err := s.as("paris").ProviderReservation(s.Context(), id)
		if err != nil || view.Releasing() != release {
			var stored broker.Reservation
			return false, fmt.Sprint(err, s.api.Get(s.Context(), types.NamespacedName{Namespace: namespace, Name: id}, &stored), stored.Status)
		}
		err = s.as("paris").AckProvider(s.Context(), id, protocol.ProviderAck{ReservationUID: view.Hold.ReservationUID, Attempt: view.Hold.Attempt, Accepted: true})
		return err == nil, fmt.Sprint(err)
	})
}

// pass lets time pass in steps, in which clusters advertise.
func (s *stage) pass(d time.Duration, used string) {
	s.Helper()
	for step := 5 * time.Minute; d > 0; d -= step {
		s.clock.Step(min(d, step))
		s.advertise("rome", "")
		s.advertise("paris", used)
	}
}

// seen waits until the history counts at that rate, in thousandths of a core.
func (s *stage) seen(promised, used int64) {
	s.Helper()
	expect.Eventually(s, "the history has seen it", func() (bool, string) {
		s.clock.Step(time.Second)
		open, err := s.history.Database.Open(s.Context())
		expect.NoError(s, err)
		var sum [2]int64
		for _, r := range open {
			rate := r.Shares["paris"].Rate
			sum[0], sum[1] = sum[0]+rate.Promised["cpu"], sum[1]+rate.Used["cpu"]
		}
		return sum == [2]int64{promised, used}, fmt.Sprint(sum)
	})
}

// gone waits until a Reservation has disappeared from the hub.
func (s *stage) gone(id string) {
	s.Helper()
	expect.Eventually(s, "the Reservation is gone", func() (bool, string) {
		err := s.api.Get(s.Context(), types.NamespacedName{Namespace: namespace, Name: id}, &broker.Reservation{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// counted waits until the history has looked at the ledger, and returns the usage of today and tomorrow.
func (s *stage) counted(cluster string) (sum struct{ promised, used, cost, reference float64 }) {
	s.Helper()
	number := func(text string) float64 {
		n, err := strconv.ParseFloat(text, 64)
		expect.NoError(s, err)
		return n
	}
	for _, item := range items[protocol.UsageItem](s, cluster, protocol.PathUsage+"?period=month") {
		if item.Namespace != "shop" || item.OwnerKind != "Deployment" || item.Owner != "web" || item.Provider != "paris" {
			s.Errorf("usage of %+v", item)
		}
		sum.promised += number(item.PromisedHours["cpu"])
		if item.UsedHours["cpu"] != "" {
			sum.used += number(item.UsedHours["cpu"])
		}
		sum.cost += number(item.Cost)
		sum.reference += number(item.ReferenceCost)
	}
	return sum
}

// within reports whether a figure is within 1 % of what was computed by hand.
func (s *stage) within(what string, got, want float64) {
	s.Helper()
	if math.Abs(got-want) > want/100 {
		s.Errorf("%s: %f, want %f within 1 %%", what, got, want)
	}
}

// TestHistory: usage after a run of known length is what was computed by hand, also over a restart, and each cluster
// sees its own only.
func TestHistory(t *testing.T) {
	s := newStage(t)
	s.start(s.sqlite())
	s.advertise("rome", "")
	s.advertise("paris", "")
	first, second := s.reserve(), s.reserve()
	s.seen(4000, 0)
	s.advertise("paris", "1")
	s.seen(4000, 1000)
	s.pass(3*time.Hour, "1")
	expect.NoError(t, s.as("rome").DeleteReservation(t.Context(), first.ID))
	s.answer(first.ID, true)
	s.gone(first.ID)
	s.pass(time.Hour, "1")
	// Four cores for three hours and two for one; one core was used; 0.1 for a core and 0.01 for a GiB.
	check := func() {
		t.Helper()
		got := s.counted("rome")
		s.within("promised core-hours", got.promised, 4*3+2*1)
		s.within("used core-hours", got.used, 4)
		s.within("cost", got.cost, 14*0.11)
		s.within("reference cost", got.reference, 14*0.4)
	}
	expect.Eventually(t, "all is counted", func() (bool, string) {
		s.clock.Step(time.Second)
		got := s.counted("rome")
		return got.promised > 13.9, fmt.Sprint(got)
	})
	check()
	ended := items[protocol.HistoryItem](s, "rome", protocol.PathHistory)
	if len(ended) != 1 || ended[0].ID != first.ID || ended[0].Owner != "web" || ended[0].Requested != "2 pods" || ended[0].Providers[0].PricePerHour != "0.22" ||
		ended[0].Providers[0].Granted.IsZero() || ended[0].Providers[0].FirstUsed.IsZero() || !strings.HasPrefix(ended[0].Providers[0].Why, "paris scored ") {
		t.Errorf("history %+v", ended)
	}
	for _, path := range []string{protocol.PathHistory, protocol.PathUsage} {
		if others := items[any](s, "berlin", path); len(others) != 0 {
			t.Errorf("berlin sees %v at %s", others, path)
		}
		status, body := s.get("rome", path+"?format=csv")
		lines, err := csv.NewReader(strings.NewReader(body)).ReadAll()
		if err != nil || status != http.StatusOK || len(lines) < 2 || !strings.Contains(body, "web") {
			t.Errorf("CSV of %s: %d %v %s", path, status, err, body)
		}
		for _, wrong := range []string{"?limit=0", "?limit=x", "?format=xml", "?requester=rome", "?namespace=" + strings.Repeat("a", 64), "?continue=" + strings.Repeat("a", 3000), "?limit=1&limit=2"} {
			if status, body := s.get("rome", path+wrong); status != http.StatusBadRequest && status != http.StatusUnprocessableEntity {
				t.Errorf("%s%s: %d %s", path, wrong, status, body)
			}
		}
	}

	s.stop()
	s.clock.Step(time.Minute)
	s.start(s.sqlite())
	if again := items[protocol.HistoryItem](s, "rome", protocol.PathHistory); len(again) != 1 || again[0].UID != ended[0].UID {
		t.Errorf("after a restart: %+v", again)
	}
	check()
	s.pass(2*time.Hour, "1")
	expect.NoError(t, s.as("rome").DeleteReservation(t.Context(), second.ID))
	s.answer(second.ID, true)
	s.gone(second.ID)
	s.within("promised core-hours after a restart", s.counted("rome").promised, 4*3+2*3)
	if all := items[protocol.HistoryItem](s, "rome", protocol.PathHistory); len(all) != 2 {
		t.Errorf("%d have ended, want 2: %+v", len(all), all)
	}
}

// TestHistoryWithoutDatabase: the end of a Reservation waits for the database, and not for ever.
func TestHistoryWithoutDatabase(t *testing.T) {
	s := newStage(t)
	s.start(s.sqlite())
	s.advertise("rome", "")
	s.advertise("paris", "")
	view := s.reserve()
	s.clock.Step(time.Second)
	expect.NoError(t, s.history.Database.Close())
	expect.NoError(t, s.as("rome").DeleteReservation(t.Context(), view.ID))
	s.answer(view.ID, true)
	if status, body := s.get("rome", protocol.PathHistory); status != http.StatusServiceUnavailable || strings.Contains(body, "sql") {
		t.Errorf("history without a database: %d %s", status, body)
	}
	exists := func() (bool, string) {
		err := s.api.Get(t.Context(), types.NamespacedName{Namespace: namespace, Name: view.ID}, &broker.Reservation{})
		return err == nil, fmt.Sprint(err)
	}
	expect.Consistently(t, time.Second, "the Reservation waits for its record", exists)
	s.clock.Step(31 * time.Second)
	expect.Eventually(t, "it disappears", func() (bool, string) { ok, state := exists(); return !ok, state })
	expect.Eventually(t, "an event says so", func() (bool, string) {
		var events eventsv1.EventList
		expect.NoError(t, s.api.List(t.Context(), &events, client.InNamespace(namespace)))
		for _, e := range events.Items {
			if e.Reason == "HistoryNotWritten" && e.Regarding.Name == view.ID && e.Type == corev1.EventTypeWarning {
				return true, ""
			}
		}
		return false, fmt.Sprint(len(events.Items))
	})
}

// TestNoHistory: without a database all works, and calls for it say what is missing.
func TestNoHistory(t *testing.T) {
	s := newStage(t)
	s.start(program.HistoryOptions{})
	s.advertise("rome", "")
	s.advertise("paris", "")
	view := s.reserve()
	for _, path := range []string{protocol.PathHistory, protocol.PathUsage} {
		if status, body := s.get("rome", path); status != http.StatusNotFound || !strings.Contains(body, "history.enabled") {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
	expect.NoError(t, s.as("rome").DeleteReservation(t.Context(), view.ID))
	s.answer(view.ID, true)
	s.gone(view.ID)
}

// TestHistoryOptions: mistakes are errors that say what to do.
func TestHistoryOptions(t *testing.T) {
	day := 24 * time.Hour
	for name, c := range map[string]struct {
		options program.HistoryOptions
		want    string
	}{
		"two databases":     {program.HistoryOptions{Path: "a", URLFile: "b", Retention: day}, "set one of them"},
		"a short retention": {program.HistoryOptions{Path: "a", Retention: day - 1}, "set 24h or more"},
		"no file":           {program.HistoryOptions{URLFile: "/nowhere", Retention: day}, "/nowhere"},
		"no currency":       {program.HistoryOptions{ReferencePrices: "cpu=1"}, "add one"},
		"an unknown price":  {program.HistoryOptions{ReferencePrices: "disk=1,currency=EUR"}, `"disk=1"`},
		"no number":         {program.HistoryOptions{ReferencePrices: "cpu=1e9,currency=EUR"}, `"cpu=1e9"`},
		"no code":           {program.HistoryOptions{ReferencePrices: "cpu=1,currency=euro"}, `"currency=euro"`},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := c.options.Open(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("want an error with %q, got %v", c.want, err)
			}
		})
	}
}
