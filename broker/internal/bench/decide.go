package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
)

func init() {
	for clusters, aim := range map[int]int{100: 2000, 1000: 200, 10000: 20} {
		name := fmt.Sprintf("decide_%d", clusters)
		benches[name] = func() error { return benchDecide(name, clusters, aim) }
	}
	benches["split_400"] = benchSplit
}

// decideFor is how long a decide bench runs, and decideWarmUp how long before that.
const decideFor, decideWarmUp = 3 * time.Second, 500 * time.Millisecond

// benchDecide measures decisions in a second of one core: of CPU time, since other
// programs may have the core, too. As in the broker, the ledger of the
// chosen cluster changes with each decision, so that its entry is computed again; and
// no request is like the one before it.
func benchDecide(name string, clusters, aim int) error {
	runtime.GOMAXPROCS(1)
	random := rand.New(rand.NewPCG(1, 2))
	var store decide.Store
	holds := map[string][]broker.Hold{}
	for i := range clusters {
		spec := randomAdvertisement(random, i)
		holds[spec.ClusterID] = randomHolds(random)
		store.Upsert(spec, holds[spec.ClusterID])
	}
	requests := make([]decide.Request, 50)
	for i := range requests {
		requests[i] = randomRequest(random, i)
	}
	one := func(i int) error {
		parts, _, _ := decide.Split(requests[i%len(requests)], store.Snapshot(nil),
			func(spec *broker.ClusterAdvertisementSpec, _ []broker.Hold, part broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
				after := slices.Concat(holds[spec.ClusterID], []broker.Hold{{ReservationUID: "new", ReservationName: "new", Requester: "consumer-new", Promised: part}})
				store.Upsert(spec, after)
				return after, nil
			})
		if len(parts) == 0 {
			return errors.New("a request fits nowhere")
		}
		return nil
	}
	run := func(d time.Duration) (n int, cpu time.Duration, err error) {
		start, used := time.Now(), processCPU()
		for ; n < 3 || time.Since(start) < d; n++ {
			if err := one(n); err != nil {
				return 0, 0, err
			}
		}
		return n, processCPU() - used, nil
	}
	if _, _, err := run(decideWarmUp); err != nil {
		return err
	}
	stop, err := profile()
	if err != nil {
		return err
	}
	defer stop()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, cpu, err := run(decideFor)
	if err != nil {
		return err
	}
	runtime.ReadMemStats(&after)
	each := func(before, after uint64) float64 { return float64(after-before) / float64(n) }
	fmt.Printf("%s: %v of CPU, %.0f allocations and %.0f kB a decision\n", name, cpu/time.Duration(n), each(before.Mallocs, after.Mallocs), each(before.TotalAlloc, after.TotalAlloc)/1024)
	lines.Time(name, float64(n)/cpu.Seconds(), "decisions/s", fmt.Sprint(">= ", aim))
	return nil
}

