package reservation_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
	"github.com/spillway-dev/spillway/broker/internal/decide"
	"github.com/spillway-dev/spillway/broker/internal/reservation"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

func TestReservations(t *testing.T) {
	ctrl.SetLogger(logr.Discard())
	config := controlplane.Start(t)
	for name, test := range map[string]func(*env){
		"Explain":               explain,
		"Rehearsed":             rehearsed,
		"LastCapacity":          lastCapacity,
		"AuditLog":              auditLog,
		"Crash":                 func(e *env) { crash(e) },
		"CrashOfFirstAttempt":   func(e *env) { crash(e, createdByBroker) },
		"Refusal":               refusal,
		"Withdrawal":            withdrawal,
		"WithdrawalAndReport":   func(e *env) { withdrawalAndReport(e, 2) },
		"WithdrawalWhileQueued": func(e *env) { withdrawalAndReport(e, 3) },
		"Unusable":              unusable,
		"UnusableMoves":         unusableMoves,
		"Release":               release,
		"GrowAndShrink":         growAndShrink,
		"RefusedGrowth":         refusedGrowth,
		"Split":                 split,
		"Spread":                spread,
		"ShrinkKeeps":           shrinkKeeps,
		"Queue":                 queue,
		"Restart":               restart,
		"Sweep":                 sweep,
		"Expiry":                expiry,
		"Impossible":            impossible,
		"StaleAcks":             staleAcks,
		"AcksOfNamesake":        acksOfNamesake,
		"SilentProvider":        silentProvider,
		"LostProvider":          lostProvider,
		"NoAnswer":              noAnswer,
		"NoAnswerToGrowth":      noAnswerToGrowth,
		"StoreUnchanged":        storeUnchanged,
		"NextBrokerWaits":       nextBrokerWaits,
		"AccountLeftToWrite":    accountLeftToWrite,
		"HoldOfAnotherAttempt":  holdOfAnotherAttempt,
		"OutdatedAdvertisement": outdatedAdvertisement,
		"Renewal":               renewal,
		"ConfigOfPlaced":        configOfPlaced,
		"ForgottenCluster":      forgottenCluster,
		"RevokedCluster":        revokedCluster,
		"AdvertisedByHand":      advertisedByHand,
		"ExpiredInvitation":     expiredInvitation,
		"UnregisteredCluster":   unregisteredCluster,
		"Validation":            validation,
		"Writes":                writes,
		"RefusingProvider":      refusingProvider,
		"GroupCommit":           groupCommit,
		"FullLedger":            fullLedger,
		"UnwritableLedger":      unwritableLedger,
		"LargeAdvertisement":    largeAdvertisement,
		"WrittenByAnother":      writtenByAnother,
		"Unreachable":           unreachable,
		"KeptByAnother":         keptByAnother,
		"AuditOfLostAnswers":    auditOfLostAnswers,
		"Columns":               columns,
	} {
		t.Run(name, func(t *testing.T) { test(newEnv(t, config)) })
	}
}

// What a consumer advertises moves its hold away from a provider that it cannot connect to,
// and the provider releases it.
func unreachable(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2)
	e.expectPods("paris", "r", 2, 0, 0)
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	p.advertise(e.spec("berlin", "1"))
	rome := e.spec("rome", "0")
	rome.Unreachable = []string{"paris"}
	p.advertise(rome)
	e.expectPods("berlin", "r", 2, 0, 0)
	e.expectPods("paris", "r", 2, 0, 2)
	p.answer("berlin", "r", true, "")
	e.expectPods("paris", "r", 0, 2, 0)
	p.answer("paris", "r", true, "")
	e.eventually("paris to have no hold", func() error {
		if hold := e.hold("paris", "r"); hold != nil {
			return fmt.Errorf("it holds %+v", hold)
		}
		return nil
	})
}

// Two brokers that are both leaders race for the last capacity.
func lastCapacity(e *env) {
	const requests, capacity = 8, 3
	one, two := e.start(nil), e.start(nil)
	one.advertise(e.spec("paris", "300m"))
	two.advertise(e.spec("paris", "300m"))
	for i := range requests {
		e.request(fmt.Sprint("r", i), 1)
	}
	e.eventually("every Reservation to be placed or queued", func() error {
		placed, queued := 0, 0
		for i := range requests {
			r := e.get(fmt.Sprint("r", i))
			if len(r.Status.Allocations) == 1 {
				placed++
			} else if meta.IsStatusConditionTrue(r.Status.Conditions, broker.ConditionQueued) {
				queued++
			}
		}
		if placed != capacity || queued != requests-capacity {
			return fmt.Errorf("%d placed and %d queued", placed, queued)
		}
		return nil
	})
	status := e.ad("paris").Status
	if len(status.Holds) != capacity || !status.Available.CPU.IsZero() || status.Reserved.CPU.String() != "300m" {
		e.Errorf("paris has %d holds, reserved %s, available %s", len(status.Holds), status.Reserved, status.Available)
	}
}

// createdByBroker makes a Reservation one that the server has created for a cluster.
func createdByBroker(r *broker.Reservation) {
	r.Labels = map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}
	r.Finalizers = []string{broker.FinalizerLedger}
}

