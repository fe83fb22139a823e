package kubelet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	vkapi "github.com/virtual-kubelet/virtual-kubelet/node/api"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	remotecommandconsts "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	cristream "k8s.io/cri-streaming/pkg/streaming/portforward"
	criexec "k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/utils/clock"
	utilexec "k8s.io/utils/exec"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// streamTimeout bounds each exchange of these tests.
const streamTimeout = 2 * time.Minute

// streamsTest is the path of a stream: client, this cluster's API server, the
// virtual node's kubelet API, the provider's API server, and a kubelet there. Both
// API servers are real; the kubelet is fake, with a real one's streaming server.
type streamsTest struct {
	consumer, provider *rest.Config
	guests             *fakeGuests
	kubelet            *fakeKubelet
}

func TestStreams(t *testing.T) {
	t.Parallel()
	s := &streamsTest{
		consumer: controlplane.StartBare(t), provider: controlplane.StartBare(t),
		kubelet: &fakeKubelet{disconnected: make(chan struct{}, 1), sizes: make(chan remotecommand.TerminalSize, 10)},
	}
	// The token is added by WrapTransport: streams must use it, too.
	var wrapped sync.Map
	wrappedConfig := rest.CopyConfig(s.provider)
	wrappedConfig.WrapTransport = func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(r *http.Request) (*http.Response, error) {
			wrapped.Store(path.Base(r.URL.Path), true)
			return next.RoundTrip(r)
		})
	}
	s.guests = &fakeGuests{config: wrappedConfig}
	createPod(t, s.provider, "worker", guestNamespace, guestName, s.kubelet.start(t))
	createPod(t, s.consumer, nodeName, podNamespace, podName, serve(t, s.guests, nil, clock.RealClock{}))
	t.Run("Exec", s.testExec)
	t.Run("ExecManyBytes", s.testExecManyBytes)
	t.Run("ExitCode", s.testExitCode)
	t.Run("TerminalSize", s.testTerminalSize)
	t.Run("ClientDisconnects", s.testClientDisconnects)
	t.Run("Attach", s.testAttach)
	t.Run("PortForward", s.testPortForward)
	t.Run("HostilePortForward", s.testHostilePortForward)
	t.Run("Logs", s.testLogs)
	t.Run("ProviderUnreachable", s.testProviderUnreachable)
	for _, subresource := range []string{"exec", "attach", "portforward", "log"} {
		if _, ok := wrapped.Load(subresource); !ok {
			t.Errorf("requests for %s were not wrapped", subresource)
		}
	}
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// request returns a request for a subresource of the overflowed pod.
func (s *streamsTest) request(subresource string) *rest.Request {
	return kubernetes.NewForConfigOrDie(s.consumer).CoreV1().RESTClient().Post().
		Namespace(podNamespace).Resource("pods").Name(podName).SubResource(subresource)
}

func (s *streamsTest) exec(ctx context.Context, command []string, options remotecommand.StreamOptions) error {
	request := s.request("exec").VersionedParams(&corev1.PodExecOptions{
		Container: "c", Command: command, TTY: options.Tty,
		Stdin: options.Stdin != nil, Stdout: options.Stdout != nil, Stderr: options.Stderr != nil,
	}, scheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(s.consumer, http.MethodGet, request.URL().String())
	if err != nil {
		return err
	}
	return executor.StreamWithContext(ctx, options)
}

func streamContext(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), streamTimeout)
	t.Cleanup(cancel)
	return ctx
}

func (s *streamsTest) testExec(t *testing.T) {
	var stdout, stderr bytes.Buffer
	expect.NoError(t, s.exec(streamContext(t), []string{"echo", "a b"}, remotecommand.StreamOptions{
		Stdin: strings.NewReader("input"), Stdout: &stdout, Stderr: &stderr,
	}))
	if stdout.String() != "c [echo a b]: input" || stderr.String() != "error output" {
		t.Errorf("got %q and %q", stdout.String(), stderr.String())
	}
}

func (s *streamsTest) testExecManyBytes(t *testing.T) {
	sent := bytes.Repeat([]byte("0123456789abcdef"), 256<<10)
	var stdout bytes.Buffer
	expect.NoError(t, s.exec(streamContext(t), []string{"cat"}, remotecommand.StreamOptions{Stdin: bytes.NewReader(sent), Stdout: &stdout}))
	if !bytes.Equal(stdout.Bytes(), sent) {
		t.Errorf("received %d bytes of %d, or different ones", stdout.Len(), len(sent))
	}
}

