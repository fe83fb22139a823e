package process

import (
	"time"

	"github.com/prometheus/procfs"
)

// CPUTime is the CPU time that a process has used; 0 if it is gone. Unlike a duration, it
// does not depend on what else the machine does.
func CPUTime(pid int) time.Duration {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return 0
	}
	stat, err := process.Stat()
	if err != nil {
		return 0
	}
	return time.Duration(stat.CPUTime() * float64(time.Second))
}

// Memory is the resident memory of a process, and its maximum so far, in MiB; 0 if it is
// gone.
func Memory(pid int) (now, peak float64) {
	process, err := procfs.NewProc(pid)
	if err != nil {
		return 0, 0
	}
	status, err := process.NewStatus()
	if err != nil {
		return 0, 0
	}
	return float64(status.VmRSS) / (1 << 20), float64(status.VmHWM) / (1 << 20)
}
