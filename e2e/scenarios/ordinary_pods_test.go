//go:build e2e

package scenarios

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/remotecommand"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/lab/install"
)

// ordinaryApp is the pod of the scenario, workloadProgram the binary in its image.
const (
	ordinaryApp     = "ordinary"
	workloadProgram = "/" + install.Workload
)

// ordinaryScenario is the state that the steps of TestOverflowedPodsAreOrdinary share.
type ordinaryScenario struct {
	ns  string
	pod corev1.Pod
	// changed is when its ConfigMap was.
	changed time.Time
}

// TestOverflowedPodsAreOrdinary uses an overflowed pod as any other: environment,
// volumes, logs, exec, port-forward, metrics, failures.
func TestOverflowedPodsAreOrdinary(t *testing.T) {
	s := &ordinaryScenario{}
	feature := features.New("ordinary pods").Setup(s.createPod)
	feature.Assess("it has its ConfigMap, its Secret and its environment", s.hasItsEnvironment)
	feature.Assess("kubectl port-forward reaches it, and kubectl logs -f shows it at once", s.portForwardAndLogs)
	feature.Assess("exec works over a terminal", s.terminal)
	feature.Assess("a failing pod shows its exit code, its restarts and its previous logs", s.failureAndRestart)
	feature.Assess("a pod that has ended keeps its logs", s.endedLogs)
	feature.Assess("the change of the ConfigMap has reached it", s.configMapHasChanged)
	feature.Assess("kubectl top shows its usage, and unauthenticated requests are rejected", s.metricsAndAuthentication)
	testenv.Test(t, feature.Feature())
}

func (s *ordinaryScenario) createPod(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectUnused(ctx, t)
	s.ns = namespace(ctx, t, "scenario-ordinary", true)
	fill(ctx, t, rome, rome.ControlPlane(), "10m")
	for _, o := range []client.Object{
		&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "words"}, Data: map[string]string{"text": "first edition"}},
		&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "key"}, StringData: map[string]string{"KEY": "for my eyes only"}},
	} {
		if err := rome.Create(ctx, o); err != nil {
			t.Fatal(err)
		}
	}
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: ordinaryApp, Labels: map[string]string{"app": ordinaryApp}}, Spec: podSpec(requests("cpu", "100m", "memory", "16Mi"), "serve")}
	c := &p.Spec.Containers[0]
	c.EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "key"}}}}
	c.Env = []corev1.EnvVar{{Name: "HOME_NAMESPACE", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}}}}
	c.VolumeMounts = []corev1.VolumeMount{{Name: "words", MountPath: "/words"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "words", VolumeSource: corev1.VolumeSource{
		ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "words"}}}}}
	if err := rome.Create(ctx, p); err != nil {
		t.Fatal(err)
	}
	_, away := allReady(ctx, t, s.ns, ordinaryApp, 1, 2*time.Minute)
	if len(away) != 1 {
		t.Fatal("the pod did not overflow")
	}
	s.pod = away[0]
	return ctx
}

func (s *ordinaryScenario) hasItsEnvironment(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	// With Liqo, a pod sees the namespace it has at the provider.
	seen := s.ns
	if driver(ctx, t) == "liqo" {
		seen += "-" + rome.Name
	}
	for _, c := range []struct{ word, about, want string }{
		{"env", "KEY", "for my eyes only"}, {"env", "HOME_NAMESPACE", seen}, {"print", "/words/text", "first edition"},
	} {
		if got, err := execIn(ctx, s.pod, workloadProgram, c.word, c.about); err != nil || got != c.want {
			t.Errorf("%s %s gives %q (%v), want %q", c.word, c.about, got, err, c.want)
		}
	}
	// The kubelet resyncs ConfigMaps about once a minute: other steps come before it is read.
	s.changed = time.Now()
	words := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "words"}}
	if err := rome.Patch(ctx, words, client.RawPatch("application/merge-patch+json", []byte(`{"data":{"text":"second edition"}}`))); err != nil {
		t.Fatal(err)
	}
	return ctx
}

func (s *ordinaryScenario) configMapHasChanged(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	eventually(ctx, t, "the pod reads the second edition", 3*time.Minute, func(ctx context.Context) (bool, string) {
		got, err := execIn(ctx, s.pod, workloadProgram, "print", "/words/text")
		return err == nil && got == "second edition", fmt.Sprint(got, err)
	})
	timing(t, "a ConfigMap, changed to read, with the steps between", time.Since(s.changed))
	return ctx
}

