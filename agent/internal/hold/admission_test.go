package hold_test

import (
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/hold"
	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestAnswerOf(t *testing.T) {
	forbidden := func(words string) error {
		return apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "p", errors.New(words))
	}
	// As the API server answers where a webhook denies without a code.
	denied := func(words string) error {
		return &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusBadRequest, Message: words}}
	}
	for what, test := range map[string]struct {
		err  error
		want string
	}{
		"no error":                   {nil, "admitted"},
		"over the grant's quota":     {forbidden("exceeded quota: spillway-guests, requested: pods=1, used: pods=1, limited: pods=1"), "admitted"},
		"the quota is not counted":   {forbidden("status unknown for quota: spillway-guests, resources: pods"), "admitted"},
		"there is no LimitRange":     {forbidden("failed quota: spillway-guests: must specify limits.memory for: c"), "admitted"},
		"not granted yet":            {forbidden("a guest may only request resources that are granted to its cluster: remove the others from its requests"), "not granted"},
		"another is not counted":     {forbidden("status unknown for quota: team, resources: pods"), "undecided"},
		"over another quota":         {forbidden("exceeded quota: team, requested: pods=1, used: pods=1, limited: pods=1"), "not admitted"},
		"denied without a reason":    {denied(`admission webhook "w.example.com" denied the request: no`), "not admitted"},
		"Pod Security":               {forbidden(`violates PodSecurity "restricted:latest"`), "not admitted"},
		"invalid":                    {apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "p", nil), "not admitted"},
		"webhook without dry run":    {apierrors.NewBadRequest(`admission webhook "w.example.com" does not support dry run`), "untriable"},
		"role not there yet":         {forbidden(`User "agent" cannot create resource "pods" in API group "" in the namespace "n"`), "undecided"},
		"ServiceAccount not there":   {forbidden(`error looking up service account n/default: serviceaccount "default" not found`), "undecided"},
		"namespace being terminated": {forbidden("unable to create new content in namespace n because it is being terminated"), "undecided"},
		"policy without parameters":  {forbidden("no params found for policy binding with `Deny` parameterNotFoundAction"), "undecided"},
		"namespace gone":             {apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "n"), "undecided"},
		"bad request":                {apierrors.NewBadRequest("the body is not JSON"), "failed"},
		"API server away":            {errors.New("connection refused"), "failed"},
	} {
		if got := hold.AnswerOf(test.err); got != test.want {
			t.Errorf("%s: got %q, want %q", what, got, test.want)
		}
	}
}

// limited makes a namespace admit no container of less than 10m CPU, until lift is called.
func (e *env) limited(namespace string) (lift func()) {
	e.Helper()
	return e.limitedBy(namespace, corev1.LimitRangeItem{Min: expect.Resources("cpu", "10m")}, expect.Resources("cpu", "1m"))
}

// limitedBy limits the containers of a namespace, so that it admits none with these requests.
func (e *env) limitedBy(namespace string, item corev1.LimitRangeItem, refused corev1.ResourceList) (lift func()) {
	e.Helper()
	item.Type = corev1.LimitTypeContainer
	limits := &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Name: "small", Namespace: namespace}, Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{item}}}
	try := func() error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: namespace}, Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: refused}}},
		}}
		return e.Create(e.Context(), pod, client.DryRunAll)
	}
	expect.NoError(e, e.Create(e.Context(), limits))
	expect.Eventually(e, "the limit to be in effect", func() (bool, string) {
		err := try()
		return err != nil, fmt.Sprint(err)
	})
	return func() {
		e.Helper()
		expect.NoError(e, e.Delete(e.Context(), limits))
		expect.Eventually(e, "the limit to be gone", func() (bool, string) {
			err := try()
			return err == nil, fmt.Sprint(err)
		})
	}
}

// admitting is an environment with a namespace for guests, where they are tried.
func admitting(t *testing.T) *env {
	t.Helper()
	e := direct(t)
	e.node("a", expect.Resources("cpu", "2", "memory", "8Gi"))
	guests := "guests-of-rome"
	expect.NoError(t, e.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guests}}))
	expect.NoError(t, e.Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default", Namespace: guests}}))
	e.priorityClasses(guest.PriorityClass)
	e.guestNamespaces = []string{guests}
	return e
}

