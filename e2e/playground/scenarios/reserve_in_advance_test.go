package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// advanceScenario is the state that the steps of TestReserveInAdvance share.
type advanceScenario struct {
	*playgroundTest
	ns             string
	local, fromHub *broker.Reservation
	onLocal, onHub *corev1.Pod
}

// TestReserveInAdvance reserves capacity in rome and, for rome, in the hub. A Reservation becomes
// a hold and a virtual node of exactly that size, grows in place, and is removed. Ordinary pods
// use two others without any further Reservation; one expires, the other is deleted while it is
// used, and nothing is left, not even of the README's commands.
func TestReserveInAdvance(t *testing.T) {
	s := &advanceScenario{playgroundTest: begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 1, "cpu", "4", "memory", "4Gi")},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "4Gi")},
	})}
	s.ns = s.optedIn("advance")
	before := s.census()
	s.hasItsSize()
	s.becomeActive()
	s.podsUseThem()
	s.remove(s.onLocal)
	s.runReadme()
	s.wait("the Reservation of rome has expired", s.rome, s.local, func() bool { return s.local.Status.Phase == broker.ReservationReleased })
	expect.NoError(t, s.rome.Delete(t.Context(), s.local))
	s.deletedInUse() // last: the other Reservation would have room for its pod
	s.eventually("no virtual node is left", func() error {
		return s.gone(s.rome, &corev1.Node{}, "", broker.VirtualNodeName("paris"))
	})
	s.eventually("the census equals the first", func() error { return s.differs(before, func(string) bool { return false }) })
}

// wait waits until a Reservation of a cluster is as wanted.
func (s *advanceScenario) wait(what string, c client.Client, reservation *broker.Reservation, check func() bool) {
	s.t.Helper()
	s.eventually(what, func() error {
		if err := c.Get(s.t.Context(), client.ObjectKeyFromObject(reservation), reservation); err != nil || check() {
			return err
		}
		return fmt.Errorf("%s %q %+v %+v", reservation.Status.Phase, reservation.Status.Summary, reservation.Status.Used, reservation.Status.Conditions)
	})
}

// hasItsSize expects that hold and node have exactly the size of a Reservation, also as it grows.
func (s *advanceScenario) hasItsSize() {
	s.t.Helper()
	r := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "by-hand"},
		Spec: broker.ReservationSpec{TargetClusterID: "paris", PodSets: []broker.PodSet{{
			Name: "pods", Count: 2,
			Requests: broker.ResourceQuantities{CPU: ptr.To(resource.MustParse("333m")), Memory: ptr.To(resource.MustParse("100000001"))},
		}}},
	}
	expect.NoError(s.t, s.rome.Create(s.t.Context(), r))
	s.carries("666m", "200000002", 2)
	// The agent writes the status meanwhile: a patch cannot conflict with it.
	raise := client.RawPatch(types.JSONPatchType, []byte(`[{"op":"replace","path":"/spec/podSets/0/count","value":3}]`))
	expect.NoError(s.t, s.rome.Patch(s.t.Context(), r, raise))
	s.carries("999m", "300000003", 3)
	expect.NoError(s.t, s.rome.Delete(s.t.Context(), r))
	s.eventually("nothing but the namespace is left", func() error {
		left, err := s.left()
		if err == nil && len(left) > 1 {
			err = errors.New(strings.Join(left, ", "))
		}
		return err
	})
}

// carries waits until the virtual node of paris has room for exactly that, and expects that as
// much CPU is held.
func (s *advanceScenario) carries(cpu, memory string, pods int64) {
	s.t.Helper()
	s.eventually("the node has room for "+cpu, func() error {
		var n corev1.Node
		err := s.rome.Get(s.t.Context(), client.ObjectKey{Name: broker.VirtualNodeName("paris")}, &n)
		have := n.Status.Allocatable
		if err == nil && (have.Cpu().Cmp(resource.MustParse(cpu)) != 0 || have.Memory().Cmp(resource.MustParse(memory)) != 0 || have.Pods().Value() != pods || n.Spec.Unschedulable) {
			err = fmt.Errorf("%v, unschedulable: %t", have, n.Spec.Unschedulable)
		}
		return err
	})
	var held broker.ClusterAdvertisement
	expect.NoError(s.t, s.hub.Get(s.t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: "paris"}, &held))
	if have := cpuOf(held.Status.Reserved); have.Cmp(resource.MustParse(cpu)) != 0 {
		s.t.Errorf("the ledger of paris has %s CPU reserved, want %s", have, cpu)
	}
}

