package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clientevents "k8s.io/client-go/tools/events"
	framework "k8s.io/kube-scheduler/framework"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

// schedulerFlags are those of kube-scheduler that decide which API server is asked, and which
// version is emulated.
func schedulerFlags(t *testing.T, set map[string]string) *pflag.FlagSet {
	t.Helper()
	flags := pflag.NewFlagSet("scheduler", pflag.ContinueOnError)
	for _, name := range []string{"config", "kubeconfig", "master", "emulated-version", "secure-port", "bind-address"} {
		flags.String(name, "", "")
	}
	for name, value := range set {
		expect.NoError(t, flags.Set(name, value))
	}
	return flags
}

// apiServer serves the version of an API server.
func apiServer(t *testing.T, version string) (address string) {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/version" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprintf(w, `{"major":"1","minor":"0","gitVersion":%q}`, version)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func TestEmulate(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, os.WriteFile(config, fmt.Appendf(nil, "kind: KubeSchedulerConfiguration\nclientConnection: {kubeconfig: %s, qps: 5}\n", kubeconfig), 0o600))
	expect.NoError(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `
clusters: [{name: c, cluster: {server: %q}}]
contexts: [{name: c, context: {cluster: c}}]
current-context: c
`, apiServer(t, "v1.36.3-vendor.1")), 0o600))
	for name, tc := range map[string]struct {
		flags map[string]string
		want  string
		found compatibility.Minor
	}{
		"of the API server that --master names":   {map[string]string{"master": apiServer(t, "v1.35.4")}, "1.35", 35},
		"of the one that the configuration names": {map[string]string{"config": config}, "1.36", 36},
		"of the one that --kubeconfig names":      {map[string]string{"kubeconfig": kubeconfig}, "1.36", 36},
		"what the flag says":                      {map[string]string{"kubeconfig": kubeconfig, "emulated-version": "1.35"}, "1.35", 36},
		"the newest with a newer API server":      {map[string]string{"master": apiServer(t, "v1.38.1")}, "1.37", 38},
		"the oldest with an older API server":     {map[string]string{"master": apiServer(t, "v1.33.1")}, "1.35", 33},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			flags, server := schedulerFlags(t, tc.flags), &compatibility.Server{}
			expect.NoError(t, emulate(t.Context(), flags, server))
			if got := flags.Lookup("emulated-version").Value.String(); got != tc.want || server.Minor() != tc.found {
				t.Errorf("emulates %s and found %s, want %s and %s", got, server.Minor(), tc.want, tc.found)
			}
		})
	}
	if err := emulate(t.Context(), schedulerFlags(t, map[string]string{"config": "none.yaml"}), &compatibility.Server{}); err == nil {
		t.Error("no error without the configuration")
	}
}

// eventsOf is the handle of a scheduler that runs in a pod.
type eventsOf struct {
	framework.Handle
	client   kubernetes.Interface
	recorder clientevents.EventRecorderLogger
}

func (h eventsOf) ClientSet() kubernetes.Interface                 { return h.client }
func (h eventsOf) EventRecorder() clientevents.EventRecorderLogger { return h.recorder }

// TestEachLookAsksAnew: behind one address there may be API servers of two minors.
func TestEachLookAsksAnew(t *testing.T) {
	var asked []string
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.RemoteAddr)
		fmt.Fprint(w, `{"gitVersion":"v1.37.0"}`)
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	expect.NoError(t, os.WriteFile(kubeconfig, fmt.Appendf(nil, `{"clusters": [{"name": "c", "cluster": {"server": %q, "insecure-skip-tls-verify": true}}],
		"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`, server.URL), 0o600))
	client, err := newDiscovery(schedulerFlags(t, map[string]string{"kubeconfig": kubeconfig}))
	expect.NoError(t, err)
	for range 3 {
		if _, err := compatibility.Of(client); err != nil {
			t.Fatal(err)
		}
	}
	if len(asked) != 3 || asked[0] == asked[1] || asked[1] == asked[2] {
		t.Errorf("asked over the connections %v, want three", asked)
	}
}

// TestUnsupportedEvent: the scheduler's pod has an event while its cluster is not supported, also
// if it cannot be read at first.
func TestUnsupportedEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "system", Name: "scheduler-1"}}
		recorder, client, tries := clientevents.NewFakeRecorder(1), fake.NewClientset(pod), 0
		client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
			tries++
			return tries == 1, nil, errors.New("connection refused")
		})
		handle := eventsOf{client: client, recorder: recorder}
		name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
		tellUnsupported(t.Context(), handle, compatibility.Newest.Problem(), name) // returns: it is supported
		if len(recorder.Events) > 0 {
			t.Errorf("an event of a supported cluster: %s", <-recorder.Events)
		}
		go tellUnsupported(t.Context(), handle, (compatibility.Newest + 1).Problem(), name)
		select {
		case event := <-recorder.Events:
			if !strings.Contains(event, "Warning UnsupportedKubernetes") || !strings.Contains(event, "upgrade Spillway") {
				t.Errorf("event %q", event)
			}
		case <-time.After(2 * lookPeriod):
			t.Error("no event of an unsupported cluster")
		}
	})
}

// TestNotReady: an unsupported cluster, or what kube-scheduler's own check says.
func TestNotReady(t *testing.T) {
	ready := true
	scheduler := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !ready || r.URL.Path != "/readyz" {
			http.Error(w, "[-]sched-handler-sync failed", http.StatusInternalServerError)
		}
	}))
	defer scheduler.Close()
	_, port, err := net.SplitHostPort(scheduler.Listener.Addr().String())
	expect.NoError(t, err)
	flags := schedulerFlags(t, map[string]string{"secure-port": port, "bind-address": "0.0.0.0"})
	check := func(version, want string) {
		t.Helper()
		server := &compatibility.Server{}
		expect.NoError(t, emulate(t.Context(), schedulerFlags(t, map[string]string{"master": apiServer(t, version)}), server))
		if got := notReady(flags, server)(); (got == "") != (want == "") || !strings.Contains(got, want) {
			t.Errorf("%s: not ready because of %q, want %q", version, got, want)
		}
	}
	if got := notReady(flags, &compatibility.Server{})(); !strings.Contains(got, "not known yet") {
		t.Errorf("before the API server has answered: %q", got)
	}
	check("v1.37.0", "")
	check("v1.38.0", "upgrade Spillway")
	check("v1.34.0", "upgrade the cluster")
	ready = false
	check("v1.37.0", "sched-handler-sync")
}