// What was committed is in the audit log, also of a plan that was cut off half-way.
func auditLog(e *env) {
	killed := errors.New("killed")
	var writes atomic.Int32
	first := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if ad, ok := o.(*broker.ClusterAdvertisement); ok && len(ad.Status.Holds) > 0 && writes.Add(1) > 1 {
				return killed
			}
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	// The price is that of the nodes.
	priced := func(cluster string) broker.ClusterAdvertisementSpec {
		spec := e.spec(cluster, "200m")
		spec.NodeClasses[0].Cost, spec.Cost = spec.Cost, &broker.Cost{CPUCost: "9", Currency: "EUR"}
		return spec
	}
	for _, cluster := range []string{"paris", "berlin"} {
		first.advertise(priced(cluster))
	}
	e.request("r", 4, func(r *broker.Reservation) { r.Spec.Duration = &metav1.Duration{Duration: time.Hour} })
	e.eventually("the second ledger write", func() error {
		if n := writes.Load(); n < 2 {
			return fmt.Errorf("%d writes", n)
		}
		return nil
	})
	e.eventually("the first line", func() error {
		if n := e.audit.count("Promised capacity"); n != 1 {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
	first.stop()
	second := e.start(nil)
	for _, cluster := range []string{"paris", "berlin"} {
		second.advertise(priced(cluster))
	}
	expectLines := func(parts ...string) {
		e.eventually(fmt.Sprintf("one line of the audit log for each cluster with %q", parts), func() error {
			for _, cluster := range []string{"paris", "berlin"} {
				if n := e.audit.count(append(parts, fmt.Sprintf("\"cluster\"=%q", cluster))...); n != 1 {
					return fmt.Errorf("%d of %s in:\n%s", n, cluster, e.audit.String())
				}
			}
			return nil
		})
	}
	expectLines("Promised capacity", `"requester"="rome"`, `"reservation"="r"`, `"attempt"=`, `"capacity"="2 pods`, `"pricePerHour"="0.02 EUR"`)
	// The lease starts again until its length is announced.
	e.eventually("the status to announce the lease", func() error {
		if status := e.get("r").Status; status.LeaseDuration == nil || len(status.Allocations) != 2 {
			return fmt.Errorf("the status is %+v", status)
		}
		return nil
	})
	e.clock.Step(2 * time.Hour)
	e.touch("r")
	expectLines("Released capacity", `"left"="nothing"`, `"reason"="Expired"`)
}

// What was committed is in the audit log once, also if the broker got no answer to the write:
// placements, refusals, what providers give up, releases, and sweeps.
func auditOfLostAnswers(e *env) {
	var lose, lost atomic.Int32
	p := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			// It is chosen before the write: the watch may show that before its answer is here.
			_, ok := o.(*broker.ClusterAdvertisement)
			if ok = ok && lose.CompareAndSwap(1, 0); ok {
				lost.Add(1)
			}
			err := c.SubResource(sub).Update(ctx, o, opts...)
			switch {
			case !ok:
				return err
			case err != nil:
				lost.Add(-1)
				lose.Store(1)
				return err
			}
			return errors.New("the answer was lost")
		},
	})
	p.advertise(e.spec("paris", "200m"))
	e.eventually("paris to be active", func() error {
		if !e.ad("paris").Status.Active {
			return errors.New("it is not")
		}
		return nil
	})
	ack := func(name string, hold *broker.Hold) {
		ctx := log.IntoContext(e.Context(), e.audit.logger())
		err := p.ApplyProviderAck(ctx, "paris", name, protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Message: "full"})
		if err == nil {
			e.Errorf("the answer to the write for %s was not lost", name)
		}
	}
	lines := map[string]string{}
	expectLines := func(name, what, reason string) {
		e.Helper()
		lines[name+what+reason] = ""
		e.eventually("each line once", func() error {
			if n := e.audit.count(fmt.Sprintf("%q", what), fmt.Sprintf(`"reservation"=%q`, name), `"requester"="rome"`, `"cluster"="paris"`, reason); n != 1 {
				return fmt.Errorf("%d lines with %s of %s for %s in:\n%s", n, what, name, reason, e.audit.String())
			}
			if n := e.audit.count(); n != len(lines) {
				return fmt.Errorf("%d lines instead of %d:\n%s", n, len(lines), e.audit.String())
			}
			return nil
		})
	}
	lose.Store(1)
	e.request("refused", 1)
	e.expect("refused", broker.ReservationReserved, "1 of 1 pods in paris")
	expectLines("refused", "Promised capacity", `"capacity"="1 pod"`)
	lose.Store(1)
	ack("refused", e.hold("paris", "refused"))
	expectLines("refused", "Released capacity", `"reason"="ProviderRefused"`)
	expect.NoError(e, e.client.Delete(e.Context(), e.get("refused")))
	e.expectDeleted("refused")

	lose.Store(1)
	e.request("r", 2, func(r *broker.Reservation) { r.Spec.PodSets[0].Requests = cpu("50m") })
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	expectLines("r", "Promised capacity", `"capacity"="2 pods"`)
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	lose.Store(1)
	ack("r", e.hold("paris", "r"))
	expectLines("r", "Released capacity", `"reason"="ProviderGaveUp"`)
	expect.NoError(e, e.client.Delete(e.Context(), e.get("r")))
	e.expectDeleted("r")

	lose.Store(1)
	e.request("deleted", 1, func(r *broker.Reservation) { r.Spec.PodSets[0].Requests = cpu("10m") })
	e.expect("deleted", broker.ReservationReserved, "1 of 1 pods in paris")
	expectLines("deleted", "Promised capacity", `"capacity"="1 pod"`)
	lose.Store(1)
	expect.NoError(e, e.client.Delete(e.Context(), e.get("deleted")))
	expectLines("deleted", "Released capacity", `"reason"="Released"`)

	e.request("orphan", 1, func(r *broker.Reservation) { r.Spec.PodSets[0].Requests = cpu("20m") })
	e.expect("orphan", broker.ReservationReserved, "1 of 1 pods in paris")
	expectLines("orphan", "Promised capacity", `"capacity"="1 pod"`)
	lose.Store(1)
	e.eventually("the finalizer to be removed", func() error {
		r := e.get("orphan")
		r.Finalizers = nil
		if err := e.client.Update(e.Context(), r); err != nil {
			return err
		}
		return e.client.Delete(e.Context(), r, client.Preconditions{ResourceVersion: &r.ResourceVersion})
	})
	expectLines("orphan", "Released capacity", `"reason"="ReservationGone"`)
	if n := lost.Load(); n != 7 {
		e.Errorf("%d answers were lost", n)
	}
}

// A broker stops after it has written the ledger and before it writes the status.
func crash(e *env, change ...func(*broker.Reservation)) {
	var stopped atomic.Bool
	killed := errors.New("killed")
	first := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			if r, ok := o.(*broker.Reservation); ok && len(r.Status.Allocations) > 0 {
				stopped.Store(true)
			}
			if stopped.Load() {
				return killed
			}
			return c.SubResource(sub).Update(ctx, o, opts...)
		},
	})
	first.advertise(e.spec("paris", "1"))
	first.advertise(e.spec("berlin", "1"))
	e.request("r", 3, change...)
	e.eventually("the broker to stop", func() error {
		if !stopped.Load() {
			return errors.New("it is running")
		}
		return nil
	})
	got := e.get("r")
	recorded := got.Status.Attempt.Number == 1
	if len(change) > 0 {
		recorded = got.Status.Attempt.Number == 0 && got.Annotations[broker.AnnotationFirstAttempt] == "berlin"
	}
	if !recorded || len(got.Status.Allocations) != 0 {
		e.Fatalf("the broker did not stop between the ledger and the status: annotations %v, %+v", got.Annotations, got.Status)
	}
	first.stop()

	// The next one has no fresh advertisement, and needs none.
	e.start(nil)
	r := e.expect("r", broker.ReservationReserved, "3 of 3 pods in berlin")
	if r.Status.Attempt.Number != 1 {
		e.Errorf("the holds of attempt 1 were created again by attempt %d", r.Status.Attempt.Number)
	}
	e.expectPods("berlin", "r", 3, 0, 0)
	if e.hold("paris", "r") != nil {
		e.Error("there is a second hold in paris")
	}
}

func refusal(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("berlin", "2"))
	p.advertise(e.spec("paris", "1"))
	e.request("r", 3)
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in berlin")
	p.answer("berlin", "r", false, "node b1 is gone")
	r := e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	if got := rejection(r, "berlin"); got.Reason != decide.ReasonRefused || !strings.Contains(got.Message, "node b1 is gone") {
		e.Errorf("berlin was rejected with %+v", got)
	}
	if e.hold("berlin", "r") != nil {
		e.Error("the refused hold stayed")
	}
	p.answer("paris", "r", false, "no memory left")
	e.expectRejection("r", "paris", decide.ReasonRefused, "no memory left")
	// An advertisement alone changes nothing: each is asked again after a while.
	p.advertise(e.spec("paris", "1100m"))
	e.expectRejection("r", "paris", decide.ReasonRefused, "no memory left")
	e.clock.Step(31 * time.Second)
	e.touch("r")
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in berlin")
}

func release(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "300m"))
	e.request("first", 3)
	e.expect("first", broker.ReservationReserved, "3 of 3 pods in paris")
	p.answer("paris", "first", true, "")
	e.expectCondition("first", broker.ConditionProviderAccepted, true, "3 pods in paris")
	p.use("first", "paris")
	e.expect("first", broker.ReservationActive, "3 of 3 pods in paris")
	e.expectCondition("first", broker.ConditionReady, true, "can be used")

	e.request("second", 2)
	e.expectRejection("second", "paris", "", "0 of 2 pods")

	expect.NoError(e, e.client.Delete(e.Context(), e.get("first")))
	e.expectPods("paris", "first", 0, 3, 0)
	// The status says so once the release takes long.
	if got := e.get("first").Status; got.Phase != broker.ReservationActive {
		e.Errorf("the status was written at once: %s", got.Phase)
	}
	e.clock.Step(5 * time.Second)
	e.expect("first", broker.ReservationReleased, "released")
	e.expectCondition("first", broker.ConditionProviderReleased, false, "Waiting for paris to confirm the release.")
	// Another advertisement does not free what is not confirmed.
	p.advertise(e.spec("paris", "300m"))
	e.expectRejection("second", "paris", "", "Insufficient cpu: requested 100m, available 0")

	p.answer("paris", "first", true, "")
	e.expect("second", broker.ReservationReserved, "2 of 2 pods in paris")
	e.expectDeleted("first")
	if err := p.ApplyProviderAck(e.Context(), "paris", "first", protocol.ProviderAck{Attempt: 2, Accepted: true}); !apierrors.IsNotFound(err) {
		e.Errorf("a repeated ack of a hold that is gone: %v", err)
	}
}