func (s *advanceScenario) becomeActive() {
	s.t.Helper()
	ctx := s.t.Context()
	total := broker.FromList(expect.Resources("cpu", "350m", "memory", "64Mi"))
	s.local = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.ns, Name: "warm"},
		Spec:       broker.ReservationSpec{RequestedResources: &total, Duration: &metav1.Duration{Duration: time.Minute}},
	}
	s.fromHub = &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "scenario-for-rome"},
		Spec:       broker.ReservationSpec{RequesterID: "rome", TargetClusterID: "paris", Namespaces: []string{s.ns}, RequestedResources: total.DeepCopy()},
	}
	expect.NoError(s.t, errors.Join(s.rome.Create(ctx, s.local), s.hub.Create(ctx, s.fromHub)))
	s.t.Cleanup(func() { _ = s.hub.Delete(context.Background(), s.fromHub) }) // gone unless a step failed
	s.wait("the Reservation of rome is Active", s.rome, s.local, func() bool {
		return s.local.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(s.local.Status.Conditions, broker.ConditionReady) &&
			meta.IsStatusConditionTrue(s.local.Status.Conditions, broker.ConditionVirtualNodeReady)
	})
	s.wait("the Reservation of the hub is Active", s.hub, s.fromHub, func() bool {
		return s.fromHub.Status.Phase == broker.ReservationActive && meta.IsStatusConditionTrue(s.fromHub.Status.Conditions, broker.ConditionReady) &&
			s.fromHub.Status.TargetClusterEndpoint != ""
	})
	if got := s.fromHub.Status.Allocations[0].Cluster; got != "paris" {
		s.t.Errorf("the one of the hub is in %s, pinned to paris", got)
	}
}

// run creates an ordinary pod and waits until it is Ready.
func (s *advanceScenario) run(name string) *corev1.Pod {
	s.t.Helper()
	pod := s.createIn(s.ns, name, "300m", func(spec *corev1.PodSpec) {
		spec.Containers[0].Resources.Requests[corev1.ResourceMemory] = expect.Resources("memory", "32Mi")["memory"]
	})
	_, away := s.allReady(s.ns, name, 1)
	if len(away) != 1 || away[0].UID != pod.UID {
		s.t.Fatalf("pod %s does not run on a virtual node", name)
	}
	return &away[0]
}

func (s *advanceScenario) podsUseThem() {
	s.t.Helper()
	// A Reservation of the pod's own namespace comes before one of the hub.
	s.onLocal, s.onHub = s.run("on-local"), s.run("on-hub")
	if got, want := s.onLocal.Spec.NodeName, broker.VirtualNodeName(s.local.Status.Allocations[0].Cluster); got != want {
		s.t.Errorf("the first pod is on %s, want %s", got, want)
	}
	if got, want := s.onLocal.Labels[broker.LabelHold], s.local.Status.ID; got != want {
		s.t.Errorf("the first pod is charged to %q, want %q", got, want)
	}
	if s.onHub.Spec.NodeName != broker.VirtualNodeName("paris") || s.onHub.Labels[broker.LabelHold] != s.fromHub.Name {
		s.t.Errorf("the second pod is on %s, charged to %q", s.onHub.Spec.NodeName, s.onHub.Labels[broker.LabelHold])
	}
	var here, there broker.ReservationList
	expect.NoError(s.t, errors.Join(s.rome.List(s.t.Context(), &here), s.hub.List(s.t.Context(), &there)))
	if len(here.Items) != 1 || len(there.Items) != 2 {
		s.t.Errorf("%d Reservations in rome and %d in the hub, want 1 and 2", len(here.Items), len(there.Items))
	}
	s.wait("rome says what is used", s.rome, s.local, func() bool {
		return s.local.Status.Used != nil && slices.Equal(s.local.Status.Used.Pods, []string{s.ns + "/on-local"})
	})
	s.wait("the hub says what is used", s.hub, s.fromHub, func() bool { return s.fromHub.Status.Used != nil && s.fromHub.Status.Used.Count == 1 })
	if line, err := s.line("rome", true, "reservations", s.ns, s.local.Name); err != nil || !strings.Contains(line, "1 pod, cpu 300m of 350m, memory 32Mi of 64Mi") {
		s.t.Errorf("kubectl get reservations -o wide: %q (%v)", line, err)
	}
}

