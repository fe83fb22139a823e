//go:build e2e

// Package page shows the broker's page in a headless Chromium, in front of a broker as it runs, whose
// hub is a real API server.
package page

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/program"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

var views = []string{"/clusters", "/flows", "/queue", "/reservations"}

// hostile is what a cluster writes where it may write anything.
const hostile = `"><script>window.hacked=1;alert(1)</script><img src=//evil.example/x onerror="window.hacked=1">`

// TestPage is one test: a process can have one broker only, as it does in a cluster. What a part needs
// is there after the ones before it.
func TestPage(t *testing.T) {
	h := startHub(t, program.HistoryOptions{
		Path: filepath.Join(t.TempDir(), "history.db"), Retention: program.DefaultRetention, ReferencePrices: "cpu=2000,memory=1,currency=EUR",
	})
	token := h.token(t, "viewer", "clusteradvertisements", "reservations")
	w := newWire(t, h.broker.PageAddress.String())
	b := open(t, "http://"+w.address)
	t.Run("sign in", func(t *testing.T) { signsIn(t, b, token) })
	t.Run("empty hub", func(t *testing.T) { emptyHub(t, b) })
	rome := h.joins(t, cluster("rome", "16", "64Gi", ""), "")
	paris := h.joins(t, cluster("paris", "32", "128Gi", "0.03"), "")
	h.joins(t, cluster("berlin", "32", "128Gi", "0.04"), "")
	t.Run("views", func(t *testing.T) { showViews(t, h, b, paris) })
	t.Run("looks", func(t *testing.T) { looks(t, b, append(views, "/history", "/reservations/rome-shop-web-5f0c")) })
	t.Run("keyboard", func(t *testing.T) { keyboard(t, h, b) })
	t.Run("without scripts", func(t *testing.T) { withoutScripts(t, b) })
	t.Run("lost connection", func(t *testing.T) { lostConnection(t, h, b, w) })
	t.Run("hostile clusters", func(t *testing.T) {
		rome.advertise(t)
		paris.advertise(t)
		hostileClusters(t, h, b)
	})
	t.Run("100 clusters", func(t *testing.T) { manyClusters(t, h, b) })
	t.Run("history", func(t *testing.T) { showHistory(t, h, b) })
	t.Run("who may not list", func(t *testing.T) { mayNotList(t, h, b) })
}

func signsIn(t *testing.T, b *tab, token string) {
	b.at(t, "/queue")
	b.shows(t, "Token of the hub")
	b.run(t, chromedp.SetValue("#token", "guess"), chromedp.Submit("#token"), chromedp.WaitVisible(".problem"))
	b.shows(t, "The hub does not accept this token")
	b.forgive("401") // which the console shows
	b.signIn(t, token, "/queue")
	if path := eval[string](t, b, "location.pathname"); path != "/queue" {
		t.Errorf("signing in leads to %s", path)
	}
	if cookies := eval[string](t, b, "document.cookie"); cookies != "" {
		t.Errorf("a script sees the cookie: %s", cookies)
	}
	for _, place := range []string{"localStorage", "sessionStorage"} {
		if n := eval[int](t, b, place+".length"); n != 0 {
			t.Errorf("%s has %d items", place, n)
		}
	}
}

func emptyHub(t *testing.T, b *tab) {
	for path, want := range map[string]string{
		"/clusters": "No cluster has joined.", "/flows": "No cluster holds capacity", "/queue": "No Reservation waits", "/reservations": "There is no Reservation",
	} {
		b.at(t, path)
		b.shows(t, want, "● Live")
	}
	b.at(t, "/history")
	b.shows(t, "Nothing has ended yet", "reload for newer figures")
}