// A deleted Reservation that someone else's finalizer keeps says at once that it grants
// nothing, and in the end that it is released.
func keptByAnother(e *env) {
	const keep = "example.com/keep"
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 1, func(r *broker.Reservation) { r.Finalizers = []string{keep} })
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 1, 0, 1)
	expect.NoError(e, e.client.Delete(e.Context(), e.get("r")))
	e.expect("r", broker.ReservationReleased, "released")
	e.expectPods("paris", "r", 0, 1, 0)
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderReleased, true, "")
	e.eventually("the broker's finalizer to be removed", func() error {
		if got := e.get("r").Finalizers; len(got) != 1 || got[0] != keep {
			return fmt.Errorf("the finalizers are %v", got)
		}
		return nil
	})
	e.edit("r", func(r *broker.Reservation) { r.Finalizers = nil })
	e.expectDeleted("r")
	e.expectEvents("r", "ReservationReleased", 1)
}

func growAndShrink(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 3)
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	e.expect("r", broker.ReservationActive, "3 of 3 pods in paris")

	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 5 })
	e.expectPods("paris", "r", 5, 0, 3)
	r := e.expect("r", broker.ReservationActive, "3 of 5 pods in paris")
	if a := r.Status.Allocations[0]; !a.Accepted || !a.VirtualNodeReady || a.Resources.CPU.String() != "300m" {
		e.Errorf("the grant does not count while the growth is pending: %+v", a)
	}
	before := r.Status.Attempt.Number
	p.answer("paris", "r", true, "")
	r = e.expect("r", broker.ReservationActive, "5 of 5 pods in paris")
	if r.Status.Attempt.Number == before || r.Status.Allocations[0].VirtualNodeReady {
		e.Error("the old report of the requester applies to the grown allocation")
	}
	p.use("r", "paris")
	e.expectCondition("r", broker.ConditionReady, true, "5 of 5 pods in paris")

	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 1 })
	e.expectPods("paris", "r", 1, 5, 1)
	e.expect("r", broker.ReservationActive, "1 of 1 pods in paris")
	if got := e.ad("paris").Status.Reserved.CPU.String(); got != "500m" {
		e.Errorf("reserved is %s before the provider has confirmed", got)
	}
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 1, 0, 1)
	if got := e.ad("paris").Status.Reserved.CPU.String(); got != "100m" {
		e.Errorf("reserved is %s after the provider has confirmed", got)
	}
}

func refusedGrowth(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 3)
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 5 })
	e.expectPods("paris", "r", 5, 0, 3)
	p.answer("paris", "r", false, "full")
	e.expectPods("paris", "r", 3, 0, 3)
	e.expectCondition("r", broker.ConditionQueued, true, "2 pods are waiting for capacity. paris: ")
	e.expectRejection("r", "paris", decide.ReasonRefused, "full")
	e.expect("r", broker.ReservationReserved, "3 of 5 pods in paris")
	p.advertise(e.spec("berlin", "1"))
	e.expect("r", broker.ReservationReserved, "5 of 5 pods: 3 in paris, 2 in berlin")
	e.expectCondition("r", broker.ConditionQueued, false, "")
}

func split(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("berlin", "200m"))
	p.advertise(e.spec("paris", "300m"))
	e.request("r", 5)
	r := e.expect("r", broker.ReservationReserved, "5 of 5 pods: 2 in berlin, 3 in paris")
	if got := r.Status.Attempt; len(got.Clusters) != 2 {
		e.Errorf("the attempt is %+v", got)
	}
	p.answer("paris", "r", true, "")
	p.answer("berlin", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	e.expect("r", broker.ReservationActive, "5 of 5 pods: 2 in berlin, 3 in paris")
	e.expectCondition("r", broker.ConditionReady, false, "Waiting for rome to report that its virtual node for berlin is ready.")
	p.use("r", "paris", "berlin")
	e.expectCondition("r", broker.ConditionReady, true, "")
}

func shrinkKeeps(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("berlin", "200m"))
	p.advertise(e.spec("paris", "300m"))
	e.request("r", 5)
	e.expect("r", broker.ReservationReserved, "5 of 5 pods: 2 in berlin, 3 in paris")
	p.answer("paris", "r", true, "")
	p.answer("berlin", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	e.edit("r", func(r *broker.Reservation) {
		r.Spec.PodSets[0].Count = 3
		r.Spec.Retained = []broker.RetainedPods{{Cluster: "paris", Count: 3}}
	})
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	e.expectPods("berlin", "r", 0, 2, 0)
	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count, r.Spec.Retained = 1, nil })
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
	e.expectPods("paris", "r", 1, 3, 1)
}

func queue(e *env) {
	p := e.start(nil)
	e.request("r", 3)
	e.expectCondition("r", broker.ConditionQueued, true, "No cluster except rome has sent an advertisement.")
	p.advertise(e.spec("paris", "100m"))
	e.expect("r", broker.ReservationReserved, "1 of 3 pods in paris")
	e.expectCondition("r", broker.ConditionQueued, true, "2 pods are waiting for capacity. paris: ")
	// kubectl wait and kstatus read Ready only.
	e.expectCondition("r", broker.ConditionReady, false, "2 pods are waiting for capacity. paris: ")
	e.expectRejection("r", "paris", "", "0 of 2 pods")
	p.advertise(e.spec("paris", "300m"))
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	e.expectCondition("r", broker.ConditionQueued, false, "")
}

func restart(e *env) {
	first := e.start(nil)
	spec := e.spec("paris", "1")
	first.advertise(spec)
	first.stop()
	second := e.start(nil)
	e.request("r", 1)
	e.expectRejection("r", "paris", decide.ReasonAdvertisementTooOld, "")
	second.advertise(spec)
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
}

func sweep(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 3)
	e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	// A user removes the finalizer.
	e.eventually("the finalizer to be removed", func() error {
		r := e.get("r")
		r.Finalizers = nil
		if err := e.client.Update(e.Context(), r); err != nil {
			return err
		}
		return e.client.Delete(e.Context(), r, client.Preconditions{ResourceVersion: &r.ResourceVersion})
	})
	e.expectPods("paris", "r", 0, 3, 0)
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 0, 0, 0)
}

func expiry(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 3, func(r *broker.Reservation) { r.Spec.Duration = &metav1.Duration{Duration: time.Hour} })
	r := e.expect("r", broker.ReservationReserved, "3 of 3 pods in paris")
	if got := r.Status.ExpiresAt.Sub(r.Status.ReservedAt.Time); got != time.Hour {
		e.Errorf("it expires after %s", got)
	}
	p.answer("paris", "r", true, "")
	e.clock.Step(time.Hour + time.Second)
	e.touch("r")
	e.expect("r", broker.ReservationReleased, "released")
	e.expectCondition("r", broker.ConditionProviderReleased, false, "Waiting for paris")
	e.expectPods("paris", "r", 0, 3, 0)
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderReleased, true, "")
}

