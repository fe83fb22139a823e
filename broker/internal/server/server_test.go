package server

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestJoining(t *testing.T) {
	hub := startHub(t)
	hash := hub.authority.CAHash()
	key, csr := newCSR(t, "rome")
	first, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, csr)
	expect.NoError(t, err)
	rome := hub.with(t, "rome", key, first)
	if _, err := rome.client.Advertisements(t.Context()); err != nil {
		t.Fatalf("the first call with a new certificate: %v", err)
	}
	t.Run("the same key may join again", func(t *testing.T) {
		again, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, csr)
		expect.NoError(t, err)
		if again.Certificate == first.Certificate {
			t.Fatal("want a new certificate")
		}
	})
	t.Run("another key must not join", func(t *testing.T) {
		_, other := newCSR(t, "rome")
		_, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, other)
		expectCode(t, err, protocol.CodeConflict)
		if !strings.Contains(err.Error(), "delete clusterregistration rome") {
			t.Fatalf("the error does not say what to do: %v", err)
		}
	})
	t.Run("a wrong token", func(t *testing.T) {
		_, csr := newCSR(t, "paris")
		_, err := protocol.Join(t.Context(), hub.url, hash, "paris", hub.token+"x", csr)
		expectCode(t, err, protocol.CodeUnauthorized)
	})
	t.Run("a request for another name", func(t *testing.T) {
		_, csr := newCSR(t, "paris")
		_, err := protocol.Join(t.Context(), hub.url, hash, "berlin", hub.token, csr)
		expectCode(t, err, protocol.CodeInvalid)
	})
	t.Run("an invalid name", func(t *testing.T) {
		_, csr := newCSR(t, "Paris!")
		_, err := protocol.Join(t.Context(), hub.url, hash, "Paris!", hub.token, csr)
		expectCode(t, err, protocol.CodeInvalid)
	})
	t.Run("a wrong hash of the CA", func(t *testing.T) {
		_, csr := newCSR(t, "paris")
		_, err := protocol.Join(t.Context(), hub.url, "sha256:"+strings.Repeat("0", 64), "paris", hub.token, csr)
		if err == nil || !strings.Contains(err.Error(), "check broker.caHash") {
			t.Fatalf("want an error with broker.caHash, got %v", err)
		}
	})
	t.Run("no certificate", func(t *testing.T) {
		for _, route := range (&Server{}).routes() {
			if !route.open {
				path := strings.ReplaceAll(route.path, "{id}", "some")
				hub.call(t, nil, route.method, path, nil).expect(t, http.StatusUnauthorized, "certificate is required")
			}
		}
	})
	t.Run("a certificate of another CA", func(t *testing.T) {
		foreign, _ := newCSR(t, "rome")
		template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "rome"}, NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
		der, err := x509.CreateCertificate(rand.Reader, template, template, foreign.Public(), foreign)
		expect.NoError(t, err)
		stranger := hub.through(t, hub.url, "rome", &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: foreign})
		if got := hub.call(t, stranger.tls, http.MethodGet, protocol.PathAdvertisements, nil); got.err == nil {
			t.Fatalf("want the handshake to fail, got %d", got.status)
		}
	})
	t.Run("the broker's serving certificate is not for clients", func(t *testing.T) {
		serving, err := hub.authority.TLSConfig().GetCertificate(nil)
		expect.NoError(t, err)
		stranger := hub.through(t, hub.url, "broker", serving)
		if got := hub.call(t, stranger.tls, http.MethodGet, protocol.PathAdvertisements, nil); got.err == nil {
			t.Fatalf("want the handshake to fail, got %d", got.status)
		}
	})
	t.Run("deleting the registration revokes the certificate and frees the cluster ID", func(t *testing.T) {
		expect.NoError(t, hub.api.Delete(t.Context(), &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: "rome"}}))
		eventually(t, "rome to be refused", func() error {
			if _, err := rome.client.Advertisements(t.Context()); !protocol.HasCode(err, protocol.CodeUnauthorized) {
				return fmt.Errorf("got %v", err)
			}
			return nil
		})
		_, other := newCSR(t, "rome")
		eventually(t, "another key to join", func() error {
			_, err := protocol.Join(t.Context(), hub.url, hash, "rome", hub.token, other)
			return err
		})
	})
	t.Run("too many join requests", func(t *testing.T) {
		hub.untilLimited(t, "the address to be limited", nil, func(transport *http.Transport) answer {
			return hub.callThrough(t, transport, http.MethodPost, protocol.PathJoin, []byte(`{}`))
		})
	})
}

