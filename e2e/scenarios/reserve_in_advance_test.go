//go:build e2e

package scenarios

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/e2e-framework/pkg/envconf"
	"sigs.k8s.io/e2e-framework/pkg/features"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// advanceScenario is the state that the steps of TestReserveInAdvance share.
type advanceScenario struct {
	ns             string
	before         map[string]bool
	empty          func()
	local, fromHub *broker.Reservation
	onLocal, onHub *corev1.Pod
	localProvider  string
}

// TestReserveInAdvance reserves capacity in rome and, for rome, in the hub. A Reservation becomes
// a hold and a virtual node of exactly that size, grows in place, and is removed. Ordinary pods
// use two others without any further Reservation; one expires, the other is deleted while it is
// used, and nothing is left, not even of the README's commands.
func TestReserveInAdvance(t *testing.T) {
	liqoOnly(t, "e2e/playground/scenarios has it with driver direct")
	s := &advanceScenario{}
	feature := features.New("Reservations in advance").Setup(s.setup)
	feature.Assess("one becomes a hold and a node of its size", s.hasItsSize)
	feature.Assess("two others become Active", s.becomeActive)
	feature.Assess("a pod runs on each, and no further Reservation is made", s.podsUseThem)
	feature.Assess("the commands of the README's section work, and meanwhile the unused one expires", s.expires)
	feature.Assess("the other is deleted in the hub: its pod runs on, and gives the capacity back at its end", s.deleted)
	feature.Assess("nothing is left", s.nothingLeft)
	testenv.Test(t, feature.Feature())
}

func (s *advanceScenario) setup(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	expectIdle(ctx, t)
	s.ns = namespace(ctx, t, "scenario-advance", true)
	s.before = census(ctx, t)
	s.empty = fill(ctx, t, rome, rome.ControlPlane(), "1m")
	total := broker.FromList(requests("cpu", "350m", "memory", "64Mi"))
	s.local = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "warm"},
		Spec:       broker.ReservationSpec{RequestedResources: &total, Duration: &metav1.Duration{Duration: time.Minute}},
	}
	s.fromHub = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "scenario-for-rome"},
		Spec:       broker.ReservationSpec{RequesterID: "rome", TargetClusterID: "paris", Namespaces: []string{s.ns}, RequestedResources: total.DeepCopy()},
	}
	t.Cleanup(func() { // gone unless a step failed
		_ = rome.Delete(context.WithoutCancel(ctx), s.local)
		_ = hub.Delete(context.WithoutCancel(ctx), s.fromHub)
	})
	return ctx
}

func (s *advanceScenario) hasItsSize(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "by-hand"},
		Spec: broker.ReservationSpec{TargetClusterID: "paris", PodSets: []broker.PodSet{{
			Name: "pods", Count: 2,
			Requests: broker.ResourceQuantities{CPU: ptr.To(resource.MustParse("333m")), Memory: ptr.To(resource.MustParse("100000001"))},
		}}},
	}
	start := time.Now()
	if err := rome.Create(ctx, r); err != nil {
		t.Fatal(err)
	}
	carries := func(what, cpu, memory string, pods int64) {
		t.Helper()
		eventually(ctx, t, what, 2*time.Minute, func(ctx context.Context) (bool, string) {
			var n corev1.Node
			if err := rome.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &n); err != nil {
				return false, err.Error()
			}
			have := n.Status.Allocatable
			return have.Cpu().Cmp(resource.MustParse(cpu)) == 0 && have.Memory().Cmp(resource.MustParse(memory)) == 0 && have.Pods().Value() == pods && !n.Spec.Unschedulable,
				fmt.Sprint(have)
		})
		var held broker.ClusterAdvertisement
		if err := hub.Get(ctx, client.ObjectKey{Namespace: broker.SystemNamespace, Name: "paris"}, &held); err != nil {
			t.Fatal(err)
		}
		if have := held.Status.Reserved.List()[corev1.ResourceCPU]; have.Cmp(resource.MustParse(cpu)) != 0 {
			t.Errorf("the ledger of paris has %s CPU reserved, want %s", have.String(), cpu)
		}
	}
	carries("the node has the size of the Reservation", "666m", "200000002", 2)
	timing(t, "a Reservation by hand, written to node", time.Since(start))
	// The agent writes the status meanwhile: a patch cannot conflict with it.
	raise := client.RawPatch(types.JSONPatchType, []byte(`[{"op":"replace","path":"/spec/podSets/0/count","value":3}]`))
	if err := rome.Patch(ctx, r, raise); err != nil {
		t.Fatal(err)
	}
	carries("the node has grown in place", "999m", "300000003", 3)
	if err := rome.Delete(ctx, r); err != nil {
		t.Fatal(err)
	}
	expectUnused(ctx, t)
	return ctx
}

