package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

func init() {
	// With a longer lease than the default: agents and the API server are on the same machine,
	// and all agents connect at once.
	benches["advertise_ingest"] = withBroker(15*time.Minute, advertiseIngest, "--leader-elect", "--leader-elect-lease-duration=30s", "--leader-elect-renew-deadline=20s")
	benches["advertise_agents"] = advertiseAgents
}

// The two can be lowered together, which keeps the rate.
var (
	clusterCount = flag.Int("clusters", 10_000, "Number of clusters of advertise_ingest.")
	beatInterval = flag.Duration("beat", 30*time.Second, "Interval of the advertisements of advertise_ingest.")
)

const (
	agentsProcess = 4
	// agentsFile names the file with the orders of a process of agents.
	agentsFile = "SPILLWAY_BENCH_AGENTS"
)

// orders are what a process of agents gets.
type orders struct {
	URL     string
	CA      []byte
	Members []member
	Beat    time.Duration
}

// advertiseIngest measures what 10,000 clusters cost that advertise every 30 s without
// changes: cores used and memory of the broker's process. The agents are in processes of
// their own, each with a connection. The broker elects a leader, as with its chart.
func advertiseIngest(ctx context.Context, d *deployment, r *replica) error {
	if err := d.loadCA(ctx); err != nil {
		return err
	}
	ingestAgents, ingestBeat := *clusterCount, *beatInterval
	members := make([]member, ingestAgents)
	group, registering := errgroup.WithContext(ctx)
	group.SetLimit(32)
	for i := range members {
		group.Go(func() (err error) {
			members[i], err = d.register(registering, fmt.Sprintf("cluster-%05d", i))
			if err != nil {
				return err
			}
			advertisement := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: members[i].ID}, Spec: offer(members[i].ID)}
			return d.api.Create(registering, advertisement)
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	fmt.Println(ingestAgents, "clusters registered")
	self, err := os.Executable()
	if err != nil {
		return err
	}
	var running []*process.Process
	for i := range agentsProcess {
		path := filepath.Join(d.dir, fmt.Sprintf("agents-%d.json", i))
		share := members[i*ingestAgents/agentsProcess : (i+1)*ingestAgents/agentsProcess]
		text, err := json.Marshal(orders{URL: r.url, CA: d.caPEM, Members: share, Beat: ingestBeat})
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, text, 0o600); err != nil {
			return err
		}
		agents, err := process.Start(process.Spec{Name: filepath.Base(path), Path: self, Args: []string{"-name=advertise_agents"}, Env: []string{agentsFile + "=" + path}, Dir: d.dir, LogDir: d.dir})
		if err != nil {
			return err
		}
		defer func() {
			fmt.Print(agents.Tail(1))
			agents.Kill()
		}()
		running = append(running, agents)
	}
	// The first beats connect, and set the clusters active.
	for range 4 {
		if err := wait(ctx, ingestBeat); err != nil {
			return err
		}
		now, _ := process.Memory(r.Pid())
		fmt.Printf("settling: %s of CPU, %.0f MiB\n", process.CPUTime(r.Pid()), now)
	}
	beats := int(math.Ceil(float64(5*time.Minute) / float64(ingestBeat)))
	sent, err := accepted(running)
	if err != nil {
		return err
	}
	cpu, began := process.CPUTime(r.Pid()), time.Now()
	if err := wait(ctx, time.Duration(beats)*ingestBeat); err != nil {
		return err
	}
	cores := (process.CPUTime(r.Pid()) - cpu).Seconds() / time.Since(began).Seconds()
	now, most := process.Memory(r.Pid())
	all, err := accepted(running)
	if err != nil {
		return err
	}
	if want := ingestAgents * beats; all-sent < want*9/10 {
		return fmt.Errorf("the broker accepted %d advertisements, which should be %d", all-sent, want)
	}
	fmt.Printf("memory at most %.0f MiB, also while the clusters registered; %d clusters, beat %s\n", most, ingestAgents, ingestBeat)
	lines.Time("advertise_ingest", cores, "cores", "<= 0.15")
	lines.Time("advertise_ingest_memory", now, "MiB", "<= 300")
	return nil
}