func impossible(e *env) {
	p := e.start(nil)
	e.request("r", 1, func(r *broker.Reservation) {
		r.Spec.TargetClusterID = "paris"
		r.Spec.Placement = &broker.Placement{ExcludeClusters: []string{"paris"}}
	})
	e.expect("r", broker.ReservationFailed, "none")
	e.expectCondition("r", broker.ConditionReady, false, "targetClusterID is paris, which placement.excludeClusters excludes")
	e.edit("r", func(r *broker.Reservation) { r.Spec.Placement = nil })
	e.expectCondition("r", broker.ConditionReady, false, "No cluster paris that lends to rome has sent an advertisement")
	e.expect("r", broker.ReservationFailed, "0 of 1 pods")

	// What only the hub's author asks for is not queued if no provider could ever give it.
	total := func(quantity string) func(*broker.Reservation) {
		return func(r *broker.Reservation) { r.Spec.PodSets, r.Spec.RequestedResources = nil, ptr.To(cpu(quantity)) }
	}
	e.request("zero", 1, total("0"))
	e.expectCondition("zero", broker.ConditionReady, false, "requestedResources is zero")
	e.request("none", 0)
	e.expectCondition("none", broker.ConditionReady, false, "requests no capacity")
	p.advertise(e.spec("berlin", "2"))
	e.request("total", 1, total("5"))
	e.expectCondition("total", broker.ConditionLocked, false, "It requests cpu 5, which is more than all nodes of the providers together have.")
	e.request("pod", 1, func(r *broker.Reservation) { r.Spec.PodSets[0].Requests = cpu("3") })
	e.expectCondition("pod", broker.ConditionReady, false, "A pod of set pods requests cpu 3, and no provider has as much")
	// In the consumer, the same holds for what was made by hand; what the scheduler plugin
	// requests waits.
	ofConsumer := func(byHand string) func(*broker.Reservation) {
		return func(r *broker.Reservation) {
			r.Labels = map[string]string{broker.LabelSourceNamespace: "shop", broker.LabelByHand: byHand}
			r.Spec.PodSets[0].Requests = cpu("3")
		}
	}
	e.request("local", 1, ofConsumer("true"))
	e.expectCondition("local", broker.ConditionReady, false, "A pod of set pods requests cpu 3, and no provider has as much")
	e.request("owned", 1, ofConsumer(""))
	e.expectCondition("owned", broker.ConditionQueued, true, "berlin")
	for _, name := range []string{"zero", "none", "total", "pod", "local"} {
		if phase := e.get(name).Status.Phase; phase != broker.ReservationFailed {
			e.Errorf("%s is %s", name, phase)
		}
	}
	e.request("later", 1, total("2"))
	e.expectCondition("later", broker.ConditionLocked, true, "")
	e.edit("later", func(r *broker.Reservation) {
		r.Spec.PodSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"tier": "batch"}}
	})
	e.expectCondition("later", broker.ConditionReady, false, "Waiting for berlin to accept")
	e.request("queued", 1, total("1"))
	e.expectCondition("queued", broker.ConditionQueued, true, "berlin")

	// They are considered again as clusters come, in any order: there is room for all.
	p.advertise(e.spec("paris", "20"))
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
	if got := e.get("r").Status; got.TargetClusterEndpoint != "https://paris:6443" {
		e.Errorf("the endpoint of the target is %q", got.TargetClusterEndpoint)
	}
	e.edit("zero", total("100m"))
	e.edit("none", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 1 })
	e.eventually("the others to be placed or to wait for room", func() error {
		for _, name := range []string{"total", "pod", "zero", "none", "local"} {
			if r := e.get(name); r.Status.Phase == broker.ReservationFailed {
				return fmt.Errorf("%s is still Failed", name)
			}
		}
		return nil
	})
}

// A provider lowers what it had accepted; what it says of the time is bounded.
func withdrawal(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "10"))
	for name, tc := range map[string]struct{ said, want time.Duration }{
		"ordinary": {10 * time.Minute, 10 * time.Minute}, "negative": {-time.Hour, 0}, "endless": {1 << 62, protocol.MaxLeaveWithin},
	} {
		e.request(name, 2)
		e.expectPods("paris", name, 2, 0, 0)
		p.answer("paris", name, true, "")
		e.expectPods("paris", name, 2, 0, 2)
		hold := e.hold("paris", name)
		one := *hold.Promised.PodSets[0].DeepCopy()
		one.Count = 1
		held := capacity.OfPodSets([]broker.PodSet{one})
		ack := protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Held: &held, LeaveWithin: &metav1.Duration{Duration: tc.said}, Message: "the node is cordoned"}
		for range 2 { // the second is a repetition
			expect.NoError(e, p.ApplyProviderAck(e.Context(), "paris", name, ack))
			e.expectPods("paris", name, 1, 0, 1)
		}
		if kept := p.Kept("paris"); kept > 0 {
			e.Errorf("%s: paris has withdrawn from all, and has kept %.0f %% of its promises", name, 100*kept)
		}
		want := []broker.Withdrawal{{Cluster: "paris", Attempt: hold.Attempt, LeaveWithin: metav1.Duration{Duration: tc.want}}}
		e.eventually("the status to say how long pods may stay", func() error {
			if got := e.get(name).Status.Withdrawals; !slices.Equal(got, want) {
				return fmt.Errorf("%s: withdrawals are %+v, want %+v", name, got, want)
			}
			return nil
		})
		// It may be asked again, and nothing waits to ask for what it has withdrawn: this test
		// gives no answer to that.
		e.edit(name, func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 1 })
		e.expectCondition(name, broker.ConditionQueued, false, "")
		e.clock.Step(time.Minute)
		p.advertise(e.spec("paris", "10"))
	}
}

// reported marks the calls that a consumer's report makes.
type reported struct{}

// A consumer's report is written between a withdrawal and the write that follows from it:
// that write conflicts, and until it is repeated the status must not grant what no provider holds.
// Of the pods requested, paris takes 2: with more, the Reservation is queued for the rest.
func withdrawalAndReport(e *env, requested int32) {
	var stopped atomic.Bool
	goOn := make(chan struct{})
	p := e.start(&interceptor.Funcs{SubResourceUpdate: func(ctx context.Context, c client.Client, resource string, object client.Object, options ...client.SubResourceUpdateOption) error {
		if _, status := object.(*broker.Reservation); status && stopped.Load() && ctx.Value(reported{}) == nil {
			select {
			case <-goOn:
			case <-ctx.Done():
			}
		}
		return c.SubResource(resource).Update(ctx, object, options...)
	}})
	p.advertise(e.spec("paris", "200m"))
	e.request("r", requested)
	e.expectPods("paris", "r", 2, 0, 0)
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	e.expect("r", broker.ReservationActive, fmt.Sprintf("2 of %d pods in paris", requested))
	e.expectCondition("r", broker.ConditionQueued, requested > 2, "")
	stopped.Store(true)
	p.advertise(e.spec("berlin", "10"))

	hold, r := e.hold("paris", "r"), e.get("r")
	held := capacity.OfPodSets([]broker.PodSet{*hold.Promised.PodSets[0].DeepCopy()})
	held.PodSets[0].Count = 1
	expect.NoError(e, p.ApplyProviderAck(e.Context(), "paris", "r", protocol.ProviderAck{
		ReservationUID: hold.ReservationUID, Attempt: hold.Attempt, Held: &held, LeaveWithin: &metav1.Duration{Duration: time.Minute},
	}))
	expect.NoError(e, p.ApplyRequesterAck(context.WithValue(e.Context(), reported{}, true), "rome", "r", protocol.RequesterAck{
		ReservationUID: r.UID, Attempt: r.Status.Attempt.Number,
	}))
	got := e.get("r").Status
	if a := got.Allocations; len(a) != 1 || a[0].PodSets[0].Count != 1 || !a[0].Accepted || a[0].VirtualNodeReady {
		e.Errorf("of 2 pods, paris has withdrawn 1; the allocations are %+v", a)
	}
	if w := got.Withdrawals; len(w) != 1 || w[0].Cluster != "paris" || got.Summary != fmt.Sprintf("1 of %d pods in paris", requested) {
		e.Errorf("the withdrawal is not shown: %+v, %q", w, got.Summary)
	}

	close(goOn)
	e.expectPods("berlin", "r", requested-1, 0, 0)
	e.expect("r", broker.ReservationActive, fmt.Sprintf("%d of %d pods: 1 in paris, %d in berlin", requested, requested, requested-1))
}