// wait waits until a Reservation of a cluster is as wanted.
func (s *advanceScenario) wait(ctx context.Context, t *testing.T, what string, r *remote, reservation *broker.Reservation, check func() bool) {
	t.Helper()
	eventually(ctx, t, what, 2*time.Minute, func(ctx context.Context) (bool, string) {
		if err := r.Get(ctx, client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return false, err.Error()
		}
		return check(), fmt.Sprintf("%s %q %+v %+v", reservation.Status.Phase, reservation.Status.Summary, reservation.Status.Used, reservation.Status.Conditions)
	})
}

func (s *advanceScenario) becomeActive(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	for r, reservation := range map[*remote]*broker.Reservation{rome: s.local, hub: s.fromHub} {
		if err := r.Create(ctx, reservation); err != nil {
			t.Fatal(err)
		}
	}
	s.wait(ctx, t, "the Reservation of rome is Active", rome, s.local, func() bool {
		return s.local.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(s.local.Status.Conditions, broker.ConditionReady)
	})
	s.wait(ctx, t, "the Reservation of the hub is Active", hub, s.fromHub, func() bool {
		return s.fromHub.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(s.fromHub.Status.Conditions, broker.ConditionReady) &&
			s.fromHub.Status.TargetClusterEndpoint != ""
	})
	if got := s.fromHub.Status.Allocations[0].Cluster; got != "paris" {
		t.Errorf("the one of the hub is in %s, pinned to paris", got)
	}
	s.localProvider = s.local.Status.Allocations[0].Cluster
	return ctx
}

// run creates an ordinary pod and waits until it is Ready.
func (s *advanceScenario) run(ctx context.Context, t *testing.T, name string) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: name}, Spec: podSpec(requests("cpu", "300m", "memory", "32Mi"), "serve")}
	start := time.Now()
	if err := rome.Create(ctx, pod); err != nil {
		t.Fatal(err)
	}
	var bound time.Duration
	eventually(ctx, t, name+" is ready", 2*time.Minute, func(ctx context.Context) (bool, string) {
		err := rome.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		if bound == 0 && pod.Spec.NodeName != "" {
			bound = time.Since(start)
		}
		return err == nil && ready(*pod), fmt.Sprint(pod.Spec.NodeName, pod.Status.Phase, pod.Status.Conditions, err)
	})
	timing(t, name+": onto capacity reserved in advance, created to bound", bound)
	return pod
}

func (s *advanceScenario) podsUseThem(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	// A Reservation of the pod's own namespace comes before one of the hub.
	s.onLocal = s.run(ctx, t, "on-local")
	s.onHub = s.run(ctx, t, "on-hub")
	if got, want := s.onLocal.Spec.NodeName, broker.VirtualNodeName(s.localProvider); got != want {
		t.Errorf("the first pod is on %s, want %s", got, want)
	}
	if got, want := s.onLocal.Labels[broker.LabelHold], s.local.Status.ID; got != want {
		t.Errorf("the first pod is charged to %q, want %q", got, want)
	}
	if s.onHub.Spec.NodeName != broker.VirtualNodeName("paris") || s.onHub.Labels[broker.LabelHold] != s.fromHub.Name {
		t.Errorf("the second pod is on %s, charged to %q", s.onHub.Spec.NodeName, s.onHub.Labels[broker.LabelHold])
	}
	var here, there broker.ReservationList
	if err := rome.List(ctx, &here); err != nil {
		t.Fatal(err)
	}
	if err := hub.List(ctx, &there); err != nil {
		t.Fatal(err)
	}
	if len(here.Items) != 1 || len(there.Items) != 2 {
		t.Errorf("%d Reservations in rome and %d in the hub, want 1 and 2", len(here.Items), len(there.Items))
	}
	s.wait(ctx, t, "rome says what is used", rome, s.local, func() bool {
		return s.local.Status.Used != nil && slices.Equal(s.local.Status.Used.Pods, []string{s.ns + "/on-local"})
	})
	s.wait(ctx, t, "the hub says what is used", hub, s.fromHub, func() bool { return s.fromHub.Status.Used != nil && s.fromHub.Status.Used.Count == 1 })
	if line, err := kubectl(ctx, t, "get", "reservations", "-n", s.ns, "--no-headers"); err != nil || !strings.Contains(line, "1 pod, cpu 300m of 350m, memory 32Mi of 64Mi") {
		t.Errorf("kubectl get reservations: %q (%v)", line, err)
	}
	return ctx
}

