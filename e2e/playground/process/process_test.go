package process_test

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// role makes the test binary act as a program instead of running tests.
const role = "PROCESS_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(role) {
	case "":
		os.Exit(m.Run())
	case "parent":
		parent()
	case "child":
		fmt.Println("hello")
		<-time.After(10 * time.Minute)
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("hello")
		<-time.After(10 * time.Minute)
	case "failing":
		fmt.Println("broken")
		os.Exit(3)
	}
}

// parent starts children from threads that end at once, says which, and waits to
// be killed.
func parent() {
	dir, err := os.MkdirTemp("", "")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	for i := range 4 {
		pids := make(chan int)
		go func() {
			p, err := process.Start(process.Spec{Name: strconv.Itoa(i), Path: os.Args[0], Env: []string{role + "=child"}, LogDir: dir})
			if err != nil {
				panic(err)
			}
			pids <- p.Pid()
		}()
		fmt.Println(<-pids)
	}
	os.RemoveAll(dir)
	fmt.Println("all")
	<-time.After(10 * time.Minute)
}

func start(t *testing.T, program string) *process.Process {
	t.Helper()
	p, err := process.Start(process.Spec{Name: program, Path: os.Args[0], Env: []string{role + "=" + program}, LogDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Kill)
	return p
}

func TestNothingOutlivesAParentThatIsKilled(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), role+"=parent")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var pids []int
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "all" {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(err)
		}
		pids = append(pids, pid)
	}
	if len(pids) != 4 {
		t.Fatalf("%d children were started, want 4", len(pids))
	}
	for _, pid := range pids {
		if !expect.ProcessExists(pid) {
			t.Errorf("child %d ended before its parent", pid)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for _, pid := range pids {
		expect.Eventually(t, fmt.Sprintf("the end of child %d", pid), func() (bool, string) { return !expect.ProcessExists(pid), "it exists" })
	}
}

func TestStop(t *testing.T) {
	for _, program := range []string{"child", "stubborn"} {
		t.Run(program, func(t *testing.T) {
			p := start(t, program)
			expect.Eventually(t, "its first line", func() (bool, string) { return strings.Contains(p.Tail(5), "hello"), "" })
			if err := p.Err(); err != nil {
				t.Errorf("while it runs: %v", err)
			}
			before := time.Now()
			p.Stop(300 * time.Millisecond)
			if took := time.Since(before); program == "stubborn" && took < 300*time.Millisecond {
				t.Errorf("it was given %s to end", took)
			}
			if expect.ProcessExists(p.Pid()) {
				t.Error("the process still exists")
			}
			if err := p.Err(); err != nil {
				t.Errorf("an end that was asked for is an error: %v", err)
			}
			p.Kill() // again
		})
	}
}

func TestAnEndThatNobodyAskedFor(t *testing.T) {
	p := start(t, "failing")
	select {
	case <-p.Done():
	case <-time.After(expect.Deadline):
		t.Fatal("the process does not end")
	}
	err := p.Err()
	if err == nil || !strings.Contains(err.Error(), "broken") || !strings.Contains(err.Error(), "failing") {
		t.Errorf("want an error with its name and the end of its log, have %v", err)
	}
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) || exit.ExitCode() != 3 {
		t.Errorf("want exit code 3, have %v", err)
	}
}

func TestNoSuchProgram(t *testing.T) {
	if _, err := process.Start(process.Spec{Name: "nothing", Path: "/nowhere/nothing", LogDir: t.TempDir()}); err == nil {
		t.Error("it was started")
	}
}
