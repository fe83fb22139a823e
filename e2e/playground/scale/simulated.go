package scale

import (
	"context"
	"crypto/ecdh"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// simulated is an agent without a cluster: it speaks the broker's protocol and
// accepts every hold. It is a provider for other simulated agents only, because no
// pod can run there.
type simulated struct {
	id     string
	peers  []string
	client *protocol.Client
	key    string

	mu    sync.Mutex
	holds map[string]broker.Hold
	// accepted counts the holds it has accepted.
	accepted atomic.Int64
}

// nodesEach is how many nodes a simulated provider advertises, of coresEach.
const (
	nodesEach = 25
	coresEach = 16
)

// joinSimulated gives a simulated agent its certificate.
func joinSimulated(ctx context.Context, url, caHash, token, id string, peers []string) (*simulated, error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: id}}, private)
	if err != nil {
		return nil, err
	}
	answer, err := protocol.Join(ctx, url, caHash, id, token, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
	if err != nil {
		return nil, err
	}
	key, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return nil, err
	}
	pair, err := tls.X509KeyPair([]byte(answer.Certificate), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	if err != nil {
		return nil, err
	}
	config, err := protocol.TLSConfig([]byte(answer.CA), func() (*tls.Certificate, error) { return &pair, nil })
	if err != nil {
		return nil, err
	}
	peerKey, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	s := &simulated{id: id, peers: peers, holds: map[string]broker.Hold{}, key: base64.StdEncoding.EncodeToString(peerKey.PublicKey().Bytes())}
	s.client, err = protocol.NewClient(url, config, logr.Discard())
	return s, err
}

// run advertises, accepts holds, and requests capacity once, until ctx ends.
func (s *simulated) run(ctx context.Context, count int32) error {
	if err := s.advertise(ctx, 1); err != nil {
		return err
	}
	var working sync.WaitGroup
	working.Go(func() { s.client.Watch(ctx, protocol.RoleProvider, func(e protocol.Event) { s.answer(ctx, e) }) })
	working.Go(func() { s.client.Watch(ctx, protocol.RoleRequester, func(e protocol.Event) { s.use(ctx, e) }) })
	defer working.Wait()
	defer s.client.Close()
	if count > 0 {
		_, err := s.client.PutReservation(ctx, protocol.ReservationRequest{
			SourceUID: uuid.NewUUID(), SourceNamespace: "default", SourceName: "pods", SourceGeneration: 1,
			Spec: broker.ReservationSpec{PodSets: []broker.PodSet{{Name: "pods", Count: count, Requests: broker.FromList(cores(1))}}},
		})
		if err != nil {
			return fmt.Errorf("%s requests capacity: %w", s.id, err)
		}
	}
	ticker := time.NewTicker(10 * time.Second)
	defer ticker.Stop()
	for sequence := int64(2); ; sequence++ {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
		// The next beat replaces a failed one.
		if err := s.advertise(ctx, sequence); err != nil && ctx.Err() == nil {
			continue
		}
	}
}

// answer accepts every hold.
func (s *simulated) answer(ctx context.Context, e protocol.Event) {
	s.mu.Lock()
	if e.Type == protocol.EventRelist {
		clear(s.holds)
	}
	delete(s.holds, e.ID)
	for _, view := range e.Provider {
		s.holds[view.ID] = view.Hold
	}
	s.mu.Unlock()
	for _, view := range e.Provider {
		if view.Hold.AcceptedAttempt == view.Hold.Attempt {
			continue
		}
		if s.client.AckProvider(ctx, view.ID, protocol.ProviderAck{ReservationUID: view.Hold.ReservationUID, Attempt: view.Hold.Attempt, Accepted: true, Message: "simulated"}) == nil {
			s.accepted.Add(1)
		}
	}
}

// use reports every allocation ready.
func (s *simulated) use(ctx context.Context, e protocol.Event) {
	for _, view := range e.Consumer {
		var ready []string
		for _, a := range view.Status.Allocations {
			if a.Accepted {
				ready = append(ready, a.Cluster)
			}
		}
		if len(ready) > 0 && view.Status.Phase == broker.ReservationReserved {
			// A lost ack is sent again with the next change.
			_ = s.client.AckRequester(ctx, view.ID, protocol.RequesterAck{ReservationUID: view.UID, Attempt: view.Status.Attempt.Number, Ready: ready})
		}
	}
}

func (s *simulated) advertise(ctx context.Context, sequence int64) error {
	all := cores(nodesEach * coresEach)
	spec := broker.ClusterAdvertisementSpec{
		ClusterID: s.id, ClusterName: s.id, EndpointURL: "https://192.0.2.1:6443", PeerKey: s.key,
		Lending: broker.Lending{Enabled: true, Consumers: s.peers},
		Resources: broker.AdvertisedResources{
			Capacity: broker.FromList(all), Allocatable: broker.FromList(all), Allocated: broker.FromList(corev1.ResourceList{}),
		},
		NodeClasses: []broker.NodeClass{{
			Name: "nodes", Arch: "amd64", Labels: map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"},
			FreeShapes: []broker.FreeShape{{Nodes: nodesEach, Free: broker.FromList(cores(coresEach)), Pods: 110}},
		}},
		Timestamp: metav1.Now(), Sequence: sequence,
	}
	if _, err := s.client.PublishAdvertisement(ctx, spec); err != nil {
		return fmt.Errorf("%s advertises: %w", s.id, err)
	}
	return nil
}

// cores are CPU and as much memory as goes with it, in GiB.
func cores(n int64) corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewQuantity(n, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(n<<30, resource.BinarySI),
	}
}