func TestCalls(t *testing.T) {
	c := &clusters{hub: startHub(t)}
	c.rome, c.paris, c.berlin = c.hub.join(t, "rome"), c.hub.join(t, "paris"), c.hub.join(t, "berlin")
	t.Run("bad input", c.testBadInput)
	t.Run("advertisements", c.testAdvertisements)
	t.Run("a reservation is visible to its requester and its provider only", c.testReservationIsPrivate)
	t.Run("an older request changes nothing", c.testOlderRequest)
	t.Run("a count is lowered that is kept at as many providers as allowed", c.testRetained)
	t.Run("a quota of Reservations", c.testQuota)
	t.Run("a deletion takes nothing of the limit of writes", c.testDeletionsAreFree)
	t.Run("relay", c.testRelay)
	t.Run("metrics", c.testMetrics)
	t.Run("bodies and calls of the original system's agents", c.testOriginalAgents)
}

// clusters are a hub and three clusters that have joined it.
type clusters struct {
	hub                 *testHub
	rome, paris, berlin *cluster
	// placed is a Reservation of rome in paris.
	placed protocol.ConsumerView
}

func (c *clusters) testAdvertisements(t *testing.T) {
	spec := newAdvertisement("berlin")
	spec.Cost = &broker.Cost{CPUCost: "0.1", Currency: "EUR"}
	spec.Lending.Consumers = []string{"rome", "madrid"}
	got, err := c.berlin.client.PublishAdvertisement(t.Context(), spec)
	expect.NoError(t, err)
	if got.Sequence != spec.Sequence {
		t.Fatalf("want sequence %d acknowledged, got %d", spec.Sequence, got.Sequence)
	}
	key := client.ObjectKey{Namespace: namespace, Name: "berlin"}
	var before, after broker.ClusterAdvertisement
	eventually(t, "others to see it", func() error {
		view, err := c.rome.client.Advertisement(t.Context(), "berlin")
		if err == nil && view.Spec.Cost == nil {
			return fmt.Errorf("got %+v", view)
		}
		if text := encode(t, view); err == nil && (strings.Contains(text, "berlin.test") || strings.Contains(text, "key-of") || strings.Contains(text, "nodeClasses") || strings.Contains(text, "consumers")) {
			t.Fatalf("rome sees what it does not need: %s", text)
		}
		return err
	})
	eventually(t, "its account to be up to date", func() error {
		expect.NoError(t, c.hub.api.Get(t.Context(), key, &before))
		if !before.Status.Active {
			return errors.New("it is not active")
		}
		return nil
	})
	_, err = c.paris.client.Advertisement(t.Context(), "berlin")
	expectCode(t, err, protocol.CodeNotFound)
	list, err := c.paris.client.Advertisements(t.Context())
	expect.NoError(t, err)
	if slices.ContainsFunc(list, func(view protocol.AdvertisementView) bool { return view.Spec.ClusterID == "berlin" }) {
		t.Fatal("paris, to which berlin does not lend, sees its advertisement in the list")
	}
	eventually(t, "an unchanged advertisement to cost no call of the API server", func() error {
		spec.Sequence++
		before := c.hub.requests.to("clusteradvertisements/berlin")
		_, err = c.berlin.client.PublishAdvertisement(t.Context(), spec)
		expect.NoError(t, err)
		if calls := c.hub.requests.to("clusteradvertisements/berlin") - before; calls != 0 {
			return fmt.Errorf("it cost %d", calls)
		}
		return nil
	})
	expect.NoError(t, c.hub.api.Get(t.Context(), key, &after))
	if before.ResourceVersion != after.ResourceVersion {
		t.Fatal("an unchanged advertisement was written")
	}
	// Whatever the cache has: what was advertised last is what is stored.
	for i := range 10 {
		spec.Sequence++
		spec.EndpointURL = fmt.Sprintf("https://berlin-%d.test", i%2)
		_, err = c.berlin.client.PublishAdvertisement(t.Context(), spec)
		expect.NoError(t, err)
		expect.NoError(t, c.hub.api.Get(t.Context(), key, &after))
		if after.Spec.EndpointURL != spec.EndpointURL {
			t.Fatalf("advertisement %d was not stored: the endpoint is %s", i, after.Spec.EndpointURL)
		}
	}
}

