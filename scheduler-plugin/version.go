package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/version"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	framework "k8s.io/kube-scheduler/framework"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

const (
	// lookTimeout is how long the API server may take to say its version.
	lookTimeout = 5 * time.Second
	// lookPeriod is how often the API server is asked whether it was upgraded.
	lookPeriod = time.Minute
	// eventDelay is when the first event is written: kube-scheduler drops those of its start.
	eventDelay = 10 * time.Second
	// eventPeriod is how often an event says that the API server is not supported.
	eventPeriod = time.Hour
	// probeTimeout is less than the readiness probe's.
	probeTimeout = 800 * time.Millisecond
)

// emulate makes kube-scheduler behave as that of the API server's minor, unless the flag says
// which: it asks for no API that the cluster lacks.
func emulate(ctx context.Context, flags *pflag.FlagSet, server *compatibility.Server) error {
	client, err := newDiscovery(flags)
	if err != nil {
		return err
	}
	log := klog.Background()
	minor, err := server.Find(ctx, client)
	if err != nil {
		// kube-scheduler waits for the API server. All know the APIs of the oldest.
		log.Error(err, "Failed to find the version of the API server; emulating the oldest until it answers", "emulated", minor)
	}
	if problem := minor.Problem(); problem != "" {
		log.Error(nil, "Unsupported version of Kubernetes; pods of this scheduler are scheduled as well as possible, and others are not steered to it", "problem", problem)
	}
	go restartWhenUpgraded(ctx, server, client)
	if flags.Changed("emulated-version") {
		return nil
	}
	log.Info("Found the version of the API server", "version", minor, "emulated", minor.Emulated())
	return flags.Set("emulated-version", minor.Emulated().String())
}

// newDiscovery returns a client for the API server that kube-scheduler's flags name.
func newDiscovery(flags *pflag.FlagSet) (discovery.ServerVersionInterface, error) {
	kubeconfig := flags.Lookup("kubeconfig").Value.String()
	if file := flags.Lookup("config").Value.String(); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading --config: %w", err)
		}
		// kube-scheduler decodes it once the version is known.
		var config struct {
			ClientConnection struct{ Kubeconfig string }
		}
		if err := yaml.Unmarshal(text, &config); err != nil {
			return nil, fmt.Errorf("reading --config: %w", err)
		}
		kubeconfig = config.ClientConnection.Kubeconfig
	}
	config, err := clientcmd.BuildConfigFromFlags(flags.Lookup("master").Value.String(), kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("locating the API server: %w", err)
	}
	config.Timeout = lookTimeout
	connection, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client of the API server: %w", err)
	}
	client, err := discovery.NewDiscoveryClientForConfigAndClient(config, connection)
	if err != nil {
		return nil, fmt.Errorf("creating a client of the API server: %w", err)
	}
	return anyServer{client, connection.Transport}, nil
}

// anyServer asks over a new connection each time: another API server of the control plane may
// answer.
type anyServer struct {
	discovery.ServerVersionInterface
	transport http.RoundTripper
}

func (s anyServer) ServerVersion() (*version.Info, error) {
	defer utilnet.CloseIdleConnectionsFor(s.transport)
	return s.ServerVersionInterface.ServerVersion()
}

// restartWhenUpgraded ends the process as a signal does when the API server has another minor
// than at start.
func restartWhenUpgraded(ctx context.Context, server *compatibility.Server, client discovery.ServerVersionInterface) {
	if minor := server.AwaitUpgrade(ctx, client, lookPeriod); ctx.Err() == nil {
		klog.Background().Info("The API server was upgraded: the scheduler restarts, to emulate its version", "version", minor)
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGTERM)
	}
}

// tellUnsupported writes an event on the scheduler's own pod while its cluster is not supported.
func tellUnsupported(ctx context.Context, handle framework.Handle, problem string, name types.NamespacedName) {
	if problem == "" {
		return
	}
	for delay := eventDelay; ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
		pod, err := handle.ClientSet().CoreV1().Pods(name.Namespace).Get(ctx, name.Name, metav1.GetOptions{})
		if err != nil {
			klog.FromContext(ctx).Error(err, "Failed to get the scheduler's own pod, for an event", "pod", name)
			delay = lookPeriod
			continue
		}
		handle.EventRecorder().Eventf(pod, nil, corev1.EventTypeWarning, "UnsupportedKubernetes", "Starting", "%s", problem)
		delay = eventPeriod
	}
}

// notReady returns why a scheduler with these flags is not ready: its cluster is not supported,
// or kube-scheduler itself says so.
func notReady(flags *pflag.FlagSet, server *compatibility.Server) func() string {
	client := http.Client{Timeout: probeTimeout, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // its certificate is self-signed; nothing is sent to it
	}}
	port := flags.Lookup("secure-port").Value.String()
	host := flags.Lookup("bind-address").Value.String()
	if ip := net.ParseIP(host); ip == nil || ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return func() string {
		if server.Minor() == 0 {
			return "the version of the API server is not known yet"
		}
		if problem := server.Minor().Problem(); problem != "" || port == "0" {
			return problem
		}
		response, err := client.Get("https://" + net.JoinHostPort(host, port) + "/readyz")
		if err != nil {
			return err.Error()
		}
		defer response.Body.Close()
		text, err := io.ReadAll(io.LimitReader(response.Body, 4096))
		if err != nil || response.StatusCode != http.StatusOK {
			return fmt.Sprintf("%s: %s", response.Status, strings.TrimSpace(string(text)))
		}
		return ""
	}
}