func staleAcks(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	uid, stale := e.get("r").UID, e.hold("paris", "r").Attempt
	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 3 })
	e.expectPods("paris", "r", 3, 0, 0)
	for _, accepted := range []bool{true, false} {
		expect.NoError(e, p.ApplyProviderAck(e.Context(), "paris", "r", protocol.ProviderAck{ReservationUID: uid, Attempt: stale, Accepted: accepted}))
	}
	e.expectPods("paris", "r", 3, 0, 0)
	expect.NoError(e, p.ApplyRequesterAck(e.Context(), "rome", "r", protocol.RequesterAck{ReservationUID: uid, Attempt: stale, Ready: []string{"paris"}}))
	if err := p.ApplyRequesterAck(e.Context(), "oslo", "r", protocol.RequesterAck{ReservationUID: uid, Attempt: stale}); !apierrors.IsNotFound(err) {
		e.Errorf("another cluster's report: %v", err)
	}
	if err := p.ApplyProviderAck(e.Context(), "paris", "unknown", protocol.ProviderAck{Attempt: 1}); !apierrors.IsNotFound(err) {
		e.Errorf("an ack of an unknown reservation: %v", err)
	}
	if got := e.get("r").Status; got.Phase != broker.ReservationReserved || got.Allocations[0].VirtualNodeReady {
		e.Errorf("a stale report was applied: %+v", got)
	}
}

// An ack of a deleted Reservation arrives when another one has its name.
func acksOfNamesake(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	former := e.get("r").UID
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	expect.NoError(e, e.client.Delete(e.Context(), e.get("r")))
	e.expectPods("paris", "r", 0, 2, 0)
	p.answer("paris", "r", true, "")
	e.expectDeleted("r")

	ack := func(accepted bool) {
		e.Helper()
		hold := e.hold("paris", "r")
		if hold == nil || hold.ReservationUID == former {
			e.Fatalf("want a hold of the new Reservation, got %+v", hold)
		}
		expect.NoError(e, p.ApplyProviderAck(e.Context(), "paris", "r", protocol.ProviderAck{ReservationUID: former, Attempt: hold.Attempt, Accepted: accepted}))
	}
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	for _, accepted := range []bool{true, false} {
		ack(accepted)
		e.expectPods("paris", "r", 2, 0, 0)
	}
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	r := e.get("r")
	expect.NoError(e, p.ApplyRequesterAck(e.Context(), "rome", "r", protocol.RequesterAck{ReservationUID: former, Attempt: r.Status.Attempt.Number, Ready: []string{"paris"}}))
	if e.get("r").Status.Allocations[0].VirtualNodeReady {
		e.Error("the former Reservation's report was applied")
	}

	expect.NoError(e, e.client.Delete(e.Context(), r))
	e.expectPods("paris", "r", 0, 2, 0)
	ack(true)
	e.expectPods("paris", "r", 0, 2, 0)
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 0, 0, 0)
}

func silentProvider(e *env) {
	p := e.start(nil)
	spec := e.spec("paris", "1")
	p.advertise(spec)
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	e.clock.Step(11 * time.Minute)
	e.request("late", 1)
	e.expectRejection("late", "paris", decide.ReasonClusterInactive, "")
	e.expectPods("paris", "r", 2, 0, 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.advertise(spec)
	e.expect("late", broker.ReservationReserved, "1 of 1 pods in paris")
}

// A provider becomes inactive after it has granted: another one replaces it, and the
// first hold is released once the consumer's virtual node is gone.
func lostProvider(e *env) {
	p := e.start(nil)
	paris := e.spec("paris", "1")
	p.advertise(paris)
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	p.use("r", "paris")
	e.expect("r", broker.ReservationActive, "2 of 2 pods in paris")

	e.clock.Step(11 * time.Minute)
	p.advertise(e.spec("berlin", "1"))
	e.eventually("paris to be reconciled before its timer", func() error {
		ad := e.ad("paris")
		metav1.SetMetaDataAnnotation(&ad.ObjectMeta, "touched", e.clock.Now().String())
		return e.client.Update(e.Context(), ad)
	})
	e.expect("r", broker.ReservationActive, "2 of 2 pods: 2 in paris, 2 in berlin")
	p.answer("berlin", "r", true, "")
	e.expectPods("berlin", "r", 2, 0, 2)
	e.expectPods("paris", "r", 2, 0, 2)
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "berlin")
	p.use("r", "paris", "berlin")
	e.expectCondition("r", broker.ConditionVirtualNodeReady, true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	p.use("r", "berlin")
	e.expectPods("paris", "r", 0, 2, 0)
	e.expect("r", broker.ReservationActive, "2 of 2 pods in berlin")

	p.advertise(paris)
	if left := e.ad("paris").Status.Available.CPU.String(); left != "800m" {
		e.Errorf("paris has %s available before it has confirmed", left)
	}
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 0, 0, 0)
	e.expectPods("berlin", "r", 2, 0, 2)
}

// A provider advertises, but does not answer before the deadline: another one is chosen.
func noAnswer(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	e.clock.Step(29 * time.Second)
	p.advertise(e.spec("paris", "1"))
	p.advertise(e.spec("berlin", "1"))
	e.request("other", 1)
	e.expect("other", broker.ReservationReserved, "1 of 1 pods in berlin")
	e.expectPods("berlin", "r", 0, 0, 0)
	e.clock.Step(time.Second)
	e.touch("r")
	e.expectPods("berlin", "r", 2, 0, 0)
	e.expectPods("paris", "r", 0, 2, 0)
	p.answer("berlin", "r", true, "")
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in berlin")
	p.answer("berlin", "other", true, "")

	// Nothing else goes there until it answers, although it advertises more than berlin.
	p.advertise(e.spec("paris", "9"))
	e.request("later", 1)
	e.expect("later", broker.ReservationReserved, "1 of 1 pods in berlin")
	// An ack that answers nothing is no answer: of an earlier attempt, of another UID, or of a
	// release.
	hold := e.hold("paris", "r")
	expect.NoError(e, p.ApplyProviderAck(e.Context(), "paris", "r", protocol.ProviderAck{ReservationUID: hold.ReservationUID, Attempt: hold.Attempt - 1, Accepted: true}))
	expect.NoError(e, p.ApplyProviderAck(e.Context(), "paris", "r", protocol.ProviderAck{ReservationUID: "another", Attempt: hold.Attempt, Accepted: true}))
	e.request("later-too", 1)
	e.expect("later-too", broker.ReservationReserved, "1 of 1 pods in berlin")
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 0, 0, 0)
	e.request("after-release", 1)
	e.expect("after-release", broker.ReservationReserved, "1 of 1 pods in berlin")
	for _, name := range []string{"later", "later-too", "after-release"} {
		p.answer("berlin", name, true, "")
	}
	// It is asked again after a while, and answers.
	e.clock.Step(30 * time.Second)
	p.advertise(e.spec("paris", "9"))
	p.advertise(e.spec("berlin", "1"))
	e.request("again", 1)
	e.expect("again", broker.ReservationReserved, "1 of 1 pods in paris")
	p.answer("paris", "again", true, "")
	e.request("last", 1)
	e.expect("last", broker.ReservationReserved, "1 of 1 pods in paris")
}