// TestWithoutHistory is in a process of its own, which can have one broker only.
func TestWithoutHistory(t *testing.T) {
	if os.Getenv("WITHOUT_HISTORY") == "" {
		alone := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestWithoutHistory$", "-test.timeout=10m")
		alone.Env = append(os.Environ(), "WITHOUT_HISTORY=1")
		if output, err := alone.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, output)
		}
		return
	}
	h := startHub(t, program.HistoryOptions{})
	b := open(t, "http://"+h.broker.PageAddress.String())
	b.signIn(t, h.token(t, "viewer", "clusteradvertisements", "reservations"), "/clusters")
	b.at(t, "/history")
	b.shows(t, "keeps no history", "history.enabled", "reload for newer figures")
}

// showHistory shows what has ended, and what it cost: oslo is dear, so that seconds count.
func showHistory(t *testing.T, h *hub, b *tab) {
	h.joins(t, cluster("oslo", "32", "128Gi", "900"), "")
	r := h.reserve(t, "rome", "past-1", "4", 5, in("oslo"))
	expect.EventuallyWithin(t, time.Minute, "oslo to hold it for some seconds", func() (bool, string) {
		err := h.Get(t.Context(), client.ObjectKeyFromObject(r), r)
		held := meta.FindStatusCondition(r.Status.Conditions, broker.ConditionProviderAccepted)
		return err == nil && held != nil && held.Status == metav1.ConditionTrue && time.Since(held.LastTransitionTime.Time) > 4*time.Second, fmt.Sprint(err, r.Status)
	})
	expect.NoError(t, h.Delete(t.Context(), r))
	var text string
	expect.EventuallyWithin(t, 2*time.Minute, "what has ended to be shown", func() (bool, string) {
		b.at(t, "/history")
		text = b.text(t)
		return strings.Contains(text, "rome-shop-past-1"), text
	})
	for _, want := range []string{"5 pods", "oslo: CPU 20, memory 10 GiB", "compared with reference prices", "Cost a day in EUR", "Core-hours a day"} {
		if !strings.Contains(text, want) {
			t.Errorf("the history does not show %q:\n%s", want, text)
		}
	}
	cost := eval[float64](t, b, "parseFloat([...document.querySelectorAll('.share')].find((s) => s.textContent.startsWith('oslo')).textContent.match(/; ([0-9.]+) EUR/)[1])")
	if cost < 0.1 {
		t.Errorf("it cost %f EUR:\n%s", cost, text)
	}
	if bars := eval[int](t, b, "[...document.querySelectorAll('svg.chart')].filter((c) => c.querySelector('rect').getBoundingClientRect().height > 10).length"); bars != 2 {
		t.Errorf("%d charts have a bar, want that of use and that of cost", bars)
	}
	b.run(t, chromedp.SetValue("#days", "7"), chromedp.Click(".filter button"), chromedp.WaitReady("#content"))
	b.shows(t, "in 7 days", "rome-shop-past-1")
	looks(t, b, []string{"/history"})
}

// showViews shows all views of a hub in use. The browser is not reloaded for what is new.
func showViews(t *testing.T, h *hub, b *tab, paris *agent) {
	b.at(t, "/clusters")
	b.shows(t, "rome", "paris", "berlin", "consumer only", "0.03 EUR a core and hour")
	h.reserve(t, "rome", "web-5f0c", "1", 6)
	h.reserve(t, "rome", "batch-77", "500m", 4)
	h.reserve(t, "rome", "train-1", "15", 4, together)
	h.reserve(t, "rome", "report-3", "1", 3, in("berlin"))
	h.reserve(t, "berlin", "ci-12", "2", 2, in("paris"))
	b.shows(t, "15 lent") // without a reload
	paris.spec.ObservedHolds = []broker.ObservedHold{{Requester: "rome", Pods: 5, Used: amounts("cpu", "4500m", "memory", "9Gi")}}
	paris.advertise(t)
	b.shows(t, "4.5 of it in use")
	b.looks(t, 0, "light")
	b.picture(t, "clusters", "table")

	b.at(t, "/flows")
	b.shows(t, "Who runs where", "rome", "paris", "EUR")
	if n := eval[int](t, b, "document.querySelectorAll('svg.flows path').length"); n == 0 {
		t.Error("no flow is drawn")
	}
	b.picture(t, "flows", "table")
	b.at(t, "/queue")
	b.shows(t, "rome-shop-train-1", "shop/train-1", "4 pods", "InsufficientCapacity")
	b.looks(t, 0, "dark")
	b.picture(t, "queue", "table")
	b.looks(t, 0, "light")
	b.at(t, "/reservations?filter=web")
	b.shows(t, "rome-shop-web-5f0c", "6 pods", "paris", "✓ Active")
	if text := b.text(t); strings.Contains(text, "batch-77") {
		t.Errorf("the filter shows others:\n%s", text)
	}
	b.run(t, chromedp.Click("#r-rome-shop-web-5f0c"), chromedp.WaitVisible(".steps"))
	b.shows(t, "What happened", "By rome, for shop/web-5f0c.", "Capacity held", "The providers have accepted", "Can be used", "Where it is held", "Why there", "holds capacity")
	b.picture(t, "reservation", ".steps + h2 + .scroll")
	b.at(t, "/reservations/nothing")
	b.shows(t, "There is no such Reservation")
	b.forgive("404")
}

