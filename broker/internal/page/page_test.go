package page_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/page"
	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// hostile is what a cluster writes where it may write anything.
const hostile = `"><script>alert(1)</script><img src=//evil.example/x onerror=alert(2)>{{.User}}`

// served is a page in front of a store.
type served struct {
	*page.Page
	store  *store.Store
	url    string
	ready  error
	review func(context.Context, string) (session.User, error)
}

// past is what has ended, as values, or why it cannot be read.
type past struct {
	rows  []history.UsageRow
	ended []history.Record
	err   error
	// asked is what was asked last.
	asked string
}

func (p *past) List(_ context.Context, query history.Query) (history.Page, error) {
	p.asked += fmt.Sprintf(" %d from %q", query.Limit, query.Continue)
	return history.Page{Records: p.ended, Continue: "a&b"}, p.err
}

func (p *past) Usage(_ context.Context, query history.UsageQuery) ([]history.UsageRow, error) {
	p.asked = fmt.Sprintf("%s %s to %s", query.Period, query.From, query.To)
	return p.rows, p.err
}

// everyone may see all, under the name of the token.
func everyone(_ context.Context, token string) (session.User, error) {
	return session.User{Name: token, Clusters: true, Reservations: true}, nil
}

func serve(t *testing.T, secure *tls.Config) *served { return serveWith(t, secure, nil) }

func serveWith(t *testing.T, secure *tls.Config, kept history.Store) *served {
	t.Helper()
	s := &served{store: store.New(clock.RealClock{}), review: everyone}
	s.Page = page.New(page.Options{
		History: kept,
		Secure:  secure, Namespace: "spillway-system", Store: s.store, Clock: clock.RealClock{}, Log: logr.Discard(), Ready: func() error { return s.ready },
		Sessions: session.New(func(ctx context.Context, token string) (session.User, error) { return s.review(ctx, token) }, clock.RealClock{}),
	})
	server := httptest.NewServer(s.Handler())
	t.Cleanup(server.Close)
	s.url = server.URL
	return s
}

// put adds a hostile cluster, and a Reservation of it.
func (s *served) put() {
	s.store.PutAdvertisement(&broker.ClusterAdvertisement{
		ObjectMeta: metav1.ObjectMeta{Name: "paris", UID: "p", ResourceVersion: "1"},
		Spec: broker.ClusterAdvertisementSpec{
			ClusterID: "paris", ClusterName: hostile, Region: hostile, Zone: hostile, Lending: broker.Lending{Enabled: true},
			Resources:     broker.AdvertisedResources{Allocatable: broker.FromList(expect.Resources("cpu", "10", "example.com/<script>", "1"))},
			ObservedHolds: []broker.ObservedHold{{Requester: hostile, Pods: 1}},
			Cost:          &broker.Cost{CPUCost: "0.05", Currency: hostile},
		},
		Status: broker.ClusterAdvertisementStatus{Active: true, Holds: []broker.Hold{{Requester: hostile, ReservationName: "web", Promised: broker.HeldCapacity{Totals: broker.FromList(expect.Resources("cpu", "1"))}}}},
	})
	s.store.PutReservation(&broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Name: "secret-web", UID: "w", ResourceVersion: "1", Annotations: map[string]string{broker.LabelSourceName: hostile, broker.LabelSourceNamespace: hostile}},
		Spec:       broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{Name: hostile, Count: 1, NodeSelector: map[string]string{hostile: hostile}}}},
		Status: broker.ReservationStatus{
			Where: hostile, Used: &broker.Use{Summary: hostile, Pods: []string{hostile}},
			Allocations: []broker.Allocation{{Cluster: hostile, PricePerHour: hostile}},
			Conditions:  []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Reason: hostile, Message: hostile, LastTransitionTime: metav1.Now()}},
			Decision:    &broker.Decision{Scores: []broker.ClusterScore{{Cluster: hostile, Score: hostile}}, Rejections: []broker.ClusterRejection{{Cluster: hostile, Reason: hostile, Message: hostile}}},
		},
	})
}