func (s *advanceScenario) remove(ctx context.Context, t *testing.T, pod *corev1.Pod) {
	t.Helper()
	if err := rome.Delete(ctx, pod); err != nil {
		t.Fatal(err)
	}
	eventually(ctx, t, pod.Name+" is gone", 2*time.Minute, func(ctx context.Context) (bool, string) {
		err := rome.Get(ctx, client.ObjectKeyFromObject(pod), pod)
		return apierrors.IsNotFound(err), fmt.Sprint(pod.Status.Phase, err)
	})
}

func (s *advanceScenario) expires(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	s.remove(ctx, t, s.onLocal)
	runReadme(ctx, t)
	s.wait(ctx, t, "the Reservation of rome has expired", rome, s.local, func() bool { return s.local.Status.Phase == broker.ReservationReleased })
	if err := rome.Delete(ctx, s.local); err != nil {
		t.Fatal(err)
	}
	return ctx
}

func (s *advanceScenario) deleted(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	if err := hub.Delete(ctx, s.fromHub); err != nil {
		t.Fatal(err)
	}
	s.wait(ctx, t, "the hub counts the pod that remains", hub, s.fromHub, func() bool {
		c := meta.FindStatusCondition(s.fromHub.Status.Conditions, broker.ConditionProviderReleased)
		return c != nil && c.Status == metav1.ConditionFalse && strings.Contains(c.Message, "still run there: 1")
	})
	if err := rome.Get(ctx, client.ObjectKeyFromObject(s.onHub), s.onHub); err != nil || !ready(*s.onHub) {
		t.Errorf("the pod that uses it does not run on: %v %v", s.onHub.Status.Conditions, err)
	}
	s.remove(ctx, t, s.onHub)
	eventually(ctx, t, "the Reservation of the hub is gone", 2*time.Minute, func(ctx context.Context) (bool, string) {
		err := hub.Get(ctx, client.ObjectKeyFromObject(s.fromHub), s.fromHub)
		return apierrors.IsNotFound(err), fmt.Sprint(s.fromHub.Status.Conditions, err)
	})
	return ctx
}

func (s *advanceScenario) nothingLeft(ctx context.Context, t *testing.T, _ *envconf.Config) context.Context {
	s.empty()
	eventually(ctx, t, "the census equals the first", 4*time.Minute, func(ctx context.Context) (bool, string) {
		added, missing := compare(s.before, census(ctx, t))
		return len(added)+len(missing) == 0, fmt.Sprintf("more: %v; less: %v", added, missing)
	})
	return ctx
}

// runReadme runs the commands of the README's section.
func runReadme(ctx context.Context, t *testing.T) {
	t.Helper()
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	readme, err := os.ReadFile(filepath.Join(root, "broker/README.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, found := strings.Cut(string(readme), "\n## Reserve in advance\n")
	_, section, fenced := strings.Cut(section, "```sh\n")
	script, _, closed := strings.Cut(section, "```")
	if !found || !fenced || !closed {
		t.Fatal("broker/README.md has no commands in section Reserve in advance")
	}
	program, err := binaries.Program(ctx, "kubectl", t.Logf)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-eu")
	cmd.Dir, cmd.Stdin = root, strings.NewReader(script)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+kubeconfig, "PATH="+filepath.Dir(program)+":"+os.Getenv("PATH"), "IMAGE="+workloadImage)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		dump(t)
		t.Fatalf("%v\n%s", err, out.String())
	}
	t.Logf("%s", out.String())
	for _, want := range []string{"spillway-paris", "1 pod, cpu 900m of 1,"} {
		if !strings.Contains(out.String(), want) && !strings.Contains(out.String(), strings.Replace(want, "paris", "berlin", 1)) {
			t.Errorf("no %q in the output", want)
		}
	}
}
