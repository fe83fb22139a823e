package page

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/internal/page/view"
	"github.com/spillway-dev/spillway/broker/text"
)

// document is a view with its URL.
type document struct {
	path, title, template string
	// needs reports whether a user may see it, and kind is what for.
	needs func(session.User) bool
	kind  string
	// still ones are not followed: they cost more, and change less.
	still bool
	// view returns nil if there is no such thing.
	view func(p *Page, r *http.Request) (any, error)
}

func clusters(u session.User) bool     { return u.Clusters }
func reservations(u session.User) bool { return u.Reservations }

// The kinds of objects whose lists the views show.
const kindClusters, kindReservations = "clusteradvertisements", "reservations"

// documents are in the order of the navigation.
var documents = []document{
	{"/clusters", "Clusters", "clusters", clusters, kindClusters, false, func(p *Page, r *http.Request) (any, error) {
		return view.OfClusters(p.snapshot(), pageOf(r)), nil
	}},
	{"/flows", "Flows", "flows", clusters, kindClusters, false, func(p *Page, r *http.Request) (any, error) {
		return view.OfFlows(p.snapshot(), pageOf(r)), nil
	}},
	{"/queue", "Queue", "queue", reservations, kindReservations, false, func(p *Page, r *http.Request) (any, error) {
		return view.OfQueue(p.snapshot(), pageOf(r)), nil
	}},
	{"/reservations", "Reservations", "reservations", reservations, kindReservations, false, func(p *Page, r *http.Request) (any, error) {
		return view.OfReservations(p.snapshot(), text.TruncateTo(r.URL.Query().Get("filter"), 100), pageOf(r)), nil
	}},
	{"/history", "History", "history", reservations, kindReservations, true, (*Page).history},
	{"/reservations/{name}", "Reservation", "reservation", reservations, kindReservations, false, func(p *Page, r *http.Request) (any, error) {
		reservation := p.Store.Reservation(r.PathValue("name"))
		if reservation == nil {
			return nil, nil
		}
		return view.OfReservation(p.snapshot(), reservation), nil
	}},
}

// daysToChoose are for how many days the history is shown; the first is the default.
var daysToChoose = []int{30, 7, 90, 365}

// history is the view of what has ended.
func (p *Page) history(r *http.Request) (any, error) {
	if p.History == nil {
		return view.History{Off: true}, nil
	}
	ctx, cancel := context.WithTimeout(r.Context(), 10*time.Second)
	defer cancel()
	days, _ := strconv.Atoi(r.URL.Query().Get("days"))
	if !slices.Contains(daysToChoose, days) {
		days = daysToChoose[0]
	}
	now := p.Clock.Now().UTC()
	rows, err := p.History.Usage(ctx, history.UsageQuery{From: now.AddDate(0, 0, 1-days).Format(time.DateOnly), To: now.Format(time.DateOnly), Period: history.Daily})
	if err != nil {
		return nil, err
	}
	ended, err := p.History.List(ctx, history.Query{Limit: view.PageSize, Continue: text.TruncateTo(r.URL.Query().Get("from"), 500)})
	if err != nil {
		return nil, err
	}
	return view.OfHistory(now, days, rows, ended, p.Reference), nil
}

// pageOf is the number of the page that is asked for.
func pageOf(r *http.Request) int {
	page, err := strconv.Atoi(r.URL.Query().Get("page"))
	if err != nil {
		return 1
	}
	return page
}

// Handler serves the page, without a listener.
func (p *Page) Handler() http.Handler {
	mux := http.NewServeMux()
	for _, asset := range []struct{ name, kind string }{{"page.css", "text/css; charset=utf-8"}, {"page.js", "text/javascript; charset=utf-8"}, {"icon.svg", "image/svg+xml"}} {
		content, err := assets.ReadFile("assets/" + asset.name)
		if err != nil {
			panic(err) // it is embedded
		}
		mux.HandleFunc("GET /assets/"+asset.name, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", asset.kind)
			w.Header().Set("Cache-Control", "no-cache")
			_, _ = w.Write(content) // or the caller is gone
		})
	}
	mux.Handle("GET /{$}", http.RedirectHandler("/clusters", http.StatusSeeOther))
	mux.HandleFunc("GET /sign-in", p.signInForm)
	mux.HandleFunc("POST /sign-in", p.signIn)
	mux.HandleFunc("POST /sign-out", p.signOut)
	mux.HandleFunc("GET /events", p.events)
	for _, d := range documents {
		mux.HandleFunc("GET "+d.path, func(w http.ResponseWriter, r *http.Request) { p.show(w, r, d) })
	}
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		p.say(w, session.User{}, http.StatusNotFound, "There is no such page.")
	})
	return p.guarded(http.NewCrossOriginProtection().Handler(mux))
}

// guarded adds to all answers what keeps a browser from running, framing, keeping or sending anything
// else, and refuses those that this page is not for.
func (p *Page) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'")
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("X-Frame-Options", "DENY")
		header.Set("Referrer-Policy", "no-referrer")
		header.Set("Cross-Origin-Opener-Policy", "same-origin")
		header.Set("Cross-Origin-Resource-Policy", "same-origin")
		header.Set("Cache-Control", "no-store")
		if p.Secure == nil && !ofThisMachine(r.Host) {
			p.say(w, session.User{}, http.StatusMisdirectedRequest, "Without TLS, this page answers at localhost only: kubectl -n "+p.Namespace+" port-forward deploy/spillway-broker 8444")
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxForm)
		next.ServeHTTP(w, r)
	})
}

// ofThisMachine reports whether a host is a name that no other machine can have: one that a foreign
// name server resolves to this machine is not.
func ofThisMachine(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.ToLower(strings.Trim(host, "[]"))
	ip := net.ParseIP(host)
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || ip != nil && ip.IsLoopback()
}

