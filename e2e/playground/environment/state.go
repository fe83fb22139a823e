package environment

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

const (
	statePrefix = "spillway-playground-"
	lockFile    = "lock"
)

// state is the directory of one playground.
type state struct {
	dir    string
	unlock func()
}

// newState creates the directory below parent, and removes those of playgrounds that
// were killed.
func newState(ctx context.Context, parent string) (state, error) {
	sweep(ctx, parent)
	dir, err := os.MkdirTemp(parent, statePrefix)
	if err != nil {
		return state{}, fmt.Errorf("making a directory for the playground: %w", err)
	}
	unlock, err := binaries.Lock(ctx, filepath.Join(dir, lockFile))
	if err != nil {
		return state{}, err
	}
	return state{dir: dir, unlock: unlock}, nil
}

// remove deletes the directory.
func (s state) remove() error {
	s.unlock()
	if err := os.RemoveAll(s.dir); err != nil {
		return fmt.Errorf("removing the playground's directory: %w", err)
	}
	return nil
}

// sweep removes the directories whose lock is free. One without a lock file may be
// under construction and is removed only when it is old.
func sweep(ctx context.Context, parent string) {
	left, err := filepath.Glob(filepath.Join(parent, statePrefix+"*"))
	if err != nil {
		return
	}
	for _, dir := range left {
		if _, err := os.Stat(filepath.Join(dir, lockFile)); err != nil {
			if info, err := os.Stat(dir); err != nil || time.Since(info.ModTime()) < time.Hour {
				continue
			}
		}
		at, cancel := context.WithTimeout(ctx, 10*time.Millisecond)
		unlock, err := binaries.Lock(at, filepath.Join(dir, lockFile))
		cancel()
		if err != nil {
			continue // in use, or of another user
		}
		_ = os.RemoveAll(dir)
		unlock()
	}
}
