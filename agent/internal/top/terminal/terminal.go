// Package terminal keeps bubbletea from asking the terminal for its colours whenever a program that
// has it starts: a terminal that does not answer delays every command by 5 s, and one that is
// recorded shows the question. Go initializes packages that are ready in the order of their paths,
// so this one before those that bubbletea needs.
package terminal

import "os"

var term, set = os.LookupEnv("TERM")

func init() { os.Setenv("TERM", "dumb") }

// Restore gives the program the TERM that it was started with. Package main calls it first.
func Restore() {
	if set {
		os.Setenv("TERM", term)
	} else {
		os.Unsetenv("TERM")
	}
}
