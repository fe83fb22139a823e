// Package mtls reaches the broker over its REST interface with mutual TLS.
package mtls

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"sync"

	"github.com/go-logr/logr"

	"github.com/spillway-dev/spillway/agent/internal/transport"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Credentials are what the agent proves itself with. They may appear late and
// change at any time.
type Credentials interface {
	// Certificate is the current client certificate, or an error that says why
	// there is none.
	Certificate() (*tls.Certificate, error)
	// CA is the broker's certificate authority in PEM, or an error that says why
	// it is not known. The channel is closed when asking again may give another
	// answer.
	CA() (pem []byte, changed <-chan struct{}, err error)
}

// Communicator is the BrokerCommunicator over HTTP.
type Communicator struct {
	url         string
	credentials Credentials
	log         logr.Logger

	mu     sync.Mutex
	ca     []byte
	client *protocol.Client
}

var _ transport.BrokerCommunicator = (*Communicator)(nil)

// New makes a Communicator for the broker at url. It connects when first used.
func New(url string, credentials Credentials, log logr.Logger) *Communicator {
	return &Communicator{url: url, credentials: credentials, log: log}
}

// current returns a client that trusts the CA of now.
func (c *Communicator) current() (*protocol.Client, <-chan struct{}, error) {
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
	if c.client != nil {
		c.client.Close()
	}
	c.client, c.ca = client, ca
	return client, changed, nil
}

// PublishAdvertisement implements transport.BrokerCommunicator.
func (c *Communicator) PublishAdvertisement(ctx context.Context, spec broker.ClusterAdvertisementSpec) error {
	client, _, err := c.current()
	if err != nil {
		return err
	}
	_, err = client.PublishAdvertisement(ctx, spec)
	return err
}

// PutReservation implements transport.BrokerCommunicator.
func (c *Communicator) PutReservation(ctx context.Context, request protocol.ReservationRequest) (protocol.ConsumerView, error) {
	client, _, err := c.current()
	if err != nil {
		return protocol.ConsumerView{}, err
	}
	return client.PutReservation(ctx, request)
}

// DeleteReservation implements transport.BrokerCommunicator.
func (c *Communicator) DeleteReservation(ctx context.Context, id string) error {
	client, _, err := c.current()
	if err != nil {
		return err
	}
	return client.DeleteReservation(ctx, id)
}

// Ack implements transport.BrokerCommunicator.
func (c *Communicator) Ack(ctx context.Context, id string, provider *protocol.ProviderAck, requester *protocol.RequesterAck) error {
	client, _, err := c.current()
	switch {
	case err != nil:
		return err
	case (provider == nil) == (requester == nil):
		return errors.New("an acknowledgement is either a provider's or a requester's")
	case provider != nil:
		return client.AckProvider(ctx, id, *provider)
	}
	return client.AckRequester(ctx, id, *requester)
}

// Relay implements transport.BrokerCommunicator.
func (c *Communicator) Relay(ctx context.Context, message protocol.RelayMessage) error {
	client, _, err := c.current()
	if err != nil {
		return err
	}
	return client.Relay(ctx, message)
}

// Watch implements transport.BrokerCommunicator. It waits for an identity first,
// and connects anew when the broker's CA is another.
func (c *Communicator) Watch(ctx context.Context, role protocol.Role, handle func(protocol.Event)) {
	for ctx.Err() == nil {
		client, changed, err := c.current()
		if err != nil {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		following, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			client.Watch(following, role, handle)
		}()
		for trusted := true; trusted; {
			select {
			case <-done:
				trusted = false
			case <-changed:
				var now *protocol.Client
				now, changed, err = c.current()
				trusted = err != nil || now == client
			}
		}
		cancel()
		<-done
	}
}

// Ping implements transport.BrokerCommunicator.
func (c *Communicator) Ping(ctx context.Context) error {
	client, _, err := c.current()
	if err != nil {
		return err
	}
	return client.Ping(ctx)
}