func (s *streamsTest) testExitCode(t *testing.T) {
	err := s.exec(streamContext(t), []string{"exit", "7"}, remotecommand.StreamOptions{Stdout: io.Discard})
	var exited utilexec.ExitError
	if !errors.As(err, &exited) || exited.ExitStatus() != 7 {
		t.Errorf("got %v, want exit code 7", err)
	}
}

func (s *streamsTest) testTerminalSize(t *testing.T) {
	ctx := streamContext(t)
	queueCtx, end := context.WithCancel(ctx)
	defer end()
	queue := &sizeQueue{sizes: []remotecommand.TerminalSize{{Width: 80, Height: 25}, {Width: 132, Height: 50}}, end: queueCtx}
	done := make(chan error, 1)
	stdin, input := io.Pipe()
	go func() {
		done <- s.exec(ctx, []string{"shell"}, remotecommand.StreamOptions{Stdin: stdin, Stdout: io.Discard, Tty: true, TerminalSizeQueue: queue})
	}()
	for _, want := range []remotecommand.TerminalSize{{Width: 80, Height: 25}, {Width: 132, Height: 50}} {
		select {
		case got := <-s.kubelet.sizes:
			if got != want {
				t.Errorf("got terminal size %v, want %v", got, want)
			}
		case <-ctx.Done():
			t.Fatalf("got no terminal size, want %v", want)
		}
	}
	input.Close()
	if err := <-done; err != nil {
		t.Errorf("the shell returned %v", err)
	}
}

func (s *streamsTest) testClientDisconnects(t *testing.T) {
	ctx, disconnect := context.WithCancel(streamContext(t))
	defer disconnect()
	started, done := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		done <- s.exec(ctx, []string{"hang"}, remotecommand.StreamOptions{Stdout: notifyWriter(started), Stdin: blockingReader{ctx}})
	}()
	select {
	case <-started:
	case err := <-done:
		t.Fatalf("the command ended before its output: %v", err)
	}
	disconnect()
	select {
	case <-s.kubelet.disconnected:
	case <-time.After(streamTimeout):
		t.Fatal("the command at the provider did not end with its client")
	}
	<-done
}

func (s *streamsTest) testAttach(t *testing.T) {
	request := s.request("attach").VersionedParams(&corev1.PodAttachOptions{Container: "c", Stdin: true, Stdout: true}, scheme.ParameterCodec)
	executor, err := remotecommand.NewSPDYExecutor(s.consumer, http.MethodPost, request.URL())
	expect.NoError(t, err)
	var stdout bytes.Buffer
	expect.NoError(t, executor.StreamWithContext(streamContext(t), remotecommand.StreamOptions{Stdin: strings.NewReader("input"), Stdout: &stdout}))
	if stdout.String() != "attached to c: input" {
		t.Errorf("got %q", stdout.String())
	}
}

func (s *streamsTest) testPortForward(t *testing.T) {
	address := s.forward(t)
	for i := range 3 {
		connection, err := net.Dial("tcp", address)
		expect.NoError(t, err)
		expect.NoError(t, connection.SetDeadline(time.Now().Add(streamTimeout)))
		sent := fmt.Sprintf("hello %d", i)
		_, err = connection.Write([]byte(sent))
		expect.NoError(t, err)
		// The guest responds once the client has closed its direction.
		expect.NoError(t, connection.(*net.TCPConn).CloseWrite())
		received, err := io.ReadAll(connection)
		if err != nil || string(received) != "port 8080: "+sent {
			t.Errorf("got %q, %v", received, err)
		}
		connection.Close()
	}
}

// connection is a client that sends an input, and reads what it gets.
type connection struct {
	io.Reader
	io.Writer
}

func (connection) Close() error { return nil }

// forwardFails is what a client sends to get an error of the fake kubelet.
const forwardFails = "fail"

// A hostile provider reports an error without end: only its beginning is read.
func (s *streamsTest) testHostilePortForward(t *testing.T) {
	g := guest{namespace: guestNamespace, name: guestName, config: s.provider, client: kubernetes.NewForConfigOrDie(s.provider)}
	err := g.forward(streamContext(t), 8080, connection{strings.NewReader(forwardFails), io.Discard})
	if err == nil || !strings.Contains(err.Error(), "hostile") || len(err.Error()) > maxForwardError {
		t.Errorf("got an error of %d bytes: %.100s", len(fmt.Sprint(err)), fmt.Sprint(err))
	}
}

// execStreams are the streams of a client.
type execStreams struct {
	vkapi.AttachIO
	stdin  io.Reader
	stdout io.WriteCloser
}