const sentFormat = "%d advertisements accepted, %d refused, %d failed\n"

// accepted sums up how many advertisements processes of agents say were accepted.
func accepted(agents []*process.Process) (sum int, err error) {
	for _, process := range agents {
		var accepted, refused, failed int
		line := process.Tail(1)
		if _, err := fmt.Sscanf(line, sentFormat, &accepted, &refused, &failed); err != nil {
			return 0, fmt.Errorf("reading %q: %w", line, err)
		}
		sum += accepted
	}
	return sum, nil
}

func wait(ctx context.Context, duration time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(duration):
		return nil
	}
}

// offer is an advertisement of ordinary size: 5 classes of 8 shapes.
func offer(id string) broker.ClusterAdvertisementSpec {
	amount := func(cpu, memory int) broker.ResourceQuantities {
		return broker.ResourceQuantities{CPU: resource.NewMilliQuantity(int64(cpu), resource.DecimalSI), Memory: resource.NewQuantity(int64(memory)<<20, resource.BinarySI)}
	}
	spec := broker.ClusterAdvertisementSpec{
		ClusterID: id, EndpointURL: "https://" + id + ".test:6443", PeerKey: "key", Lending: broker.Lending{Enabled: true},
		Resources: broker.AdvertisedResources{Capacity: amount(640_000, 1<<20), Allocatable: amount(600_000, 1<<20), Allocated: amount(100_000, 1<<18)},
		Timestamp: metav1.Now().Rfc3339Copy(), Sequence: 1,
	}
	for class := range 5 {
		nodes := broker.NodeClass{Name: fmt.Sprint("class-", class), Arch: "amd64", Labels: map[string]string{"topology.kubernetes.io/zone": fmt.Sprint("zone-", class), "kubernetes.io/os": "linux"}}
		for shape := range 8 {
			nodes.FreeShapes = append(nodes.FreeShapes, broker.FreeShape{Nodes: 2, Free: amount(8000-900*shape, 16<<10-shape<<10), Pods: 100})
		}
		spec.NodeClasses = append(spec.NodeClasses, nodes)
	}
	return spec
}

// advertiseAgents is a process of agents: each beats until the process is killed.
func advertiseAgents() error {
	text, err := os.ReadFile(os.Getenv(agentsFile))
	if err != nil {
		return err
	}
	var o orders
	if err := json.Unmarshal(text, &o); err != nil {
		return err
	}
	ctx := context.Background()
	var sent, refused, failed atomic.Int64
	group, ctx := errgroup.WithContext(ctx)
	for _, member := range o.Members {
		group.Go(func() error {
			client, err := member.dial(o.URL, o.CA)
			if err != nil {
				return err
			}
			spec := offer(member.ID)
			if err := wait(ctx, rand.N(o.Beat)); err != nil {
				return err
			}
			for {
				spec.Sequence++
				spec.Timestamp = metav1.Now().Rfc3339Copy()
				known, err := client.Beat(ctx, protocol.Beat{Sequence: spec.Sequence, Digest: protocol.Digest(spec)})
				if err == nil && !known {
					_, err = client.PublishAdvertisement(ctx, spec)
				}
				var refusal *protocol.Error
				switch {
				case err == nil:
					sent.Add(1)
				case errors.As(err, &refusal) && refusal.Status() != http.StatusServiceUnavailable:
					refused.Add(1)
				default:
					failed.Add(1)
				}
				if err := wait(ctx, o.Beat); err != nil {
					return err
				}
			}
		})
	}
	group.Go(func() error {
		for {
			if err := wait(ctx, 5*time.Second); err != nil {
				return err
			}
			fmt.Printf(sentFormat, sent.Load(), refused.Load(), failed.Load())
		}
	})
	return group.Wait()
}
