package request

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand/demandtest"
	"github.com/spillway-dev/spillway/scheduler-plugin/waiting"
)

// notes records the texts of the events of a reason.
type notes struct {
	reason string
	texts  []string
}

// Eventf implements events.EventRecorder.
func (n *notes) Eventf(_, _ runtime.Object, _, reason, _, format string, args ...any) {
	if reason == n.reason {
		n.texts = append(n.texts, fmt.Sprintf(format, args...))
	}
}

var reservations = schema.GroupResource{Group: broker.Group, Resource: "reservations"}

// forbidden is the nth answer of a quota, broken that of a webhook that is down.
func forbidden(n int) apierrors.APIStatus {
	return apierrors.NewForbidden(reservations, "crunch", fmt.Errorf("exceeded quota: team-a, used: %d, %s", n, strings.Repeat("limited ", 200)))
}

func broken(n int) apierrors.APIStatus {
	return apierrors.NewInternalError(fmt.Errorf("failed calling webhook team-a, attempt %d", n))
}

// TestWriteIsRefused: while the API server does not accept a Reservation, its pods have one event
// with its answer, however often it answers, and whatever figures it names.
func TestWriteIsRefused(t *testing.T) {
	brokenAtFirst := func(n int) apierrors.APIStatus {
		if n < 4 {
			return broken(n)
		}
		return forbidden(n)
	}
	for name, tc := range map[string]struct {
		// answer is that to the nth request; nil if there is none.
		answer func(n int) apierrors.APIStatus
		// accepts is when the API server accepts it.
		accepts time.Duration
		events  int
		retry   time.Duration
		// unasked: pods do not wait for a decision.
		unasked bool
		// every is how often it is requested for further pods, whatever the API server answers.
		every time.Duration
	}{
		"a quota":       {answer: forbidden, accepts: 5 * time.Minute, events: 1, retry: blockedRetryAfter, unasked: true},
		"an API server": {answer: forbidden, accepts: 10 * time.Second, events: 0},
		"a webhook without a code": {answer: func(n int) apierrors.APIStatus {
			return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusBadRequest, Message: fmt.Sprintf("webhook team-a denied the request %d", n)}}
		}, accepts: 5 * time.Minute, events: 1, retry: blockedRetryAfter, unasked: true},
		"no CRD":            {answer: func(int) apierrors.APIStatus { return apierrors.NewNotFound(reservations, "team-a") }, accepts: 5 * time.Minute, events: 1, retry: blockedRetryAfter, unasked: true},
		"a broken webhook":  {answer: broken, accepts: 5 * time.Minute, events: 1, retry: blockedRetryAfter},
		"a busy API server": {answer: broken, accepts: 10 * time.Second, events: 0},
		"an API server that does not answer meanwhile": {answer: func(n int) apierrors.APIStatus {
			if n == 3 {
				return nil
			}
			return forbidden(n)
		}, accepts: 20 * time.Second, events: 0},
		"an API server, and pods that come one after another": {answer: forbidden, accepts: 10 * time.Second, every: 300 * time.Millisecond, events: 0},
		"a quota after an API server":                         {answer: brokenAtFirst, accepts: 20 * time.Second, events: 0},
		"no answer for a while":                               {answer: func(int) apierrors.APIStatus { return nil }, accepts: 5 * time.Minute, events: 0},
	} {
		t.Run(name, func(t *testing.T) {
			pods := demandtest.NewIndexer()
			c, now := testController(t, pods)
			began := now.Now()
			var mu sync.Mutex
			var during []bool
			pod := demandtest.JobPod("crunch", "crunch-0", "1")
			expect.NoError(t, pods.Add(pod))
			key, _ := c.Keys.KeyOf(pod)
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				body, _ := io.ReadAll(r.Body) // what is missing does not decode
				during = append(during, c.Grants.IsUnasked(key))
				w.Header().Set("Content-Type", "application/json")
				if now.Now().Sub(began) < tc.accepts {
					answer := tc.answer(len(during))
					if answer == nil {
						panic(http.ErrAbortHandler)
					}
					status := answer.Status()
					status.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}
					w.WriteHeader(int(status.Code))
					body, _ = json.Marshal(status)
				}
				_, _ = w.Write(body)
			}))
			defer server.Close()
			client, err := NewClient(&rest.Config{Host: server.URL})
			expect.NoError(t, err)
			recorded := &notes{reason: "OverflowFailed"}
			c.Recorder, c.Policies, c.Synced = recorded, newPolicies(), func() bool { return true }
			c.Reservations = NewReservations(client, demandtest.NewIndexer(), now)
			c.Pending.Add(pod.UID, waiting.NameOf(pod), began)
			of, _ := c.Keys.Get(pod)
			set := of.Set
			set.Count = 1
			request := demand.Request{Key: key, Owner: of.Owner, PodSets: []broker.PodSet{set}, Pending: []types.UID{pod.UID}}
			for {
				again := c.reconcile(t.Context(), request)
				if again == 0 {
					break
				}
				if tc.every > 0 {
					again = min(again, tc.every)
				}
				if now.Now().Sub(began) > blockedRetryAfter && tc.events > 0 {
					if tc.retry > 0 && again != tc.retry {
						t.Fatalf("retried after %s, want %s", again, tc.retry)
					}
					if got := c.Grants.IsUnasked(key); got != tc.unasked {
						t.Fatalf("unasked: %t", got)
					}
				}
				now.Step(again)
			}
			if len(recorded.texts) != tc.events {
				t.Errorf("%d events, want %d: %q", len(recorded.texts), tc.events, recorded.texts)
			}
			for _, text := range recorded.texts {
				if len(text) > events.MaxMessage || !strings.Contains(text, "team-a") || !strings.HasSuffix(text, fmt.Sprintf("It is requested again every %.0f s.", tc.retry.Seconds())) {
					t.Errorf("%d bytes: %s", len(text), text)
				}
			}
			server.Close() // waits for the last request
			// What was decided stays while it is requested again.
			if last := during[len(during)-1]; last != tc.unasked {
				t.Errorf("unasked while it is requested again: %t, want %t", last, tc.unasked)
			}
			if c.Grants.IsUnasked(key) {
				t.Error("it is requested, and yet unasked")
			}
			if c.refusals.Get(refusalKey(key, refusedWrite)) != 0 || c.refusals.Get(refusalKey(key, failedWrite)) != 0 {
				t.Error("what was refused before it was requested counts later")
			}
		})
	}
}

// TestRefusalsOfGonePods: what was refused for pods that are gone is not kept.
func TestRefusalsOfGonePods(t *testing.T) {
	c, now := testController(t, demandtest.NewIndexer())
	refuse := func(name string) string {
		key := demand.Key{Namespace: "shop", Shape: name}
		if after := c.refused(demand.Request{Key: key}, refusedWrite, errors.New("exceeded quota")); after != retryAfter {
			t.Errorf("%s: retried after %s, want %s", name, after, retryAfter)
		}
		return refusalKey(key, refusedWrite)
	}
	gone := refuse("gone")
	if now.Step(time.Hour); c.refusals.Get(gone) == 0 {
		t.Fatal("it was not kept before")
	}
	if refuse("other"); c.refusals.Get(gone) != 0 {
		t.Error("a refusal for pods that are gone is kept")
	}
}