// refusesStandby reports whether this replica does not lead. Then it has answered.
func (p *Page) refusesStandby(w http.ResponseWriter) bool {
	err := p.Ready()
	if err != nil {
		w.Header().Set("Retry-After", "2")
		p.say(w, session.User{}, http.StatusServiceUnavailable, "This replica of the broker does not lead: "+err.Error()+". Reload, or forward a port of the replica that is Ready.")
	}
	return err != nil
}

// signedIn returns who asks. If it reports false, it has answered.
func (p *Page) signedIn(w http.ResponseWriter, r *http.Request) (user session.User, ok bool) {
	if p.refusesStandby(w) {
		return user, false
	}
	err, key := session.ErrNone, ""
	if cookie, missing := r.Cookie(p.cookieName(r)); missing == nil {
		ctx, cancel := context.WithTimeout(r.Context(), 5*time.Second)
		defer cancel()
		key = hashed(cookie.Value)
		user, err = p.Sessions.User(ctx, cookie.Value)
	}
	switch {
	case errors.Is(err, session.ErrNone), errors.Is(err, session.ErrToken):
		if r.URL.Path == "/events" {
			http.Error(w, "Sign in.", http.StatusUnauthorized)
			return user, false
		}
		http.Redirect(w, r, "/sign-in?next="+url.QueryEscape(r.URL.RequestURI()), http.StatusSeeOther)
		return user, false
	case err != nil:
		p.Log.Info("Cannot ask the API server about a session", "reason", err.Error())
		w.Header().Set("Retry-After", "5")
		p.say(w, session.User{}, http.StatusServiceUnavailable, "The API server of the hub did not answer. Reload in a few seconds.")
		return user, false
	}
	// Many people may share a user, such as one ServiceAccount.
	if p.requests.Take(key, 1) > 0 || p.ofUsers.Take(user.Name, 1) > 0 {
		w.Header().Set("Retry-After", "1")
		p.say(w, user, http.StatusTooManyRequests, "Too many requests. Reload in a few seconds.")
		return user, false
	}
	return user, true
}

// show answers with a view.
func (p *Page) show(w http.ResponseWriter, r *http.Request, d document) {
	user, ok := p.signedIn(w, r)
	if !ok {
		return
	}
	if !d.needs(user) {
		p.say(w, user, http.StatusForbidden, fmt.Sprintf("%s may not list %s in namespace %s. An administrator of the hub can bind Role spillway-broker-page to them.", user.Name, d.kind, p.Namespace))
		return
	}
	body, err := p.make(r, d, user)
	switch {
	case errors.Is(err, errNone):
		p.say(w, user, http.StatusNotFound, "There is no such Reservation, or not any more: see History.")
	case errors.Is(err, errBusy):
		w.Header().Set("Retry-After", "2")
		p.say(w, user, http.StatusServiceUnavailable, "The broker makes other views now. Reload in a few seconds.")
	case err != nil:
		p.Log.Error(err, "Failed to make a view", "view", d.template)
		p.say(w, user, http.StatusServiceUnavailable, "This view cannot be shown now: the log of the broker says why. Reload in a few seconds.")
	default:
		send(w, http.StatusOK, body)
	}
}

// Errors of views: there is no such thing, or others are made.
var errNone, errBusy = errors.New("there is no such thing"), errors.New("other views are made")

// make makes a view, once not too many others are made. It does not write to the browser, which may
// read slowly.
func (p *Page) make(r *http.Request, d document, user session.User) ([]byte, error) {
	making := p.making
	if d.still {
		making = p.reading
	}
	timer := p.Clock.NewTimer(waitTimeout)
	defer timer.Stop()
	select {
	case making <- struct{}{}:
		defer func() { <-making }()
	case <-timer.C():
		return nil, errBusy
	case <-r.Context().Done():
		return nil, errBusy
	}
	content, err := p.viewed(r, d)
	switch {
	case err != nil:
		return nil, err
	case content == nil:
		return nil, errNone
	}
	return render(d.template, shown{Title: d.title, Path: d.path, Live: !d.still, User: user, At: p.Clock.Now().UTC(), View: content})
}

// say answers with one sentence.
func (p *Page) say(w http.ResponseWriter, user session.User, status int, message string) {
	p.write(w, status, "message", shown{Title: http.StatusText(status), User: user, At: p.Clock.Now().UTC(), View: message})
}

// shown is what a template gets.
type shown struct {
	// Path is empty for what is no view.
	Title, Path string
	// Live is whether the script follows the broker.
	Live bool
	User session.User
	At   time.Time
	View any
}

// write writes a whole document, or none.
func (p *Page) write(w http.ResponseWriter, status int, template string, with shown) {
	body, err := render(template, with)
	if err != nil {
		p.Log.Error(err, "Failed to make a view", "view", template)
		http.Error(w, "This view cannot be shown: see the log of the broker.", http.StatusInternalServerError)
		return
	}
	send(w, status, body)
}

// bounded is a buffer that does not take more than maxDocument.
type bounded struct{ bytes.Buffer }

func (b *bounded) Write(part []byte) (int, error) {
	if b.Len()+len(part) > maxDocument {
		return 0, fmt.Errorf("the document is larger than %d bytes", maxDocument)
	}
	return b.Buffer.Write(part)
}

func render(template string, with shown) ([]byte, error) {
	var body bounded
	err := templates[template].ExecuteTemplate(&body, "layout", with)
	return body.Bytes(), err
}

func send(w http.ResponseWriter, status int, body []byte) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(body) // or the caller is gone
}
