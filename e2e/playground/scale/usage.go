package scale

import (
	"cmp"
	"os"
	"slices"

	"github.com/spillway-dev/spillway/e2e/playground/environment"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

// usage is the resource usage of a program so far.
type usage struct {
	name string
	// peakMiB is the most memory it ever had resident, and aimMiB the aim.
	peakMiB float64
	aimMiB  int
	// cpu in seconds.
	cpu float64
}

// usages reads the usage of Spillway's programs from the kernel; zero where it
// cannot be read.
func usages(p *environment.Playground, provider string) []usage {
	all := []usage{
		{name: "broker", aimMiB: 512}, {name: "agent_consumer", aimMiB: 200}, {name: "agent_provider", aimMiB: 200},
		{name: "scheduler", aimMiB: 1024}, {name: "virtual_node", aimMiB: 400},
	}
	for i, where := range []struct{ cluster, program string }{
		{environment.Hub, "spillway-broker"}, {consumer, "spillway-agent"}, {provider, "spillway-agent"},
		{consumer, "spillway-scheduler"}, {consumer, "spillway-virtual-node"},
	} {
		if running := p.Process(where.cluster, where.program); running != nil {
			_, all[i].peakMiB = process.Memory(running.Pid())
			all[i].cpu = process.CPUTime(running.Pid()).Seconds()
		}
	}
	return all
}

// cpu is the CPU time of programs in seconds, by name and cluster.
type cpu map[string]float64

// cpuTimes reads the CPU time of all programs of the playground, also of those that only
// play a cluster, from the kernel.
func cpuTimes(p *environment.Playground) cpu {
	all := cpu{}
	for _, c := range p.Clusters() {
		for _, running := range c.Processes() {
			all[running.Name()+" in "+c.Name] = process.CPUTime(running.Pid()).Seconds()
		}
	}
	all["this program, with the simulated agents"] = process.CPUTime(os.Getpid()).Seconds()
	return all
}

// minus returns what has been used since before, by those that used a second at least, most
// first.
func (c cpu) minus(before cpu) (used []usage) {
	for name := range c {
		if seconds := c[name] - before[name]; seconds >= 1 {
			used = append(used, usage{name: name, cpu: seconds})
		}
	}
	slices.SortFunc(used, func(a, b usage) int { return cmp.Compare(b.cpu, a.cpu) })
	return used
}
