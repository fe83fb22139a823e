package binaries

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"
)

// goBuild builds packages of a module, named relative to the project's root, into dir, and
// logs the progress of what takes long.
func goBuild(ctx context.Context, root, module, dir string, log Log, pkgs ...string) error {
	p := &progress{log: log}
	stop := p.every(10 * time.Second)
	defer stop()
	// Downloads what is missing, too.
	cached := `{{if and .Stale (ne .StaleReason "not installed but available in build cache")}}{{.ImportPath}}{{"\n"}}{{end}}`
	folder, flags := filepath.Join(root, module), flagsFor(module)
	list, err := goCommand(ctx, folder, p, slices.Concat([]string{"list", "-deps", "-f", cached}, flags, pkgs)...)
	if err != nil {
		return err
	}
	p.expect(bytes.Count(list, []byte("\n")))
	_, err = goCommand(ctx, folder, p, slices.Concat([]string{"build", "-v", "-o", dir + "/"}, flags, pkgs)...)
	return err
}

// goCommand runs the go command in a module and returns its standard output. The progress,
// which may be nil, gets its standard error.
func goCommand(ctx context.Context, module string, p *progress, args ...string) ([]byte, error) {
	var stdout bytes.Buffer
	stderr := &lines{progress: p}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTOOLCHAIN=local", "GOWORK=off", "GOFLAGS=")
	if runtime.NumCPU() <= 4 {
		// Few packages need more memory than this to compile: to collect garbage before would take
		// an eighth of the CPU time. As many compilers run as there are CPUs.
		cmd.Env = append(cmd.Env, "GOGC=off", "GOMEMLIMIT=700MiB")
	}
	cmd.Stdout, cmd.Stderr = &stdout, stderr
	if err := cmd.Run(); err != nil {
		return stdout.Bytes(), fmt.Errorf("go %s in %s: %w\n%s", args[0], module, err, stderr.problems.Bytes())
	}
	return stdout.Bytes(), nil
}

// lines receives the standard error of a go command. It counts in the progress what is
// downloaded and compiled, and keeps the error messages.
type lines struct {
	progress *progress
	problems bytes.Buffer
	rest     []byte
}

func (l *lines) Write(text []byte) (int, error) {
	l.rest = append(l.rest, text...)
	for {
		line, rest, ok := bytes.Cut(l.rest, []byte("\n"))
		if !ok {
			return len(text), nil
		}
		l.rest = rest
		switch {
		case bytes.HasPrefix(line, []byte("go: downloading ")):
			l.progress.count(1, 0)
		case !bytes.ContainsAny(line, " \t#"):
			l.progress.count(0, 1) // a package's import path
		case l.problems.Len() < 4000:
			l.problems.Write(append(line, '\n'))
		}
	}
}

// progress is what is known of a build that runs.
type progress struct {
	log                            Log
	mu                             sync.Mutex
	began                          time.Time // of compiling
	downloaded, compiled, expected int
}

// expect sets the number of packages to compile. From now on they are.
func (p *progress) expect(packages int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.began, p.expected = time.Now(), packages
	if packages > 50 {
		p.log("  … %d packages to compile, %d modules were downloaded", packages, p.downloaded)
	}
}

func (p *progress) count(downloaded, compiled int) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.downloaded += downloaded
	p.compiled += compiled
}

// every logs a line at every interval until stop is called.
func (p *progress) every(interval time.Duration) (stop func()) {
	ended := make(chan struct{})
	var logging sync.WaitGroup
	logging.Go(func() {
		ticker := time.NewTicker(interval)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
				p.log("  … %s", p.String())
			case <-ended:
				return
			}
		}
	})
	return func() {
		close(ended)
		logging.Wait()
	}
}

// String says what is happening, how much is done, and how long the rest may take.
func (p *progress) String() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.began.IsZero() && p.downloaded == 0:
		return "reading the modules"
	case p.began.IsZero():
		return fmt.Sprintf("downloading modules, %d so far", p.downloaded)
	case p.compiled >= p.expected:
		return "all packages are compiled; linking"
	}
	text := fmt.Sprintf("%d of %d packages compiled", p.compiled, p.expected)
	if passed := time.Since(p.began); p.compiled*20 > p.expected {
		left := time.Duration(float64(passed) * float64(p.expected-p.compiled) / float64(p.compiled))
		text += fmt.Sprintf(", about %s left", left.Round(10*time.Second))
	}
	return text
}