func (s execStreams) Stdin() io.Reader       { return s.stdin }
func (s execStreams) Stdout() io.WriteCloser { return s.stdout }
func (execStreams) Stderr() io.WriteCloser   { return nil }
func (execStreams) TTY() bool                { return false }

type buffer struct{ bytes.Buffer }

func (*buffer) Close() error { return nil }

// TestStreamsWithoutWebsockets: where the provider or a proxy refuses websockets, SPDY is used.
func TestStreamsWithoutWebsockets(t *testing.T) {
	t.Parallel()
	var kubelet fakeKubelet
	config := fakeProvider(t, func(w http.ResponseWriter, r *http.Request) {
		switch subresource := path.Base(r.URL.Path); {
		case strings.EqualFold(r.Header.Get("Upgrade"), "websocket"):
			http.Error(w, "unknown protocol", http.StatusBadRequest)
		case subresource == "exec":
			criexec.ServeExec(w, r, &kubelet, guestName, "", "c", r.URL.Query()["command"],
				&criexec.Options{Stdin: true, Stdout: true}, streamTimeout, streamTimeout, remotecommandconsts.SupportedStreamingProtocols)
		case subresource == "portforward":
			cristream.ServePortForward(w, r, &kubelet, guestName, "", &cristream.V4Options{}, streamTimeout, streamTimeout, cristream.SupportedProtocols)
		}
	})
	g := guest{namespace: guestNamespace, name: guestName, config: config, client: kubernetes.NewForConfigOrDie(config)}
	var out buffer
	expect.NoError(t, g.stream(streamContext(t), "exec", &corev1.PodExecOptions{Container: "c", Command: []string{"cat"}, Stdin: true, Stdout: true},
		execStreams{stdin: strings.NewReader("input"), stdout: &out}))
	if out.String() != "input" {
		t.Errorf("exec returned %q", out.String())
	}
	var received bytes.Buffer
	expect.NoError(t, g.forward(streamContext(t), 8080, connection{strings.NewReader("hello"), &received}))
	if received.String() != "port 8080: hello" {
		t.Errorf("port-forward returned %q", received.String())
	}
}

func (s *streamsTest) testLogs(t *testing.T) {
	got, err := kubernetes.NewForConfigOrDie(s.consumer).CoreV1().Pods(podNamespace).
		GetLogs(podName, &corev1.PodLogOptions{Container: "c", TailLines: ptr.To[int64](3), Timestamps: true}).DoRaw(streamContext(t))
	if want := "log of " + guestName + "/c tailLines=3 timestamps=true"; err != nil || string(got) != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

func (s *streamsTest) testProviderUnreachable(t *testing.T) {
	before := s.guests.ProviderConfig()
	s.guests.setConfig(&rest.Config{Host: "https://127.0.0.1:1"})
	defer s.guests.setConfig(before)
	err := s.exec(streamContext(t), []string{"cat"}, remotecommand.StreamOptions{Stdout: io.Discard})
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("got %v, want an error with the provider's address", err)
	}
}

// createPod creates a running pod on a node with the given kubelet.
func createPod(t *testing.T, cluster *rest.Config, node, namespace, name string, kubelet *httptest.Server) {
	t.Helper()
	client, ctx := kubernetes.NewForConfigOrDie(cluster).CoreV1(), t.Context()
	address := kubelet.Listener.Addr().(*net.TCPAddr)
	created, err := client.Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	created.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address.IP.String()}}
	created.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(address.Port)
	_, err = client.Nodes().UpdateStatus(ctx, created, metav1.UpdateOptions{})
	expect.NoError(t, err)
	_, err = client.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	pod, err := client.Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "none", Stdin: true}}},
	}, metav1.CreateOptions{})
	expect.NoError(t, err)
	pod.Status.Phase = corev1.PodRunning
	_, err = client.Pods(namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	expect.NoError(t, err)
}

// forward forwards a local port to port 8080 of the pod, and returns its address.
func (s *streamsTest) forward(t *testing.T) string {
	t.Helper()
	transport, upgrader, err := spdy.RoundTripperFor(s.consumer)
	expect.NoError(t, err)
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	dialer := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, s.request("portforward").URL())
	var stderr bytes.Buffer
	forwarder, err := portforward.NewOnAddressesForStreaming(dialer, []string{"127.0.0.1"}, []string{"0:8080"}, stop, ready, io.Discard, &stderr)
	expect.NoError(t, err)
	go func() { ended <- forwarder.ForwardPorts() }()
	t.Cleanup(func() {
		close(stop)
		<-ended
		if stderr.Len() > 0 {
			t.Logf("port-forward: %s", stderr.String())
		}
	})
	select {
	case <-ready:
	case err := <-ended:
		ended <- err
		t.Fatalf("port-forward ended: %v", err)
	case <-time.After(streamTimeout):
		t.Fatal("port-forward did not start")
	}
	ports, err := forwarder.GetPorts()
	expect.NoError(t, err)
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}