// TestDefaultLimits: a container without a memory limit gets the default one of the
// namespace, which may be below what it requests. Guests have a limit of their own.
func TestDefaultLimits(t *testing.T) {
	e := admitting(t)
	e.limitedBy(e.guestNamespaces[0], corev1.LimitRangeItem{Default: expect.Resources("memory", "256Mi")}, expect.Resources("memory", "1Gi"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1m", "memory", "1Gi"))))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("r1", 1, verdict.ReasonAccepted, "Holding 2 pods", 2)
}

// TestPodSecurity: a provider of Pod Security Standard restricted refuses pods that do not
// comply, and names the fields; of baseline, it accepts them. The other standard of the
// namespace, which an administrator has set there, refuses them in the API server's words.
func TestPodSecurity(t *testing.T) {
	e := admitting(t)
	root, complying := set("pods", 2, expect.Resources("cpu", "1m")), set("pods", 2, expect.Resources("cpu", "1m"))
	root.PodSecurity, complying.PodSecurity = broker.PodSecurityBaseline, broker.PodSecurityRestricted

	e.lending.PodSecurity = broker.PodSecurityRestricted
	e.hold("root", "rome", 1, pods(root))
	e.hold("complying", "rome", 1, pods(complying))
	e.hold("unknown", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1m"))))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("root", 1, capacity.ReasonPodSecurityViolated, "set runAsNonRoot to true, allowPrivilegeEscalation to false, capabilities.drop to [ALL] and seccompProfile.type to RuntimeDefault", 0)
	e.decided("root", 1, capacity.ReasonPodSecurityViolated, "guests.podSecurity to baseline", 0)
	e.decided("complying", 1, verdict.ReasonAccepted, "Holding 2 pods", 2)
	e.decided("unknown", 1, verdict.ReasonAccepted, "Holding 2 pods", 2)

	e.lending.PodSecurity = broker.PodSecurityBaseline
	e.hold("root", "rome", 2, pods(root))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("root", 2, verdict.ReasonAccepted, "Holding 2 pods", 2)

	namespace := &corev1.Namespace{}
	expect.NoError(t, e.Get(t.Context(), client.ObjectKey{Name: e.guestNamespaces[0]}, namespace))
	namespace.Labels = map[string]string{broker.LabelGuestsOf: "rome", "pod-security.kubernetes.io/enforce": "restricted"}
	expect.NoError(t, e.Update(t.Context(), namespace))
	expect.Eventually(t, "the standard of the namespace to be in effect", func() (bool, string) {
		err := e.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: namespace.Name}, Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "c", Image: "i"}},
		}}, client.DryRunAll)
		return err != nil, fmt.Sprint(err)
	})
	e.hold("another", "rome", 1, pods(root))
	e.hold("another-complying", "rome", 1, pods(complying))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("another", 1, verdict.ReasonGuestNotAdmitted, `violates PodSecurity "restricted:latest"`, 0)
	e.decided("another-complying", 1, verdict.ReasonAccepted, "Holding 2 pods", 2)
}

// TestTotalNotAdmitted: pods of a total may be of any size. It is refused where the API server
// admits none of several.
func TestTotalNotAdmitted(t *testing.T) {
	e := admitting(t)
	lift := e.limitedBy(e.guestNamespaces[0], corev1.LimitRangeItem{Min: expect.Resources("cpu", "100m"), Max: expect.Resources("cpu", "300m")}, expect.Resources("cpu", "1m"))
	accepted := func(name string, attempt int64) {
		t.Helper()
		in, c := e.get(name)
		if in.Status.ObservedAttempt != attempt || c.Reason != verdict.ReasonAccepted {
			t.Errorf("%s is not accepted: %+v", name, in.Status)
		}
	}
	e.hold("small", "rome", 1, total(expect.Resources("cpu", "90m")))
	e.hold("whole", "rome", 1, total(expect.Resources("cpu", "110m")))
	e.hold("part", "rome", 1, total(expect.Resources("cpu", "1")))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("small", 1, verdict.ReasonGuestNotAdmitted, "The API server does not admit pods of any part of cpu 90m: ", 0)
	e.decided("small", 1, verdict.ReasonGuestNotAdmitted, "minimum cpu usage per Container is 100m", 0)
	accepted("whole", 1)
	accepted("part", 1)
	lift()
	e.hold("small", "rome", 2, total(expect.Resources("cpu", "90m")))
	reconciled(t, e.agent(e.Client), "rome")
	accepted("small", 2)
}