// browser keeps cookies and does not follow redirects.
func browser(t *testing.T) *http.Client {
	t.Helper()
	jar, err := cookiejar.New(nil)
	expect.NoError(t, err)
	return &http.Client{Jar: jar, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// answer is a response that was read.
type answer struct {
	*http.Response
	body string
}

func do(t *testing.T, browser *http.Client, method, url string, form url.Values, headers ...string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(form.Encode()))
	expect.NoError(t, err)
	if form != nil {
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	for i := 0; i+1 < len(headers); i += 2 {
		if request.Header.Set(headers[i], headers[i+1]); headers[i] == "Host" {
			request.Host = headers[i+1]
		}
	}
	response, err := browser.Do(request)
	expect.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	expect.NoError(t, err)
	return answer{response, string(body)}
}

// signIn returns a browser that has signed in with a token.
func (s *served) signIn(t *testing.T, token string) *http.Client {
	t.Helper()
	b := browser(t)
	if a := do(t, b, http.MethodPost, s.url+"/sign-in", url.Values{"token": {" " + token + "\n"}, "next": {"/queue?page=2"}}); a.StatusCode != http.StatusSeeOther || a.Header.Get("Location") != "/queue?page=2" {
		t.Fatalf("signing in: %s, to %s", a.Status, a.Header.Get("Location"))
	}
	return b
}

var paths = []string{"/clusters", "/flows", "/queue", "/reservations", "/reservations?filter=" + url.QueryEscape(hostile), "/history", "/reservations/secret-web"}

// inline is what runs or styles inline, once the values of attributes are left out, and foreign what
// leads to another host.
var (
	value   = regexp.MustCompile(`="[^"]*"`)
	inline  = regexp.MustCompile(`(?i)<[^>]*\s(on[a-z]+|style)\b|<style|<script>|<script [^>]*>[^<]`)
	foreign = regexp.MustCompile(`(?i)(src|href|action)="(https?:|//|javascript:)`)
)

// TestHostileViews: what a cluster wrote is text, in every view, and the browser may run and load only
// what the page has of its own.
func TestHostileViews(t *testing.T) {
	s := serveWith(t, nil, &past{
		rows: []history.UsageRow{{
			UsageKey: history.UsageKey{Period: history.DateOf(time.Now()), Requester: hostile, Provider: hostile, Currency: hostile},
			Sum:      history.Sum{Promised: history.Amount{corev1.ResourceCPU: big.NewInt(capacity.Unit * time.Hour.Milliseconds())}, Cost: big.NewRat(1, 1)},
		}},
		ended: []history.Record{{
			Name: hostile, Requester: hostile, Namespace: hostile, Owner: hostile, Requested: hostile, Reason: hostile,
			Shares: map[string]history.Share{hostile: {Why: hostile, Currency: hostile, PricePerHour: big.NewRat(1, 1)}},
		}},
	})
	s.put()
	b := s.signIn(t, "ada")
	for _, path := range append(paths, "/", "/sign-in?next="+url.QueryEscape(hostile), "/nothing") {
		a := do(t, b, http.MethodGet, s.url+path, nil)
		want := map[string]int{"/": http.StatusSeeOther, "/nothing": http.StatusNotFound}[path]
		if want == 0 {
			want = http.StatusOK
		}
		if a.StatusCode != want {
			t.Errorf("%s: %s", path, a.Status)
		}
		if found := inline.FindString(value.ReplaceAllString(a.body, "")) + foreign.FindString(a.body); found != "" {
			t.Errorf("%s has %q", path, found)
		}
		if strings.Contains(a.body, "<script>alert") || strings.Contains(a.body, "<img") {
			t.Errorf("%s has what a cluster wrote:\n%s", path, a.body)
		}
		if slices.Contains(paths[:4], path) && !strings.Contains(a.body, "&lt;script&gt;alert(1)") {
			t.Errorf("%s does not show what the cluster wrote:\n%s", path, a.body)
		}
		for header, want := range map[string]string{
			"Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
			"X-Content-Type-Options":  "nosniff", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
		} {
			if got := a.Header.Get(header); got != want {
				t.Errorf("%s: %s is %q", path, header, got)
			}
		}
	}
	for _, asset := range []string{"page.css", "page.js", "icon.svg"} {
		if a := do(t, b, http.MethodGet, s.url+"/assets/"+asset, nil); a.StatusCode != http.StatusOK || strings.Contains(a.body, "//evil") {
			t.Errorf("%s: %s", asset, a.Status)
		}
	}
	if a := do(t, b, http.MethodGet, s.url+"/assets/layout.html", nil); a.StatusCode != http.StatusNotFound {
		t.Errorf("a template is served: %s", a.Status)
	}
	if a := do(t, b, http.MethodGet, s.url+"/reservations/other", nil); a.StatusCode != http.StatusNotFound {
		t.Errorf("an unknown Reservation: %s", a.Status)
	}
}

// TestWhoMaySee: a user sees the kinds that they may list, and without a session there is nothing.
func TestWhoMaySee(t *testing.T) {
	s := serve(t, nil)
	s.put()
	s.review = func(_ context.Context, token string) (session.User, error) {
		return session.User{Name: token, Clusters: token == "of-clusters", Reservations: token == "of-reservations"}, nil
	}
	for who, allowed := range map[string][]string{"of-clusters": paths[:2], "of-reservations": paths[2:], "": nil} {
		b := browser(t)
		if who != "" {
			b = s.signIn(t, who)
		}
		for _, path := range append(paths, "/events") {
			if path == "/events" && who != "" {
				continue
			}
			a := do(t, b, http.MethodGet, s.url+path, nil)
			want := http.StatusForbidden
			switch {
			case path == "/events":
				want = http.StatusUnauthorized
			case who == "":
				want = http.StatusSeeOther
			case slices.Contains(allowed, path):
				want = http.StatusOK
			}
			if a.StatusCode != want {
				t.Errorf("%q at %s: %s, want %d", who, path, a.Status, want)
			}
			if strings.Contains(a.body, "alert(1)") && !slices.Contains(allowed, path) {
				t.Errorf("%q sees at %s what they may not list", who, path)
			}
		}
	}
	if a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {"stranger"}}); a.StatusCode != http.StatusForbidden || len(a.Cookies()) != 0 || !strings.Contains(a.body, "bind Role spillway-broker-page") {
		t.Errorf("who may list nothing: %s, %v", a.Status, a.Cookies())
	}
}