func (c *clusters) testReservationIsPrivate(t *testing.T) {
	_, err := c.paris.client.PublishAdvertisement(t.Context(), newAdvertisement("paris"))
	expect.NoError(t, err)
	_, err = c.rome.client.PublishAdvertisement(t.Context(), withoutLending(newAdvertisement("rome")))
	expect.NoError(t, err)
	request := newRequest("mine")
	request.Spec.TargetClusterID, request.ByHand = "paris", true
	view, err := c.rome.client.PutReservation(t.Context(), request)
	expect.NoError(t, err)
	again, err := c.rome.client.PutReservation(t.Context(), request)
	expect.NoError(t, err)
	if view.ID != again.ID || view.ID != "rome-"+string(request.SourceUID) {
		t.Fatalf("the same request is two reservations: %s and %s", view.ID, again.ID)
	}
	stored := &broker.Reservation{}
	expect.NoError(t, c.hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: view.ID}, stored))
	for label, want := range map[string]string{broker.LabelRequester: "rome", broker.LabelSourceNamespace: "shop", broker.LabelSourceName: "mine", broker.LabelByHand: "true"} {
		if stored.Labels[label] != want {
			t.Errorf("label %s is %q, not %q", label, stored.Labels[label], want)
		}
	}
	var hold protocol.ProviderView
	eventually(t, "paris to see the hold", func() (err error) {
		hold, err = c.paris.client.ProviderReservation(t.Context(), view.ID)
		return err
	})
	if hold.Requester != "rome" || hold.RequesterPeerKey != "key-of-rome" {
		t.Fatalf("the hold is not of rome: %+v", hold)
	}
	eventually(t, "rome to see its provider", func() error {
		view, err := c.rome.client.ConsumerReservation(t.Context(), view.ID)
		if err == nil && (len(view.Status.Allocations) != 1 || view.Status.Allocations[0].Endpoint != "https://paris.test:6443" || view.PeerKeys["paris"] != "key-of-paris") {
			return fmt.Errorf("got %+v", view)
		}
		return err
	})
	// No other cluster can read or change it, in either role.
	_, err = c.berlin.client.ConsumerReservation(t.Context(), view.ID)
	expectCode(t, err, protocol.CodeNotFound)
	_, err = c.berlin.client.ProviderReservation(t.Context(), view.ID)
	expectCode(t, err, protocol.CodeNotFound)
	_, err = c.paris.client.ConsumerReservation(t.Context(), view.ID)
	expectCode(t, err, protocol.CodeNotFound)
	expectCode(t, c.berlin.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: hold.Hold.ReservationUID, Attempt: hold.Hold.Attempt, Accepted: true}), protocol.CodeNotFound)
	expectCode(t, c.berlin.client.AckRequester(t.Context(), view.ID, protocol.RequesterAck{ReservationUID: view.UID, Attempt: hold.Hold.Attempt}), protocol.CodeNotFound)
	for _, other := range []*cluster{c.paris, c.berlin} {
		c.hub.call(t, other.tls, http.MethodDelete, protocol.PathReservations+"/"+view.ID, nil).expect(t, 404, "belongs to another cluster")
		if list, err := other.client.ConsumerReservations(t.Context()); err != nil || len(list) != 0 {
			t.Fatalf("%s lists %v, %v", other.id, list, err)
		}
	}
	others, err := c.berlin.client.Advertisement(t.Context(), "paris")
	expect.NoError(t, err)
	if len(others.Status.Holds) != 0 {
		t.Fatalf("berlin sees holds of others in paris: %+v", others.Status.Holds)
	}
	expect.NoError(t, c.paris.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: hold.Hold.ReservationUID, Attempt: hold.Hold.Attempt, Accepted: true}))
	eventually(t, "rome to see that paris accepted", func() error {
		view, err := c.rome.client.ConsumerReservation(t.Context(), view.ID)
		if err == nil && !slices.ContainsFunc(view.Status.Allocations, func(a broker.Allocation) bool { return a.Accepted }) {
			return fmt.Errorf("got %+v", view.Status)
		}
		return err
	})

	expect.NoError(t, c.rome.client.AckRequester(t.Context(), view.ID, protocol.RequesterAck{ReservationUID: view.UID, Attempt: hold.Hold.Attempt, Ready: []string{"paris"}}))
	c.placed = view
	request.Spec.PodSets[0].NodeSelector = map[string]string{"another": "shape"}
	request.SourceGeneration++
	_, err = c.rome.client.PutReservation(t.Context(), request)
	expectCode(t, err, protocol.CodeConflict)
}

