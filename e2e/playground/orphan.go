package main

import (
	"os"
	"path/filepath"
	"strconv"
	"syscall"
)

// Under "go run", a SIGKILL ends the go command and would leave this process behind.
// PR_SET_PDEATHSIG makes the kernel end it too. This is in init, because the signal
// is tied to the main thread, which init runs on.
func init() {
	parent := os.Getppid()
	program, err := os.Readlink("/proc/" + strconv.Itoa(parent) + "/exe")
	if err != nil || filepath.Base(program) != "go" {
		return
	}
	_, _, _ = syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0)
	if os.Getppid() != parent {
		os.Exit(130) // the parent ended before the call
	}
}
