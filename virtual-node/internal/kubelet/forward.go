package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	vkapi "github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
)

// portForward joins connections of a client with ports of a guest.
func (a *api) portForward(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	// The handler returns when the client's connection ends, and what is still
	// joined then has to end too: virtual-kubelet's own context never does.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	forward := func(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
		return g.homeNames(g.forward(ctx, port, stream))
	}
	vkapi.HandlePortForward(forward, vkapi.WithPortForwardStreamIdleTimeout(idleAfter),
		vkapi.WithPortForwardCreationTimeout(streamsWithin))(w, withVars(r))
}

// forward joins one connection with a port of the guest until both directions are
// done, one breaks, or ctx ends.
func (g guest) forward(ctx context.Context, port int32, client io.ReadWriteCloser) error {
	connection, err := g.dialForward()
	if err != nil {
		return err
	}
	defer connection.Close()
	defer context.AfterFunc(ctx, func() { connection.Close() })()

	headers := http.Header{}
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	headers.Set(corev1.PortHeader, strconv.Itoa(int(port)))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	problems, err := connection.CreateStream(headers)
	if err != nil {
		return fmt.Errorf("opening the stream for errors to the provider: %w", err)
	}
	// Nothing is ever sent on it.
	problems.Close()
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := connection.CreateStream(headers)
	if err != nil {
		return fmt.Errorf("opening the stream for data to the provider: %w", err)
	}

	told := make(chan error, 1)
	go func() {
		words, err := io.ReadAll(problems)
		switch {
		case len(words) > 0:
			told <- errors.New(string(words))
		case err != nil && ctx.Err() == nil:
			told <- fmt.Errorf("the connection to the provider broke: %w", err)
		default:
			told <- nil
		}
	}()
	go func() {
		// The guest may go on to answer after the client has said all; but a client
		// that broke off is not to keep the connection.
		if _, err := io.Copy(data, client); err != nil {
			connection.Close()
			return
		}
		data.Close()
	}()
	received := make(chan error, 1)
	go func() {
		_, err := io.Copy(client, data)
		received <- err
	}()

	// The provider closes both when the guest's side has ended, and tells on the
	// one why where it never began: then nothing comes on the other.
	select {
	case err := <-told:
		if err != nil {
			return err
		}
		return <-received
	case err := <-received:
		if err != nil {
			return fmt.Errorf("the connection to the provider broke: %w", err)
		}
		return <-told
	case <-ctx.Done():
		return nil
	}
}

// dialForward opens a connection for port-forwarding at the provider: SPDY inside
// of a websocket, or SPDY as such where the API server or a proxy before it does
// not know that.
func (g guest) dialForward() (httpstream.Connection, error) {
	address := g.at(http.MethodPost, "portforward").URL()
	tunnel, err := portforward.NewSPDYOverWebsocketDialer(address, g.config)
	if err != nil {
		return nil, fmt.Errorf("preparing port-forward at the provider: %w", err)
	}
	transport, upgrader, err := spdy.RoundTripperFor(g.config)
	if err != nil {
		return nil, fmt.Errorf("preparing port-forward at the provider: %w", err)
	}
	plain := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	connection, _, err := portforward.NewFallbackDialer(tunnel, plain, tryOther).Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, fmt.Errorf("opening port-forward at the provider: %w", err)
	}
	return connection, nil
}
