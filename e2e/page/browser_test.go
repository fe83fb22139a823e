//go:build e2e

package page

import (
	"bytes"
	"context"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// tab is one of a headless Chromium, at one page.
type tab struct {
	ctx  context.Context
	base string

	mutex sync.Mutex
	// hosts are those of which something was asked, and problems what a console shows in red.
	hosts, problems []string
}

// open opens a tab in a browser of its own, with the time zone and language of no place.
func open(t *testing.T, base string) *tab {
	t.Helper()
	options := append(slices.Clone(chromedp.DefaultExecAllocatorOptions[:]), chromedp.NoSandbox, chromedp.WindowSize(1120, 800), chromedp.Flag("lang", "en"))
	allocated, free := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(free)
	ctx, closeTab := chromedp.NewContext(allocated)
	t.Cleanup(closeTab)
	b := &tab{ctx: ctx, base: base}
	answered(t, func() (any, error) { return nil, chromedp.Listen(ctx, b.heard) }) // which starts the browser
	call(t, b, network.Enable, network.EnableParams{})
	call(t, b, log.Enable, cdp.Empty{})
	call(t, b, page.Enable, page.EnableParams{})
	t.Cleanup(func() {
		b.mutex.Lock()
		defer b.mutex.Unlock()
		for _, host := range b.hosts {
			if "http://"+host != base {
				t.Errorf("the page asks %s", host)
			}
		}
		if len(b.problems) > 0 {
			t.Errorf("the console has %q", b.problems)
		}
	})
	return b
}

// heard takes note of what the browser says.
func (b *tab) heard(event any) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		if at, err := url.Parse(e.Request.URL); err == nil && at.Scheme != "data" && at.Scheme != "about" && !slices.Contains(b.hosts, at.Host) {
			b.hosts = append(b.hosts, at.Host)
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.EntryLevelError {
			b.problems = append(b.problems, e.Entry.Text+" "+e.Entry.URL)
		}
	case *runtime.EventExceptionThrown:
		b.problems = append(b.problems, e.ExceptionDetails.Text)
	case *runtime.EventConsoleAPICalled:
		b.problems = append(b.problems, fmt.Sprint(e.Type))
	case *page.EventJavascriptDialogOpening:
		b.problems = append(b.problems, "a dialog: "+e.Message)
		go func() {
			_, _ = chromedp.Call(b.ctx, page.HandleJavaScriptDialog, page.HandleJavaScriptDialogParams{})
		}()
	}
}

// forgive forgets the problems that are expected.
func (b *tab) forgive(contains ...string) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.problems = slices.DeleteFunc(b.problems, func(problem string) bool {
		return slices.ContainsFunc(contains, func(part string) bool { return strings.Contains(problem, part) })
	})
}

// replaced is what Chromium says of an element that is not in the document any more.
var replaced = []string{"Could not find node with given id", "Node is detached from document", "Node does not have a layout object"}

// run takes steps. One whose element was replaced before it was acted on is taken again, as a person would.
func (b *tab) run(t *testing.T, steps ...chromedp.Action[chromedp.Void]) {
	t.Helper()
	for _, step := range steps {
		expect.Eventually(t, "the element to be there", func() (bool, string) {
			err := answered(t, func() (err error, _ error) { return chromedp.Do(b.ctx, step), nil })
			gone := err != nil && slices.ContainsFunc(replaced, func(says string) bool { return strings.Contains(err.Error(), says) })
			if !gone {
				expect.NoError(t, err)
			}
			return !gone, fmt.Sprint(err)
		})
	}
}

// call makes a call of the protocol.
func call[P, R any](t *testing.T, b *tab, command cdp.Command[P, R], params P) R {
	t.Helper()
	return answered(t, func() (R, error) { return chromedp.Call(b.ctx, command, params) })
}

// answered waits for an answer of the browser. A deadline of its context would end the browser.
func answered[T any](t *testing.T, ask func() (T, error)) (answer T) {
	t.Helper()
	done := make(chan error, 1)
	go func() {
		var err error
		answer, err = ask()
		done <- err
	}()
	select {
	case err := <-done:
		expect.NoError(t, err)
	case <-time.After(expect.Deadline):
		t.Fatal("the browser does not answer")
	}
	return answer
}

// at goes to a path.
func (b *tab) at(t *testing.T, path string) {
	t.Helper()
	b.run(t, chromedp.Navigate(b.base+path), chromedp.WaitReady("#content"))
}

// signIn signs in with a token, which leads to a path.
func (b *tab) signIn(t *testing.T, token, path string) {
	t.Helper()
	b.at(t, path)
	b.run(t, chromedp.SetValue("#token", token), chromedp.Submit("#token"), chromedp.WaitReady("#live .time"))
}

