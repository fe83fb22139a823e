package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"

	tea "github.com/charmbracelet/bubbletea"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/spillway-dev/spillway/agent/internal/top"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTop: printed once where lines cannot be drawn again.
func TestTop(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	out, _ := c.run(0, "top")
	for _, want := range []string{"rome  ", "paris", "0.08 EUR/h", "shop/web-1a2b3c4d", "1 waiting"} {
		if !strings.Contains(out, want) {
			t.Errorf("top says nothing of %q:\n%s", want, out)
		}
	}
	out, _ = c.run(0, "top", "--once", "-o=json")
	var board top.Board
	expect.NoError(t, json.Unmarshal([]byte(out), &board))
	if len(board.Flows) != 1 || board.Flows[0].To != "paris" || board.Flows[0].Pods != 1 {
		t.Errorf("top as JSON is %s", out)
	}
	c.refuses("top")
	c.refuses("top", "-o=json")
	c.grantSystem("bob")
	if out, _ := c.run(0, "top", "--as=bob"); !strings.Contains(out, "you may not list nodes") {
		t.Errorf("top with some permissions says\n%s", out)
	}
	c.run(exitNoAnswer, "top", "--server=https://127.0.0.1:1")
}

// screen is what a terminal has been sent.
type screen struct {
	mu   sync.Mutex
	sent bytes.Buffer
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sent.Write(p)
}

func (s *screen) shows(text string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Contains(s.sent.String(), text)
}

// TestTopDraws: it draws what has changed, and ends with q, or with the context.
func TestTopDraws(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	for _, quits := range []bool{true, false} {
		var shown screen
		o := c.options()
		o.Out = &shown
		live, err := o.client()
		expect.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		keys, press := io.Pipe()
		ended := make(chan error, 1)
		go func() {
			remembered := top.Remember(live)
			board, err := o.board(ctx, remembered)
			if err == nil {
				err = o.live(ctx, board, remembered, tea.WithInput(keys))
			}
			ended <- err
		}()
		draws := func(id string) {
			expect.Eventually(t, "it to draw "+id, func() (bool, string) { return shown.shows(id), "" })
		}
		draws("paris")
		if quits {
			c.lends("berlin", "4")
			draws("berlin")
			_, err = press.Write([]byte("q"))
			expect.NoError(t, err)
		} else {
			cancel()
		}
		expect.NoError(t, <-ended)
	}
}

// options are those of a verb.
func (c *testCluster) options() *options {
	flags := genericclioptions.NewConfigFlags(true)
	flags.KubeConfig, flags.CacheDir = &c.args[1], &c.args[3]
	return &options{flags: flags, system: broker.SystemNamespace}
}

// TestTopWaits: a list that waits for a refused watch until its time is up is no answer.
func TestTopWaits(t *testing.T) {
	r := newReader(t.Context(), nil)
	r.note("list", "pods", "", apierrors.NewTimeoutError("failed waiting for *v1.Pod Informer to sync", 0))
	if r.err(&options{flags: genericclioptions.NewConfigFlags(true)}) == nil {
		t.Error("the board counts as read")
	}
}

// TestTopWatches: what changes is seen without another list.
func TestTopWatches(t *testing.T) {
	c := clusterOf(t, controlplane.Start(t))
	c.shop()
	c.installed()
	o := c.options()
	live, err := o.client()
	expect.NoError(t, err)
	remembered := top.Remember(live)
	_, err = o.board(t.Context(), remembered)
	expect.NoError(t, err)
	config, err := o.flags.ToRESTConfig()
	expect.NoError(t, err)
	watched, lost, err := top.Watch(t.Context(), config, live, o.system)
	expect.NoError(t, err)
	remembered.Client = watched
	sees := func(id string) {
		expect.Eventually(t, "the board to show "+id, func() (bool, string) {
			board, err := o.board(t.Context(), remembered)
			return strings.Contains(fmt.Sprintf("%+v", board.Clusters), id), fmt.Sprintf("%+v, %v", board.Clusters, err)
		})
	}
	sees("paris")
	c.lends("berlin", "4")
	sees("berlin")
	if why := lost(); why != "" {
		t.Errorf("the watches do not get on: %s", why)
	}
}
