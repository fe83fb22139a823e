package policies

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/request"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

func namespace(name, team string) *corev1.Namespace {
	return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled, "team": team}}}
}

func policy(name, team, cpu string) *broker.OverflowPolicy {
	p := &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 2}}
	if team != "" {
		p.Spec.NamespaceSelector.MatchLabels = map[string]string{"team": team}
	}
	if cpu != "" {
		limit, cores := broker.FromList(expect.Resources("memory", "100Gi")), resource.MustParse(cpu)
		limit.CPU, p.Spec.MaxResources = &cores, &limit
	}
	return p
}

// TestStatuses: each policy says where it applies, what is used there, and why it does not apply.
func TestStatuses(t *testing.T) {
	for name, tc := range map[string]struct {
		reason     string
		policies   []*broker.OverflowPolicy
		undecoded  []broker.Undecoded
		accepted   string // of policy p
		message    string
		namespaces int32
		first      string
		usage      string
	}{
		"applies to all": {reason: "no selector selects all", policies: []*broker.OverflowPolicy{policy("p", "", "")},
			accepted: "Applies", message: "all namespaces that it selects", namespaces: 3, first: "shop"},
		"limited": {reason: "shop uses most", policies: []*broker.OverflowPolicy{policy("p", "a", "8")},
			accepted: "Applies", message: "all namespaces", namespaces: 2, first: "shop", usage: "cpu 3 of 8 (shop)"},
		"a limit of zero": {reason: "nothing more is requested", policies: []*broker.OverflowPolicy{policy("p", "a", "0")},
			accepted: "Applies", message: "all namespaces", namespaces: 2, first: "shop", usage: "cpu 3 of 0 (shop)"},
		"selects none": {reason: "no namespace has the label", policies: []*broker.OverflowPolicy{policy("p", "c", "")},
			accepted: "NoNamespace", message: "correct its namespaceSelector"},
		"overridden": {reason: "another one comes first", policies: []*broker.OverflowPolicy{policy("a", "", ""), policy("p", "a", "")},
			accepted: "Overridden", message: "bank (a), shop (a)"},
		"overridden in part": {reason: "another one comes first for some", policies: []*broker.OverflowPolicy{policy("a", "b", ""), policy("p", "", "")},
			accepted: "Applies", message: "comes first: lab (a).", namespaces: 2, first: "shop"},
		"another cannot be decoded": {reason: "that comes first", policies: []*broker.OverflowPolicy{policy("p", "", "")}, undecoded: []broker.Undecoded{{Name: "a", Raw: []byte(`{"spec":{"namespaceSelector":{"matchLabels":{"team":"a"}}}}`)}},
			accepted: "Applies", message: "applies", namespaces: 1, first: "lab"},
	} {
		t.Run(name, func(t *testing.T) {
			in := input{policies: demand.Policies{Decoded: tc.policies, Undecoded: tc.undecoded}, now: metav1.NewTime(time.Unix(1000, 0)),
				namespaces: []*corev1.Namespace{namespace("bank", "a"), namespace("shop", "a"), namespace("lab", "b")},
				requested:  map[string]corev1.ResourceList{"shop": expect.Resources("cpu", "3", "memory", "1Gi")}}
			status := statuses(in, nil)["p"]
			c := meta.FindStatusCondition(status.Conditions, broker.ConditionAccepted)
			if c == nil || c.Reason != tc.accepted || (c.Status == metav1.ConditionTrue) != (tc.accepted == ReasonApplies) || !strings.Contains(c.Message, tc.message) {
				t.Errorf("%+v, want %s with %q, because %s", c, tc.accepted, tc.message, tc.reason)
			}
			if status.NamespaceCount != tc.namespaces || status.Usage != tc.usage || len(status.Namespaces) != int(tc.namespaces) || tc.first != "" && status.Namespaces[0].Name != tc.first {
				t.Errorf("%d namespaces %+v, usage %q, want %d from %s, %q", status.NamespaceCount, status.Namespaces, status.Usage, tc.namespaces, tc.first, tc.usage)
			}
		})
	}
	// One of which only an earlier version can be decoded keeps its status: what it says now is not known.
	earlier := input{policies: demand.Policies{Decoded: []*broker.OverflowPolicy{policy("p", "a", "8")}, Undecoded: []broker.Undecoded{{Name: "p", Raw: []byte(`{}`)}}}, namespaces: []*corev1.Namespace{namespace("shop", "a")}}
	if status := statuses(earlier, nil); len(status) > 0 {
		t.Errorf("of an earlier version: %+v", status)
	}
	var many []*corev1.Namespace
	for i := range 30 {
		many = append(many, namespace(fmt.Sprintf("shop-%02d", i), "a"))
	}
	in := input{policies: demand.Policies{Decoded: []*broker.OverflowPolicy{policy("p", "a", "8")}}, namespaces: many, requested: map[string]corev1.ResourceList{"shop-29": expect.Resources("cpu", "1")}}
	if status := statuses(in, nil)["p"]; len(status.Namespaces) != broker.MaxPolicyNamespaces || status.NamespaceCount != 30 || status.Namespaces[0].Name != "shop-29" || status.Namespaces[1].Name != "shop-00" {
		t.Errorf("of 30 namespaces: %d, %+v", status.NamespaceCount, status.Namespaces)
	}
}