func (s *ordinaryScenario) portForwardAndLogs(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	lines := follow(ctx, t, "logs", "-f", "-n", s.ns, ordinaryApp)
	await(t, lines, "serving as "+ordinaryApp)
	forwarded := follow(ctx, t, "port-forward", "-n", s.ns, "pod/"+ordinaryApp, ":8080")
	said := await(t, forwarded, "Forwarding from 127.0.0.1:")
	_, rest, _ := strings.Cut(said, "127.0.0.1:")
	port, _, _ := strings.Cut(rest, " ")
	for i := range 3 {
		path := fmt.Sprintf("/round-%d", i)
		answer, err := http.Get("http://" + net.JoinHostPort("127.0.0.1", port) + path)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if err != nil || strings.TrimSpace(string(text)) != ordinaryApp {
			t.Fatalf("through the forwarded port it answers %q (%v)", text, err)
		}
		await(t, lines, "served "+path)
	}
	if text, err := kubectl(ctx, t, "logs", "-n", s.ns, ordinaryApp, "--tail=1"); err != nil || strings.TrimSpace(text) != "served /round-2" {
		t.Errorf("the last line is %q (%v)", text, err)
	}
	if text, err := kubectl(ctx, t, "logs", "-n", s.ns, ordinaryApp, "--since=1h", "--timestamps"); err != nil || !strings.Contains(text, "Z served /round-0") {
		t.Errorf("the lines of the last hour are %q (%v)", text, err)
	}
	return ctx
}

func (s *ordinaryScenario) terminal(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	request := rome.set.CoreV1().RESTClient().Post().Resource("pods").Namespace(s.ns).Name(ordinaryApp).SubResource("exec").
		VersionedParams(&corev1.PodExecOptions{Container: "main", Command: []string{workloadProgram, "answer"}, Stdin: true, Stdout: true, TTY: true}, clientgoscheme.ParameterCodec)
	executor, err := remotecommand.NewWebSocketExecutor(rome.config, "GET", request.URL().String())
	if err != nil {
		t.Fatal(err)
	}
	talk, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	in, say := io.Pipe()
	out, heard := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- executor.StreamWithContext(talk, remotecommand.StreamOptions{Stdin: in, Stdout: heard, Tty: true})
		heard.Close()
	}()
	lines := scan(out)
	await(t, lines, "talking over a terminal")
	fmt.Fprintln(say, "good morning")
	await(t, lines, "heard GOOD MORNING")
	fmt.Fprintln(say, "bye")
	if err := <-ended; err != nil {
		t.Errorf("the exec session ended with %v", err)
	}
	return ctx
}

func (s *ordinaryScenario) failureAndRestart(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "failing"}, Spec: podSpec(requests("cpu", "100m", "memory", "16Mi"), "fail", "3")}
	if err := rome.Create(ctx, p); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "it has failed once and is restarted", 2*time.Minute, func(ctx context.Context) (bool, string) {
		err := rome.Get(ctx, client.ObjectKeyFromObject(p), p)
		if err != nil || len(p.Status.ContainerStatuses) != 1 {
			return false, fmt.Sprint(p.Status.Phase, err)
		}
		s := p.Status.ContainerStatuses[0]
		last := s.LastTerminationState.Terminated
		return overflowed(*p) && s.RestartCount > 0 && last != nil && last.ExitCode == 3, fmt.Sprintf("%+v", s)
	})
	// The previous container changes with every restart.
	eventually(ctx, t, "its previous logs can be read", time.Minute, func(ctx context.Context) (bool, string) {
		text, err := kubectl(ctx, t, "logs", "-n", s.ns, "failing", "--previous")
		return err == nil && strings.Contains(text, "failing with 3"), fmt.Sprint(text, err)
	})
	return ctx
}

func (s *ordinaryScenario) endedLogs(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "ended"}, Spec: podSpec(requests("cpu", "100m", "memory", "16Mi"), "work", "1s")}
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	if err := rome.Create(ctx, p); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, "it has succeeded elsewhere", 2*time.Minute, func(ctx context.Context) (bool, string) {
		err := rome.Get(ctx, client.ObjectKeyFromObject(p), p)
		return err == nil && overflowed(*p) && p.Status.Phase == corev1.PodSucceeded, fmt.Sprint(p.Status.Phase, p.Spec.NodeName, err)
	})
	if text, err := logs(ctx, *p); err != nil || !strings.Contains(text, "done as "+p.Name) {
		t.Errorf("its logs are %q (%v)", text, err)
	}
	return ctx
}

