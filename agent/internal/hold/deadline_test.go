package hold_test

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// deadline is a provider whose broker waits 30 s for an answer, or does not say how long.
type deadline struct {
	*env
	agent    *hold.Reconciler
	trials   *trials
	recorded time.Time
}

// ask makes an attempt of a hold for rome, which is recorded now.
func (d *deadline) ask(name string, attempt int64, want broker.HeldCapacity, says bool) {
	d.Helper()
	if d.answerWithin = nil; says {
		d.answerWithin = &metav1.Duration{Duration: 30 * time.Second}
	}
	d.hold(name, "rome", attempt, want)
	// Places are not planned twice at once.
	d.recorded = d.clock.Now().Add(time.Second)
	d.at(0)
}

// at reconciles the holds at a time after the last attempt was recorded.
func (d *deadline) at(after time.Duration) {
	d.Helper()
	d.clock.SetTime(d.recorded.Add(after))
	reconciled(d.T, d.agent, "rome")
}

// bindOne lets the scheduler find a place for one placeholder more of a hold.
func (d *deadline) bindOne(name string) {
	d.Helper()
	var list corev1.PodList
	expect.NoError(d, d.List(d.Context(), &list, client.InNamespace(holds)))
	for i := range list.Items {
		if pod := &list.Items[i]; pod.Spec.NodeName == "" && pod.Annotations[broker.LabelHold] == name {
			expect.NoError(d, d.SubResource("binding").Create(d.Context(), pod, &corev1.Binding{Target: corev1.ObjectReference{Kind: "Node", Name: "a"}}))
			return
		}
	}
	d.Fatal("each placeholder has a place")
}

func (d *deadline) undecided(name string, attempt int64, when string) {
	d.Helper()
	if in, c := d.get(name); in.Status.ObservedAttempt == attempt {
		d.Errorf("attempt %d of %s is decided %s: %+v", attempt, name, when, c)
	}
}

// TestAnswersInTime: an attempt is accepted or refused, with the reason, before the broker stops
// waiting for the answer, whatever takes so long. Where an older broker does not say how long it
// waits, it takes as long as there is progress.
func TestAnswersInTime(t *testing.T) {
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	e.priorityClasses(guest.PriorityClass, placeholder.PriorityClass)
	expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: holds}}))
	d := &deadline{env: e, trials: &trials{Client: e.Client}}
	d.agent = e.agent(e.Client, func(o *hold.Options) {
		o.ProofTimeout = time.Minute
		o.GuestNamespaces, o.Placeholders = d.trials, placeholder.Options{Namespace: holds, Image: placeholder.DefaultImage}
		o.Recognizer.Placeholder = func(pod *corev1.Pod) (string, bool) { return placeholder.ConsumerOf(pod, holds) }
	})
	for _, step := range []struct {
		name string
		run  func(*deadline)
	}{
		{"an older broker", olderBroker},
		{"a scheduler that is slow", slowProof},
		{"guests that cannot be tried", lateTrial},
		{"a grant that is not in effect", lateGrant},
		{"attempts that wait for others", inQueue},
		{"attempts that wait for one that is refused", behindRefused},
	} {
		if !t.Run(step.name, func(t *testing.T) {
			in, on := *d, *e
			on.T, in.env = t, &on
			step.run(&in)
		}) {
			return
		}
	}
}

func (d *deadline) release(name string, attempt int64) {
	d.Helper()
	d.ask(name, attempt, broker.HeldCapacity{}, true)
	d.at(time.Second)
	d.decided(name, attempt, broker.ReasonReleased, "", 0)
	d.clock.SetTime(d.clock.Now().Add(time.Hour))
}

var fourPods = pods(set("pods", 4, expect.Resources("cpu", "1m")))

func olderBroker(d *deadline) {
	d.ask("r1", 1, fourPods, false)
	for i := range 4 {
		d.undecided("r1", 1, "before each has a place")
		d.bindOne("r1")
		d.at(time.Duration(i+1) * 15 * time.Second)
	}
	d.decided("r1", 1, verdict.ReasonAccepted, "Holding 4 pods", 4)
	d.release("r1", 2)
}