func (c *clusters) testOlderRequest(t *testing.T) {
	request := newRequest("late")
	request.SourceGeneration = 2
	_, err := c.rome.client.PutReservation(t.Context(), request)
	expect.NoError(t, err)
	newer := request
	newer.SourceGeneration, newer.Spec.PodSets = 3, slices.Clone(request.Spec.PodSets)
	newer.Spec.PodSets[0].Count = 9
	newer.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 1}}
	_, err = c.rome.client.PutReservation(t.Context(), newer)
	expect.NoError(t, err)
	view, err := c.rome.client.PutReservation(t.Context(), request)
	expect.NoError(t, err)
	stored := &broker.Reservation{}
	expect.NoError(t, c.hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: view.ID}, stored))
	if stored.Spec.PodSets[0].Count != 9 || len(stored.Spec.Retained) != 1 {
		t.Fatalf("want the newer request, got %+v", stored)
	}
}

// testRetained lowers a count with a list of what each provider keeps.
func (c *clusters) testRetained(t *testing.T) {
	request := newRequest("wide")
	request.Spec.PodSets[0].Count = 3 * broker.MaxRetained
	_, err := c.rome.client.PutReservation(t.Context(), request)
	expect.NoError(t, err)
	request.SourceGeneration++
	request.Spec.PodSets = slices.Clone(request.Spec.PodSets)
	request.Spec.PodSets[0].Count = broker.MaxRetained
	for i := range broker.MaxRetained {
		id := fmt.Sprintf("cluster-%0*d", protocol.MaxClusterID-len("cluster-"), i)
		request.Spec.Retained = append(request.Spec.Retained, broker.RetainedPods{Cluster: id, Count: 1, Attempt: 1 << 40})
	}
	view, err := c.rome.client.PutReservation(t.Context(), request)
	expect.NoError(t, err)
	stored := &broker.Reservation{}
	expect.NoError(t, c.hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: view.ID}, stored))
	if len(stored.Spec.Retained) != broker.MaxRetained {
		t.Errorf("%d of %d entries are stored", len(stored.Spec.Retained), broker.MaxRetained)
	}
	expect.NoError(t, c.rome.client.DeleteReservation(t.Context(), view.ID))
}

