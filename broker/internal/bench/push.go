package main

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/playground/process"
)

func init() { benches["push_latency"] = withBroker(10*time.Minute, pushLatency) }

// pushLatency measures from the begin of a write of a Reservation until its consumer's
// agent has it, for consumers with 1 and with 1,000 Reservations. The broker and the API
// server are processes of their own.
func pushLatency(ctx context.Context, d *deployment, r *replica) error {
	worst := time.Duration(0)
	for _, count := range []int{1, 1000} {
		p99, err := d.push(ctx, r, "consumer-"+strconv.Itoa(count), count)
		if err != nil {
			return err
		}
		worst = max(worst, p99)
	}
	lines.Time("push_latency", float64(worst.Microseconds())/1000, "ms", "<= 100")
	return nil
}

func (d *deployment) push(ctx context.Context, r *replica, id string, count int) (p99 time.Duration, err error) {
	consumer, err := d.register(ctx, id)
	if err != nil {
		return 0, err
	}
	agent, err := consumer.dial(r.url, d.caPEM)
	if err != nil {
		return 0, err
	}
	defer agent.Close()
	group, creating := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range count {
		group.Go(func() error { return d.api.Create(creating, waiting(id, i)) })
	}
	if err := group.Wait(); err != nil {
		return 0, err
	}
	// Every view that the agent receives, by ID, with its marker.
	received := make(chan protocol.ConsumerView, 1<<20)
	streaming, stop := context.WithCancel(ctx)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		agent.Watch(streaming, protocol.RoleRequester, func(event protocol.Event) {
			for _, view := range event.Consumer {
				received <- view
			}
		})
	}()
	defer func() {
		stop()
		<-ended
	}()
	// Until the broker has decided on all of them.
	for quiet := false; !quiet; {
		select {
		case <-received:
		case <-time.After(5 * time.Second):
			quiet = true
		}
	}
	cpu := process.CPUTime(r.Pid())
	const samples = 200
	var latencies []time.Duration
	for i := range samples {
		name := waiting(id, i%count).Name
		began := time.Now()
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"%s/source-generation":"%d"}}}`, broker.Group, i+2)
		if err := d.api.Patch(ctx, &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: name}}, client.RawPatch(types.MergePatchType, []byte(patch))); err != nil {
			return 0, err
		}
		for view := (protocol.ConsumerView{}); view.ID != name || view.SourceGeneration != int64(i+2); {
			select {
			case view = <-received:
			case <-time.After(10 * time.Second):
				return 0, fmt.Errorf("the agent has not received change %d", i)
			}
		}
		latencies = append(latencies, time.Since(began))
		time.Sleep(20 * time.Millisecond)
	}
	cpu = process.CPUTime(r.Pid()) - cpu
	slices.Sort(latencies)
	p99 = latencies[samples*99/100]
	fmt.Printf("%d Reservations: p50 %s, p99 %s with the write; %s of CPU in the broker for each change\n", count, latencies[samples/2].Round(10*time.Microsecond), p99.Round(10*time.Microsecond), (cpu / samples).Round(10*time.Microsecond))
	return p99, nil
}

// waiting is a Reservation for which there is no provider.
func waiting(requester string, i int) *broker.Reservation {
	cpu := resource.MustParse("500m")
	return &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: fmt.Sprintf("%s-%d", requester, i), Labels: map[string]string{broker.LabelRequester: requester}},
		Spec:       broker.ReservationSpec{RequesterID: requester, PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.ResourceQuantities{CPU: &cpu}}}},
	}
}
