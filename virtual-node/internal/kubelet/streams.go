package kubelet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/gorilla/mux"
	vkapi "github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/streaming/pkg/httpstream"
)

const (
	// streamIdleTimeout is a kubelet's.
	streamIdleTimeout = 4 * time.Hour
	// streamCreationTimeout bounds the time until a client has opened its streams.
	streamCreationTimeout = 30 * time.Second
)

// exec runs a command in a guest's container.
func (a *api) exec(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	run := func(ctx context.Context, _, _, container string, command []string, streams vkapi.AttachIO) error {
		return g.stream(ctx, "exec", &corev1.PodExecOptions{
			Container: container, Command: command, TTY: streams.TTY(),
			Stdin: streams.Stdin() != nil, Stdout: streams.Stdout() != nil, Stderr: streams.Stderr() != nil,
		}, streams)
	}
	vkapi.HandleContainerExec(run, vkapi.WithExecStreamIdleTimeout(streamIdleTimeout),
		vkapi.WithExecStreamCreationTimeout(streamCreationTimeout))(w, withVars(r))
}

// attach attaches to a guest's container.
func (a *api) attach(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	run := func(ctx context.Context, _, _, container string, streams vkapi.AttachIO) error {
		return g.stream(ctx, "attach", &corev1.PodAttachOptions{
			Container: container, TTY: streams.TTY(),
			Stdin: streams.Stdin() != nil, Stdout: streams.Stdout() != nil, Stderr: streams.Stderr() != nil,
		}, streams)
	}
	vkapi.HandleContainerAttach(run, vkapi.WithExecStreamIdleTimeout(streamIdleTimeout),
		vkapi.WithExecStreamCreationTimeout(streamCreationTimeout))(w, withVars(r))
}

// withVars sets the variables of the path as virtual-kubelet's handlers read them.
func withVars(r *http.Request) *http.Request {
	vars := map[string]string{}
	for _, name := range []string{"namespace", "pod", "container"} {
		if value := r.PathValue(name); value != "" {
			vars[name] = value
		}
	}
	return mux.SetURLVars(r, vars)
}

// stream connects streams with a subresource of the guest until one side closes or
// ctx ends; virtual-kubelet cancels ctx when its client disconnects. The error that
// carries a command's exit code is returned unchanged.
func (g guest) stream(ctx context.Context, subresource string, options runtime.Object, streams vkapi.AttachIO) error {
	url := g.request(http.MethodPost, subresource).VersionedParams(options, scheme.ParameterCodec).URL()
	// Websockets pass proxies that do not support SPDY; older API servers support only
	// SPDY.
	websocket, websocketErr := remotecommand.NewWebSocketExecutor(g.config, http.MethodGet, url.String())
	spdy, spdyErr := remotecommand.NewSPDYExecutor(g.config, http.MethodPost, url)
	executor, err := remotecommand.NewFallbackExecutor(websocket, spdy, shouldFallBack)
	if err := errors.Join(websocketErr, spdyErr, err); err != nil {
		return fmt.Errorf("preparing %s at the provider: %w", subresource, err)
	}
	streamOptions := remotecommand.StreamOptions{Stdin: streams.Stdin(), Tty: streams.TTY()}
	// client-go compares with a nil interface, not with a nil io.WriteCloser.
	if out := streams.Stdout(); out != nil {
		streamOptions.Stdout = io.Writer(out)
	}
	if out := streams.Stderr(); out != nil {
		streamOptions.Stderr = io.Writer(out)
	}
	if streams.TTY() {
		streamOptions.TerminalSizeQueue = terminalSizes{ctx: ctx, resize: streams.Resize()}
	}
	return g.withPodName(executor.StreamWithContext(ctx, streamOptions))
}

// shouldFallBack reports whether SPDY may work where websockets failed. The errors are those of
// k8s.io/streaming: apimachinery's package of that name has types of its own.
func shouldFallBack(err error) bool {
	return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
}

// terminalSizes implements remotecommand.TerminalSizeQueue.
type terminalSizes struct {
	ctx    context.Context
	resize <-chan vkapi.TermSize
}

// emptySizeDelay is the delay after an empty size: virtual-kubelet sends them in a
// loop once the client has closed its side.
const emptySizeDelay = 100 * time.Millisecond

// Next returns the next size, or nil if there is none left.
func (s terminalSizes) Next() *remotecommand.TerminalSize {
	for {
		select {
		case <-s.ctx.Done():
			return nil
		case size, open := <-s.resize:
			if !open {
				return nil
			}
			if size.Width != 0 || size.Height != 0 {
				return &remotecommand.TerminalSize{Width: size.Width, Height: size.Height}
			}
		}
		select {
		case <-s.ctx.Done():
		case <-time.After(emptySizeDelay):
		}
	}
}