// testDeletionsAreFree deletes Reservations after the limit of writes was reached.
func (c *clusters) testDeletionsAreFree(t *testing.T) {
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: configName}}
	config.Spec.Quotas = &broker.Quotas{WritesPerSecond: new(int32(1)), WriteBurst: new(int32(10))}
	expect.NoError(t, c.hub.api.Create(t.Context(), config))
	defer func() {
		expect.NoError(t, c.hub.api.Delete(context.Background(), config))
		eventually(t, "the limit to be the default again", func() error {
			if limit := c.hub.server.Store.Settings().WritesPerSecond; limit == 1 {
				return fmt.Errorf("it is %v", limit)
			}
			return nil
		})
	}()
	// The quota of the test before is refused with the same status.
	eventually(t, "the limit to apply", func() error {
		if have := c.hub.server.Store.Settings(); have.WritesPerSecond != 1 {
			return fmt.Errorf("have %+v", have)
		}
		return nil
	})
	var mutex sync.Mutex
	var created []string
	c.hub.untilLimited(t, "a write to be refused", c.berlin.tls, func(transport *http.Transport) answer {
		request := unplaceable("limited")
		answer := c.hub.callThrough(t, transport, http.MethodPost, protocol.PathReservations, []byte(encode(t, request)))
		if answer.status != http.StatusTooManyRequests {
			mutex.Lock()
			defer mutex.Unlock()
			created = append(created, protocol.ReservationID("berlin", request.SourceUID))
		}
		return answer
	})
	if len(created) < 10 {
		t.Fatalf("%d Reservations were created", len(created))
	}
	eventually(t, "the broker's watch to show all", func() error {
		for _, id := range created {
			if c.hub.server.views.Reservation("berlin", id) == nil {
				return errors.New(id + " is not there")
			}
		}
		return nil
	})
	for _, id := range created {
		c.hub.call(t, c.berlin.tls, http.MethodDelete, protocol.PathReservations+"/"+id, nil).expect(t, http.StatusNoContent, "")
	}
	c.hub.untilLimited(t, "the deletion of an unknown one to be refused", c.berlin.tls, func(transport *http.Transport) answer {
		return c.hub.callThrough(t, transport, http.MethodDelete, protocol.PathReservations+"/unknown", nil)
	})
}

// testQuota creates as many Reservations as the quota allows, in parallel.
func (c *clusters) testQuota(t *testing.T) {
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: configName}}
	config.Spec.Quotas = &broker.Quotas{ReservationsPerCluster: new(int32(5)), ReservationBytes: new(int32(1024))}
	expect.NoError(t, c.hub.api.Create(t.Context(), config))
	defer func() { expect.NoError(t, c.hub.api.Delete(context.Background(), config)) }()
	eventually(t, "the quotas to apply", func() error {
		if have := c.hub.server.Store.Settings(); have.ReservationsPerCluster != 5 || have.ReservationBytes != 1024 {
			return fmt.Errorf("have %+v", have)
		}
		return nil
	})
	large := newRequest("large")
	large.Spec.PodSets[0].NodeSelector = map[string]string{"long": strings.Repeat("x", 1024)}
	_, err := c.berlin.client.PutReservation(t.Context(), large)
	if !protocol.HasCode(err, protocol.CodeTooLarge) || !strings.Contains(err.Error(), "raise spec.quotas.reservationBytes") {
		t.Fatalf("got %v", err)
	}
	var group sync.WaitGroup
	refusals := make(chan error, 20)
	var created atomic.Int32
	for i := range 20 {
		group.Go(func() {
			answer := c.hub.call(t, c.berlin.tls, http.MethodPost, protocol.PathReservations, []byte(encode(t, unplaceable(fmt.Sprint("quota-", i)))))
			if answer.status == http.StatusOK {
				created.Add(1)
			} else {
				refusals <- answer.refusal()
			}
		})
	}
	group.Wait()
	close(refusals)
	for refusal := range refusals {
		if !protocol.HasCode(refusal, protocol.CodeTooMany) || !strings.Contains(refusal.Error(), "has 5 Reservations") || !strings.Contains(refusal.Error(), "raise spec.quotas.reservationsPerCluster") {
			t.Fatalf("got %v", refusal)
		}
	}
	if created.Load() != 5 {
		t.Fatalf("%d Reservations were created", created.Load())
	}
	// There are some of other clusters, too.
	config.Spec.Quotas.Reservations = new(int32(1))
	expect.NoError(t, c.hub.api.Update(t.Context(), config))
	eventually(t, "the bound of all to apply", func() error {
		if have := c.hub.server.Store.Settings(); have.Reservations != 1 {
			return fmt.Errorf("have %+v", have)
		}
		return nil
	})
	_, err = c.paris.client.PutReservation(t.Context(), unplaceable("beyond"))
	if !protocol.HasCode(err, protocol.CodeTooMany) || !strings.Contains(err.Error(), "raise spec.quotas.reservations of") {
		t.Fatalf("got %v", err)
	}
	config.Spec.Quotas.Reservations = nil
	expect.NoError(t, c.hub.api.Update(t.Context(), config))
	eventually(t, "the bound to be the default", func() error {
		if have := c.hub.server.Store.Settings(); have.Reservations < 1000 {
			return fmt.Errorf("have %+v", have)
		}
		return nil
	})
	// Room appears when one is gone.
	var list []protocol.ConsumerView
	eventually(t, "the broker's watch to show one", func() error {
		if list, err = c.berlin.client.ConsumerReservations(t.Context()); err == nil && len(list) == 0 {
			return errors.New("the list is empty")
		}
		return err
	})
	expect.NoError(t, c.berlin.client.DeleteReservation(t.Context(), list[0].ID))
	eventually(t, "another to be created", func() error {
		answer := c.hub.call(t, c.berlin.tls, http.MethodPost, protocol.PathReservations, []byte(encode(t, unplaceable("another"))))
		if answer.status != http.StatusOK {
			return answer.refusal()
		}
		return nil
	})
}

