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
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// portForward forwards connections of a client to ports of a guest.
func (a *api) portForward(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	// virtual-kubelet does not cancel the context that it passes when the client
	// disconnects; the handler returns then.
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	forward := func(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
		return g.withPodName(g.forward(ctx, port, stream))
	}
	vkapi.HandlePortForward(forward, vkapi.WithPortForwardStreamIdleTimeout(streamIdleTimeout),
		vkapi.WithPortForwardCreationTimeout(streamCreationTimeout))(w, withVars(r))
}

// forward connects a client's stream with a port of the guest until both directions
// are closed, one fails, or ctx ends.
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
	errorStream, err := connection.CreateStream(headers)
	if err != nil {
		return fmt.Errorf("opening the error stream to the provider: %w", err)
	}
	errorStream.Close() // it is only read
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := connection.CreateStream(headers)
	if err != nil {
		return fmt.Errorf("opening the data stream to the provider: %w", err)
	}

	remoteErr := make(chan error, 1)
	go func() {
		message, err := io.ReadAll(io.LimitReader(errorStream, maxForwardError))
		switch {
		case len(message) > 0:
			remoteErr <- errors.New(string(message))
		case err != nil && ctx.Err() == nil:
			remoteErr <- fmt.Errorf("reading from the provider: %w", err)
		default:
			remoteErr <- nil
		}
	}()
	go func() {
		// The guest may respond after the client has closed its direction, but an
		// aborted client must not keep the connection.
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

	// The provider closes both streams when the guest's side ends. If the guest's port
	// cannot be reached, it reports that on the error stream and sends no data.
	select {
	case err := <-remoteErr:
		if err != nil {
			return err
		}
		return <-received
	case err := <-received:
		if err != nil {
			return fmt.Errorf("reading from the provider: %w", err)
		}
		return <-remoteErr
	case <-ctx.Done():
		return nil
	}
}

// maxForwardError is how much is read of the error of a provider, which is not trusted.
const maxForwardError = 4096

// dialForward opens a connection for port-forwarding to the provider: SPDY over a
// websocket, or SPDY alone if the API server or a proxy does not support that.
func (g guest) dialForward() (httpstream.Connection, error) {
	url := g.request(http.MethodPost, "portforward").URL()
	tunnel, tunnelErr := portforward.NewSPDYOverWebsocketDialerForStreaming(url, g.config)
	transport, upgrader, err := spdy.RoundTripperFor(g.config)
	if err := errors.Join(tunnelErr, err); err != nil {
		return nil, fmt.Errorf("preparing port-forward at the provider: %w", err)
	}
	plain := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	connection, _, err := portforward.NewFallbackDialerForStreaming(tunnel, plain, shouldFallBack).Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, fmt.Errorf("connecting for port-forward to the provider: %w", err)
	}
	return connection, nil
}
