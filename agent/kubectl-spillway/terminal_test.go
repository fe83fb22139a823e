package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTerminalIsNotAsked starts a program with the plugin's libraries at a terminal that answers
// nothing: it asks nothing, and so does not wait for an answer.
func TestTerminalIsNotAsked(t *testing.T) {
	ptmx, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	expect.NoError(t, err)
	defer ptmx.Close()
	expect.NoError(t, unix.IoctlSetPointerInt(int(ptmx.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(ptmx.Fd()), unix.TIOCGPTN)
	expect.NoError(t, err)
	tty, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	expect.NoError(t, err)
	defer tty.Close()

	program := exec.Command(os.Args[0], "-test.run=^$")
	program.Env = append(os.Environ(), "TERM=xterm-256color")
	program.Stdin, program.Stdout, program.Stderr = tty, tty, tty
	program.SysProcAttr = &unix.SysProcAttr{Setsid: true, Setctty: true}
	expect.NoError(t, program.Start())
	ended := make(chan error, 1)
	go func() { ended <- program.Wait() }()
	select {
	case err := <-ended:
		expect.NoError(t, err)
	case <-time.After(time.Minute):
		t.Fatal("it has not ended")
	}
	sent := make([]byte, 4096)
	n, err := ptmx.Read(sent)
	expect.NoError(t, err)
	if bytes.ContainsRune(sent[:n], '\x1b') {
		t.Errorf("it has sent the terminal %q", sent[:n])
	}
}
