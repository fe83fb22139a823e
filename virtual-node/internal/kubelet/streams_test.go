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
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	remotecommandconsts "k8s.io/apimachinery/pkg/util/remotecommand"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/client-go/transport/spdy"
	cristream "k8s.io/kubelet/pkg/cri/streaming/portforward"
	criexec "k8s.io/kubelet/pkg/cri/streaming/remotecommand"
	"k8s.io/utils/clock"
	utilexec "k8s.io/utils/exec"

	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// streamsIn bounds each exchange of these tests.
const streamsIn = 25 * time.Second

// The whole way of a stream: client, home's API server, the virtual node's kubelet
// API, the provider's API server, a kubelet there. Both API servers are real; the
// kubelet at the provider is played, with the real one's streaming server.
func TestStreamsThroughBothAPIServers(t *testing.T) {
	t.Parallel()
	home, provider := controlplane.StartBare(t), controlplane.StartBare(t)
	there := &playedKubelet{left: make(chan struct{}, 1), sizes: make(chan remotecommand.TerminalSize, 10)}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	podOn(ctx, t, provider, "real-node", guestSpace, guestPod, there.start(t))
	guests := &oneGuest{config: provider}
	podOn(ctx, t, home, nodeName, homeSpace, homePod, serve(t, guests, nil, clock.RealClock{}))

	exec := func(ctx context.Context, command []string, options remotecommand.StreamOptions) error {
		request := kubernetes.NewForConfigOrDie(home).CoreV1().RESTClient().Post().
			Namespace(homeSpace).Resource("pods").Name(homePod).SubResource("exec").
			VersionedParams(&corev1.PodExecOptions{
				Container: "c", Command: command, TTY: options.Tty,
				Stdin: options.Stdin != nil, Stdout: options.Stdout != nil, Stderr: options.Stderr != nil,
			}, scheme.ParameterCodec)
		executor, err := remotecommand.NewWebSocketExecutor(home, http.MethodGet, request.URL().String())
		if err != nil {
			return err
		}
		return executor.StreamWithContext(ctx, options)
	}

	t.Run("Exec", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		var out, problems bytes.Buffer
		err := exec(ctx, []string{"echo", "a b"}, remotecommand.StreamOptions{
			Stdin: strings.NewReader("typed"), Stdout: &out, Stderr: &problems,
		})
		if err != nil {
			t.Fatal(err)
		}
		if out.String() != "c [echo a b]: typed" || problems.String() != "complaint" {
			t.Errorf("got %q and %q", out.String(), problems.String())
		}
	})
	t.Run("ExecManyBytes", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		sent := bytes.Repeat([]byte("0123456789abcdef"), 256<<10)
		var out bytes.Buffer
		if err := exec(ctx, []string{"cat"}, remotecommand.StreamOptions{Stdin: bytes.NewReader(sent), Stdout: &out}); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(out.Bytes(), sent) {
			t.Errorf("%d bytes came back of %d, or changed", out.Len(), len(sent))
		}
	})
	t.Run("ExitCode", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		err := exec(ctx, []string{"exit", "7"}, remotecommand.StreamOptions{Stdout: io.Discard})
		var exited utilexec.ExitError
		if !errors.As(err, &exited) || exited.ExitStatus() != 7 {
			t.Errorf("got %v, want exit code 7", err)
		}
	})
	t.Run("TerminalSize", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		ended, end := context.WithCancel(ctx)
		defer end()
		queue := &sizeQueue{sizes: []remotecommand.TerminalSize{{Width: 80, Height: 25}, {Width: 132, Height: 50}}, end: ended}
		done := make(chan error, 1)
		in, typing := io.Pipe()
		go func() {
			done <- exec(ctx, []string{"shell"}, remotecommand.StreamOptions{Stdin: in, Stdout: io.Discard, Tty: true, TerminalSizeQueue: queue})
		}()
		for _, want := range []remotecommand.TerminalSize{{Width: 80, Height: 25}, {Width: 132, Height: 50}} {
			select {
			case got := <-there.sizes:
				if got != want {
					t.Errorf("the guest's terminal became %v, want %v", got, want)
				}
			case <-ctx.Done():
				t.Fatalf("the guest's terminal never became %v", want)
			}
		}
		typing.Close()
		if err := <-done; err != nil {
			t.Errorf("the shell ended with %v", err)
		}
	})
	t.Run("ClientLeaves", func(t *testing.T) {
		leaving, leave := context.WithTimeout(ctx, streamsIn)
		defer leave()
		begun := make(chan struct{}, 1)
		done := make(chan error, 1)
		go func() {
			done <- exec(leaving, []string{"hang"}, remotecommand.StreamOptions{Stdout: signalling(begun), Stdin: neverEnds{leaving}})
		}()
		select {
		case <-begun:
		case err := <-done:
			t.Fatalf("it ended before it began: %v", err)
		}
		leave()
		select {
		case <-there.left:
		case <-ctx.Done():
			t.Fatal("the command runs on at the provider although its client left")
		}
		<-done
	})
	t.Run("Attach", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		request := kubernetes.NewForConfigOrDie(home).CoreV1().RESTClient().Post().
			Namespace(homeSpace).Resource("pods").Name(homePod).SubResource("attach").
			VersionedParams(&corev1.PodAttachOptions{Container: "c", Stdin: true, Stdout: true}, scheme.ParameterCodec)
		executor, err := remotecommand.NewSPDYExecutor(home, http.MethodPost, request.URL())
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := executor.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: strings.NewReader("typed"), Stdout: &out}); err != nil {
			t.Fatal(err)
		}
		if out.String() != "attached to c: typed" {
			t.Errorf("got %q", out.String())
		}
	})
	t.Run("PortForward", func(t *testing.T) {
		address := forwarded(t, home)
		for i := range 3 {
			connection, err := net.Dial("tcp", address)
			if err != nil {
				t.Fatal(err)
			}
			if err := connection.SetDeadline(time.Now().Add(streamsIn)); err != nil {
				t.Fatal(err)
			}
			said := fmt.Sprintf("hello %d", i)
			if _, err := connection.Write([]byte(said)); err != nil {
				t.Fatal(err)
			}
			// The guest answers only after the client has said all.
			if err := connection.(*net.TCPConn).CloseWrite(); err != nil {
				t.Fatal(err)
			}
			heard, err := io.ReadAll(connection)
			if err != nil || string(heard) != "port 8080: "+said {
				t.Errorf("got %q, %v", heard, err)
			}
			connection.Close()
		}
	})
	t.Run("Logs", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		lines := int64(3)
		got, err := kubernetes.NewForConfigOrDie(home).CoreV1().Pods(homeSpace).
			GetLogs(homePod, &corev1.PodLogOptions{Container: "c", TailLines: &lines, Timestamps: true}).DoRaw(ctx)
		if want := "log of " + guestPod + "/c tailLines=3 timestamps=true"; err != nil || string(got) != want {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	})
	t.Run("ProviderUnreachable", func(t *testing.T) {
		guests.lead(&rest.Config{Host: "https://127.0.0.1:1"}, nil)
		defer guests.lead(provider, nil)
		ctx, cancel := context.WithTimeout(ctx, streamsIn)
		defer cancel()
		err := exec(ctx, []string{"cat"}, remotecommand.StreamOptions{Stdout: io.Discard})
		if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") {
			t.Errorf("got %v, want an error that names who is not reached", err)
		}
	})
}