// TestNotAdmittedAfterRestart: a hold that was recorded before the agent restarted, and whose
// guests the API server does not admit, is given up.
func TestNotAdmittedAfterRestart(t *testing.T) {
	e := admitting(t)
	e.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	e.hold("r1", "rome", 1, pods(set("pods", 2, expect.Resources("cpu", "1m"))))
	reconciled(t, e.agent(e.Client), "rome")
	if in, c := e.get("r1"); c.Reason != verdict.ReasonGrantPending || in.Status.Held == nil {
		t.Fatalf("the hold is not recorded: %+v", in.Status)
	}
	e.provider.Free("EnsureGrant")
	e.limited(e.guestNamespaces[0])
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("r1", 1, verdict.ReasonGuestNotAdmitted, "minimum cpu usage per Container is 10m", 0)
	e.granted("rome", "nothing", 0)
}

// TestGrowthNotAdmittedAfterRestart: of a larger hold that was recorded before the agent
// restarted, what was accepted before stays. If not even that can be held any more, guests
// have the time to leave; it ends with a hold that is accepted again.
func TestGrowthNotAdmittedAfterRestart(t *testing.T) {
	e := admitting(t)
	small := expect.Resources("cpu", "1m")
	e.hold("r1", "rome", 1, pods(set("pods", 2, small)))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("r1", 1, verdict.ReasonAccepted, "Holding 2 pods", 2)

	e.provider.Hold("EnsureGrant", peering.Waiting("QuotaPending", "waiting for the quota"))
	e.hold("r1", "rome", 2, pods(set("pods", 4, small)))
	reconciled(t, e.agent(e.Client), "rome")
	if in, c := e.get("r1"); c.Reason != verdict.ReasonGrantPending || in.Status.Held.Pods() != 4 {
		t.Fatalf("the larger hold is not recorded: %+v", in.Status)
	}
	e.provider.Free("EnsureGrant")
	lift := e.limited(e.guestNamespaces[0])
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("r1", 2, verdict.ReasonGuestNotAdmitted, "minimum cpu usage per Container is 10m", 2)
	e.granted("rome", "cpu 2m", 2)
	if in, _ := e.get("r1"); in.Status.LeaveBy != nil || in.Status.Accepted != nil {
		t.Errorf("nothing is withdrawn: %+v", in.Status)
	}

	e.clock.SetTime(e.clock.Now().Add(time.Hour))
	e.hold("r1", "rome", 3, pods(set("pods", 2, small)))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("r1", 3, verdict.ReasonGuestNotAdmitted, "Guests beyond that must leave by ", 0)
	if in, _ := e.get("r1"); in.Status.LeaveBy == nil || in.Status.LeaveBy.Sub(e.clock.Now()).Round(time.Minute) != 10*time.Minute {
		t.Errorf("guests must leave by %v, at %s", in.Status.LeaveBy, e.clock.Now())
	}
	lift()
	e.hold("r1", "rome", 4, pods(set("pods", 2, small)))
	reconciled(t, e.agent(e.Client), "rome")
	e.decided("r1", 4, verdict.ReasonAccepted, "Holding 2 pods of cpu 1m for consumer rome.", 2)
	if in, _ := e.get("r1"); in.Status.LeaveBy != nil {
		t.Errorf("no guest must leave any more: %v", in.Status.LeaveBy)
	}
}