// unplaceable requests a provider that does not exist, so that no hold delays its end.
func unplaceable(name string) protocol.ReservationRequest {
	request := newRequest(name)
	request.Spec.TargetClusterID = "nowhere"
	return request
}

func (c *clusters) testRelay(t *testing.T) {
	received := watch(t, c.paris, "")
	expectEvent(t, received, "a Relist", func(event protocol.Event) bool {
		return event.Type == protocol.EventRelist && len(event.Relay) == 0
	})
	expect.NoError(t, c.rome.client.Relay(t.Context(), protocol.RelayMessage{To: "paris", ID: "1", Sealed: []byte("secret")}))
	expectEvent(t, received, "the message", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && len(event.Relay) == 1 && event.Relay[0].From == "rome" && string(event.Relay[0].Sealed) == "secret"
	})
	for reason, message := range map[string]protocol.RelayMessage{
		protocol.CodeTooLarge:  {To: "paris", ID: "1", Sealed: make([]byte, protocol.MaxSealed+1)},
		protocol.CodeForbidden: {From: "berlin", To: "paris", ID: "1", Sealed: []byte("x")},
		protocol.CodeInvalid:   {To: "paris", Sealed: []byte("x")},
	} {
		expectCode(t, c.rome.client.Relay(t.Context(), message), reason)
	}
	const maxMessagesFrom = 32
	// The answers do not tell whether a cluster has joined.
	for _, to := range []string{"berlin", "nowhere"} {
		message := []byte(encode(t, protocol.RelayMessage{To: to, ID: "1", Sealed: []byte("x")}))
		for range maxMessagesFrom {
			if got := c.hub.call(t, c.rome.tls, http.MethodPost, protocol.PathRelay, message); got.status != http.StatusAccepted {
				t.Fatalf("got %d: %s", got.status, got.body)
			}
		}
		c.hub.call(t, c.rome.tls, http.MethodPost, protocol.PathRelay, message).expect(t, http.StatusTooManyRequests, "mailbox of cluster "+to+" is full")
	}
	expectEvent(t, watch(t, c.berlin, ""), "the messages in the mailbox", func(event protocol.Event) bool {
		return event.Type == protocol.EventRelist && len(event.Relay) == maxMessagesFrom
	})
}