// processCPU is the CPU time that this process has used.
func processCPU() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		panic(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// benchSplit measures one request for 400 pods at 400 clusters with room for one pod each: it
// is split over as many as one Reservation may have.
func benchSplit() error {
	runtime.GOMAXPROCS(1)
	var store decide.Store
	for i := range 400 {
		store.Upsert(&broker.ClusterAdvertisementSpec{
			ClusterID: fmt.Sprintf("cluster-%05d", i),
			Lending:   broker.Lending{Enabled: true},
			Resources: broker.AdvertisedResources{Allocatable: amount(1000+int64(i), 8)},
			NodeClasses: []broker.NodeClass{{Name: "std", Arch: "amd64", FreeShapes: []broker.FreeShape{
				{Nodes: 1, Free: amount(1000, 8), Pods: 10},
			}}},
			Cost: &broker.Cost{CPUCost: fmt.Sprintf("0.%04d", 100+i), MemoryCost: "0.005", Currency: "EUR"},
		}, nil)
	}
	want := capacity.OfPodSets([]broker.PodSet{{Name: "web", Count: 400, Requests: amount(800, 1)}})
	start := processCPU()
	parts, missing, _ := decide.Split(decide.Request{Requester: "consumer-1", Want: want}, store.Snapshot(nil),
		func(_ *broker.ClusterAdvertisementSpec, holds []broker.Hold, part broker.HeldCapacity) ([]broker.Hold, *capacity.Rejection) {
			return append(holds, broker.Hold{ReservationUID: "new", ReservationName: "new", Requester: "consumer-1", Promised: part}), nil
		})
	if len(parts) != decide.MaxProviders || missing.Pods() != 400-decide.MaxProviders {
		return fmt.Errorf("%d parts, %d pods missing", len(parts), missing.Pods())
	}
	lines.Time("split_400", float64((processCPU()-start).Microseconds())/1000, "ms", "<= 200")
	return nil
}

// profile writes a CPU profile to the file named by CPUPROFILE.
func profile() (stop func(), err error) {
	path := os.Getenv("CPUPROFILE")
	if path == "" {
		return func() {}, nil
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, err
	}
	return func() { pprof.StopCPUProfile(); _ = file.Close() }, nil
}

func amount(milliCPU, gib int64) broker.ResourceQuantities {
	return broker.ResourceQuantities{
		CPU: resource.NewMilliQuantity(milliCPU, resource.DecimalSI), Memory: resource.NewQuantity(gib<<30, resource.BinarySI),
	}
}

// randomAdvertisement has 5 node classes with 8 free shapes each.
func randomAdvertisement(random *rand.Rand, i int) *broker.ClusterAdvertisementSpec {
	spec := &broker.ClusterAdvertisementSpec{
		ClusterID: fmt.Sprintf("cluster-%05d", i),
		Lending:   broker.Lending{Enabled: true},
		Cost:      &broker.Cost{CPUCost: fmt.Sprintf("0.%04d", random.IntN(1000)), MemoryCost: fmt.Sprintf("0.%04d", random.IntN(100)), Currency: "EUR"},
		Region:    fmt.Sprintf("region-%d", i%10),
		Zone:      fmt.Sprintf("zone-%d", i%30),
		Sequence:  1,
	}
	var cpu, memory int64
	for class := range 5 {
		c := broker.NodeClass{Name: fmt.Sprintf("class-%d", class), Arch: "amd64", Labels: map[string]string{
			corev1.LabelOSStable: "linux", corev1.LabelInstanceTypeStable: fmt.Sprintf("type-%d", class),
			corev1.LabelTopologyRegion: spec.Region, corev1.LabelTopologyZone: spec.Zone,
		}}
		if class == 4 {
			c.Taints = []corev1.Taint{{Key: "dedicated", Value: "batch", Effect: corev1.TaintEffectNoSchedule}}
		}
		for range 8 {
			shape := broker.FreeShape{Nodes: 1 + random.Int32N(6), Free: amount(random.Int64N(32000), 1+random.Int64N(128)), Pods: 20 + random.Int32N(80)}
			cpu, memory = cpu+shape.Free.CPU.MilliValue()*int64(shape.Nodes), memory+shape.Free.Memory.Value()>>30*int64(shape.Nodes)
			c.FreeShapes = append(c.FreeShapes, shape)
		}
		spec.NodeClasses = append(spec.NodeClasses, c)
	}
	spec.Resources.Allocatable, spec.Resources.Allocated = amount(2*cpu, 2*memory), amount(cpu, memory)
	return spec
}

func randomHolds(random *rand.Rand) []broker.Hold {
	holds := make([]broker.Hold, 5, 6)
	for i := range holds {
		id := fmt.Sprintf("reservation-%d", i)
		holds[i] = broker.Hold{ReservationUID: types.UID(id), ReservationName: id, Requester: fmt.Sprintf("consumer-%d", i%3), Attempt: 1, AcceptedAttempt: 1}
		holds[i].Promised = capacity.OfPodSets(randomSets(random, i, 3))
		holds[i].Granted = holds[i].Promised.DeepCopy()
	}
	return holds
}

// randomSets are 3 pod sets, each with a required node affinity.
func randomSets(random *rand.Rand, variant int, count int32) []broker.PodSet {
	in := func(key string, values ...string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: key, Operator: corev1.NodeSelectorOpIn, Values: values}
	}
	var sets []broker.PodSet
	for i, types := range [][]string{{"type-0", "type-1"}, {"type-2", fmt.Sprintf("type-%d", variant%2)}, {"type-3", "type-4"}} {
		sets = append(sets, broker.PodSet{
			Name: fmt.Sprintf("set-%d", i), Count: 1 + random.Int32N(count), Requests: amount(250+random.Int64N(4000), 1+random.Int64N(8)),
			NodeAffinity: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
				in(corev1.LabelInstanceTypeStable, types...), in(corev1.LabelArchStable, "amd64"),
			}}}},
			Tolerations: []corev1.Toleration{{Key: "dedicated", Operator: corev1.TolerationOpExists}},
		})
	}
	return sets
}

func randomRequest(random *rand.Rand, i int) decide.Request {
	return decide.Request{Requester: "consumer-new", Want: capacity.OfPodSets(randomSets(random, i, 10)), Committed: nil, Budget: nil}
}
