// Package process runs the playground's programs as child processes that never
// outlive it: not when it is stopped, not when it crashes, and not when it is
// killed with SIGKILL.
package process

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Spec is a program to run.
type Spec struct {
	// Name in messages, and of the log file.
	Name string
	// Path of the executable, and its arguments.
	Path string
	Args []string
	// Env is added to the environment of this process.
	Env []string
	// Dir to run in, and LogDir where <Name>.log is written, both output streams
	// together.
	Dir, LogDir string
}

// Process is a running program, or one that has ended.
type Process struct {
	spec Spec
	log  string
	cmd  *exec.Cmd
	done chan struct{}

	mu      sync.Mutex
	wanted  bool // its end was requested
	outcome error
}

// spawner is the one thread that starts every child. The kernel sends a child's
// parent-death signal when the thread that started it ends, so this one lives
// for as long as the process does.
var spawner = sync.OnceValue(func() chan<- func() {
	work := make(chan func())
	go func() {
		runtime.LockOSThread()
		for f := range work {
			f()
		}
	}()
	return work
})

// Start runs a program in a process group of its own. It gets SIGKILL when this
// process ends, however that ends.
func Start(spec Spec) (*Process, error) {
	p := &Process{spec: spec, log: filepath.Join(spec.LogDir, spec.Name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	defer log.Close() // the child has its own
	p.cmd = exec.Command(spec.Path, spec.Args...)
	p.cmd.Dir = spec.Dir
	p.cmd.Env = append(os.Environ(), spec.Env...)
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	spawner() <- func() { started <- p.cmd.Start() }
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", spec.Name, err)
	}
	go func() {
		err := p.cmd.Wait()
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.outcome = err; err == nil {
			p.outcome = errors.New("ended unexpectedly")
		}
		close(p.done)
	}()
	return p, nil
}

// Name is the one it was started with.
func (p *Process) Name() string { return p.spec.Name }

// Pid is its process ID, and that of its group.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Log is the path of what it writes.
func (p *Process) Log() string { return p.log }

// Done is closed when it has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Err returns how the process ended unexpectedly, with the end of its log; nil while
// it runs or if its end was requested.
func (p *Process) Err() error {
	select {
	case <-p.done:
	default:
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.wanted {
		return nil
	}
	return fmt.Errorf("%s ended: %w; the end of its log:\n%s", p.spec.Name, p.outcome, p.Tail(15))
}

// Stopped reports whether the process has ended as requested.
func (p *Process) Stopped() bool {
	select {
	case <-p.done:
		return p.Err() == nil
	default:
		return false
	}
}

// Kill kills the process group.
func (p *Process) Kill() {
	p.signal(syscall.SIGKILL)
	<-p.done
}

// Stop sends SIGTERM, and kills the process group after grace.
func (p *Process) Stop(grace time.Duration) {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(grace):
	}
	p.Kill() // including the rest of its group
}

func (p *Process) signal(signal syscall.Signal) {
	p.mu.Lock()
	p.wanted = true
	p.mu.Unlock()
	// An error means that the group has ended already.
	_ = syscall.Kill(-p.Pid(), signal)
}

// Tail is the last lines of its log.
func (p *Process) Tail(lines int) string { return Tail(p.log, lines) }

// widest is the longest line that Tail returns, in bytes: enough for a sentence,
// too little for a stack.
const widest = 400

// Tail is the last lines of a file, indented; at most 64 KiB of it are read.
func Tail(path string, lines int) string {
	f, err := os.Open(path)
	if err != nil {
		return "    " + err.Error()
	}
	defer f.Close()
	const most = 64 << 10
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return "    " + err.Error()
		}
	}
	text, err := io.ReadAll(f)
	if err != nil {
		return "    " + err.Error()
	}
	all := strings.Split(string(bytes.TrimSpace(text)), "\n")
	if len(all) > lines {
		all = all[len(all)-lines:]
	}
	for i, line := range all {
		if len(line) > widest {
			all[i] = strings.ToValidUTF8(line[:widest], "") + "…"
		}
	}
	return "    " + strings.Join(all, "\n    ")
}