// podOn makes a running pod on a node whose kubelet is server.
func podOn(ctx context.Context, t *testing.T, cluster *rest.Config, node, namespace, name string, server *httptest.Server) {
	t.Helper()
	client := kubernetes.NewForConfigOrDie(cluster)
	at, err := url.Parse(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.ParseInt(at.Port(), 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	made, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: node}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	made.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: at.Hostname()}}
	made.Status.DaemonEndpoints.KubeletEndpoint.Port = int32(port)
	if _, err := client.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	pod, err := client.CoreV1().Pods(namespace).Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "none", Stdin: true}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.Phase = corev1.PodRunning
	if _, err := client.CoreV1().Pods(namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// forwarded forwards a free local port to port 8080 of the home pod.
func forwarded(t *testing.T, home *rest.Config) string {
	t.Helper()
	address := kubernetes.NewForConfigOrDie(home).CoreV1().RESTClient().Post().
		Namespace(homeSpace).Resource("pods").Name(homePod).SubResource("portforward").URL()
	transport, upgrader, err := spdy.RoundTripperFor(home)
	if err != nil {
		t.Fatal(err)
	}
	stop, ready, ended := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	dialer := spdy.NewDialer(upgrader, &http.Client{Transport: transport}, http.MethodPost, address)
	var problems bytes.Buffer
	forwarder, err := portforward.NewOnAddresses(dialer, []string{"127.0.0.1"}, []string{"0:8080"}, stop, ready, io.Discard, &problems)
	if err != nil {
		t.Fatal(err)
	}
	go func() { ended <- forwarder.ForwardPorts() }()
	t.Cleanup(func() {
		close(stop)
		<-ended
		if problems.Len() > 0 {
			t.Logf("port-forward said: %s", problems.String())
		}
	})
	select {
	case <-ready:
	case err := <-ended:
		ended <- err
		t.Fatalf("forwarding ended before it began: %v", err)
	case <-time.After(streamsIn):
		t.Fatal("forwarding never began")
	}
	ports, err := forwarder.GetPorts()
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", ports[0].Local)
}

// playedKubelet is one at the provider.
type playedKubelet struct {
	left  chan struct{}
	sizes chan remotecommand.TerminalSize
}

func (k *playedKubelet) start(t *testing.T) *httptest.Server {
	routes := http.NewServeMux()
	routes.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		options, err := criexec.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		criexec.ServeExec(w, r, k, r.PathValue("pod"), "", r.PathValue("container"), r.URL.Query()["command"],
			options, streamsIn, streamsIn, remotecommandconsts.SupportedStreamingProtocols)
	})
	routes.HandleFunc("/attach/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		options, err := criexec.NewOptions(r)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		criexec.ServeAttach(w, r, k, r.PathValue("pod"), "", r.PathValue("container"),
			options, streamsIn, streamsIn, remotecommandconsts.SupportedStreamingProtocols)
	})
	routes.HandleFunc("/portForward/{namespace}/{pod}", func(w http.ResponseWriter, r *http.Request) {
		cristream.ServePortForward(w, r, k, r.PathValue("pod"), "", &cristream.V4Options{}, streamsIn, streamsIn, cristream.SupportedProtocols)
	})
	routes.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "log of %s/%s tailLines=%s timestamps=%s", r.PathValue("pod"), r.PathValue("container"),
			r.URL.Query().Get("tailLines"), r.URL.Query().Get("timestamps"))
	})
	server := httptest.NewTLSServer(routes)
	t.Cleanup(server.Close)
	return server
}

