package scenarios_test

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// leaveWithin is the time to leave that berlin gives. All that is asserted also holds if a
// busy machine takes longer for something else.
const leaveWithin = 45 * time.Second

// door is a port of this machine that refuses connections until it is opened.
type door struct {
	fd      int
	address string
	close   func() error
}

func newDoor(t *testing.T) *door {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	expect.NoError(t, err)
	// It is bound, so that nothing else gets it, and does not listen.
	expect.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	name, err := syscall.Getsockname(fd)
	expect.NoError(t, err)
	d := &door{fd, fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port), func() error { return syscall.Close(fd) }}
	t.Cleanup(func() { _ = d.close() })
	return d
}

// open makes the door lead to an address.
func (d *door) open(t *testing.T, to string) {
	t.Helper()
	expect.NoError(t, syscall.Listen(d.fd, 64))
	file := os.NewFile(uintptr(d.fd), d.address)
	listener, err := net.FileListener(file)
	expect.NoError(t, errors.Join(err, file.Close()))
	d.close = listener.Close
	go func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer from.Close()
				onward, err := net.Dial("tcp", to)
				if err != nil {
					return
				}
				defer onward.Close()
				go func() {
					_, _ = io.Copy(onward, from)
					_ = onward.Close()
				}()
				_, _ = io.Copy(from, onward)
			}()
		}
	}()
}

// openParis makes paris reachable, without room for pods at first.
func (s *playgroundTest) openParis() {
	s.t.Helper()
	s.cordon("paris", "paris-1", true)
	s.advertised("paris", "no node", func(ad *broker.ClusterAdvertisement) bool { return len(ad.Spec.NodeClasses) == 0 })
	s.door.open(s.t, strings.TrimPrefix(s.p.Cluster("paris").Endpoint, "https://"))
}

// guests are the running guests of rome on a node of berlin, by the names of their pods.
func (s *playgroundTest) guests(node string) map[string]corev1.Pod {
	s.t.Helper()
	var list corev1.PodList
	expect.NoError(s.t, s.berlin.List(s.t.Context(), &list, client.InNamespace(broker.GuestNamespace("rome"))))
	out := map[string]corev1.Pod{}
	for _, guest := range list.Items {
		if guest.Spec.NodeName == node && guest.Status.Phase == corev1.PodRunning {
			out[guest.Annotations[broker.Group+"/origin-name"]] = guest
		}
	}
	return out
}

// web are the pods of Deployment web in rome, by name.
func (s *playgroundTest) web() map[string]corev1.Pod {
	s.t.Helper()
	var list corev1.PodList
	expect.NoError(s.t, s.rome.List(s.t.Context(), &list, client.InNamespace("shop"), client.MatchingLabels{"app": "web"}))
	out := map[string]corev1.Pod{}
	for _, pod := range list.Items {
		out[pod.Name] = pod
	}
	return out
}

// runWeb runs five pods of rome on two nodes of berlin, three of them beside pod plain and
// a pod of berlin on berlin-amd-1.
func (s *playgroundTest) runWeb() {
	s.t.Helper()
	ctx := s.t.Context()
	local := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "local", Name: "stays"}, Spec: specOf("100m", func(spec *corev1.PodSpec) {
		spec.NodeSelector = map[string]string{corev1.LabelHostname: "berlin-amd-1"}
	})}
	expect.NoError(s.t, s.berlin.Create(ctx, local))
	expect.NoError(s.t, s.p.Cluster("berlin").AddNodes(ctx, "berlin-more", 1, expect.Resources("cpu", "2600m", "memory", "8Gi"), nil))
	expect.NoError(s.t, s.rome.Create(ctx, deploymentOf("shop", "web", 5, "1", nil)))
	s.eventually("five pods run on two nodes of berlin", func() error {
		one, two := len(s.guests("berlin-amd-1")), len(s.guests("berlin-more-1"))
		if one != 4 || two != 2 {
			return fmt.Errorf("%d guests on the first node, %d on the second", one, two)
		}
		return nil
	})
}