// TestSignInForm: the cookie, where it leads, and who may send the form.
func TestSignInForm(t *testing.T) {
	for _, secure := range []*tls.Config{nil, {}} {
		s := serve(t, secure)
		a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {"ada"}})
		name := map[bool]string{true: "__Host-spillway-page", false: "spillway-page"}[secure != nil] + "-" + a.Request.URL.Port()
		if c := a.Cookies(); len(c) != 1 || c[0].Name != name || !c[0].HttpOnly || c[0].SameSite != http.SameSiteStrictMode || c[0].Secure != (secure != nil) || c[0].Path != "/" || strings.Contains(c[0].Value, "ada") {
			t.Errorf("%v", a.Header["Set-Cookie"])
		}
	}
	for next, want := range map[string]string{
		"": "/clusters", "/flows": "/flows", "/reservations/web?page=2": "/reservations/web?page=2", "//evil.example": "/clusters", "https://evil.example/": "/clusters",
		`/\evil.example`: "/clusters", "flows": "/clusters", "javascript:alert(1)": "/clusters", "/%2f/evil.example": "/clusters", "/\nSet-Cookie: a=b": "/clusters",
	} {
		a := do(t, browser(t), http.MethodPost, serve(t, nil).url+"/sign-in", url.Values{"token": {"ada"}, "next": {next}})
		if got := a.Header.Get("Location"); got != want {
			t.Errorf("%q leads to %q, want %q", next, got, want)
		}
	}
}

