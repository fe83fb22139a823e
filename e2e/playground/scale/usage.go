package scale

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// usage is the resource usage of a program so far.
type usage struct {
	name string
	// peakMiB is the most memory it ever had resident, limitMiB what its chart
	// allows it.
	peakMiB  float64
	limitMiB int
	// cpu in seconds.
	cpu float64
}

// usages reads the usage of Spillway's programs from the kernel; zero where it
// cannot be read.
func usages(p *environment.Playground, provider string) []usage {
	all := []usage{
		{name: "broker", limitMiB: 512}, {name: "agent_consumer", limitMiB: 512}, {name: "agent_provider", limitMiB: 512},
		{name: "scheduler", limitMiB: 1024}, {name: "virtual_node", limitMiB: 1024},
	}
	for i, where := range []struct{ cluster, program string }{
		{environment.Hub, "spillway-broker"}, {consumer, "spillway-agent"}, {provider, "spillway-agent"},
		{consumer, "spillway-scheduler"}, {consumer, "spillway-virtual-node"},
	} {
		if process := p.Process(where.cluster, where.program); process != nil {
			all[i].peakMiB, all[i].cpu = read(process.Pid())
		}
	}
	return all
}

// ticks are the kernel's units of CPU time in a second: USER_HZ, which is 100 on
// every Linux that Go runs on.
const ticks = 100

// read is a process's peak memory in MiB and its CPU time in seconds.
func read(pid int) (peakMiB, cpu float64) {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		if fields := strings.Fields(line); len(fields) == 3 && fields[0] == "VmHWM:" {
			kib, _ := strconv.ParseFloat(fields[1], 64)
			peakMiB = kib / 1024
		}
	}
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The name, in parentheses, may contain anything; 11 fields come between it
	// and utime.
	if i := strings.LastIndexByte(string(stat), ')'); i >= 0 {
		if fields := strings.Fields(string(stat[i+1:])); len(fields) > 12 {
			user, _ := strconv.ParseFloat(fields[11], 64)
			system, _ := strconv.ParseFloat(fields[12], 64)
			cpu = (user + system) / ticks
		}
	}
	return peakMiB, cpu
}
