package top

import (
	tea "github.com/charmbracelet/bubbletea"

	"github.com/spillway-dev/spillway/agent/internal/explain"
)

// Model shows the Board that it was sent last. It ends with q, Esc or Ctrl-C.
type Model struct {
	Style         explain.Style
	board         *Board
	width, height int
}

// Init does nothing: Boards are sent to the program.
func (m Model) Init() tea.Cmd { return nil }

// Update takes a Board, the size of the terminal, or a key.
func (m Model) Update(message tea.Msg) (tea.Model, tea.Cmd) {
	switch message := message.(type) {
	case Board:
		m.board = &message
	case tea.WindowSizeMsg:
		m.width, m.height = message.Width, message.Height
	case tea.KeyMsg:
		switch message.String() {
		case "q", "esc", "ctrl+c":
			return m, tea.Quit
		}
	}
	return m, nil
}

// View is the Board above a line about the keys.
func (m Model) View() string {
	const keys = "q quits"
	switch {
	case m.board == nil:
		return "reading…"
	case m.height < 2:
		return m.board.View(m.width, m.height, m.Style)
	}
	return m.board.View(m.width, m.height-1, m.Style) + "\n" + keys
}
