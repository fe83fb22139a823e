// Package mtls is the agent's client of the broker: its REST interface over
// mutual TLS, with an identity that may become available late or be replaced at
// any time.
package mtls

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net/url"
	"sync"
	"time"

	"github.com/go-logr/logr"
	"k8s.io/apimachinery/pkg/types"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Credentials authenticate the agent to the broker and the broker to the agent.
type Credentials interface {
	// Certificate returns the current client certificate, or the reason why there
	// is none.
	Certificate() (*tls.Certificate, error)
	// CA returns the broker's certificate authority in PEM, or the reason why it
	// is not known. The channel is closed when the result may have changed.
	CA() (pem []byte, changed <-chan struct{}, err error)
}

// Client calls the broker. Every call may be repeated. An error that wraps a
// *protocol.Error is the broker's response; any other error means that the
// broker was not reached.
type Client struct {
	url          string
	credentials  Credentials
	pollInterval time.Duration
	log          logr.Logger

	mu     sync.Mutex
	ca     []byte
	client *protocol.Client
}

// New returns a Client of the broker at url. It connects on first use. Where streams are cut, it
// polls at an interval.
func New(url string, credentials Credentials, pollInterval time.Duration, log logr.Logger) *Client {
	return &Client{url: url, credentials: credentials, pollInterval: pollInterval, log: log}
}

// current returns a client that trusts the current CA.
func (c *Client) current() (*protocol.Client, <-chan struct{}, error) {
	ca, changed, err := c.credentials.CA()
	if err != nil {
		return nil, changed, fmt.Errorf("no identity for the broker yet: %w", err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client != nil && bytes.Equal(ca, c.ca) {
		return c.client, changed, nil
	}
	config, err := protocol.TLSConfig(ca, c.credentials.Certificate)
	if err != nil {
		return nil, changed, err
	}
	client, err := protocol.NewClient(c.url, config, c.log)
	if err != nil {
		return nil, changed, err
	}
	client.PollInterval = c.pollInterval
	if c.client != nil {
		c.client.Close()
	}
	c.client, c.ca = client, ca
	return client, changed, nil
}

// do makes a call with a client that trusts the current CA.
func (c *Client) do(call func(*protocol.Client) error) error {
	client, _, err := c.current()
	if err != nil {
		return err
	}
	return call(client)
}

// PublishAdvertisement replaces this cluster's advertisement at the broker. It returns a
// *protocol.OutdatedError if the broker has a later one.
func (c *Client) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	client, _, err := c.current()
	if err != nil {
		return err
	}
	response, err := client.PublishAdvertisement(ctx, spec)
	if err == nil && response.Sequence > spec.Sequence {
		return &protocol.OutdatedError{Latest: response.Sequence}
	}
	return err
}

// Beat reports whether the broker has this cluster's advertisement as it is.
func (c *Client) Beat(ctx context.Context, beat protocol.Beat) (known bool, err error) {
	err = c.do(func(client *protocol.Client) (err error) { known, err = client.Beat(ctx, beat); return err })
	return known, err
}

// PutReservation creates or updates a reservation at the broker.
func (c *Client) PutReservation(ctx context.Context, request protocol.ReservationRequest) (view protocol.ConsumerView, err error) {
	err = c.do(func(client *protocol.Client) (err error) { view, err = client.PutReservation(ctx, request); return err })
	return view, err
}

// DeleteReservation releases a reservation at the broker; it succeeds if there is
// none with this ID.
func (c *Client) DeleteReservation(ctx context.Context, id string) error {
	return c.do(func(client *protocol.Client) error { return client.DeleteReservation(ctx, id) })
}

// Usage sums up what this cluster's pods were given.
func (c *Client) Usage(ctx context.Context, query url.Values) (list protocol.UsageList, err error) {
	err = c.do(func(client *protocol.Client) (err error) { list, err = client.Usage(ctx, query); return err })
	return list, err
}

// AckProvider reports the provider's decision about a hold.
func (c *Client) AckProvider(ctx context.Context, id string, ack protocol.ProviderAck) error {
	return c.do(func(client *protocol.Client) error { return client.AckProvider(ctx, id, ack) })
}

// AckRequester reports the consumer's progress on a reservation.
func (c *Client) AckRequester(ctx context.Context, id string, ack protocol.RequesterAck) error {
	return c.do(func(client *protocol.Client) error { return client.AckRequester(ctx, id, ack) })
}

// Renew renews the lease of a reservation.
func (c *Client) Renew(ctx context.Context, id string, uid types.UID) error {
	return c.do(func(client *protocol.Client) error { return client.Renew(ctx, id, uid) })
}

// Relay sends a sealed message to another cluster. Delivery is not guaranteed.
func (c *Client) Relay(ctx context.Context, message protocol.RelayMessage) error {
	return c.do(func(client *protocol.Client) error { return client.Relay(ctx, message) })
}

// Watch implements transport.Watcher. It waits for an identity and reconnects
// when the broker's CA changes.
func (c *Client) Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event)) {
	for ctx.Err() == nil {
		client, changed, err := c.current()
		if err != nil {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		watchCtx, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			client.Watch(watchCtx, role, handle)
		}()
		for watching := true; watching; {
			select {
			case <-done:
				watching = false
			case <-changed:
				var latest *protocol.Client
				latest, changed, err = c.current()
				watching = err != nil || latest == client
			}
		}
		cancel()
		<-done
	}
}