// TestForeignSites: another site's form neither signs in nor out, and its name leads to nothing.
func TestForeignSites(t *testing.T) {
	s := serve(t, nil)
	b := s.signIn(t, "ada")
	for _, path := range []string{"/sign-in", "/sign-out"} {
		if a := do(t, b, http.MethodPost, s.url+path, url.Values{"token": {"mallory"}}, "Sec-Fetch-Site", "cross-site"); a.StatusCode != http.StatusForbidden || len(a.Cookies()) > 0 {
			t.Errorf("%s: %s", path, a.Status)
		}
		if a := do(t, b, http.MethodPost, s.url+path, url.Values{"token": {"mallory"}}, "Origin", "https://evil.example"); a.StatusCode != http.StatusForbidden {
			t.Errorf("%s from another origin: %s", path, a.Status)
		}
	}
	for _, host := range []string{"evil.example", "evil.example:8444", "127.0.0.1.evil.example", "localhost.evil.example", "192.0.2.1", ""} {
		if a := do(t, b, http.MethodGet, s.url+"/clusters", nil, "Host", host); host != "" && a.StatusCode != http.StatusMisdirectedRequest {
			t.Errorf("host %q: %s", host, a.Status)
		}
	}
	for _, host := range []string{"localhost", "localhost:9000", "127.0.0.1:1", "[::1]:8444", "spillway.localhost"} {
		if a := do(t, b, http.MethodGet, s.url+"/sign-in", nil, "Host", host); a.StatusCode != http.StatusOK {
			t.Errorf("host %q: %s", host, a.Status)
		}
	}
	if a := do(t, b, http.MethodPost, s.url+"/sign-out", nil, "Sec-Fetch-Site", "same-origin"); a.StatusCode != http.StatusSeeOther {
		t.Errorf("signing out: %s", a.Status)
	}
	if a := do(t, b, http.MethodGet, s.url+"/clusters", nil); a.StatusCode != http.StatusSeeOther {
		t.Errorf("after signing out: %s", a.Status)
	}
}

// TestBounds: attempts to sign in and requests have a rate, forms a size, and a replica that does not
// lead says so.
func TestBounds(t *testing.T) {
	s := serve(t, nil)
	codes := map[int]int{}
	for range 20 {
		codes[do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {"x"}}).StatusCode]++
	}
	if codes[http.StatusTooManyRequests] < 5 {
		t.Errorf("signing in again and again: %v", codes)
	}
	s = serve(t, nil)
	if a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {strings.Repeat("x", 64<<10)}}); a.StatusCode != http.StatusBadRequest {
		t.Errorf("a large form: %s", a.Status)
	}
	if a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {" "}}); a.StatusCode != http.StatusBadRequest {
		t.Errorf("no token: %s", a.Status)
	}
	b := s.signIn(t, "ada")
	codes = map[int]int{}
	for range 300 {
		codes[do(t, b, http.MethodGet, s.url+"/queue", nil).StatusCode]++
	}
	if codes[http.StatusTooManyRequests] == 0 || codes[http.StatusOK] < 100 {
		t.Errorf("many requests: %v", codes)
	}
	s.ready = errors.New("this replica is not the leader")
	if a := do(t, b, http.MethodGet, s.url+"/clusters", nil); a.StatusCode != http.StatusServiceUnavailable || !strings.Contains(a.body, "does not lead") {
		t.Errorf("a standby: %s", a.Status)
	}
	s.ready = nil
	s.review = func(context.Context, string) (session.User, error) { return session.User{}, errors.New("no answer") }
	if a := do(t, browser(t), http.MethodPost, s.url+"/sign-in", url.Values{"token": {"ada"}}); a.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("an API server that does not answer: %s", a.Status)
	}
}

// TestManyObjects: a page of 100 clusters or 10,000 Reservations stays small.
func TestManyObjects(t *testing.T) {
	s := serve(t, nil)
	for i := range 1000 {
		name := fmt.Sprintf("cluster-%04d", i)
		s.store.PutAdvertisement(&broker.ClusterAdvertisement{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), ResourceVersion: "1"},
			Spec:       broker.ClusterAdvertisementSpec{ClusterID: name, ClusterName: strings.Repeat("<", 253), Resources: broker.AdvertisedResources{Allocatable: broker.FromList(expect.Resources("cpu", "10", "memory", "10Gi", "nvidia.com/gpu", "4"))}},
		})
	}
	for i := range 10_000 {
		name := fmt.Sprintf("web-%05d", i)
		s.store.PutReservation(&broker.Reservation{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), ResourceVersion: "1"},
			Status:     broker.ReservationStatus{Conditions: []metav1.Condition{{Type: broker.ConditionQueued, Status: metav1.ConditionTrue, Message: strings.Repeat("<", 8<<10)}}},
		})
	}
	b := s.signIn(t, "ada")
	for _, path := range []string{"/clusters?page=3", "/flows", "/queue?page=7", "/reservations?page=100", "/reservations?filter=web-0", "/reservations/web-00001"} {
		began := time.Now()
		a := do(t, b, http.MethodGet, s.url+path, nil)
		t.Logf("%s: %d KiB in %s", path, len(a.body)>>10, time.Since(began))
		if a.StatusCode != http.StatusOK || len(a.body) > 600<<10 {
			t.Errorf("%s: %s, %d bytes", path, a.Status, len(a.body))
		}
	}
}

