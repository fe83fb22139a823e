package environment_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// startAndWait has the test binary start a playground in the directory that it
// names, and wait to be killed, instead of running tests.
const startAndWait = "PLAYGROUND_TEST_DIR"

func TestMain(m *testing.M) {
	dir := os.Getenv(startAndWait)
	if dir == "" {
		os.Exit(m.Run())
	}
	p, err := environment.Start(context.Background(), environment.Options{Dir: dir})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for _, c := range p.Clusters() {
		for _, process := range c.Processes() {
			fmt.Println(process.Pid(), process.Name())
		}
	}
	fmt.Println("up")
	<-time.After(10 * time.Minute)
}

func cores(n string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(n), corev1.ResourceMemory: resource.MustParse("1Gi")}
}

// TestOverflowAndRelease has a Deployment overflow from one cluster to another
// with the direct driver, and checks that all is removed when it scales down.
func TestOverflowAndRelease(t *testing.T) {
	ctx := t.Context()
	began := time.Now()
	timing := func(what string) { t.Logf("timing: %-40s %6.1fs", what, time.Since(began).Seconds()) }
	dir := t.TempDir()
	p, err := environment.Start(ctx, environment.Options{Dir: dir, Log: t.Logf, Members: []environment.Member{
		{Name: "rome", Overflows: true, Nodes: []environment.NodeGroup{{Prefix: "rome", Count: 1, Resources: cores("2")}}},
		{Name: "paris", Nodes: []environment.NodeGroup{{Prefix: "paris", Count: 2, Resources: cores("2")}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	stopped := false
	stop := func() {
		if !stopped {
			stopped = true
			if err := p.Stop(); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(p.Logs(20))
		}
		stop()
	})
	timing("clusters started")
	hub, rome, paris := p.Cluster(environment.Hub).Client, p.Cluster("rome").Client, p.Cluster("paris").Client

	web := fourReplicas()
	if err := errors.Join(
		rome.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{broker.LabelOverflow: broker.OverflowEnabled}}}),
		rome.Create(ctx, web),
	); err != nil {
		t.Fatal(err)
	}
	eventually(t, p, "two pods run at home and two in paris", 3*time.Minute, func() error {
		return splitEvenly(ctx, rome, paris)
	})
	timing("two of four pods run in paris")

	if err := rome.Patch(ctx, web, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"replicas":1}}`))); err != nil {
		t.Fatal(err)
	}
	eventually(t, p, "nothing is left of it", expect.Deadline, func() error {
		for _, api := range []client.Client{hub, rome} {
			var reservations broker.ReservationList
			if err := api.List(ctx, &reservations); err != nil || len(reservations.Items) > 0 {
				return fmt.Errorf("%d reservations (%w)", len(reservations.Items), err)
			}
		}
		if err := rome.Get(ctx, client.ObjectKey{Name: broker.VirtualNodeName("paris")}, &corev1.Node{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the virtual node still exists (%w)", err)
		}
		if err := paris.Get(ctx, client.ObjectKey{Name: broker.GuestNamespace("rome")}, &corev1.Namespace{}); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the guest namespace still exists (%w)", err)
		}
		return nil
	})
	timing("nothing is left of it")

	var all []int
	for _, c := range p.Clusters() {
		for _, process := range c.Processes() {
			all = append(all, process.Pid())
		}
	}
	stop()
	for _, pid := range all {
		if expect.ProcessExists(pid) {
			t.Errorf("process %d still exists", pid)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v %v", left, err)
	}
	timing("clusters stopped")
}

// fourReplicas is a Deployment of four pods of one core each.
func fourReplicas() *appsv1.Deployment {
	labels := map[string]string{"app": "web"}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
		Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To(int32(4)), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: corev1.PodSpec{TerminationGracePeriodSeconds: ptr.To(int64(1)), Containers: []corev1.Container{{
					Name: "main", Image: "app", Args: []string{"serve"},
					Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1")}},
				}}},
			},
		},
	}
}

// splitEvenly returns nil when two pods run at home and two as guests in paris.
func splitEvenly(ctx context.Context, rome, paris client.Client) error {
	var pods corev1.PodList
	if err := rome.List(ctx, &pods, client.InNamespace("shop")); err != nil {
		return err
	}
	home, away := 0, 0
	var states []string
	for _, pod := range pods.Items {
		states = append(states, fmt.Sprintf("%s %s on %q", pod.Name, pod.Status.Phase, pod.Spec.NodeName))
		if pod.Status.Phase != corev1.PodRunning {
			continue
		}
		if pod.Spec.NodeName == broker.VirtualNodeName("paris") {
			away++
		} else {
			home++
		}
	}
	if home != 2 || away != 2 {
		return errors.New(strings.Join(states, "; "))
	}
	var there corev1.PodList
	if err := paris.List(ctx, &there, client.InNamespace(broker.GuestNamespace("rome"))); err != nil {
		return err
	}
	for _, pod := range there.Items {
		if !strings.HasPrefix(pod.Spec.NodeName, "paris-") || pod.Status.Phase != corev1.PodRunning {
			return fmt.Errorf("guest %s is %s on %q", pod.Name, pod.Status.Phase, pod.Spec.NodeName)
		}
	}
	if len(there.Items) != 2 {
		return fmt.Errorf("paris has %d guests", len(there.Items))
	}
	return nil
}

// TestKilled kills a playground with SIGKILL: no process outlives it, and the
// next one removes what lies about.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), startAndWait+"="+dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	names := map[int]string{}
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "up" {
		number, name, _ := strings.Cut(lines.Text(), " ")
		pid, err := strconv.Atoi(number)
		if err != nil {
			t.Fatal(lines.Text())
		}
		names[pid] = name
	}
	if len(names) < 3 {
		t.Fatalf("want etcd, an API server and a broker, have %v", names)
	}
	for pid, name := range names {
		if !expect.ProcessExists(pid) {
			t.Errorf("%s is not there", name)
		}
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	for pid, name := range names {
		eventually(t, nil, name+" is gone", expect.Deadline, func() error {
			if expect.ProcessExists(pid) {
				return errors.New("it is there")
			}
			return nil
		})
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Fatalf("want one directory left behind, have %v %v", left, err)
	}
	p, err := environment.Start(t.Context(), environment.Options{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Stop(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the directory: %v %v", left, err)
	}
}

// eventually waits for ok, and fails early when a process of the playground ended.
func eventually(t *testing.T, p *environment.Playground, what string, timeout time.Duration, ok func() error) {
	t.Helper()
	expect.EventuallyWithin(t, timeout, what, func() (bool, string) {
		if p != nil {
			expect.NoError(t, p.Err())
		}
		err := ok()
		return err == nil, fmt.Sprint(err)
	})
}