// withdraw has an administrator of berlin cordon a node with guests. The provider says what it
// holds and by when the rest must go; those that must go move to paris as far as there is room,
// and at the deadline the rest has left. All others stay.
func (s *playgroundTest) withdraw() {
	s.t.Helper()
	leave, stay := s.guests("berlin-amd-1"), s.guests("berlin-more-1")
	maps.Copy(stay, s.guests("berlin-gpu-1"))
	stay["plain"] = leave["plain"]
	delete(leave, "plain")
	before := s.web()
	s.cordon("berlin", "berlin-amd-1", true)
	leaveBy := s.saysWhatItHolds()
	s.marked(leave, before, leaveBy)
	s.cordon("paris", "paris-1", false)
	s.eventually("two pods run in paris, two in berlin, and one waits", func() error {
		state := map[string]int{}
		for name, pod := range s.web() {
			state[fmt.Sprintf("%s on %q", pod.Status.Phase, pod.Spec.NodeName)]++
			if _, goes := leave[name]; goes {
				return fmt.Errorf("pod %s has not left", name)
			}
		}
		if want := map[string]int{`Running on "spillway-paris"`: 2, `Running on "spillway-berlin"`: 2, `Pending on ""`: 1}; !maps.Equal(state, want) {
			return fmt.Errorf("%v", state)
		}
		return nil
	})
	s.stayed(stay)
	var events corev1.EventList
	expect.NoError(s.t, s.rome.List(s.t.Context(), &events, client.InNamespace("shop")))
	for _, e := range events.Items {
		if e.Reason == "EvictedFromVirtualNode" {
			s.t.Logf("pod %s: %s", e.InvolvedObject.Name, e.Message)
		}
	}
}

// marked waits until the pods that must leave are marked. On a busy machine, one may have left
// without it once the time to leave is over, and none before.
func (s *playgroundTest) marked(leave, before map[string]corev1.Pod, leaveBy time.Time) {
	s.t.Helper()
	seen := map[string]bool{}
	s.eventually("the pods on the cordoned node are marked", func() error {
		pods := s.web()
		for name, pod := range pods {
			if slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
				return c.Type == broker.PodMustLeave && c.Status == corev1.ConditionTrue
			}) {
				seen[name] = true
			}
		}
		var missing []string
		for name := range leave {
			if seen[name] {
				continue
			}
			missing = append(missing, name)
			if now := pods[name]; now.UID != before[name].UID || now.DeletionTimestamp != nil {
				// Both sides round to seconds.
				if over := time.Now(); over.Before(leaveBy.Add(-2 * time.Second)) {
					s.t.Fatalf("pod %s has left without a mark at %s, and had time until %s", name, over.UTC(), leaveBy.UTC())
				}
				s.t.Logf("the machine is busy: the time of pod %s is over", name)
				return nil
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("%v are not marked", missing)
		}
		return nil
	})
	for name := range seen {
		if _, goes := leave[name]; !goes {
			s.t.Errorf("pod %s is marked and its guest is on another node", name)
		}
	}
}

// saysWhatItHolds waits until one line of berlin's instructions says what it holds and by when
// the rest must go, which it returns.
func (s *playgroundTest) saysWhatItHolds() (leaveBy time.Time) {
	s.t.Helper()
	s.eventually("berlin says what it holds", func() error {
		var list broker.ProviderInstructionList
		if err := s.berlin.List(s.t.Context(), &list, client.InNamespace(environment.Namespace)); err != nil {
			return err
		}
		var seen []string
		for _, in := range list.Items {
			c := meta.FindStatusCondition(in.Status.Conditions, broker.ConditionEnforced)
			if c == nil {
				continue
			}
			if by := in.Status.LeaveBy; by != nil && c.Reason == "CapacityLost" && in.Status.Enforced && in.Status.Held != nil && in.Status.Held.Pods() == 2 &&
				strings.Contains(c.Message, "2 pods of cpu 1") && strings.Contains(c.Message, "Guests beyond that must leave by "+by.UTC().Format(time.RFC3339)) {
				s.t.Logf("berlin: %s", c.Message)
				leaveBy = by.Time
				return nil
			}
			seen = append(seen, c.Reason+": "+c.Message)
		}
		return fmt.Errorf("%q", seen)
	})
	return leaveBy
}

// stayed expects that guests and the pod of berlin on the cordoned node run as before.
func (s *playgroundTest) stayed(guests map[string]corev1.Pod) {
	s.t.Helper()
	for name, guest := range guests {
		now := &corev1.Pod{}
		expect.NoError(s.t, s.berlin.Get(s.t.Context(), client.ObjectKeyFromObject(&guest), now))
		if now.UID != guest.UID || now.Status.Phase != corev1.PodRunning || now.DeletionTimestamp != nil {
			s.t.Errorf("the guest of pod %s did not stay: %+v", name, now.Status)
		}
		if slices.ContainsFunc(now.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == broker.PodMustLeave }) {
			s.t.Errorf("the guest of pod %s is marked", name)
		}
	}
	local := &corev1.Pod{}
	expect.NoError(s.t, s.berlin.Get(s.t.Context(), client.ObjectKey{Namespace: "local", Name: "stays"}, local))
	if local.Spec.NodeName != "berlin-amd-1" || local.Status.Phase != corev1.PodRunning {
		s.t.Errorf("the pod of berlin is %s on %q", local.Status.Phase, local.Spec.NodeName)
	}
	if len(guests) != 2+1+1+heldPods {
		s.t.Errorf("%d guests stayed", len(guests))
	}
}
