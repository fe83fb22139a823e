package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// ackWorkers is how many acks an agent sends at once, as the real agent does.
const ackWorkers = 48

// issue gets an agent's certificate and the broker's CA.
func issue(ctx context.Context, url, caHash, token, id string) (func() (*tls.Certificate, error), []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: id}}, key)
	if err != nil {
		return nil, nil, err
	}
	answer, err := protocol.Join(ctx, url, caHash, id, token, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	if err != nil {
		return nil, nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, err
	}
	pair, err := tls.X509KeyPair([]byte(answer.Certificate), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}))
	return func() (*tls.Certificate, error) { return &pair, nil }, []byte(answer.CA), err
}

// agents are simulated consumers and providers: they accept every hold and report every
// virtual node as ready at once.
type agents struct {
	consumers, providers []*agent
	stop                 func() error
}

// agent acks what its streams bring.
type agent struct {
	id     string
	client *protocol.Client
	acks   chan func(ctx context.Context) error

	mu sync.Mutex
	// delivered is when a view of a reservation first came that an agent makes an instruction of.
	delivered map[types.UID]time.Time
}

// startAgents starts agents that ack if ack is set.
func (h *hub) startAgents(ctx context.Context, consumers, providers int, ack bool) (*agents, error) {
	all := &agents{}
	running, cancel := context.WithCancel(ctx)
	group, running := errgroup.WithContext(running)
	all.stop = func() error {
		cancel()
		return group.Wait()
	}
	for i := range consumers + providers {
		a := &agent{id: fmt.Sprintf("consumer-%d", i+1), acks: make(chan func(context.Context) error, 1<<16), delivered: map[types.UID]time.Time{}}
		role := protocol.RoleRequester
		if i >= consumers {
			a.id, role = fmt.Sprintf("provider-%d", i-consumers+1), protocol.RoleProvider
		}
		var err error
		if a.client, err = h.join(ctx, a.id); err != nil {
			return all, err
		}
		if role == protocol.RoleProvider {
			all.providers = append(all.providers, a)
			spec := a.advertisement()
			if _, err := a.client.PublishAdvertisement(ctx, spec); err != nil {
				return all, err
			}
			group.Go(func() error { return a.beat(running, spec) })
		} else {
			all.consumers = append(all.consumers, a)
		}
		group.Go(func() error {
			a.client.Watch(running, role, func(e protocol.Event) { a.handle(e, ack) })
			return nil
		})
		for range ackWorkers {
			group.Go(func() error { return a.work(running) })
		}
	}
	return all, nil
}

// beat repeats an advertisement until ctx ends.
func (a *agent) beat(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	for wait(ctx, 30*time.Second) == nil {
		spec.Sequence++
		spec.Timestamp = metav1.Now()
		if _, err := a.client.PublishAdvertisement(ctx, spec); err != nil && ctx.Err() == nil {
			fmt.Println("advertising:", err)
		}
	}
	return nil
}

// advertisement offers room for everything.
func (a *agent) advertisement() broker.ClusterAdvertisementSpec {
	const nodes = 100
	all := amounts("6400", "25600Gi")
	return broker.ClusterAdvertisementSpec{
		ClusterID: a.id, EndpointURL: "https://192.0.2.1:6443", Lending: broker.Lending{Enabled: true},
		Resources: broker.AdvertisedResources{Capacity: all, Allocatable: all},
		NodeClasses: []broker.NodeClass{{
			Name: "nodes", Arch: "amd64",
			FreeShapes: []broker.FreeShape{{Nodes: nodes, Free: amounts("64", "256Gi"), Pods: 110}},
		}},
		Timestamp: metav1.Now(), Sequence: 1,
	}
}

func amounts(cpu, memory string) broker.ResourceQuantities {
	return broker.FromList(corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(cpu), corev1.ResourceMemory: resource.MustParse(memory)})
}

func (a *agent) handle(e protocol.Event, ack bool) {
	now := time.Now()
	saw := func(uid types.UID) {
		a.mu.Lock()
		defer a.mu.Unlock()
		if _, known := a.delivered[uid]; !known {
			a.delivered[uid] = now
		}
	}
	for _, view := range e.Provider {
		hold := view.Hold
		saw(hold.ReservationUID)
		if ack && (hold.AcceptedAttempt != hold.Attempt || hold.Unconfirmed != nil) {
			a.acks <- func(ctx context.Context) error {
				return a.client.AckProvider(ctx, view.ID, protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Accepted: true})
			}
		}
	}
	for _, view := range e.Consumer {
		var ready []string
		news := false
		for _, allocation := range view.Status.Allocations {
			if allocation.Accepted { // else, an agent makes no instruction of it
				saw(view.UID)
				ready = append(ready, allocation.Cluster)
				news = news || !allocation.VirtualNodeReady
			}
		}
		if ack && news {
			a.acks <- func(ctx context.Context) error {
				return a.client.AckRequester(ctx, view.ID, protocol.RequesterAck{ReservationUID: view.UID, Attempt: view.Status.Attempt.Number, Ready: ready})
			}
		}
	}
}

// work sends acks until ctx ends.
func (a *agent) work(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case ack := <-a.acks:
			if err := retry(ctx, ack); err != nil && ctx.Err() == nil {
				return fmt.Errorf("acking as %s: %w", a.id, err)
			}
		}
	}
}

// retry repeats a call while the broker is busy, and accepts that there is nothing to ack.
func retry(ctx context.Context, call func(context.Context) error) error {
	for {
		err := call(ctx)
		switch {
		case protocol.HasCode(err, protocol.CodeNotFound):
			return nil
		case protocol.HasCode(err, protocol.CodeTooMany), protocol.HasCode(err, protocol.CodeUnavailable), protocol.HasCode(err, protocol.CodeConflict):
		default:
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