// A provider does not answer to a growth before the deadline: what it granted still
// counts, the rest is placed elsewhere, and stays there.
func noAnswerToGrowth(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	e.edit("r", func(r *broker.Reservation) { r.Spec.PodSets[0].Count = 3 })
	e.expectPods("paris", "r", 3, 0, 2)
	e.clock.Step(2 * time.Minute)
	p.advertise(e.spec("berlin", "1"))
	e.touch("r")
	e.expectPods("berlin", "r", 1, 0, 0)
	e.expectPods("paris", "r", 2, 3, 2)
	p.answer("berlin", "r", true, "")
	e.expectPods("berlin", "r", 1, 0, 1)
	e.expectPods("paris", "r", 2, 3, 2)
	attempt := e.get("r").Status.Attempt.Number
	e.touch("r")
	e.request("control", 1)
	e.expect("control", broker.ReservationReserved, "1 of 1 pods in berlin")
	if now := e.get("r").Status.Attempt.Number; now != attempt {
		e.Errorf("attempt %d followed %d without a change", now, attempt)
	}
	// It is active again and accepts: now one pod is too many.
	p.advertise(e.spec("paris", "1"))
	p.answer("paris", "r", true, "")
	e.eventually("three promised pods", func() error {
		var sum int32
		for _, cluster := range []string{"paris", "berlin"} {
			promised, _, _ := pods(e.hold(cluster, "r"))
			sum += promised
		}
		if sum != 3 {
			return fmt.Errorf("%d are promised", sum)
		}
		return nil
	})
}

// What has not changed is not stored, for hours too, and the cluster stays active.
func storeUnchanged(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 2, 0, 2)
	before := e.ad("paris")
	for range 2 * time.Hour / (30 * time.Second) {
		e.clock.Step(30 * time.Second)
		p.advertise(e.spec("paris", "1"))
	}
	after := e.ad("paris")
	if after.ResourceVersion != before.ResourceVersion || after.Status.Available.CPU.String() != "800m" || !after.Status.Active {
		e.Errorf("an unchanged advertisement was written: version %s after %s, available %s", after.ResourceVersion, before.ResourceVersion, after.Status.Available)
	}
	e.expectPods("paris", "r", 2, 0, 2)
}

// The next broker gives a cluster that advertised to the one before, and that it does not hear,
// the time of a silent one.
func nextBrokerWaits(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	p.stop()
	e.clock.Step(time.Hour)
	next := e.start(nil)
	reconcile := func() (requeued bool) {
		e.Helper()
		result, err := next.ReconcileAdvertisement(e.Context(), "paris")
		expect.NoError(e, err)
		return result.RequeueAfter > 0
	}
	// From then on, it waits for paris.
	expect.Eventually(e, "the next broker to know paris", func() (bool, string) { return reconcile(), "it does not" })
	for range 9 {
		e.clock.Step(time.Minute)
		next.advertise(e.spec("rome", "0"))
	}
	reconcile()
	if ad := e.ad("paris"); !ad.Status.Active {
		e.Errorf("the next broker takes paris for silent too early: %+v", ad.Status.Conditions)
	}
	e.clock.Step(2 * time.Minute)
	next.advertise(e.spec("rome", "0"))
	e.eventually("paris to be inactive", func() error {
		reconcile()
		if ad := e.ad("paris"); ad.Status.Active {
			return fmt.Errorf("its conditions are %+v", ad.Status.Conditions)
		}
		return nil
	})
}

// While an advertisement is stored, its spec before its status, the account is left to that
// write.
func accountLeftToWrite(e *env) {
	reached, release := make(chan struct{}), make(chan struct{})
	var gate sync.Once
	var armed atomic.Bool
	p := e.start(&interceptor.Funcs{
		SubResourceUpdate: func(ctx context.Context, c client.Client, sub string, object client.Object, options ...client.SubResourceUpdateOption) error {
			if armed.Load() {
				gate.Do(func() {
					close(reached)
					<-release
				})
			}
			return c.SubResource(sub).Update(ctx, object, options...)
		},
	})
	p.advertise(e.spec("paris", "1"))
	e.eventually("the account to be up to date", func() error {
		_, writing := p.Committer.Waiting("paris")
		if ad := e.ad("paris"); !ad.Status.Active || ad.Status.ObservedGeneration != ad.Generation || writing {
			return fmt.Errorf("the status is %+v", ad.Status)
		}
		return nil
	})
	armed.Store(true)
	stored := make(chan error, 1)
	go func() { stored <- p.StoreAdvertisement(e.Context(), e.spec("paris", "2")) }()
	<-reached
	ctx, cancel := context.WithTimeout(e.Context(), expect.Deadline)
	defer cancel()
	result, err := p.ReconcileAdvertisement(ctx, "paris")
	close(release)
	if err != nil || result.RequeueAfter <= 0 {
		e.Errorf("the account waits for the write of the advertisement: %+v, %v", result, err)
	}
	expect.NoError(e, <-stored)
	if ad := e.ad("paris"); ad.Status.Available.CPU.String() != "2" || ad.Status.ObservedGeneration != ad.Generation {
		e.Errorf("the account is %+v of generation %d", ad.Status, ad.Generation)
	}
}

// A late or repeated advertisement does not replace a newer one, nor do its holds follow.
func outdatedAdvertisement(e *env) {
	p := e.start(nil)
	large, small := e.spec("paris", "10"), e.spec("paris", "100m")
	p.advertise(small)
	var outdated *protocol.OutdatedError
	if err := p.StoreAdvertisement(e.Context(), large); !errors.As(err, &outdated) || outdated.Latest != small.Sequence {
		e.Errorf("an older advertisement was accepted: %v", err)
	}
	e.request("r", 50)
	e.expect("r", broker.ReservationReserved, "1 of 50 pods in paris")
	// An unchanged one is not written, but counts.
	again := e.spec("paris", "100m")
	p.advertise(again)
	between := large
	between.Sequence = again.Sequence - 1
	if between.Sequence <= small.Sequence {
		between.Sequence = small.Sequence
	}
	if err := p.StoreAdvertisement(e.Context(), between); !errors.As(err, &outdated) || outdated.Latest != again.Sequence {
		e.Errorf("an older advertisement was accepted: %v", err)
	}
}

// What the BrokerConfig says of leases concerns also those that are placed, at once.
func configOfPlaced(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("paris", "1"))
	e.request("r", 1)
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	config := &broker.BrokerConfig{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "default"}}
	expectLease := func(want time.Duration) {
		e.Helper()
		e.eventually(fmt.Sprintf("the lease to be %s", want), func() error {
			if got := e.get("r").Status.LeaseDuration; got == nil || got.Duration != want {
				return fmt.Errorf("it is %v", got)
			}
			return nil
		})
	}
	config.Spec.DefaultDuration = &metav1.Duration{Duration: time.Hour}
	expect.NoError(e, e.client.Create(e.Context(), config))
	expectLease(time.Hour)
	config.Spec.MaxDuration = &metav1.Duration{Duration: time.Minute}
	expect.NoError(e, e.client.Update(e.Context(), config))
	expectLease(time.Minute)
}