// eval is what a script returns.
func eval[T any](t *testing.T, b *tab, script string) (result T) {
	t.Helper()
	return answered(t, func() (T, error) { return chromedp.Run(b.ctx, chromedp.Evaluate[T](script)) })
}

// text is that of the document, as people see it; empty while the tab goes to another one.
func (b *tab) text(t *testing.T) string {
	t.Helper()
	return answered(t, func() (string, error) {
		text, err := chromedp.Run(b.ctx, chromedp.Evaluate[string]("document.body ? document.body.innerText : ''"))
		if err != nil && strings.Contains(err.Error(), "navigated") {
			return "", nil
		}
		return text, err
	})
}

// shows waits until the document has texts.
func (b *tab) shows(t *testing.T, texts ...string) {
	t.Helper()
	expect.EventuallyWithin(t, 90*time.Second, fmt.Sprintf("the page to show %q", texts), func() (bool, string) {
		text := b.text(t)
		return !slices.ContainsFunc(texts, func(part string) bool { return !strings.Contains(text, part) }), text
	})
}

// press presses a key.
func (b *tab) press(t *testing.T, keys string) {
	t.Helper()
	b.run(t, chromedp.KeyEvent(keys))
}

// looks sets the width of the window, 0 for a wide one, and the color scheme.
func (b *tab) looks(t *testing.T, width int64, scheme string) {
	t.Helper()
	call(t, b, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}}})
	if width > 0 {
		b.run(t, chromedp.EmulateViewport(width, 740, chromedp.EmulateMobile))
	} else {
		b.run(t, chromedp.EmulateViewport(1120, 800))
	}
}

// unreadable is a script that returns what has too little contrast to its ground for WCAG AA.
const unreadable = `(() => {
  const parse = (c) => { const m = c.match(/[\d.]+/g).map(Number); return m.length === 3 ? [...m, 1] : m; };
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; } return [255, 255, 255, 1]; };
  const bad = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.getClientRects().length || e.closest('svg')) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(ground(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.push(e.tagName + '.' + e.className + ' ' + contrast.toFixed(2));
  }
  return bad;
})()`

// pictures is where those of the documents are.
const pictures = "broker/internal/page/pictures"

// picture writes what the tab shows down to an element, if PICTURES=1.
func (b *tab) picture(t *testing.T, name, to string) {
	t.Helper()
	if os.Getenv("PICTURES") != "1" {
		return
	}
	height := eval[float64](t, b, fmt.Sprintf("Math.ceil(document.querySelector(%q).getBoundingClientRect().bottom + scrollY + 14)", to))
	width := eval[float64](t, b, "innerWidth")
	taken := call(t, b, page.CaptureScreenshot, page.CaptureScreenshotParams{CaptureBeyondViewport: new(true), Clip: &page.Viewport{Width: width, Height: height, Scale: 1}})
	shot, err := png.Decode(bytes.NewReader(taken.Data))
	expect.NoError(t, err)
	root, err := binaries.Root()
	expect.NoError(t, err)
	expect.NoError(t, os.MkdirAll(filepath.Join(root, pictures), 0o755))
	file, err := os.Create(filepath.Join(root, pictures, name+".png"))
	expect.NoError(t, err)
	expect.NoError(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(file, few(shot)))
	expect.NoError(t, file.Close())
}

// few is a picture in its 64 most frequent colors, which makes it small.
func few(shot image.Image) image.Image {
	counts := map[color.RGBA]int{}
	area := shot.Bounds()
	at := func(x, y int) color.RGBA { return color.RGBAModel.Convert(shot.At(x, y)).(color.RGBA) }
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			counts[at(x, y)]++
		}
	}
	var all []color.RGBA
	for c := range counts {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b color.RGBA) int {
		if counts[a] != counts[b] {
			return counts[b] - counts[a]
		}
		return bytes.Compare([]byte{a.R, a.G, a.B}, []byte{b.R, b.G, b.B})
	})
	var palette color.Palette
	for _, c := range all[:min(len(all), 64)] {
		palette = append(palette, c)
	}
	small := image.NewPaletted(area, palette)
	nearest := map[color.RGBA]uint8{}
	for y := area.Min.Y; y < area.Max.Y; y++ {
		for x := area.Min.X; x < area.Max.X; x++ {
			c := at(x, y)
			i, known := nearest[c]
			if !known {
				i = uint8(palette.Index(c))
				nearest[c] = i
			}
			small.SetColorIndex(x, y, i)
		}
	}
	return small
}