func slowProof(d *deadline) {
	d.ask("r2", 1, fourPods, true)
	for i := range 3 {
		d.bindOne("r2")
		d.at(time.Duration(i+1) * 8 * time.Second)
	}
	d.undecided("r2", 1, "early")
	d.at(25 * time.Second)
	d.decided("r2", 1, verdict.ReasonInsufficientCapacity, "The scheduler found a place for 3 of 4 pods of cpu 1m", 0)
	if _, c := d.get("r2"); c.Message != "The scheduler found a place for 3 of 4 pods of cpu 1m: the scheduler has not answered for the others; check that it runs. The broker waits 30s for an answer." {
		d.Errorf("the message is %q", c.Message)
	}
	// Another attempt has all of the time.
	d.ask("r2", 2, fourPods, true)
	d.at(10 * time.Second)
	d.undecided("r2", 2, "early")
	for range 4 {
		d.bindOne("r2")
	}
	d.at(24 * time.Second)
	d.decided("r2", 2, verdict.ReasonAccepted, "Holding 4 pods", 4)
	// Its time is over when it is decided on again: what changes has nothing to do with it.
	in, _ := d.get("r2")
	in.Spec.RequesterPeerKey = "another key"
	expect.NoError(d, d.Update(d.Context(), in))
	d.at(time.Minute)
	d.decided("r2", 2, verdict.ReasonAccepted, "Holding 4 pods", 4)
	d.release("r2", 3)
}

func lateTrial(d *deadline) {
	d.trials.waits = "the last one is being deleted"
	d.ask("r3", 1, pods(set("pods", 1, expect.Resources("cpu", "1m"))), true)
	d.at(15 * time.Second)
	d.at(23 * time.Second)
	d.bindOne("r3")
	d.at(24 * time.Second)
	d.undecided("r3", 1, "early")
	d.at(25 * time.Second)
	d.decided("r3", 1, verdict.ReasonGuestNotAdmitted, "It is not known whether the API server admits pods of cpu 1m: the last one is being deleted.", 0)
	d.trials.waits = ""
	d.release("r3", 2)
}

func lateGrant(d *deadline) {
	d.ask("r4", 1, pods(set("pods", 1, expect.Resources("cpu", "1m"))), true)
	d.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	d.bindOne("r4")
	d.at(time.Second)
	d.at(24 * time.Second)
	d.undecided("r4", 1, "early")
	d.at(25 * time.Second)
	// What is granted may be used, until less is.
	d.undecided("r4", 1, "before the smaller grant is in effect")
	if _, all := d.bound(holds); all != 0 {
		d.Errorf("%d placeholders remain", all)
	}
	d.provider.Free("EnsureGrant")
	d.at(27 * time.Second)
	d.decided("r4", 1, verdict.ReasonGrantTimeout, "The grant is not in effect in time. The broker waits 30s for an answer.", 0)
	d.granted("rome", "nothing", 0)
	d.release("r4", 2)
}

// The broker waits longer for the others while answers come.
func inQueue(d *deadline) {
	one := pods(set("pods", 1, expect.Resources("cpu", "1m")))
	d.ask("r5", 1, one, true)
	d.hold("r6", "rome", 1, one)
	d.at(time.Second)
	d.bindOne("r5")
	d.at(10 * time.Second)
	d.decided("r5", 1, verdict.ReasonAccepted, "", 1)
	d.at(34 * time.Second)
	d.undecided("r6", 1, "although another one was answered meanwhile")
	d.at(36 * time.Second)
	d.decided("r6", 1, verdict.ReasonInsufficientCapacity, "The broker waits 30s for an answer.", 0)
}

// The broker waits longer for the others when one is refused, too, also for those that are known
// since the same moment: a slow scheduler has not refused what it has not come to.
func behindRefused(d *deadline) {
	d.release("r5", 2)
	d.answerWithin = &metav1.Duration{Duration: 30 * time.Second}
	d.hold("r8", "rome", 1, pods(set("pods", 1, expect.Resources("cpu", "1m"))))
	d.ask("r7", 1, fourPods, true)
	d.bindOne("r7")
	d.at(24 * time.Second)
	d.undecided("r7", 1, "early")
	d.at(25 * time.Second)
	first, second := "r7", "r8"
	if in, _ := d.get(first); in.Status.ObservedAttempt != 1 {
		first, second = second, first
	}
	d.decided(first, 1, verdict.ReasonInsufficientCapacity, "The broker waits 30s for an answer.", 0)
	d.undecided(second, 1, "with the one before it")
	d.at(48 * time.Second)
	d.undecided(second, 1, "although another one was answered meanwhile")
	d.at(51 * time.Second)
	d.decided(second, 1, verdict.ReasonInsufficientCapacity, "The broker waits 30s for an answer.", 0)
}