func (k *playedKubelet) ExecInContainer(_ context.Context, pod string, _ types.UID, container string, command []string,
	in io.Reader, out, problems io.WriteCloser, _ bool, resize <-chan remotecommand.TerminalSize, _ time.Duration) error {
	if pod != guestPod {
		return fmt.Errorf("no pod %s here", pod)
	}
	switch command[0] {
	case "echo":
		typed, err := io.ReadAll(in)
		if err != nil {
			return err
		}
		fmt.Fprint(problems, "complaint")
		fmt.Fprintf(out, "%s %v: %s", container, command, typed)
		return nil
	case "cat":
		_, err := io.Copy(out, in)
		return err
	case "exit":
		code, err := strconv.Atoi(command[1])
		if err != nil {
			return err
		}
		return utilexec.CodeExitError{Err: errors.New("it failed"), Code: code}
	case "shell":
		go func() {
			for size := range resize {
				k.sizes <- size
			}
		}()
		_, err := io.Copy(io.Discard, in)
		return err
	case "hang":
		fmt.Fprint(out, "begun")
		_, err := io.Copy(io.Discard, in)
		k.left <- struct{}{}
		return err
	}
	return fmt.Errorf("no command %v", command)
}

func (k *playedKubelet) AttachContainer(_ context.Context, _ string, _ types.UID, container string,
	in io.Reader, out, _ io.WriteCloser, _ bool, _ <-chan remotecommand.TerminalSize) error {
	typed, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "attached to %s: %s", container, typed)
	return err
}

func (k *playedKubelet) PortForward(_ context.Context, _ string, _ types.UID, port int32, stream io.ReadWriteCloser) error {
	said, err := io.ReadAll(stream)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stream, "port %d: %s", port, said)
	return err
}

// sizeQueue gives sizes, and then none until end.
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

// signalling notes that something was written.
type signalling chan struct{}

func (s signalling) Write(p []byte) (int, error) {
	select {
	case s <- struct{}{}:
	default:
	}
	return len(p), nil
}

// neverEnds is an input on which nothing comes until ctx ends.
type neverEnds struct{ ctx context.Context }

func (n neverEnds) Read([]byte) (int, error) {
	<-n.ctx.Done()
	return 0, n.ctx.Err()
}