// looks checks what is on small and large screens, in the dark and in the light.
func looks(t *testing.T, b *tab, paths []string) {
	for _, path := range paths {
		b.at(t, path)
		for _, width := range []int64{360, 0} {
			for scheme, dark := range map[string]bool{"light": false, "dark": true} {
				b.looks(t, width, scheme)
				what := fmt.Sprintf("%s, %d wide, %s", path, width, scheme)
				if over := eval[int](t, b, "document.documentElement.scrollWidth - innerWidth"); over > 0 {
					t.Errorf("%s is %d pixels too wide", what, over)
				}
				if bad := eval[[]string](t, b, unreadable); len(bad) > 0 {
					t.Errorf("%s: too little contrast: %v", what, bad)
				}
				ground := eval[string](t, b, "getComputedStyle(document.body).backgroundColor")
				if (ground != "rgb(255, 255, 255)") != dark {
					t.Errorf("%s has ground %s", what, ground)
				}
			}
		}
	}
	b.at(t, "/clusters")
	// What colors say, stripes and words say, too.
	if n := eval[int](t, b, "document.querySelectorAll('.bar .lent').length - document.querySelectorAll('.bar .lent + rect[fill=\"url(#stripes)\"]').length"); n != 0 {
		t.Errorf("%d parts that are lent have no stripes", n)
	}
	if bars := eval[int](t, b, "[...document.querySelectorAll('svg.bar')].filter((s) => !/of .*: own .*, lent .*, used of that .*, free .*/.test(s.getAttribute('aria-label'))).length"); bars != 0 {
		t.Errorf("%d bars have no words", bars)
	}
	b.looks(t, 0, "light")
}

