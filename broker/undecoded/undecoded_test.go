package undecoded_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	clientevents "k8s.io/client-go/tools/events"
	testclock "k8s.io/utils/clock/testing"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/undecoded"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// object is one of a kind, cluster-scoped or in namespace default.
func object(kind, name string, spec map[string]any) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
	o.SetGroupVersionKind(broker.GroupVersion.WithKind(kind))
	o.SetName(name)
	if kind != "OverflowPolicy" {
		o.SetNamespace("default")
	}
	return o
}

// namesOf are the sorted names of the objects that cannot be decoded.
func namesOf(objects *undecoded.Objects) (names []string) {
	for _, u := range slices.Concat(objects.Of("OverflowPolicy"), objects.Of("BrokerConfig")) {
		names = append(names, u.Name)
	}
	slices.Sort(names)
	return names
}

// observed are the objects that were observed, as name and whether it is gone.
type observed struct {
	sync.Mutex
	last map[string]bool
}

func (o *observed) observe(object client.Object, deleted bool) {
	o.Lock()
	defer o.Unlock()
	o.last[object.GetName()] = deleted
}

func (o *observed) gone(name string) (gone, known bool) {
	o.Lock()
	defer o.Unlock()
	gone, known = o.last[name]
	return gone, known
}

// TestObjects follows objects of a real API server that cannot be decoded, in a cache as programs
// have it.
func TestObjects(t *testing.T) {
	config := controlplane.StartBare(t)
	controlplane.InstallCRDsWithoutRules(t, config)
	c, err := client.New(config, client.Options{})
	expect.NoError(t, err)
	create := func(o *unstructured.Unstructured) *unstructured.Unstructured {
		t.Helper()
		expect.NoError(t, c.Create(t.Context(), o))
		return o
	}
	change := func(o *unstructured.Unstructured, value any, path ...string) {
		t.Helper()
		expect.NoError(t, unstructured.SetNestedField(o.Object, value, path...))
		expect.NoError(t, c.Update(t.Context(), o))
	}
	typo := create(object("OverflowPolicy", "typo", map[string]any{"duration": "1d"}))
	label := create(object("OverflowPolicy", "label", map[string]any{"namespaceSelector": map[string]any{"matchLabels": map[string]any{"team": "a b"}}}))
	create(object("OverflowPolicy", "good", map[string]any{"duration": "24h"}))
	own := create(object("BrokerConfig", "default", map[string]any{"staleAfter": "5m"}))

	var logged sync.Map
	log := funcr.New(func(_, line string) { logged.Store(line, true) }, funcr.Options{})
	gauge, fake, seen := undecoded.NewGauge("test"), testclock.NewFakeClock(time.Now()), &observed{last: map[string]bool{}}
	objects := undecoded.New(log, gauge, fake)
	objects.Observe(seen.observe)
	recorder := clientevents.NewFakeRecorder(100)
	go objects.Run(t.Context(), recorder)
	scheme := runtime.NewScheme()
	expect.NoError(t, broker.AddToScheme(scheme))
	informers, err := cache.New(config, cache.Options{Scheme: scheme, NewInformer: objects.NewInformer})
	expect.NoError(t, err)
	go func() { _ = informers.Start(t.Context()) }()
	informers.WaitForCacheSync(t.Context())

	expectNames := func(want ...string) {
		t.Helper()
		expect.Eventually(t, fmt.Sprintf("%v not to be decodable", want), func() (bool, string) {
			have := namesOf(objects)
			n := testutil.ToFloat64(gauge.WithLabelValues("OverflowPolicy")) + testutil.ToFloat64(gauge.WithLabelValues("BrokerConfig"))
			return slices.Equal(have, want) && int(n) == len(want), fmt.Sprintf("%v, and the metric says %v", have, n)
		})
	}
	expectEvent := func(parts ...string) {
		t.Helper()
		for {
			select {
			case event := <-recorder.Events:
				if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(event, part) }) {
					return
				}
			case <-time.After(expect.Deadline):
				t.Fatalf("no event with %q", parts)
			}
		}
	}
	staleAfter := func() time.Duration {
		var config broker.BrokerConfig
		if err := informers.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "default"}, &config); err != nil || config.Spec.StaleAfter == nil {
			return 0
		}
		return config.Spec.StaleAfter.Duration
	}

	var policies broker.OverflowPolicyList
	expect.NoError(t, informers.List(t.Context(), &policies))
	if len(policies.Items) != 1 || policies.Items[0].Name != "good" {
		t.Errorf("have the policies %v, want good alone", policies.Items)
	}
	expectNames("label", "typo")
	expectEvent("Warning NotDecodable The OverflowPolicy cannot be decoded", "no capacity is requested")
	if gone, known := seen.gone("typo"); gone || !known {
		t.Error("typo was not observed")
	}
	found := false
	logged.Range(func(line, _ any) bool {
		found = found || strings.Contains(line.(string), `"error"="time: unknown unit`) && strings.Contains(line.(string), `"name"="typo"`)
		return true
	})
	if !found {
		t.Error("typo is not in the log as an error")
	}

	// The last version stays.
	expect.Eventually(t, "the BrokerConfig", func() (bool, string) { return staleAfter() == 5*time.Minute, fmt.Sprint(staleAfter()) })
	change(own, "1d", "spec", "staleAfter")
	expectNames("default", "label", "typo")
	expectEvent("The BrokerConfig cannot be decoded", `unknown unit "d"`, "that of its last version")
	if have := staleAfter(); have != 5*time.Minute {
		t.Errorf("after the typo: staleAfter is %s, want the 5m before it", have)
	}
	change(own, "7m", "spec", "staleAfter")
	expect.Eventually(t, "the corrected BrokerConfig", func() (bool, string) { return staleAfter() == 7*time.Minute, fmt.Sprint(staleAfter()) })
	expectNames("label", "typo")

	// One that comes while the others are watched.
	other := create(object("OverflowPolicy", "other", map[string]any{"namespaceSelector": map[string]any{"matchLabels": map[string]any{"a b": "c"}}}))
	expectNames("label", "other", "typo")
	expect.NoError(t, c.Delete(t.Context(), other))
	expectNames("label", "typo")
	expect.NoError(t, c.Delete(t.Context(), typo))
	expectNames("label")
	if gone, _ := seen.gone("typo"); !gone {
		t.Error("the deletion of typo was not observed")
	}
	for len(recorder.Events) > 0 {
		<-recorder.Events
	}
	fake.Step(time.Hour)
	expectEvent("spec.namespaceSelector")
	change(label, "a", "spec", "namespaceSelector", "matchLabels", "team")
	expectNames()
	expect.NoError(t, informers.List(t.Context(), &policies))
	if len(policies.Items) != 2 {
		t.Errorf("have %d policies, want good and label", len(policies.Items))
	}
}

