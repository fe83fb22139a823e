package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/uuid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

func init() { benches["failover_seconds"] = failover }

// failover measures from the kill -9 of the leading of two brokers until a Reservation
// that is requested meanwhile is placed. The provider's agent advertises when its stream
// opens, as the real one does, and otherwise not.
func failover() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	d, err := deploy(ctx)
	if err != nil {
		return err
	}
	defer d.stop()
	service, err := newService()
	if err != nil {
		return err
	}
	defer service.listener.Close()
	for i := range 2 {
		if err := service.start(ctx, d, fmt.Sprint("broker-", i)); err != nil {
			return err
		}
	}
	defer service.kill()
	if err := poll(ctx, "a broker to lead", func() bool { return service.leader() != nil }); err != nil {
		return err
	}
	consumer, err := d.agent(ctx, service.url, "rome")
	if err != nil {
		return err
	}
	defer consumer.Close()
	provider, err := d.agent(ctx, service.url, "paris")
	if err != nil {
		return err
	}
	defer provider.Close()
	streaming, stop := context.WithCancel(ctx)
	defer stop()
	spec := offer("paris")
	go provider.Watch(streaming, protocol.RoleProvider, func(event protocol.Event) {
		if event.Type == protocol.EventRelist {
			spec.Sequence++
			spec.Timestamp = metav1.Now().Rfc3339Copy()
			if _, err := provider.PublishAdvertisement(streaming, spec); err != nil && streaming.Err() == nil {
				fmt.Println("advertising:", err)
			}
		}
	})
	placed := make(chan protocol.ConsumerView, 1024)
	go consumer.Watch(streaming, protocol.RoleRequester, func(event protocol.Event) {
		for _, view := range event.Consumer {
			if len(view.Status.Allocations) > 0 {
				placed <- view
			}
		}
	})
	if _, err := requestOne(ctx, consumer, placed); err != nil {
		return err
	}
	const rounds = 5
	var times []time.Duration
	for round := range rounds {
		// Until the new broker is a standby for long enough to have seen the lease.
		if err := wait(ctx, 5*time.Second); err != nil {
			return err
		}
		leader := service.leader()
		if leader == nil {
			return fmt.Errorf("no broker leads before round %d", round)
		}
		began := time.Now()
		leader.Kill()
		if _, err := requestOne(ctx, consumer, placed); err != nil {
			return err
		}
		times = append(times, time.Since(began))
		fmt.Printf("round %d: %s\n", round+1, times[round].Round(10*time.Millisecond))
		if err := service.start(ctx, d, fmt.Sprint("broker-", round+2)); err != nil {
			return err
		}
	}
	slices.Sort(times)
	fmt.Printf("median %s\n", times[rounds/2].Round(10*time.Millisecond))
	lines.Time("failover_seconds", times[rounds-1].Seconds(), "s", "<= 5")
	return nil
}

// requestOne asks for one pod until a broker takes it, and waits until it is placed.
func requestOne(ctx context.Context, consumer *protocol.Client, placed chan protocol.ConsumerView) (protocol.ConsumerView, error) {
	cpu := resource.MustParse("100m")
	body := protocol.ReservationRequest{
		SourceUID: types.UID(uuid.NewUUID()), SourceNamespace: "shop", SourceName: "web", SourceGeneration: 1,
		Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: 1, Requests: broker.ResourceQuantities{CPU: &cpu}}}},
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		if _, err := consumer.PutReservation(ctx, body); err == nil {
			break
		}
		if err := wait(ctx, 100*time.Millisecond); err != nil {
			return protocol.ConsumerView{}, fmt.Errorf("requesting: %w", err)
		}
	}
	for {
		select {
		case view := <-placed:
			if view.SourceUID == body.SourceUID {
				return view, nil
			}
		case <-ctx.Done():
			return protocol.ConsumerView{}, fmt.Errorf("the request was not placed: %w", ctx.Err())
		}
	}
}

// agent registers a cluster and returns its client.
func (d *deployment) agent(ctx context.Context, url, id string) (*protocol.Client, error) {
	member, err := d.register(ctx, id)
	if err != nil {
		return nil, err
	}
	return member.dial(url, d.caPEM)
}

// service forwards connections to the broker that is ready, as a Service does. Without
// one, it closes them.
type service struct {
	listener net.Listener
	url      string
	mutex    sync.Mutex
	replicas []*replica
}

func newService() (*service, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s := &service{listener: listener, url: "https://" + listener.Addr().String()}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go s.forward(connection)
		}
	}()
	return s, nil
}

func (s *service) start(ctx context.Context, d *deployment, name string) error {
	r, err := d.replica(ctx, name, "--leader-elect")
	if err != nil {
		return err
	}
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.replicas = append(s.replicas, r)
	return nil
}

func (s *service) leader() *replica {
	s.mutex.Lock()
	replicas := slices.Clone(s.replicas)
	s.mutex.Unlock()
	for _, r := range slices.Backward(replicas) {
		if r.leads() {
			return r
		}
	}
	return nil
}

func (s *service) kill() {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	for _, r := range s.replicas {
		r.Kill()
	}
}

func (s *service) forward(from net.Conn) {
	defer from.Close()
	leader := s.leader()
	if leader == nil {
		return
	}
	to, err := net.Dial("tcp", leader.url[len("https://"):])
	if err != nil {
		return
	}
	defer to.Close()
	go func() {
		_, _ = io.Copy(to, from)
		_ = to.Close()
		_ = from.Close()
	}()
	_, _ = io.Copy(from, to)
}
