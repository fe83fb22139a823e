package page

import (
	"fmt"
	"net/http"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/page/session"
)

const (
	// lookEvery is how often a stream looks whether there is something new, aliveEvery how often
	// it says that it is there: then ages are newer, too.
	lookEvery, aliveEvery = time.Second, 10 * time.Second
	// writeTimeout is how long a browser may take to read an event.
	writeTimeout = 10 * time.Second
)

// events is a stream of server-sent events. An event has nothing but a number: the script gets the
// view again, as any reload does.
func (p *Page) events(w http.ResponseWriter, r *http.Request) {
	user, ok := p.signedIn(w, r)
	if !ok || r.Method == http.MethodHead {
		return
	}
	if !seesAny(user) {
		p.say(w, user, http.StatusForbidden, "There is nothing that "+user.Name+" may list.")
		return
	}
	key := ""
	if cookie, err := r.Cookie(p.cookieName(r)); err == nil {
		key = hashed(cookie.Value)
	}
	if !p.streams.Begin(key, maxStreams) {
		p.refuseStream(w, user)
		return
	}
	defer p.streams.End(key)
	if !p.streamsOfUsers.Begin(user.Name, maxStreamsOfUser) {
		p.refuseStream(w, user)
		return
	}
	defer p.streamsOfUsers.End(user.Name)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no")
	ticker := p.Clock.NewTicker(lookEvery)
	defer ticker.Stop()
	var seen uint64
	var sent time.Time
	for {
		now, _ := p.look()
		if at := p.Clock.Now(); now != seen || at.Sub(sent) >= aliveEvery {
			extend(w)
			if !p.mayStay(r) || !writeEvent(w, now) {
				return
			}
			seen, sent = now, at
		}
		select {
		case <-r.Context().Done():
			return
		case <-p.stopping:
			extend(w)
			return
		case <-ticker.C():
		}
	}
}

func (p *Page) refuseStream(w http.ResponseWriter, user session.User) {
	w.Header().Set("Retry-After", "5")
	p.say(w, user, http.StatusTooManyRequests, "Too many streams are open.")
}

// seesAny reports whether there is something that a user may see.
func seesAny(user session.User) bool { return user.Clusters || user.Reservations }

// mayStay reports whether who opened a stream is still signed in, and this replica still leads.
func (p *Page) mayStay(r *http.Request) bool {
	cookie, err := r.Cookie(p.cookieName(r))
	if err != nil || p.Ready() != nil {
		return false
	}
	user, err := p.Sessions.User(r.Context(), cookie.Value)
	return err == nil && seesAny(user)
}

// extend gives the browser time to read an event, or the end.
func extend(w http.ResponseWriter) {
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // it was for the request
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
}

func writeEvent(w http.ResponseWriter, number uint64) bool {
	_, err := fmt.Fprintf(w, "retry: 2000\ndata: %d\n\n", number)
	return err == nil && http.NewResponseController(w).Flush() == nil
}