func keyboard(t *testing.T, h *hub, b *tab) {
	b.at(t, "/reservations")
	b.press(t, kb.Tab)
	if text := eval[string](t, b, "document.activeElement.textContent"); text != "Skip to content" {
		t.Errorf("the first stop is %q", text)
	}
	b.press(t, kb.Enter)
	if id := eval[string](t, b, "document.activeElement.id"); id != "content" {
		t.Errorf("it leads to %q", id)
	}
	// What has the focus keeps it when there is something new.
	for range 12 {
		if eval[bool](t, b, "document.activeElement.id === 'r-rome-shop-batch-77'") {
			break
		}
		b.press(t, kb.Tab)
	}
	if !eval[bool](t, b, "document.activeElement.id === 'r-rome-shop-batch-77' && getComputedStyle(document.activeElement).outlineStyle !== 'none'") {
		t.Fatalf("no key leads to a Reservation, or it is not marked: %s", eval[string](t, b, "document.activeElement.outerHTML"))
	}
	eval[any](t, b, "document.activeElement.marked = 1")
	h.reserve(t, "rome", "late-1", "250m", 1)
	b.shows(t, "rome-shop-late-1")
	if !eval[bool](t, b, "document.activeElement.id === 'r-rome-shop-batch-77' && !document.activeElement.marked") {
		t.Error("the focus is lost when there is something new")
	}
	b.press(t, kb.Enter)
	b.run(t, chromedp.WaitVisible(".steps"))
	b.shows(t, "By rome, for shop/batch-77.")

	// What is selected stays, and the page says so.
	b.at(t, "/reservations")
	b.shows(t, "● Live")
	eval[any](t, b, "document.getSelection().selectAllChildren(document.getElementById('r-rome-shop-batch-77'))")
	h.reserve(t, "rome", "later-1", "250m", 1)
	b.shows(t, "Waits while text is selected or something is pressed.")
	eval[any](t, b, "document.getSelection().removeAllRanges()")
	b.shows(t, "● Live", "rome-shop-later-1")

	// What is pressed stays, so that no click is lost.
	b.at(t, "/reservations")
	b.shows(t, "● Live")
	at := eval[[]float64](t, b, "(({x, y, width, height}) => [x + width / 2, y + height / 2])(document.getElementById('r-rome-shop-batch-77').getBoundingClientRect())")
	b.run(t, chromedp.MouseEvent(chromedp.MousePressed, at[0], at[1], chromedp.ButtonLeft, chromedp.ClickCount(1)))
	h.reserve(t, "rome", "last-1", "250m", 1)
	b.shows(t, "Waits while text is selected or something is pressed.")
	b.run(t, chromedp.MouseEvent(chromedp.MouseReleased, at[0], at[1], chromedp.ButtonLeft, chromedp.ClickCount(1)))
	b.shows(t, "By rome, for shop/batch-77.")

	// Who reads may stop what moves.
	b.at(t, "/clusters")
	b.shows(t, "● Live")
	b.run(t, chromedp.Focus("#pause"))
	b.press(t, kb.Enter)
	b.shows(t, "Paused.")
	b.press(t, kb.Enter)
	b.shows(t, "● Live")
}

func withoutScripts(t *testing.T, b *tab) {
	call(t, b, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true})
	defer call(t, b, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{})
	for _, path := range append(views, "/reservations/rome-shop-web-5f0c") {
		b.run(t, chromedp.Navigate(b.base+path))
		text := b.text(t) // the protocol's own scripts run
		if !strings.Contains(text, "rome") || !strings.Contains(text, "reload for newer figures") {
			t.Errorf("%s without scripts:\n%s", path, text)
		}
	}
}

func lostConnection(t *testing.T, h *hub, b *tab, w *wire) {
	b.at(t, "/reservations")
	b.shows(t, "● Live")
	w.cut()
	b.shows(t, "Connection lost.", "Trying again", "rome-shop-web-5f0c")
	h.reserve(t, "rome", "meanwhile-1", "250m", 1)
	w.mend(t)
	b.shows(t, "● Live", "rome-shop-meanwhile-1")
	b.forgive("net::ERR_")
}

