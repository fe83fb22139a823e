package moves

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/returnhome"
)

// evictionCase is an API server's answer to an eviction.
type evictionCase struct {
	reason string
	// answer to the eviction; evicts: it takes place.
	answer func(http.ResponseWriter)
	evicts bool
	// What is known afterwards, when the caches show the pod as it is, and when no answer
	// can come any more.
	moving, movingObserved, movingLater bool
	events                              []string
}

// TestEvictions: a pod whose eviction got no answer counts as moving, so that no second one
// is evicted beside it, until it is observed that it was not evicted.
func TestEvictions(t *testing.T) {
	connectionLost := func(http.ResponseWriter) { panic(http.ErrAbortHandler) }
	status := func(code int, retryAfter string) func(http.ResponseWriter) {
		return func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/json")
			if retryAfter != "" {
				w.Header().Set("Retry-After", retryAfter)
			}
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: int32(code), Message: "because"})
		}
	}
	for name, tc := range map[string]evictionCase{
		"evicted":        {"it moves until its replacement is settled", status(http.StatusCreated, ""), true, true, true, true, []string{"ReturningHome"}},
		"answer lost":    {"it took place", connectionLost, true, true, true, true, []string{"ReturningHome"}},
		"request lost":   {"it did not take place", connectionLost, false, true, true, false, []string{"ReturnHomeBlocked"}},
		"timeout":        {"the API server may go on", status(http.StatusGatewayTimeout, ""), true, true, true, true, []string{"ReturningHome"}},
		"internal error": {"it is not known what failed", status(http.StatusInternalServerError, ""), false, true, true, false, []string{"ReturnHomeBlocked"}},
		"budget":         {"it is refused", status(http.StatusTooManyRequests, ""), false, false, false, false, []string{"ReturnHomeBlocked"}},
		"budget, later":  {"a retry of the client's own would end with a time-out", status(http.StatusTooManyRequests, "1"), false, false, false, false, []string{"ReturnHomeBlocked"}},
		"forbidden":      {"it is refused", status(http.StatusForbidden, ""), false, false, false, false, []string{"ReturnHomeBlocked"}},
		"has just ended": {"its next event shows it", status(http.StatusNotFound, ""), false, false, false, false, nil},
		"another pod":    {"it has been replaced", status(http.StatusConflict, ""), false, false, false, false, nil},
	} {
		t.Run(name, func(t *testing.T) { tc.run(t) })
	}
}

func (tc *evictionCase) run(t *testing.T) {
	pod := ownedPod("ReplicaSet", "guest", "spillway-paris", "1")
	pod.APIVersion, pod.Kind = "v1", "Pod"
	var mu sync.Mutex // for the pod and the number of evictions
	evictions := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/eviction") {
			mu.Lock()
			evictions++
			if tc.evicts {
				pod.DeletionTimestamp = &metav1.Time{Time: time.Unix(1000, 0)}
			}
			mu.Unlock()
			tc.answer(w)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(pod)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	expect.NoError(t, err)
	recorder, pods := events.NewFakeRecorder(10), demandtest.NewIndexer(pod.DeepCopy())
	m, now := testMover()
	m.Client, m.Recorder, m.Pods = client, recorder, corelisters.NewPodLister(pods)
	key, _ := m.Keys.Get(pod)
	expectMoving := func(when string, want bool) {
		t.Helper()
		m.settle(t.Context())
		if got := m.planner.Moving() != nil; got != want {
			t.Errorf("%s: moving %t, want %t, because %s", when, got, want, tc.reason)
		}
	}
	candidate := returnhome.Candidate{Pod: pod.UID, Namespace: pod.Namespace, Name: pod.Name, Owner: replacerOf(pod, key.Key), Room: true}
	plan := func() *returnhome.Candidate { return m.planner.Plan(now.Now(), []returnhome.Candidate{candidate}) }
	if plan() == nil {
		t.Fatal("the pod is not to be moved")
	}
	m.evict(t.Context(), candidate, pod.DeepCopy())
	if plan() != nil {
		t.Error("the pod is to be moved again at once")
	}
	expectMoving("at once", tc.moving)
	mu.Lock()
	observed := pod.DeepCopy()
	mu.Unlock()
	expect.NoError(t, pods.Update(observed))
	now.Step(time.Second)
	expectMoving("observed", tc.movingObserved)
	now.Step(unansweredFor)
	expectMoving("later", tc.movingLater)
	mu.Lock()
	if evictions != 1 {
		t.Errorf("%d requests for an eviction, want 1", evictions)
	}
	mu.Unlock()
	close(recorder.Events)
	var got []string
	for e := range recorder.Events {
		got = append(got, strings.Fields(e)[1])
	}
	if !slices.Equal(got, tc.events) {
		t.Errorf("events %v, want %v", got, tc.events)
	}
}
