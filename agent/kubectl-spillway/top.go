package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/spf13/cobra"
	"golang.org/x/term"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	"github.com/spillway-dev/spillway/agent/internal/top"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/text"
)

// drawnEvery is how often the board is made again from what the watches have brought.
const drawnEvery = time.Second

// readWithin limits how long a board waits for watches that bring nothing: some are refused.
const readWithin = 10 * time.Second

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
			first := top.Remember(c)
			board, err := o.board(command.Context(), first)
			if err != nil {
				return err
			}
			if err := o.forbidden(board.Unreadable, health.Advertisements, explain.Nodes, explain.Instructions, explain.Reservations); err != nil && board.Empty() {
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

// live draws boards until the user quits. terminal says which one, unless it is that of the process.
func (o *options) live(ctx context.Context, first top.Board, c *top.Remembering, terminal ...tea.ProgramOption) (err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	config, err := o.flags.ToRESTConfig()
	if err != nil {
		return fmt.Errorf("reading the kubeconfig: %w", err)
	}
	watched, lost, err := top.Watch(ctx, config, c.Client, o.system)
	if err != nil {
		return fmt.Errorf("watching %s: %w", o.cluster(), err)
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
		board, problem := first, ""
		for {
			board.Problem = cmp.Or(lost(), problem)
			program.Send(board)
			select {
			case <-ctx.Done():
				return
			case <-time.After(drawnEvery):
			}
			reading, done := context.WithTimeout(ctx, readWithin)
			next, err := o.board(reading, c)
			done()
			if problem = ""; err == nil {
				board = next
			} else {
				problem = text.Line(err.Error(), top.MaxProblem)
			}
		}
	}()
	if _, err = program.Run(); err != nil && !errors.Is(err, tea.ErrProgramKilled) {
		return fmt.Errorf("drawing on the terminal: %w (--once prints once)", err)
	}
	return nil
}
