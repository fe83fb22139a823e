package hold_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTotals: the placeholders of a divisible total request together what no guest uses of it,
// while it grows, guests come and go, and local pods take a part of it.
func TestTotals(t *testing.T) {
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.hold("t1", "rome", 1, total(expect.Resources("cpu", "1", "memory", "128Mi")))
	e.held("t1", 1, verdict.ReasonAccepted, "Holding cpu 1, memory 128Mi for consumer rome.")

	w := e.watchParts()
	w.shows("cpu 1, memory 128Mi")
	w.changed("a hold", 1, 0)
	e.hold("t1", "rome", 2, total(expect.Resources("cpu", "1300m", "memory", "128Mi")))
	e.held("t1", 2, verdict.ReasonAccepted, "Holding cpu 1300m, memory 128Mi for consumer rome.")
	e.proven("t1")
	w.shows("cpu 1, memory 128Mi; cpu 300m")
	w.changed("growth", 1, 0)

	waits := func(s *corev1.PodSpec) {
		s.PriorityClassName = guest.PriorityClass
		s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	w.neverMoreThan("cpu", "1300m", "memory", "128Mi")
	e.pod("guests-of-rome", "g1", "900m", waits)
	e.eventuallyBound("guests-of-rome", 1)
	w.shows("cpu 100m, memory 128Mi; cpu 300m")
	w.changed("a guest that uses 900m of 1 CPU", 1, 1)
	e.pod("guests-of-rome", "g2", "400m", waits)
	e.eventuallyBound("guests-of-rome", 2)
	w.shows("memory 128Mi")
	w.changed("a guest that uses two parts", 1, 2)
	expect.NoError(t, e.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "g2", Namespace: "guests-of-rome"}}))
	w.shows("cpu 400m; memory 128Mi")
	w.changed("a guest that ends", 1, 0)
	w.stop()

	// Of 2 CPUs, the guest uses 900m and this pod as much.
	e.pod(namespace, "local", "900m", func(s *corev1.PodSpec) { s.NodeName = "a" })
	e.held("t1", 2, verdict.ReasonCapacityLost, "Holding only cpu 1100m, memory 128Mi: Insufficient cpu on the nodes without taints: requested 400m")
	e.hold("t1", "rome", 3, total(expect.Resources("cpu", "1100m", "memory", "128Mi")))
	e.held("t1", 3, verdict.ReasonCapacityLost, "Holding cpu 1100m, memory 128Mi for consumer rome. Guests beyond that must leave by ")
	e.proven("t1")
	e.parts("cpu 200m; memory 128Mi")

	// What remains of a part gets a place after the answer.
	e.hold("t1", "rome", 4, total(expect.Resources("cpu", "1050m", "memory", "128Mi")))
	e.held("t1", 4, verdict.ReasonCapacityLost, "Holding cpu 1050m, memory 128Mi for consumer rome.")
	e.proven("t1")
	e.parts("cpu 150m; memory 128Mi")
}

// held waits until an attempt is decided for a reason, with a message.
func (e *env) held(name string, attempt int64, reason, message string) {
	e.Helper()
	expect.Eventually(e, fmt.Sprintf("attempt %d of %s to be %s: %s", attempt, name, reason, message), func() (bool, string) {
		in, c := e.get(name)
		return in.Status.ObservedAttempt == attempt && c.ObservedGeneration == in.Generation && c.Reason == reason && strings.Contains(c.Message, message), fmt.Sprintf("%+v", in.Status)
	})
}

// proven waits until condition Proven is true.
func (e *env) proven(name string) {
	e.Helper()
	expect.Eventually(e, name+" to be proven", func() (bool, string) {
		in, _ := e.get(name)
		return meta.IsStatusConditionTrue(in.Status.Conditions, broker.ConditionProven), fmt.Sprintf("%+v", in.Status.Conditions)
	})
}

