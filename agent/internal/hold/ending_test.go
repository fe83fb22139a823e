package hold_test

import (
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// A consumer does not have more running than it is promised by deleting guests that terminate for
// long, and creating others.
func TestEndingGuestsCount(t *testing.T) {
	e := startPlaces(t, true)
	e.amd64("a", expect.Resources("cpu", "8", "memory", "8Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "500m"))))
	e.decided("r1", 1, verdict.ReasonAccepted, "", 2)
	for i, tc := range []struct {
		name  string
		first []string
		next  string
	}{
		{"of the held shape", []string{"500m", "500m"}, "500m"},
		{"of a smaller shape", []string{"400m", "300m"}, "500m"},
		{"then one of a smaller shape", []string{"500m", "500m"}, "300m"},
	} {
		if !t.Run(tc.name, func(t *testing.T) {
			in := *e
			in.T = t
			in.endingCount(fmt.Sprint("b", i), tc.first, tc.next)
		}) {
			return
		}
	}
}

// endingCount lets a guest come while the first ones, which are bound, are being deleted.
func (e *env) endingCount(other string, first []string, next string) {
	const guests = "guests-of-rome"
	waits := func(s *corev1.PodSpec) {
		s.PriorityClassName, s.TerminationGracePeriodSeconds = guest.PriorityClass, ptr.To[int64](3600)
		s.SchedulingGates = []corev1.PodSchedulingGate{{Name: broker.GateHandOver}}
	}
	var names []string
	for i, cpu := range first {
		names = append(names, fmt.Sprint("first-", i))
		e.pod(guests, names[i], cpu, waits)
	}
	e.eventuallyBound(guests, len(first))
	for _, name := range names {
		expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: name}}))
		e.known("that "+name+" is being deleted", func() error {
			pod := &corev1.Pod{}
			if err := e.cached.Get(e.Context(), client.ObjectKey{Namespace: guests, Name: name}, pod); err != nil || pod.DeletionTimestamp != nil {
				return err
			}
			return errors.New("it is not")
		})
	}
	e.pod(guests, "next", next, waits)
	e.known("the next guest", func() error {
		return e.cached.Get(e.Context(), client.ObjectKey{Namespace: guests, Name: "next"}, &corev1.Pod{})
	})
	// The agent goes on meanwhile.
	e.hold(other, "berlin", 1, pods(set("pods", 1, expect.Resources("cpu", "100m"))))
	e.decided(other, 1, verdict.ReasonAccepted, "", 1)
	if bound, _ := e.bound(guests); bound != len(first) {
		e.Errorf("%d guests have a node, which are more than the promise: those that are being deleted still run", bound)
	}
	for _, name := range names {
		expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: name}}, client.GracePeriodSeconds(0)))
	}
	e.eventuallyBound(guests, 1)
	expect.NoError(e, e.Delete(e.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: guests, Name: "next"}}, client.GracePeriodSeconds(0)))
	e.eventuallyBound(guests, 0)
}