func (s *ordinaryScenario) metricsAndAuthentication(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	if driver(ctx, t) != "direct" {
		t.Skip("Liqo's virtual kubelet has no figures here: its metric agent is turned off")
	}
	var last string
	eventually(ctx, t, "kubectl top shows the pod", 3*time.Minute, func(ctx context.Context) (bool, string) {
		text, err := kubectl(ctx, t, "top", "pod", "-n", s.ns, ordinaryApp, "--no-headers")
		last = strings.TrimSpace(text)
		fields := strings.Fields(text)
		return err == nil && len(fields) == 3 && fields[0] == ordinaryApp && fields[2] != "0Mi", fmt.Sprint(text, err)
	})
	t.Logf("kubectl top pod: %s", last)
	raw, err := rome.set.CoreV1().RESTClient().Get().AbsPath("/api/v1/nodes", s.pod.Spec.NodeName, "proxy", "metrics", "resource").DoRaw(ctx)
	if err != nil || !strings.Contains(string(raw), fmt.Sprintf(`pod=%q`, ordinaryApp)) {
		t.Errorf("the node's /metrics/resource (%v): %s", err, raw)
	}
	var node corev1.Node
	if err := rome.Get(ctx, client.ObjectKey{Name: s.pod.Spec.NodeName}, &node); err != nil {
		t.Fatal(err)
	}
	// Only pods and nodes reach it: the filler pod of rome serves as a client.
	filler := corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "filler-" + rome.ControlPlane()}}
	base := fmt.Sprintf("https://%s:%d", node.Status.Addresses[0].Address, node.Status.DaemonEndpoints.KubeletEndpoint.Port)
	for _, path := range []string{"/metrics/resource", "/stats/summary", "/containerLogs/" + s.ns + "/" + ordinaryApp + "/main"} {
		if got, err := execIn(ctx, filler, workloadProgram, "status", base+path); err != nil || got != "401" {
			t.Errorf("an unauthenticated client gets %q from %s (%v), want 401", got, path, err)
		}
	}
	return ctx
}

// driver is the driver that the lab runs now.
func driver(ctx context.Context, t *testing.T) string {
	t.Helper()
	d, err := rome.set.AppsV1().Deployments("spillway-system").Get(ctx, "spillway-agent", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range d.Spec.Template.Spec.Containers[0].Args {
		if name, ok := strings.CutPrefix(a, "--driver="); ok {
			return name
		}
	}
	return install.Drivers[0]
}

func command(ctx context.Context, t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	program, err := binaries.Program(ctx, "kubectl", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	return exec.CommandContext(ctx, program, append([]string{"--kubeconfig", kubeconfig, "--context", rome.Context()}, args...)...)
}

// kubectl runs kubectl against rome.
func kubectl(ctx context.Context, t *testing.T, args ...string) (string, error) {
	t.Helper()
	cmd := command(ctx, t, args...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, stderr.String())
	}
	return out.String(), nil
}

// follow runs kubectl for the rest of the assessment, and returns its lines as
// they come.
func follow(ctx context.Context, t *testing.T, args ...string) <-chan string {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	cmd := command(ctx, t, args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		cmd.Wait() // canceled above: the error says so
		if t.Failed() {
			t.Logf("kubectl %v: %s", args, stderr.String())
		}
	})
	return scan(out)
}

func scan(r io.Reader) <-chan string {
	lines := make(chan string, 1000)
	go func() {
		defer close(lines)
		for s := bufio.NewScanner(r); s.Scan(); {
			lines <- s.Text()
		}
	}()
	return lines
}

// await reads lines until one contains want.
func await(t *testing.T, lines <-chan string, want string) string {
	t.Helper()
	var seen []string
	late := time.After(30 * time.Second)
	for {
		select {
		case line, open := <-lines:
			if !open {
				t.Fatalf("the output ended before %q; got %q", want, seen)
			}
			if strings.Contains(line, want) {
				return line
			}
			seen = append(seen, line)
		case <-late:
			t.Fatalf("no %q within 30 s; got %q", want, seen)
		}
	}
}