// parts waits until exactly these placeholders have a place.
func (e *env) parts(want string) {
	e.Helper()
	expect.Eventually(e, "placeholders of "+want, func() (bool, string) {
		var list corev1.PodList
		expect.NoError(e, e.List(e.Context(), &list, client.InNamespace(holds)))
		bound, sizes := 0, []string{}
		for i := range list.Items {
			sizes = append(sizes, sizeOf(&list.Items[i]))
			if list.Items[i].Spec.NodeName != "" {
				bound++
			}
		}
		slices.Sort(sizes)
		return bound == len(sizes) && strings.Join(sizes, "; ") == want, fmt.Sprintf("%d of %q have a place", bound, sizes)
	})
}

func sizeOf(pod *corev1.Pod) string {
	return broker.FromList(pod.Spec.Containers[0].Resources.Requests).String()
}

// partsWatch follows the pods, in the order in which they change.
type partsWatch struct {
	*env
	watch watch.Interface
	done  chan struct{}

	mu               sync.Mutex
	pods             map[types.UID]*corev1.Pod
	created, removed int
	most             capacity.Vector
	tooMuch          []string
}

func (e *env) watchParts() *partsWatch {
	e.Helper()
	watching, err := client.NewWithWatch(e.config, client.Options{Scheme: e.Scheme()})
	expect.NoError(e, err)
	pods, err := watching.Watch(e.Context(), &corev1.PodList{})
	expect.NoError(e, err)
	w := &partsWatch{env: e, watch: pods, done: make(chan struct{}), pods: map[types.UID]*corev1.Pod{}}
	go func() {
		defer close(w.done)
		for event := range pods.ResultChan() {
			if pod, ok := event.Object.(*corev1.Pod); ok {
				w.observe(event.Type, pod)
			}
		}
	}()
	e.Cleanup(pods.Stop)
	return w
}

func (w *partsWatch) observe(event watch.EventType, pod *corev1.Pod) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch event {
	case watch.Deleted:
		delete(w.pods, pod.UID)
		if pod.Namespace == holds {
			w.removed++
		}
	default:
		if w.pods[pod.UID] == nil && pod.Namespace == holds {
			w.created++
		}
		w.pods[pod.UID] = pod
	}
	if w.most == nil {
		return
	}
	sum := capacity.Vector{}
	for _, pod := range w.pods {
		if pod.Namespace == holds || pod.Namespace == "guests-of-rome" && pod.Spec.NodeName != "" {
			sum.Add(capacity.Ceil(pod.Spec.Containers[0].Resources.Requests), 1)
		}
	}
	if sum.FitsIn(w.most) == 0 {
		w.tooMuch = append(w.tooMuch, fmt.Sprintf("%s of %s: %s", event, pod.Name, broker.FromList(sum.List())))
	}
}

// neverMoreThan is what placeholders and guests with a node may request together from now on.
func (w *partsWatch) neverMoreThan(pairs ...string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.most = capacity.Floor(expect.Resources(pairs...))
}

// shows waits until exactly these placeholders have a place.
func (w *partsWatch) shows(want string) {
	w.Helper()
	expect.Eventually(w, "placeholders of "+want, func() (bool, string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		bound, sizes := 0, []string{}
		for _, pod := range w.pods {
			if pod.Namespace == holds {
				sizes = append(sizes, sizeOf(pod))
				if pod.Spec.NodeName != "" {
					bound++
				}
			}
		}
		slices.Sort(sizes)
		return bound == len(sizes) && strings.Join(sizes, "; ") == want, fmt.Sprintf("%d of %q have a place", bound, sizes)
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.tooMuch) > 0 {
		w.Fatalf("more than the total is held or used: %q", w.tooMuch)
	}
}

// changed expects how many placeholders were created and removed since it was called last.
func (w *partsWatch) changed(what string, created, removed int) {
	w.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.created != created || w.removed != removed {
		w.Errorf("%s: %d placeholders were created and %d removed, want %d and %d", what, w.created, w.removed, created, removed)
	}
	w.created, w.removed = 0, 0
}

func (w *partsWatch) stop() {
	w.watch.Stop()
	<-w.done
}