// The lease is renewed by its own consumer, in memory.
func renewal(e *env) {
	p := e.start(nil)
	spec := e.spec("paris", "1")
	p.advertise(spec)
	e.request("r", 1, func(r *broker.Reservation) { r.Spec.Duration = &metav1.Duration{Duration: time.Hour} })
	e.expect("r", broker.ReservationReserved, "1 of 1 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	r := e.get("r")
	if got := r.Status.Allocations[0].PricePerHour; got != "0.01 EUR" {
		e.Errorf("the price is %q", got)
	}
	for _, tc := range []struct{ requester, name string }{{"oslo", "r"}, {"rome", "unknown"}} {
		if err := p.Renew(tc.requester, tc.name, r.UID); !apierrors.IsNotFound(err) {
			e.Errorf("renewal of %s by %s: %v", tc.name, tc.requester, err)
		}
	}
	dearer := e.spec("paris", "1")
	dearer.NodeClasses[0].Cost = &broker.Cost{CPUCost: "50", Currency: "EUR"}
	p.advertise(dearer)
	e.clock.Step(50 * time.Minute)
	e.eventually("the event about the price", func() error {
		expect.NoError(e, p.Renew("rome", "r", r.UID))
		var events eventsv1.EventList
		expect.NoError(e, e.client.List(e.Context(), &events, client.InNamespace(e.namespace)))
		for i := range events.Items {
			if events.Items[i].Reason == "PriceIncreased" && strings.Contains(events.Items[i].Note, "renewed at 0.01 EUR per hour in paris. At its present prices, the same capacity would cost 5.00 EUR") {
				return nil
			}
		}
		return fmt.Errorf("there are %d others", len(events.Items))
	})
	e.clock.Step(50 * time.Minute)
	e.touch("r")
	e.request("control", 1)
	e.expectRejection("control", "paris", decide.ReasonClusterInactive, "")
	if got := e.get("r").Status; got.Phase != broker.ReservationReserved || got.Allocations[0].PricePerHour != "0.01 EUR" {
		e.Errorf("a renewed Reservation is %s: %+v", got.Phase, got.Allocations)
	}
	e.clock.Step(10 * time.Minute)
	e.touch("r")
	e.expect("r", broker.ReservationReleased, "released")
}

// Deleting a ClusterRegistration ends what the cluster has asked for, and frees those
// that wait for it.
func forgottenCluster(e *env) {
	endedCluster(e, "forgotten-consumer", func(id string) {
		registration := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: id}}
		expect.NoError(e, e.client.Delete(e.Context(), registration))
		e.eventually(id+" to be forgotten", func() error {
			if err := e.client.Get(e.Context(), client.ObjectKeyFromObject(registration), registration); !apierrors.IsNotFound(err) {
				return fmt.Errorf("its registration exists: %v", err)
			}
			return nil
		})
	})
}

// Revoking a cluster ends the same, and keeps its registration. What it creates after that ends,
// too.
func revokedCluster(e *env) {
	const consumer = "revoked-consumer"
	phase := func(id string, want broker.RegistrationPhase) {
		e.eventually(id+" to be "+string(want), func() error {
			var registration broker.ClusterRegistration
			if err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: id}, &registration); err != nil || registration.Status.Phase == want {
				return err
			}
			return fmt.Errorf("it is %q", registration.Status.Phase)
		})
	}
	decide := func(id, approval string) {
		registration := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: id}}
		expect.NoError(e, e.client.Patch(e.Context(), registration, client.RawPatch(types.MergePatchType, []byte(`{"spec":{"approval":`+approval+`}}`))))
	}
	endedCluster(e, consumer, func(id string) {
		decide(id, `"Revoked"`)
		phase(id, broker.RegistrationRevoked)
	})
	e.request("late", 1, func(r *broker.Reservation) {
		r.Labels = map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelRequester: consumer}
		r.Spec.RequesterID = consumer
	})
	e.expectEnding("late")
	decide(consumer, "null")
	phase(consumer, broker.RegistrationApproved)
}

// expectEnding waits until a Reservation is being deleted: its provider, which may have been chosen
// before, does not answer.
func (e *env) expectEnding(name string) {
	e.Helper()
	e.eventually(name+" to be deleted", func() error {
		var r broker.Reservation
		if err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: name}, &r); err != nil || !r.DeletionTimestamp.IsZero() {
			return client.IgnoreNotFound(err)
		}
		return errors.New("it stays")
	})
}

// advertisedByHand: an advertisement that was made by hand, as the original system's samples are,
// counts as received when it is changed.
func advertisedByHand(e *env) {
	e.start(nil)
	text, err := os.ReadFile("../../../charts/broker/examples/clusteradvertisement.yaml")
	expect.NoError(e, err)
	// As kubectl sends it, without the fields that it does not have.
	sample := &unstructured.Unstructured{}
	expect.NoError(e, yaml.UnmarshalStrict(text, &sample.Object))
	sample.SetNamespace(e.namespace)
	ad := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: sample.GetName()}}
	e.register(ad.Name)
	expect.NoError(e, e.client.Create(e.Context(), sample))
	e.eventually("its score", func() error {
		if ad := e.ad(ad.Name); !ad.Status.Active || ad.Status.Score == "" || ad.Status.Available.CPU.String() != "10" {
			return fmt.Errorf("the status is %+v", ad.Status)
		}
		return nil
	})
	asked := func(name, cpu, memory string) {
		e.request(name, 0, func(r *broker.Reservation) {
			total := broker.FromList(expect.Resources("cpu", cpu, "memory", memory))
			r.Spec.PodSets, r.Spec.RequestedResources, r.Spec.RequesterID = nil, &total, "rome"
		})
	}
	asked("small", "2", "4Gi")
	e.expect("small", broker.ReservationReserved, "cpu 2, memory 4Gi in cluster-1")
	if r := e.get("small"); len(r.Status.Allocations) != 1 || r.Status.Allocations[0].Cluster != ad.Name {
		e.Errorf("it is in %+v", r.Status.Allocations)
	}
	asked("impossible", "20", "50Gi")
	e.expectCondition("impossible", broker.ConditionReady, false, "which is more than all nodes of the providers together have")
	if phase := e.get("impossible").Status.Phase; phase != broker.ReservationFailed {
		e.Errorf("it is %s", phase)
	}

	// It ages, until it is changed.
	phase := func(want broker.AdvertisementPhase, patch string) {
		expect.NoError(e, e.client.Patch(e.Context(), ad, client.RawPatch(types.MergePatchType, []byte(patch))))
		e.eventually("it to be "+string(want), func() error {
			if got := e.ad(ad.Name).Status.Phase; got != want {
				return fmt.Errorf("it is %s", got)
			}
			return nil
		})
	}
	e.clock.Step(11 * time.Minute)
	phase(broker.AdvertisementStale, `{"metadata":{"labels":{"seen":"no"}}}`)
	phase(broker.AdvertisementActive, `{"spec":{"timestamp":"2025-11-19T16:11:00Z"}}`)
}

// An invitation that was not used ends when it expires, and a used one does not.
func expiredInvitation(e *env) {
	e.start(nil)
	expired := &broker.Invitation{TokenHash: strings.Repeat("0", 64), Expires: metav1.NewTime(e.clock.Now().Add(-time.Second))}
	member := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "member"}, Spec: broker.ClusterRegistrationSpec{ClusterID: "member"}}
	expect.NoError(e, e.client.Create(e.Context(), member))
	member.Status.Phase = broker.RegistrationApproved
	expect.NoError(e, e.client.Status().Update(e.Context(), member))
	expect.NoError(e, e.client.Patch(e.Context(), &broker.ClusterRegistration{ObjectMeta: member.ObjectMeta, Spec: broker.ClusterRegistrationSpec{ClusterID: "member", Invitation: expired}}, client.Merge))
	guest := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "guest"}, Spec: broker.ClusterRegistrationSpec{ClusterID: "guest", Invitation: expired}}
	expect.NoError(e, e.client.Create(e.Context(), guest))
	e.eventually("the invitation to be deleted", func() error {
		err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: "guest"}, &broker.ClusterRegistration{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("it exists: %v", err)
		}
		return nil
	})
	expect.NoError(e, e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: "member"}, &broker.ClusterRegistration{}))
}