func (s *advanceScenario) remove(pod *corev1.Pod) {
	s.t.Helper()
	expect.NoError(s.t, s.rome.Delete(s.t.Context(), pod))
	s.eventually("pod "+pod.Name+" is gone", func() error { return s.gone(s.rome, pod.DeepCopy(), pod.Namespace, pod.Name) })
}

// deletedInUse deletes the Reservation of the hub: its pod runs on, and gives the capacity back
// at its end.
func (s *advanceScenario) deletedInUse() {
	s.t.Helper()
	expect.NoError(s.t, s.hub.Delete(s.t.Context(), s.fromHub))
	s.wait("the hub counts the pod that remains", s.hub, s.fromHub, func() bool {
		c := meta.FindStatusCondition(s.fromHub.Status.Conditions, broker.ConditionProviderReleased)
		return c != nil && c.Status == metav1.ConditionFalse && strings.Contains(c.Message, "still run there: 1")
	})
	if err := s.rome.Get(s.t.Context(), client.ObjectKeyFromObject(s.onHub), s.onHub); err != nil || !has(*s.onHub, corev1.PodReady) {
		s.t.Errorf("the pod that uses it does not run on: %v %v", s.onHub.Status.Conditions, err)
	}
	s.remove(s.onHub)
	s.eventually("the Reservation of the hub is gone", func() error { return s.gone(s.hub, s.fromHub.DeepCopy(), s.fromHub.Namespace, s.fromHub.Name) })
}

// runReadme runs the commands of the README's section, with kubeconfigs instead of contexts.
func (s *advanceScenario) runReadme() {
	s.t.Helper()
	root, err := binaries.Root()
	expect.NoError(s.t, err)
	readme, err := os.ReadFile(filepath.Join(root, "broker/README.md"))
	expect.NoError(s.t, err)
	_, section, found := strings.Cut(string(readme), "\n## Reserve in advance\n")
	_, section, fenced := strings.Cut(section, "```sh\n")
	script, _, closed := strings.Cut(section, "```")
	if !found || !fenced || !closed {
		s.t.Fatal("broker/README.md has no commands in section Reserve in advance")
	}
	script = strings.NewReplacer(
		"kubectl config use-context kind-rome\n", "",
		"--context kind-hub", "--kubeconfig "+s.p.Cluster(environment.Hub).Kubeconfig,
	).Replace(script)
	program, err := binaries.Program(s.t.Context(), "kubectl", s.t.Logf)
	expect.NoError(s.t, err)
	s.t.Cleanup(func() { // gone unless a command failed
		_ = s.rome.Delete(context.Background(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "early"}})
		_ = s.rome.Delete(context.Background(), &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "warm"}})
		_ = s.hub.Delete(context.Background(), &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "for-rome"}})
	})
	ctx, cancel := context.WithTimeout(s.t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-eu")
	cmd.Dir, cmd.Stdin, cmd.WaitDelay = root, strings.NewReader(script), time.Second
	cmd.Env = append(os.Environ(), "KUBECONFIG="+s.p.Cluster("rome").Kubeconfig, "PATH="+filepath.Dir(program)+":"+os.Getenv("PATH"),
		"IMAGE=app", "HOME="+s.t.TempDir()) // kubectl caches what a port serves
	out, err := cmd.CombinedOutput()
	s.t.Logf("%s", out)
	expect.NoError(s.t, err)
	for _, want := range []string{broker.VirtualNodeName("paris"), "1 pod, cpu 900m of 1,"} {
		if !strings.Contains(string(out), want) {
			s.t.Errorf("no %q in the output", want)
		}
	}
}
