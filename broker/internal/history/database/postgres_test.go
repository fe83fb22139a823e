//go:build postgres

package database_test

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/broker/internal/history"
	"github.com/spillway-dev/spillway/broker/internal/history/database"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// server is a PostgreSQL of its own, which listens at a socket only.
type server struct {
	t              *testing.T
	programs, root string
	databases      atomic.Int32
	stop           func()
}

// programs is the folder with initdb and postgres; make test-postgres has found it.
func programs(t *testing.T) string {
	t.Helper()
	folder := os.Getenv("POSTGRES")
	if folder == "" {
		t.Fatal("set POSTGRES to the folder of initdb and postgres, as make test-postgres does")
	}
	return folder
}

// command is a program of PostgreSQL, which does not run as root.
func (s *server) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	c := exec.CommandContext(ctx, filepath.Join(s.programs, name), args...)
	c.Dir, c.Env = s.root, []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C.UTF-8", "HOME=" + s.root}
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGQUIT}
	if uid, gid := s.account(); uid != 0 {
		c.SysProcAttr.Credential = &syscall.Credential{Uid: uid, Gid: gid}
	}
	return c
}

// unprivileged is the account with the fewest rights on Debian.
const unprivileged = 65534

// account is that of the server; 0 for the test's own.
func (s *server) account() (uid, gid uint32) {
	if os.Getuid() != 0 {
		return 0, 0
	}
	return unprivileged, unprivileged
}

// startServer creates a PostgreSQL, and runs it until the end of the test.
func startServer(t *testing.T) *server {
	t.Helper()
	// The path of a socket is short.
	root, err := os.MkdirTemp("", "postgres")
	expect.NoError(t, err)
	t.Cleanup(func() { expect.NoError(t, os.RemoveAll(root)) })
	s := &server{t: t, programs: programs(t), root: root}
	if uid, gid := s.account(); uid != 0 {
		expect.NoError(t, os.Chown(root, int(uid), int(gid)))
	}
	if out, err := s.command(t.Context(), "initdb", "-D", filepath.Join(root, "data"), "-U", "postgres", "-A", "trust", "-N").CombinedOutput(); err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	s.run()
	return s
}

// run starts the server, and waits until it answers.
func (s *server) run() {
	s.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := s.command(ctx, "postgres", "-D", filepath.Join(s.root, "data"), "-k", s.root, "-c", "listen_addresses=", "-F")
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGINT) }
	var log strings.Builder
	c.Stdout, c.Stderr = &log, &log
	expect.NoError(s.t, c.Start())
	ended := make(chan error, 1)
	go func() { ended <- c.Wait() }()
	stopped := false
	s.stop = func() {
		if !stopped {
			stopped = true
			cancel()
			<-ended
		}
	}
	s.t.Cleanup(func() {
		if s.stop(); s.t.Failed() {
			s.t.Log(log.String())
		}
	})
	d := s.open("postgres")
	defer d.Close()
	expect.EventuallyWithin(s.t, 30*time.Second, "PostgreSQL answers", func() (bool, string) {
		_, err := d.Open(s.t.Context())
		// It answers that the table does not exist.
		return err != nil && strings.Contains(err.Error(), "does not exist"), fmt.Sprint(err)
	})
}

// open opens a database by a file with its URL.
func (s *server) open(name string) *database.Database {
	s.t.Helper()
	at := url.URL{Scheme: "postgres", User: url.User("postgres"), Path: "/" + name, RawQuery: url.Values{"host": {s.root}}.Encode()}
	file := filepath.Join(s.t.TempDir(), "url")
	expect.NoError(s.t, os.WriteFile(file, []byte(at.String()+"\n"), 0o600))
	d, err := database.OpenPostgreSQL(file)
	expect.NoError(s.t, err)
	return d
}

// create creates a database.
func (s *server) create() string {
	s.t.Helper()
	name := fmt.Sprintf("history_%d", s.databases.Add(1))
	c := s.command(s.t.Context(), "postgres", "--version")
	c.Path, c.Args = filepath.Join(s.programs, "createdb"), []string{"createdb", "-h", s.root, "-U", "postgres", name}
	if out, err := c.CombinedOutput(); err != nil {
		s.t.Fatalf("createdb: %v\n%s", err, out)
	}
	return name
}

func TestPostgreSQL(t *testing.T) {
	s := startServer(t)
	contract(t, func(t *testing.T) func() *database.Database {
		name := s.create()
		return func() *database.Database { return s.open(name) }
	})

	t.Run("a server that is away is an error, and then answers again", func(t *testing.T) {
		d := s.open(s.create())
		defer d.Close()
		expect.NoError(t, d.Prepare(t.Context()))
		s.stop()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		err := d.Write(ctx, []history.Record{record("a", "rome", "shop", began, 1)})
		if err == nil || errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("writing without a server: %v", err)
		}
		s.run()
		expect.NoError(t, d.Write(t.Context(), []history.Record{record("a", "rome", "shop", began, 1)}))
		if got := names(t, d, history.Query{}); len(got) != 1 {
			t.Errorf("records %v", got)
		}
	})
}