// TestWriter: with a real API server, the statuses are written once, again when they change, and
// kubectl prints them.
func TestWriter(t *testing.T) {
	config := controlplane.Start(t)
	scheme := runtime.NewScheme()
	expect.NoError(t, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	api, err := request.NewClient(config)
	expect.NoError(t, err)
	clock := clocktesting.NewFakeClock(time.Now().Truncate(time.Second))
	objects := undecoded.New(klog.Background(), undecoded.NewGauge("test"), clock)
	newInformer := func(resource string, example runtime.Object) cache.SharedIndexInformer {
		informer := objects.NewInformer(cache.NewFilteredListWatchFromClient(api, resource, "", func(*metav1.ListOptions) {}), example, 0, request.Indexers())
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			informer.RunWithContext(ctx)
		}()
		t.Cleanup(func() {
			cancel()
			<-ended
		})
		return informer
	}
	policies, reservations := newInformer("overflowpolicies", &broker.OverflowPolicy{}), newInformer("reservations", &broker.Reservation{})
	w := &Writer{Log: klog.Background(), Clock: clock, Client: api, Policies: request.PolicyCache{Decoded: policies.GetIndexer(), Objects: objects},
		Namespaces: corelisters.NewNamespaceLister(demandtest.NewIndexer(namespace("shop", "a"))), Reservations: request.NewReservations(api, reservations.GetIndexer(), clock)}
	expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}))
	team := policy("team", "a", "8")
	team.Generation = 0
	expect.NoError(t, c.Create(t.Context(), team))
	// line waits until kubectl prints a part, while the writer writes.
	line := func(name, part string) {
		t.Helper()
		expect.Eventually(t, "the line of "+name, func() (bool, string) {
			w.write(t.Context())
			got, err := controlplane.Line(t.Context(), config, true, "overflowpolicies", "", name)
			return err == nil && strings.Contains(got, part), fmt.Sprintf("%s (%v), want %q", got, err, part)
		})
	}
	line("team", "Accepted=True, Namespaces=1, Usage=cpu 0 of 8 (shop), Max CPU=8, ")
	expect.NoError(t, c.Create(t.Context(), &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "web", Count: 3, Requests: broker.FromList(expect.Resources("cpu", "1"))}}}}))
	line("team", "Usage=cpu 3 of 8 (shop), ")
	expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(team), team))
	expect.Eventually(t, "the cache to have it", func() (bool, string) {
		obj, _, err := policies.GetIndexer().GetByKey("team")
		return err == nil && obj.(*broker.OverflowPolicy).ResourceVersion == team.ResourceVersion, ""
	})
	w.write(t.Context())
	again := team.DeepCopy()
	if expect.NoError(t, c.Get(t.Context(), client.ObjectKeyFromObject(team), again)); again.ResourceVersion != team.ResourceVersion {
		t.Errorf("the status is written again without a change: %+v", again.Status)
	}
}