// fakeKubelet is a kubelet of the provider.
type fakeKubelet struct {
	disconnected chan struct{}
	sizes        chan remotecommand.TerminalSize
}

func (k *fakeKubelet) start(t *testing.T) *httptest.Server {
	routes := http.NewServeMux()
	routes.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		options, err := criexec.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		criexec.ServeExec(w, r, k, r.PathValue("pod"), "", r.PathValue("container"), r.URL.Query()["command"],
			options, streamTimeout, streamTimeout, remotecommandconsts.SupportedStreamingProtocols)
	})
	routes.HandleFunc("/attach/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		options, err := criexec.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		criexec.ServeAttach(w, r, k, r.PathValue("pod"), "", r.PathValue("container"),
			options, streamTimeout, streamTimeout, remotecommandconsts.SupportedStreamingProtocols)
	})
	routes.HandleFunc("/portForward/{namespace}/{pod}", func(w http.ResponseWriter, r *http.Request) {
		cristream.ServePortForward(w, r, k, r.PathValue("pod"), "", &cristream.V4Options{}, streamTimeout, streamTimeout, cristream.SupportedProtocols)
	})
	routes.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "log of %s/%s tailLines=%s timestamps=%s", r.PathValue("pod"), r.PathValue("container"),
			r.URL.Query().Get("tailLines"), r.URL.Query().Get("timestamps"))
	})
	server := httptest.NewTLSServer(routes)
	t.Cleanup(server.Close)
	return server
}

func (k *fakeKubelet) ExecInContainer(_ context.Context, pod string, _ string, container string, command []string,
	stdin io.Reader, stdout, stderr io.WriteCloser, _ bool, resize <-chan criexec.TerminalSize, _ time.Duration) error {
	if pod != guestName {
		return fmt.Errorf("unknown pod %s", pod)
	}
	switch command[0] {
	case "echo":
		input, err := io.ReadAll(stdin)
		if err != nil {
			return err
		}
		fmt.Fprint(stderr, "error output")
		fmt.Fprintf(stdout, "%s %v: %s", container, command, input)
		return nil
	case "cat":
		_, err := io.Copy(stdout, stdin)
		return err
	case "exit":
		code, err := strconv.Atoi(command[1])
		if err != nil {
			return err
		}
		return utilexec.CodeExitError{Err: errors.New("failed"), Code: code}
	case "shell":
		go func() {
			for size := range resize {
				k.sizes <- remotecommand.TerminalSize(size)
			}
		}()
		_, err := io.Copy(io.Discard, stdin)
		return err
	case "hang":
		fmt.Fprint(stdout, "started")
		_, err := io.Copy(io.Discard, stdin)
		k.disconnected <- struct{}{}
		return err
	}
	return fmt.Errorf("unknown command %v", command)
}

func (k *fakeKubelet) AttachContainer(_ context.Context, _ string, _ string, container string,
	stdin io.Reader, stdout, _ io.WriteCloser, _ bool, _ <-chan criexec.TerminalSize) error {
	input, err := io.ReadAll(stdin)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, "attached to %s: %s", container, input)
	return err
}

func (k *fakeKubelet) PortForward(_ context.Context, _ string, _ string, port int32, stream io.ReadWriteCloser) error {
	received, err := io.ReadAll(stream)
	if err != nil {
		return err
	}
	if string(received) == forwardFails {
		return errors.New(strings.Repeat("hostile", 100_000))
	}
	_, err = fmt.Fprintf(stream, "port %d: %s", port, received)
	return err
}

// sizeQueue returns sizes, and nil when end is done.
type sizeQueue struct {
	sizes []remotecommand.TerminalSize
	end   context.Context
}

func (q *sizeQueue) Next() *remotecommand.TerminalSize {
	if len(q.sizes) == 0 {
		<-q.end.Done()
		return nil
	}
	next := q.sizes[0]
	q.sizes = q.sizes[1:]
	return &next
}

// notifyWriter signals each write.
type notifyWriter chan struct{}

func (s notifyWriter) Write(p []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(p), nil
}

// blockingReader has no input until ctx ends.
type blockingReader struct{ ctx context.Context }

func (b blockingReader) Read([]byte) (int, error) {
	<-b.ctx.Done()
	return 0, b.ctx.Err()
}
