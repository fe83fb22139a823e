package binaries

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"time"
)

func goBuild(ctx context.Context, module, dir string, log Log, pkgs ...string) error {
	args := slices.Concat([]string{"build", "-v", "-o", dir + "/"}, flags, pkgs)
	_, err := goCommand(ctx, module, log, args...)
	return err
}

// goCommand runs the go command in a module and returns its standard output.
// log, which may be nil, gets the progress of a build with -v.
func goCommand(ctx context.Context, module string, log Log, args ...string) ([]byte, error) {
	var stdout bytes.Buffer
	stderr := &progress{log: log, last: time.Now()}
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = module
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOTOOLCHAIN=local", "GOWORK=off", "GOFLAGS=")
	cmd.Stdout, cmd.Stderr = &stdout, stderr
	if err := cmd.Run(); err != nil {
		return stdout.Bytes(), fmt.Errorf("go %s in %s: %w\n%s", args[0], module, err, stderr.problems.Bytes())
	}
	return stdout.Bytes(), nil
}

// progress receives the standard error of a go command. It counts the downloaded
// modules and compiled packages for the log, and keeps the error messages.
type progress struct {
	log                  Log
	last                 time.Time
	downloaded, compiled int
	problems             bytes.Buffer
	line                 []byte
}

func (p *progress) Write(text []byte) (int, error) {
	p.line = append(p.line, text...)
	for {
		line, rest, ok := bytes.Cut(p.line, []byte("\n"))
		if !ok {
			break
		}
		p.line = rest
		switch {
		case bytes.HasPrefix(line, []byte("go: downloading ")):
			p.downloaded++
		case !bytes.ContainsAny(line, " \t#"):
			p.compiled++ // a package's import path
		case p.problems.Len() < 4000:
			p.problems.Write(append(line, '\n'))
		}
	}
	if p.log != nil && time.Since(p.last) > 20*time.Second {
		p.last = time.Now()
		p.log("  … %d modules downloaded, %d packages compiled", p.downloaded, p.compiled)
	}
	return len(text), nil
}
