package kubelet

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/gorilla/mux"
	vkapi "github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/httpstream"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
)

const (
	// idleAfter ends a stream that carried nothing for so long, as a kubelet does.
	idleAfter = 4 * time.Hour
	// streamsWithin is how long a client may take to open its streams.
	streamsWithin = 30 * time.Second
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
	vkapi.HandleContainerExec(run, vkapi.WithExecStreamIdleTimeout(idleAfter),
		vkapi.WithExecStreamCreationTimeout(streamsWithin))(w, withVars(r))
}

// attach joins the streams of a guest's container.
func (a *api) attach(w http.ResponseWriter, r *http.Request) {
	g, ok := a.locate(w, r)
	if !ok {
		return
	}
	join := func(ctx context.Context, _, _, container string, streams vkapi.AttachIO) error {
		return g.stream(ctx, "attach", &corev1.PodAttachOptions{
			Container: container, TTY: streams.TTY(),
			Stdin: streams.Stdin() != nil, Stdout: streams.Stdout() != nil, Stderr: streams.Stderr() != nil,
		}, streams)
	}
	vkapi.HandleContainerAttach(join, vkapi.WithExecStreamIdleTimeout(idleAfter),
		vkapi.WithExecStreamCreationTimeout(streamsWithin))(w, withVars(r))
}

// withVars hands the parts of the path to virtual-kubelet's handlers in the way
// they look for them.
func withVars(r *http.Request) *http.Request {
	vars := map[string]string{}
	for _, part := range []string{"namespace", "pod", "container"} {
		if value := r.PathValue(part); value != "" {
			vars[part] = value
		}
	}
	return mux.SetURLVars(r, vars)
}

// stream joins streams with a subresource of the guest until one side ends, or
// ctx, which virtual-kubelet cancels when its client leaves. A command's exit code
// is an error that says so, and passes unchanged.
func (g guest) stream(ctx context.Context, subresource string, options runtime.Object, streams vkapi.AttachIO) error {
	address := g.at(http.MethodPost, subresource).VersionedParams(options, scheme.ParameterCodec).URL()
	// Websockets pass where proxies know no SPDY; older API servers know no websockets here.
	websocket, err := remotecommand.NewWebSocketExecutor(g.config, http.MethodGet, address.String())
	if err != nil {
		return fmt.Errorf("preparing %s at the provider: %w", subresource, err)
	}
	spdy, err := remotecommand.NewSPDYExecutor(g.config, http.MethodPost, address)
	if err != nil {
		return fmt.Errorf("preparing %s at the provider: %w", subresource, err)
	}
	either, err := remotecommand.NewFallbackExecutor(websocket, spdy, tryOther)
	if err != nil {
		return fmt.Errorf("preparing %s at the provider: %w", subresource, err)
	}
	joined := remotecommand.StreamOptions{Stdin: streams.Stdin(), Tty: streams.TTY()}
	// A nil stream must become a nil interface, which is how client-go tells it.
	if out := streams.Stdout(); out != nil {
		joined.Stdout = io.Writer(out)
	}
	if out := streams.Stderr(); out != nil {
		joined.Stderr = io.Writer(out)
	}
	if streams.TTY() {
		joined.TerminalSizeQueue = sizes{ctx: ctx, from: streams.Resize()}
	}
	return g.homeNames(either.StreamWithContext(ctx, joined))
}

// tryOther is true where a connection failed in a way that the other protocol may
// not.
func tryOther(err error) bool {
	return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
}

// sizes are those of a client's terminal.
type sizes struct {
	ctx  context.Context
	from <-chan vkapi.TermSize
}

// emptySizePause is the rest after an empty size. virtual-kubelet sends them
// without end when the client has closed its side.
const emptySizePause = 100 * time.Millisecond

// Next waits for the next size; nil says that there will be none.
func (s sizes) Next() *remotecommand.TerminalSize {
	for {
		select {
		case <-s.ctx.Done():
			return nil
		case size, open := <-s.from:
			if !open {
				return nil
			}
			if size.Width != 0 || size.Height != 0 {
				return &remotecommand.TerminalSize{Width: size.Width, Height: size.Height}
			}
		}
		pause := time.NewTimer(emptySizePause)
		select {
		case <-s.ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
	}
}
