package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"sync"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/top"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	// drawnEvery is how often the board is made again from what the watches have brought.
	drawnEvery = time.Second
	// lostFor is how long after the last failure of a watch the board counts as not up to date: a
	// watch is tried again within that time.
	lostFor = 35 * time.Second
)

func newTop(o *options) *cobra.Command {
	once := false
	command := &cobra.Command{
		Use:   "top",
		Short: "Watch clusters, what they lend, who uses whom, the queue, and the price of an hour",
		Long: `Shows what happens now, and goes on until q is pressed: clusters with what they lend and what is used of it, which
cluster uses which, the queue, and the price of an hour. In the hub it shows all clusters, elsewhere what this cluster
sees. Nothing is polled: it watches. With --once, -o json or yaml, or if standard output is no terminal, it prints once.`,
		Example: `  kubectl spillway top --context=hub
  kubectl spillway top --once | grep paris`,
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(command *cobra.Command, _ []string) error {
			c, err := o.client()
			if err != nil {
				return err
			}
			first := &remembering{Client: c, refused: map[reflect.Type]error{}}
			board, err := o.board(command.Context(), first)
			if err != nil {
				return err
			}
			if once || !o.draws() {
				return o.print(board, func(style explain.Style) string { return board.View(style.Width, 0, style) + "\n" })
			}
			return o.live(command.Context(), board, first)
		},
	}
	command.Flags().BoolVar(&once, "once", false, "Print once and end.")
	return command
}

// draws reports whether standard output is a terminal on which lines can be drawn again.
func (o *options) draws() bool {
	file, ok := o.Out.(*os.File)
	name := os.Getenv("TERM")
	return ok && term.IsTerminal(int(file.Fd())) && name != "" && name != "dumb" && o.output != outputJSON && o.output != outputYAML
}

// board reads what is to be shown.
func (o *options) board(ctx context.Context, c client.Client) (top.Board, error) {
	var pods corev1.PodList
	r := newReader(ctx, c)
	r.list("pods", &pods, client.HasLabels{broker.LabelHold})
	observed, err := o.observeSystem(r)
	if err != nil {
		return top.Board{}, err
	}
	return top.Of(observed, pods.Items), nil
}

// remembering is a client that does not ask again for lists that were refused.
type remembering struct {
	client.Client
	mu      sync.Mutex
	refused map[reflect.Type]error
}

func (c *remembering) List(ctx context.Context, list client.ObjectList, options ...client.ListOption) error {
	kind := reflect.TypeOf(list)
	c.mu.Lock()
	err := c.refused[kind]
	c.mu.Unlock()
	if err != nil {
		return err
	}
	err = c.Client.List(ctx, list, options...)
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) || meta.IsNoMatchError(err) {
		c.mu.Lock()
		c.refused[kind] = err
		c.mu.Unlock()
	}
	return err
}

// live draws boards until the user quits. terminal says which one, unless it is that of the process.
func (o *options) live(ctx context.Context, first top.Board, c *remembering, terminal ...tea.ProgramOption) (err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	watched, lost, err := o.watch(ctx)
	if err != nil {
		return err
	}
	c.Client = watched
	terminal = append(terminal, tea.WithContext(ctx), tea.WithOutput(o.Out), tea.WithAltScreen(), tea.WithoutCatchPanics(), tea.WithoutSignalHandler())
	program := tea.NewProgram(top.Model{Style: o.style()}, terminal...)
	defer func() {
		if r := recover(); r != nil {
			_ = program.RestoreTerminal() // what follows is an error already
			err = fmt.Errorf("internal error, please report it: %v", r)
		}
	}()
	go func() {
		board := first
		for {
			board.Problem = lost()
			program.Send(board)
			select {
			case <-ctx.Done():
				return
			case <-time.After(drawnEvery):
			}
			if next, err := o.board(ctx, c); err == nil {
				board = next
			}
		}
	}()
	if _, err = program.Run(); err != nil && !errors.Is(err, tea.ErrProgramKilled) {
		return fmt.Errorf("drawing on the terminal: %w (--once prints once)", err)
	}
	return nil
}

// watch returns a client that reads from watches of what board reads, and a function that says why they
// do not get on, empty if they do.
func (o *options) watch(ctx context.Context) (client.Client, func() string, error) {
	c, err := o.client()
	if err != nil {
		return nil, nil, err
	}
	config, err := o.flags.ToRESTConfig()
	if err != nil {
		return nil, nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	var mu sync.Mutex
	var at time.Time
	why := ""
	failed := func(_ context.Context, _ *toolscache.Reflector, err error) {
		if errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
			return // the watch begins again
		}
		mu.Lock()
		defer mu.Unlock()
		at, why = time.Now(), err.Error()
	}
	some := func(label string) cache.ByObject {
		exists, err := labels.NewRequirement(label, selection.Exists, nil)
		if err != nil {
			panic(err) // no such label
		}
		return cache.ByObject{Label: labels.NewSelector().Add(*exists)}
	}
	system := cache.ByObject{Namespaces: map[string]cache.Config{o.system: {}}}
	watches, err := cache.New(config, cache.Options{
		Scheme: c.Scheme(), Mapper: c.RESTMapper(), DefaultUnsafeDisableDeepCopy: ptr.To(true), DefaultWatchErrorHandler: failed,
		ByObject: map[client.Object]cache.ByObject{
			&corev1.Pod{}: some(broker.LabelHold), &corev1.Node{}: some(broker.LabelProvider), &appsv1.Deployment{}: system, &coordinationv1.Lease{}: system,
			&broker.ClusterAdvertisement{}: system, &broker.ReservationInstruction{}: system,
		},
	})
	if err != nil {
		return nil, nil, fmt.Errorf("watching %s: %w", o.cluster(), err)
	}
	go func() { _ = watches.Start(ctx) }() // it ends with the context
	cached, err := client.New(config, client.Options{Scheme: c.Scheme(), Mapper: c.RESTMapper(), Cache: &client.CacheOptions{Reader: watches}})
	if err != nil {
		return nil, nil, fmt.Errorf("connecting to the API server: %w", err)
	}
	return cached, func() string {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(at) > lostFor {
			return ""
		}
		return why
	}, nil
}