// hostileClusters shows what clusters write, as text.
func hostileClusters(t *testing.T, h *hub, b *tab) {
	spec := cluster("mallory", "64", "256Gi", "0.001")
	spec.ClusterName, spec.Region, spec.Zone = hostile, hostile[:63], hostile[:63]
	h.joins(t, spec, hostile)
	r := h.reserve(t, "rome", "bait-1", "2", 1)
	r.Annotations[broker.LabelSourceName] = hostile
	expect.Eventually(t, "the annotation to be hostile", func() (bool, string) {
		err := h.Get(t.Context(), client.ObjectKeyFromObject(r), r)
		if err == nil {
			r.Annotations[broker.LabelSourceName] = hostile
			err = h.Update(t.Context(), r)
		}
		return err == nil, fmt.Sprint(err)
	})
	for path, want := range map[string]string{"/clusters": "<script>window.hacked", "/reservations": "<script>window.hacked", "/reservations/rome-shop-bait-1": "<script>window.hacked", "/flows": "Who runs where", "/queue": "rome-shop-train-1"} {
		b.at(t, path)
		b.shows(t, want)
		if eval[bool](t, b, "window.hacked !== undefined || document.querySelector('main img, main script') !== null") {
			t.Errorf("%s runs what a cluster wrote", path)
		}
	}
	b.at(t, "/reservations/rome-shop-bait-1")
	b.shows(t, "mallory", "window.hacked")
	// Were it run, the policy would stop it: the console would say so, which fails the test.
	eval[any](t, b, "document.getElementById('live').innerHTML = '<img src=/none onerror=\"window.hacked=1\">'")
	expect.Eventually(t, "the policy to refuse a handler", func() (bool, string) {
		b.mutex.Lock()
		defer b.mutex.Unlock()
		return strings.Contains(strings.Join(b.problems, " "), "Content Security Policy"), fmt.Sprint(b.problems)
	})
	expect.Eventually(t, "the picture not to be there", func() (bool, string) {
		b.mutex.Lock()
		defer b.mutex.Unlock()
		return strings.Contains(strings.Join(b.problems, " "), "/none"), fmt.Sprint(b.problems)
	})
	b.forgive("Content Security Policy", "/none")
	if eval[bool](t, b, "window.hacked !== undefined") {
		t.Error("a handler runs")
	}
}

func manyClusters(t *testing.T, h *hub, b *tab) {
	for i := range 97 {
		spec := cluster(fmt.Sprintf("zone-%03d", i), "32", "128Gi", "0.05")
		expect.NoError(t, h.Create(t.Context(), &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: spec.ClusterID}, Spec: spec}))
	}
	b.at(t, "/clusters")
	b.shows(t, "zone-000", "zone-095", "1 to 100 of 101")
	if n := eval[int](t, b, "document.querySelectorAll('tbody').length"); n != 100 {
		t.Errorf("the page has %d clusters", n)
	}
	if over := eval[int](t, b, "document.documentElement.scrollWidth - innerWidth"); over > 0 {
		t.Errorf("the page is %d pixels too wide", over)
	}
	b.run(t, chromedp.Click("#next"), chromedp.WaitVisible("#back"))
	b.shows(t, "zone-096", "101 to 101 of 101")
}

// mayNotList: who may list one kind only sees no other, and no one sees anything after signing out.
func mayNotList(t *testing.T, h *hub, b *tab) {
	b.at(t, "/clusters")
	b.run(t, chromedp.Submit(".who button"), chromedp.WaitVisible("#token"))
	b.signIn(t, h.token(t, "of-clusters", "clusteradvertisements"), "/flows")
	for _, path := range []string{"/queue", "/reservations", "/reservations/rome-shop-web-5f0c"} {
		b.at(t, path)
		b.shows(t, "may not list reservations")
		if text := b.text(t); strings.Contains(text, "shop") {
			t.Errorf("%s shows Reservations:\n%s", path, text)
		}
	}
	b.forgive("403")
	// A stream does not outlive the permission to be there: a page that was open asks to sign in.
	b.at(t, "/clusters")
	b.shows(t, "● Live")
	eval[any](t, b, "void fetch('/sign-out', {method: 'POST', redirect: 'manual'})")
	b.shows(t, "Token of the hub")
	b.forgive("401")
}

// TestPictures: those in the documents are small.
func TestPictures(t *testing.T) {
	root, err := binaries.Root()
	expect.NoError(t, err)
	files, err := filepath.Glob(filepath.Join(root, pictures, "*.png"))
	expect.NoError(t, err)
	var total int64
	for _, file := range files {
		info, err := os.Stat(file)
		expect.NoError(t, err)
		total += info.Size()
	}
	if len(files) == 0 || total > 150_000 {
		t.Errorf("%d pictures have %d bytes, at most 150,000 are allowed", len(files), total)
	}
}