// TestEvents: a stream says when there is something new, and ends with the session.
func TestEvents(t *testing.T) {
	s := serve(t, nil)
	b := s.signIn(t, "ada")
	response, err := b.Get(s.url + "/events")
	expect.NoError(t, err)
	defer response.Body.Close()
	if response.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatal(response.Header)
	}
	events := bufio.NewScanner(response.Body)
	next := func() (data string, ok bool) {
		for events.Scan() {
			if data, ok = strings.CutPrefix(events.Text(), "data: "); ok {
				return data, true
			}
		}
		return "", false
	}
	if first, ok := next(); !ok || first != "0" {
		t.Fatalf("the first event is %q", first)
	}
	began := time.Now()
	s.store.Note(&broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "a", UID: "a", ResourceVersion: "1"}}, false)
	if second, ok := next(); !ok || second != "1" || time.Since(began) > 8*time.Second {
		t.Errorf("after a change, the event is %q, after %s", second, time.Since(began))
	}
	var others []*http.Response
	for range 15 {
		other, err := b.Get(s.url + "/events")
		expect.NoError(t, err)
		others = append(others, other)
	}
	if a := do(t, b, http.MethodGet, s.url+"/events", nil); a.StatusCode != http.StatusTooManyRequests {
		t.Errorf("the 17th stream of a user: %s", a.Status)
	}
	for _, other := range others {
		expect.NoError(t, other.Body.Close())
	}
	if a := do(t, b, http.MethodPost, s.url+"/sign-out", nil); a.StatusCode != http.StatusSeeOther {
		t.Fatal(a.Status)
	}
	s.store.Note(&broker.Reservation{ObjectMeta: metav1.ObjectMeta{Name: "b", UID: "b", ResourceVersion: "2"}}, false)
	if data, ok := next(); ok {
		t.Errorf("after signing out, there is event %q", data)
	}
}

// TestHistory: the view of what has ended, for some numbers of days, in pages; or that there is none.
func TestHistory(t *testing.T) {
	s := serve(t, nil)
	if a := do(t, s.signIn(t, "ada"), http.MethodGet, s.url+"/history", nil); a.StatusCode != http.StatusOK || !strings.Contains(a.body, "keeps no history") {
		t.Errorf("without a history: %s", a.Status)
	}
	kept := &past{ended: []history.Record{{Name: "web-ended", Requester: "rome", Ended: time.Now()}}}
	s = serveWith(t, nil, kept)
	b := s.signIn(t, "ada")
	today := time.Now().UTC()
	day := func(before int) string { return today.AddDate(0, 0, -before).Format(time.DateOnly) }
	for query, want := range map[string]string{
		"":                     "day " + day(29) + " to " + day(0) + ` 100 from ""`,
		"?days=365&from=a%26b": "day " + day(364) + " to " + day(0) + ` 100 from "a&b"`,
		"?days=100000":         "day " + day(29) + " to " + day(0) + ` 100 from ""`,
	} {
		a := do(t, b, http.MethodGet, s.url+"/history"+query, nil)
		if a.StatusCode != http.StatusOK || !strings.Contains(a.body, "web-ended") || strings.Contains(a.body, "page.js") || !strings.Contains(a.body, "from=a%26b") {
			t.Errorf("%q: %s\n%s", query, a.Status, a.body)
		}
		if kept.asked != want && day(0) == time.Now().UTC().Format(time.DateOnly) {
			t.Errorf("%q asks for %s, want %s", query, kept.asked, want)
		}
	}
	kept.err = errors.New("no disk at /var/lib")
	if a := do(t, b, http.MethodGet, s.url+"/history", nil); a.StatusCode != http.StatusServiceUnavailable || strings.Contains(a.body, "/var/lib") {
		t.Errorf("a history that cannot be read: %s", a.Status)
	}
}