// endedCluster has a consumer, whose name no other test has since they share the metrics, and its
// provider end.
func endedCluster(e *env, consumer string, end func(id string)) {
	p := e.start(nil)
	registrations := []string{consumer, "paris"}
	for _, id := range registrations {
		expect.NoError(e, e.client.Create(e.Context(), &broker.ClusterRegistration{
			ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: id}, Spec: broker.ClusterRegistrationSpec{ClusterID: id},
		}))
		e.eventually("the finalizer", func() error {
			var registration broker.ClusterRegistration
			if err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: id}, &registration); err != nil {
				return err
			}
			if len(registration.Finalizers) == 0 {
				return errors.New("there is none")
			}
			return nil
		})
	}
	p.advertise(e.spec("paris", "1"))
	e.request("r", 2, func(r *broker.Reservation) { r.Spec.RequesterID = consumer })
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in paris")
	p.answer("paris", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	e.request("of-oslo", 1, func(r *broker.Reservation) { r.Spec.RequesterID = "oslo" })
	e.expect("of-oslo", broker.ReservationReserved, "1 of 1 pods in paris")

	// The consumer: its hold is released. paris, which does not answer, is forgotten, too:
	// nothing waits for it any more.
	end(consumer)
	e.expectPods("paris", "r", 0, 2, 0)
	p.advertise(e.spec("berlin", "1"))
	end("paris")
	e.expectDeleted("r")
	e.eventually("its metrics to be deleted", func() error {
		if names := reservation.Series(e.T, consumer); len(names) > 0 {
			return fmt.Errorf("there are %v", names)
		}
		return nil
	})
	e.expect("of-oslo", broker.ReservationReserved, "1 of 1 pods in berlin")
	if err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: "paris"}, &broker.ClusterAdvertisement{}); !apierrors.IsNotFound(err) {
		e.Errorf("the ledger of paris: %v", err)
	}
}

// What is created for a cluster after it was forgotten ends: its call was accepted before.
// A Reservation that was created in the hub by hand stays.
func unregisteredCluster(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("berlin", "1"))
	created := func(id string) func(*broker.Reservation) {
		return func(r *broker.Reservation) {
			r.Labels = map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway, broker.LabelRequester: id}
			r.Spec.RequesterID = id
		}
	}
	e.request("of-berlin", 1, created("berlin"))
	e.request("by-hand", 1)
	// An agent in the hub has a copy of its advertisement beside that of the broker.
	agentsCopy := &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{
		Namespace: e.namespace, Name: "cluster-advertisement", Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
	}, Spec: e.spec("berlin", "1")}
	expect.NoError(e, e.client.Create(e.Context(), agentsCopy))
	e.request("late", 1, created("rome"))
	expect.NoError(e, client.IgnoreNotFound(p.StoreAdvertisement(e.Context(), e.spec("rome", "1"))))
	e.expectEnding("late")
	e.eventually("the advertisement of rome to be deleted", func() error {
		err := e.client.Get(e.Context(), client.ObjectKey{Namespace: e.namespace, Name: "rome"}, &broker.ClusterAdvertisement{})
		if !apierrors.IsNotFound(err) {
			return fmt.Errorf("it exists: %v", err)
		}
		return nil
	})
	for _, name := range []string{"of-berlin", "by-hand"} {
		if r := e.get(name); !r.DeletionTimestamp.IsZero() {
			e.Errorf("%s was deleted", name)
		}
	}
	e.ad("berlin")
	e.ad(agentsCopy.Name)
}

// What the API server accepts of changes and amounts.
func validation(e *env) {
	shape := func(s *broker.PodSet) {
		s.NodeSelector = map[string]string{"disk": "ssd"}
		s.NodeAffinity = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpIn, Values: []string{"b"}}}}}}
		s.Tolerations = []corev1.Toleration{{Key: "gpu"}}
	}
	e.request("r", 3, func(r *broker.Reservation) { shape(&r.Spec.PodSets[0]) })
	for what, tc := range map[string]struct {
		change func(*broker.ReservationSpec)
		part   string
	}{
		"a count": {func(s *broker.ReservationSpec) { s.PodSets[0].Count = 5 }, ""},
		"another set": {func(s *broker.ReservationSpec) {
			s.PodSets = append(s.PodSets, broker.PodSet{Name: "more", Count: 1, Requests: cpu("1")})
		}, ""},
		"requests":    {func(s *broker.ReservationSpec) { s.PodSets[0].Requests = cpu("2") }, "immutable"},
		"a selector":  {func(s *broker.ReservationSpec) { s.PodSets[0].NodeSelector["disk"] = "hdd" }, "immutable"},
		"no selector": {func(s *broker.ReservationSpec) { s.PodSets[0].NodeSelector = nil }, "immutable"},
		"an affinity": {func(s *broker.ReservationSpec) {
			s.PodSets[0].NodeAffinity.NodeSelectorTerms[0].MatchExpressions[0].Values[0] = "c"
		}, "immutable"},
		"no affinity":    {func(s *broker.ReservationSpec) { s.PodSets[0].NodeAffinity = nil }, "immutable"},
		"tolerations":    {func(s *broker.ReservationSpec) { s.PodSets[0].Tolerations[0].Key = "x" }, "immutable"},
		"no tolerations": {func(s *broker.ReservationSpec) { s.PodSets[0].Tolerations = nil }, "immutable"},
		"the consumer":   {func(s *broker.ReservationSpec) { s.RequesterID = "oslo" }, "immutable"},
		"no consumer":    {func(s *broker.ReservationSpec) { s.RequesterID = "" }, "immutable"},
		"a negative amount": {func(s *broker.ReservationSpec) {
			s.PodSets = append(s.PodSets, broker.PodSet{Name: "more", Count: 1, Requests: broker.ResourceQuantities{Extended: map[corev1.ResourceName]resource.Quantity{"example.com/fpga": resource.MustParse("-1")}}})
		}, "of 0 or more"},
		"many to retain": {func(s *broker.ReservationSpec) {
			for i := range broker.MaxRetained {
				s.Retained = append(s.Retained, broker.RetainedPods{Cluster: fmt.Sprintf("cluster-%d", i), Count: 1})
			}
		}, ""},
	} {
		r := e.get("r")
		tc.change(&r.Spec)
		err := e.client.Update(e.Context(), r, client.DryRunAll)
		if (err == nil) != (tc.part == "") || err != nil && !strings.Contains(err.Error(), tc.part) {
			e.Errorf("changing %s: %v", what, err)
		}
	}
	for what, spec := range map[string]broker.ReservationSpec{
		"duration must be a duration": {RequestedResources: ptr.To(cpu("1")), Duration: &metav1.Duration{}},
		"deadline must be a duration": {RequestedResources: ptr.To(cpu("1")), Deadline: &metav1.Duration{Duration: -time.Second}},
		"quantities of 0 or more":     {RequestedResources: &broker.ResourceQuantities{Extended: map[corev1.ResourceName]resource.Quantity{"example.com/fpga": resource.MustParse("-1")}}},
		"minAvailable is the number":  {RequestedResources: ptr.To(cpu("1")), MinAvailable: 1},
	} {
		r := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: e.namespace, Name: "invalid"}, Spec: spec}
		if err := e.client.Create(e.Context(), r, client.DryRunAll); err == nil || !strings.Contains(err.Error(), what) {
			e.Errorf("%s: %v", what, err)
		}
	}
}

// A former leader writes a hold of an earlier attempt.
func holdOfAnotherAttempt(e *env) {
	p := e.start(nil)
	p.advertise(e.spec("berlin", "1"))
	p.advertise(e.spec("paris", "900m"))
	e.request("r", 2)
	r := e.expect("r", broker.ReservationReserved, "2 of 2 pods in berlin")
	p.answer("berlin", "r", true, "")
	e.expectCondition("r", broker.ConditionProviderAccepted, true, "")
	e.eventually("the stale hold to be written", func() error {
		ad := e.ad("paris")
		ad.Status.Holds = append(ad.Status.Holds, broker.Hold{
			ReservationUID: r.UID, ReservationName: "r", Requester: "rome", Attempt: 1,
			Promised: broker.HeldCapacity{Totals: cpu("200m"), PodSets: r.Spec.PodSets},
		})
		return e.client.Status().Update(e.Context(), ad)
	})
	e.expectPods("paris", "r", 0, 2, 0)
	e.expectPods("berlin", "r", 2, 0, 2)
	p.answer("paris", "r", true, "")
	e.expectPods("paris", "r", 0, 0, 0)
	e.expect("r", broker.ReservationReserved, "2 of 2 pods in berlin")
}
