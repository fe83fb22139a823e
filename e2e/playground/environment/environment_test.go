package environment

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// startAndWait has the test binary start a playground in the directory that it
// names, and wait to be killed, instead of running tests.
const startAndWait = "PLAYGROUND_TEST_DIR"

func TestMain(m *testing.M) {
	dir := os.Getenv(startAndWait)
	if dir == "" {
		os.Exit(m.Run())
	}
	p, err := Start(context.Background(), Options{Dir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, c := range p.Clusters() {
		for _, process := range c.Processes() {
			fmt.Println(process.Pid(), process.Name())
		}
	}
	fmt.Println("up")
	<-time.After(10 * time.Minute)
}

// TestKilled kills a playground with SIGKILL: no process outlives it, and the
// next one removes what lies about.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), startAndWait+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	names := map[int]string{}
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "up" {
		number, name, _ := strings.Cut(lines.Text(), " ")
		pid, err := strconv.Atoi(number)
		if err != nil {
			t.Fatal(lines.Text())
		}
		names[pid] = name
	}
	if len(names) < 3 {
		t.Fatalf("want etcd, an API server and a broker, have %v", names)
	}
	for pid, name := range names {
		if !expect.ProcessExists(pid) {
			t.Errorf("%s is not there", name)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for pid, name := range names {
		expect.Eventually(t, name+" to be gone", func() (bool, string) { return !expect.ProcessExists(pid), "it is there" })
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Fatalf("want one directory left behind, have %v %v", left, err)
	}
	next, err := newState(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := next.remove(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v %v", left, err)
	}
}