// streams are lists and watches of OverflowPolicies, which the test answers. A watch goes on after
// it was stopped, as one does whose next event was read before.
type streams struct {
	watches chan chan watch.Event
	lists   chan *broker.OverflowPolicyList
}

type stream chan watch.Event

func (s stream) ResultChan() <-chan watch.Event { return s }
func (stream) Stop()                            {}

func (s *streams) List(metav1.ListOptions) (runtime.Object, error) { return <-s.lists, nil }

func (s *streams) Watch(metav1.ListOptions) (watch.Interface, error) {
	events := make(chan watch.Event)
	s.watches <- events
	return stream(events), nil
}

// TestEndedWatch: what a watch brings after it ended with an object that cannot be used does not
// undo the list that followed it.
func TestEndedWatch(t *testing.T) {
	unusable := broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{Name: "label", UID: "u", ResourceVersion: "5"}, Spec: broker.OverflowPolicySpec{
		NamespaceSelector: metav1.LabelSelector{MatchLabels: map[string]string{"team": "a b"}},
	}}
	objects := undecoded.New(logr.Discard(), undecoded.NewGauge("test"), testclock.NewFakeClock(time.Now()))
	from := &streams{watches: make(chan chan watch.Event), lists: make(chan *broker.OverflowPolicyList)}
	go objects.NewInformer(from, &broker.OverflowPolicy{}, 0, nil).RunWithContext(t.Context())

	ended := <-from.watches // of the initial events
	ended <- watch.Event{Type: watch.Added, Object: unusable.DeepCopy()}
	from.lists <- &broker.OverflowPolicyList{ListMeta: metav1.ListMeta{ResourceVersion: "6"}, Items: []broker.OverflowPolicy{unusable}}
	<-from.watches // from the list on: it has been taken
	bookmark := &broker.OverflowPolicy{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "6", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}
	ended <- watch.Event{Type: watch.Bookmark, Object: bookmark}
	select {
	case ended <- watch.Event{Type: watch.Bookmark, Object: bookmark}: // the one before has been looked at
	case <-time.After(10 * time.Second):
		t.Error("what the watch still brings is not read: a goroutine stays")
	}
	if have := namesOf(objects); !slices.Equal(have, []string{"label"}) {
		t.Errorf("have %v, want label", have)
	}
}

// TestLists: what is a list is decoded item by item, and what is none is an error.
func TestLists(t *testing.T) {
	var list broker.BrokerConfigList
	expect.NoError(t, list.UnmarshalJSON([]byte(`{"metadata":{"resourceVersion":"7","continue":"next"},"items":[
		{"metadata":{"name":"bad","uid":"u","resourceVersion":"5"},"spec":{"staleAfter":"1d"}},{"metadata":{"name":"good"},"spec":{"staleAfter":"24h"}}]}`)))
	if len(list.Items) != 1 || list.Items[0].Name != "good" || len(list.Undecoded) != 1 || list.Undecoded[0].Name != "bad" || list.ResourceVersion != "7" || list.Continue != "next" {
		t.Errorf("have %+v", list)
	}
	for _, none := range []string{`{"items":"none"}`, `{"items":[1]}`, `{"metadata":1,"items":[]}`} {
		if err := list.UnmarshalJSON([]byte(none)); err == nil {
			t.Errorf("%s was decoded", none)
		}
	}
}