func TestStreams(t *testing.T) {
	hub := startHub(t)
	rome, paris := hub.join(t, "rome"), hub.join(t, "paris")
	_, err := paris.client.PublishAdvertisement(t.Context(), newAdvertisement("paris"))
	expect.NoError(t, err)

	line := startProxy(t, strings.TrimPrefix(hub.url, "https://"))
	shaky := hub.through(t, "https://"+line.address, "rome", certificateOf(t, rome))
	consumer, provider, broken := watch(t, rome, protocol.RoleRequester), watch(t, paris, protocol.RoleProvider), watch(t, shaky, protocol.RoleRequester)
	for _, events := range []chan protocol.Event{consumer, provider, broken} {
		expectEvent(t, events, "an empty Relist", func(event protocol.Event) bool {
			return event.Type == protocol.EventRelist && len(event.Consumer) == 0 && len(event.Provider) == 0
		})
	}

	view, err := rome.client.PutReservation(t.Context(), newRequest("first"))
	expect.NoError(t, err)
	expectEvent(t, consumer, "a Put of the reservation", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && event.Consumer[0].ID == view.ID && event.Consumer[0].SourceName == "first"
	})
	hold := expectEvent(t, provider, "a Put of the hold", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && event.Provider[0].ID == view.ID && event.Provider[0].Hold.Promised.Pods() == 2
	}).Provider[0]
	expect.NoError(t, paris.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: hold.Hold.ReservationUID, Attempt: hold.Hold.Attempt, Accepted: true}))
	expectEvent(t, consumer, "a Put of the acceptance", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && len(event.Consumer[0].Status.Allocations) == 1 && event.Consumer[0].Status.Allocations[0].Accepted
	})

	line.closeAll()
	expectEvent(t, broken, "a full Relist after the break", func(event protocol.Event) bool {
		return event.Type == protocol.EventRelist && len(event.Consumer) == 1 && event.Consumer[0].ID == view.ID
	})

	expect.NoError(t, rome.client.DeleteReservation(t.Context(), view.ID))
	released := expectEvent(t, provider, "a Put of the release", func(event protocol.Event) bool {
		return event.Type == protocol.EventPut && event.Provider[0].ID == view.ID && event.Provider[0].Releasing()
	}).Provider[0]
	expect.NoError(t, paris.client.AckProvider(t.Context(), view.ID, protocol.ProviderAck{ReservationUID: released.Hold.ReservationUID, Attempt: released.Hold.Attempt, Accepted: true}))
	for _, events := range []chan protocol.Event{consumer, provider, broken} {
		expectEvent(t, events, "a Delete", func(event protocol.Event) bool { return event.Type == protocol.EventDelete && event.ID == view.ID })
	}
	expect.NoError(t, rome.client.DeleteReservation(t.Context(), view.ID))

	t.Run("revoking the cluster ends the streams", func(t *testing.T) {
		registration := &broker.ClusterRegistration{}
		expect.NoError(t, hub.api.Get(t.Context(), client.ObjectKey{Namespace: namespace, Name: "rome"}, registration))
		registration.Spec.Approval = broker.ApprovalRevoked
		expect.NoError(t, hub.api.Update(t.Context(), registration))
		eventually(t, "its streams to end", func() error {
			if open := line.open(); open > 0 {
				return fmt.Errorf("%d are open", open)
			}
			return nil
		})
	})
	t.Run("stopping ends the streams", func(t *testing.T) {
		began := time.Now()
		hub.stop()
		if took := time.Since(began); took > shutdownGrace {
			t.Fatalf("it took %s", took)
		}
	})
}

// TestOpenAPICoversRoutes compares the document with the routes, both ways.
func TestOpenAPICoversRoutes(t *testing.T) {
	var document struct {
		Paths map[string]map[string]struct {
			Security []any `json:"security"`
		} `json:"paths"`
	}
	expect.NoError(t, json.Unmarshal(protocol.OpenAPI, &document))
	described := 0
	for _, item := range document.Paths {
		described += len(item)
	}
	routes := (&Server{}).routes()
	for _, route := range routes {
		operation, there := document.Paths[route.path][strings.ToLower(route.method)]
		if !there {
			t.Errorf("the document does not have %s %s", route.method, route.path)
		} else if open := len(operation.Security) == 0; open != route.open {
			t.Errorf("the document is wrong on whether %s %s needs a certificate", route.method, route.path)
		}
	}
	if described != len(routes) {
		t.Errorf("the document has %d operations, the server %d", described, len(routes))
	}
}
