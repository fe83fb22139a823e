package protocol

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// cutting is a broker of which something on the way cuts the streams.
type cutting struct {
	sync.Mutex
	views []ConsumerView
	// keeps is set once streams are not cut any more, silent if nothing comes of them, and down if
	// all calls fail.
	keeps, silent, down         bool
	streams, lists, notModified int
}

func (b *cutting) serve(w http.ResponseWriter, r *http.Request) {
	b.Lock()
	defer b.Unlock()
	watching := isStream(r)
	if b.down {
		panic(http.ErrAbortHandler)
	}
	if watching && b.silent {
		b.Unlock()
		<-r.Context().Done()
		b.Lock()
		return
	}
	if watching {
		_ = json.NewEncoder(w).Encode(Event{Type: EventRelist, Consumer: b.views})
		_ = http.NewResponseController(w).Flush()
		if !b.keeps {
			panic(http.ErrAbortHandler)
		}
		b.Unlock()
		<-r.Context().Done()
		b.Lock()
		return
	}
	b.lists++
	body, _ := json.Marshal(ConsumerList{Items: b.views})
	etag := fmt.Sprintf("%q", fmt.Sprint(len(body)))
	w.Header().Set("ETag", etag)
	if r.Header.Get("If-None-Match") == etag {
		b.notModified++
		w.WriteHeader(http.StatusNotModified)
		return
	}
	_, _ = w.Write(body)
}

func isStream(r *http.Request) bool { return r.URL.Query().Get("watch") == "true" }

// countsStreams counts them where they begin: one may be given up before the broker hears of it.
type countsStreams struct {
	*http.Transport
	of *cutting
}

func (c countsStreams) RoundTrip(r *http.Request) (*http.Response, error) {
	if isStream(r) {
		c.of.Lock()
		c.of.streams++
		c.of.Unlock()
	}
	return c.Transport.RoundTrip(r)
}

func (b *cutting) set(ids ...string) {
	b.Lock()
	defer b.Unlock()
	b.views = nil
	for _, id := range ids {
		b.views = append(b.views, ConsumerView{ID: id})
	}
}

func (b *cutting) counts() (streams, lists, notModified int) {
	b.Lock()
	defer b.Unlock()
	return b.streams, b.lists, b.notModified
}

// watchedOf follows a Watch of a broker, with a client that tries a stream again after a time.
func (b *cutting) watchedOf(t *testing.T, streamAgainAfter time.Duration) <-chan string {
	t.Helper()
	client := serve(t, b.serve)
	client.calls.Transport = countsStreams{client.calls.Transport.(*http.Transport), b}
	client.heartbeat, client.PollInterval, client.streamAgainAfter = time.Minute, 5*time.Millisecond, streamAgainAfter
	if b.silent {
		client.heartbeat = 10 * time.Millisecond
	}
	events := make(chan string, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	var ended sync.WaitGroup
	ended.Go(func() {
		client.Watch(ctx, RoleRequester, func(event Event) {
			text := string(event.Type) + " " + event.ID
			for _, view := range event.Consumer {
				text += view.ID + " "
			}
			events <- text
		})
	})
	t.Cleanup(func() { cancel(); ended.Wait() })
	return events
}

// TestPollsWhereStreamsAreCut: after a few streams that were cut, news come from lists, only what
// has changed is handed over, and what has not is not sent.
func TestPollsWhereStreamsAreCut(t *testing.T) {
	b := &cutting{}
	b.set("a", "b")
	events := b.watchedOf(t, time.Hour)
	for range maxBriefStreams + 1 { // the last one is the first list
		want(t, events, "Relist a b ")
	}
	b.set("a", "b", "c-longer")
	want(t, events, "Put c-longer ")
	b.set("a", "c-longer")
	want(t, events, "Delete b")
	expect.Eventually(t, "lists without changes", func() (bool, string) {
		_, _, notModified := b.counts()
		return notModified > 10, fmt.Sprint(notModified)
	})
	if streams, _, _ := b.counts(); streams != maxBriefStreams {
		t.Errorf("%d streams, want %d", streams, maxBriefStreams)
	}
	select {
	case event := <-events:
		t.Errorf("nothing has changed, got %s", event)
	default:
	}
}

// TestPollsWhereStreamsAreSilent: a proxy that keeps a response until it is complete.
func TestPollsWhereStreamsAreSilent(t *testing.T) {
	b := &cutting{silent: true}
	b.set("a")
	events := b.watchedOf(t, time.Hour)
	want(t, events, "Relist a ")
	if streams, _, _ := b.counts(); streams != maxBriefStreams {
		t.Errorf("%d streams, want %d", streams, maxBriefStreams)
	}
	b.set("a", "b-longer")
	want(t, events, "Put b-longer ")
}

// TestOutageIsNoReasonToPoll: where lists fail too, streams are tried until one succeeds.
func TestOutageIsNoReasonToPoll(t *testing.T) {
	b := &cutting{down: true, keeps: true}
	b.set("a")
	events := b.watchedOf(t, time.Hour)
	expect.Eventually(t, "many streams that fail", func() (bool, string) {
		streams, _, _ := b.counts()
		return streams > 2*maxBriefStreams, fmt.Sprint(streams)
	})
	b.Lock()
	b.down = false
	b.Unlock()
	want(t, events, "Relist a ")
}

// TestStreamsAreTriedAgain: while they are cut, one for each period of polling, and they are
// used again once they are not.
func TestStreamsAreTriedAgain(t *testing.T) {
	b := &cutting{}
	b.set("a")
	const period = 40 * time.Millisecond
	began := time.Now()
	b.watchedOf(t, period)
	expect.Eventually(t, "some streams to be tried again", func() (bool, string) {
		streams, _, _ := b.counts()
		return streams > maxBriefStreams && time.Since(began) > 20*period, fmt.Sprint(streams)
	})
	if streams, _, _ := b.counts(); streams > maxBriefStreams+int(time.Since(began)/period) {
		t.Errorf("%d streams in %s", streams, time.Since(began))
	}
	b.Lock()
	b.keeps = true
	b.Unlock()
	last := 0
	expect.Eventually(t, "a stream that is kept, and no lists", func() (bool, string) {
		_, lists, _ := b.counts()
		before := last
		last = lists
		return before == lists, fmt.Sprint(lists - before)
	})
}

func want(t *testing.T, events <-chan string, want string) {
	t.Helper()
	select {
	case got := <-events:
		if got != want {
			t.Fatalf("got %q, want %q", got, want)
		}
	case <-time.After(expect.Deadline):
		t.Fatalf("no event, want %q", want)
	}
}
