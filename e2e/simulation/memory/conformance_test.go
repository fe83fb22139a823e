package memory_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/simulation/memory"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// TestConformance makes the same calls to a real API server and to the one in memory.
// Both must give the same results.
func TestConformance(t *testing.T) {
	scheme := runtime.NewScheme()
	expect.NoError(t, clientgoscheme.AddToScheme(scheme))
	expect.NoError(t, broker.AddToScheme(scheme))
	real, err := client.New(controlplane.Start(t), client.Options{Scheme: scheme})
	expect.NoError(t, err)
	server, err := memory.NewServer("hub", scheme, time.Now, &broker.Reservation{}, &broker.ClusterAdvertisement{})
	expect.NoError(t, err)
	for _, call := range []struct {
		name string
		do   func(client.Client) string
	}{
		{"create, read and list", createAndRead}, {"versions", versions}, {"status and spec", statusAndSpec},
		{"finalizers", finalizers}, {"preconditions", preconditions}, {"patches", patches},
	} {
		t.Run(call.name, func(t *testing.T) {
			want, got := call.do(real), call.do(server.Client())
			if got != want {
				t.Errorf("the API server:\n%s\nin memory:\n%s", want, got)
			}
			if strings.Count(want, "\n") < 4 {
				t.Errorf("the calls show nothing:\n%s", want)
			}
		})
	}
}

// transcript is what a client observes.
type transcript struct {
	strings.Builder
	client client.Client
}

func (tr *transcript) say(what string, err error) {
	reason := "done"
	if err != nil {
		reason = "failed " + string(apierrors.ReasonForError(err))
	}
	fmt.Fprintf(tr, "%s: %s\n", what, reason)
}

// show describes an object without what differs between servers.
func (tr *transcript) show(name string) {
	var r broker.Reservation
	err := tr.client.Get(context.Background(), client.ObjectKey{Namespace: "default", Name: name}, &r)
	tr.say("get "+name, err)
	fmt.Fprintf(tr, "  generation %d, finalizers %v, deleted %t, labels %v, target %s, pods %v, phase %s, summary %q, attempt %d, reserved %d, conditions %d\n",
		r.Generation, r.Finalizers, r.DeletionTimestamp != nil, r.Labels, r.Spec.TargetClusterID, r.Spec.PodSets, r.Status.Phase, r.Status.Summary,
		r.Status.Attempt.Number, ptr.Deref(r.Status.ReservedAt, metav1.Time{}).UnixNano(), len(r.Status.Conditions))
}

func reservation(name string, finalizers ...string) *broker.Reservation {
	return &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, Finalizers: finalizers, Labels: map[string]string{"for": name}},
		Spec: broker.ReservationSpec{RequesterID: "rome", PodSets: []broker.PodSet{{
			Name: "pods", Count: 2, Requests: broker.ResourceQuantities{CPU: resource.NewQuantity(1, resource.DecimalSI)},
		}}},
	}
}

func createAndRead(c client.Client) string {
	ctx, tr := context.Background(), &transcript{client: c}
	r := reservation("read")
	r.Status.Summary = "ignored at creation"
	tr.say("create", c.Create(ctx, r))
	tr.say("create with a version", c.Create(ctx, r))
	tr.say("create again", c.Create(ctx, reservation("read")))
	tr.say("get what is missing", c.Get(ctx, client.ObjectKey{Namespace: "default", Name: "missing"}, &broker.Reservation{}))
	tr.show("read")
	expectSecond(tr, c, ctx)
	return tr.String()
}

// expectSecond lists by namespace and label.
func expectSecond(tr *transcript, c client.Client, ctx context.Context) {
	tr.say("create another", c.Create(ctx, reservation("another")))
	for _, options := range [][]client.ListOption{{client.InNamespace("default")}, {client.InNamespace("other")}, {client.MatchingLabels{"for": "read"}}} {
		var list broker.ReservationList
		tr.say("list", c.List(ctx, &list, options...))
		for _, r := range list.Items {
			fmt.Fprintf(tr, "  %s\n", r.Name)
		}
	}
	for _, name := range []string{"read", "another"} {
		tr.say("delete", c.Delete(ctx, reservation(name)))
		tr.say("delete again", c.Delete(ctx, reservation(name)))
	}
}

func versions(c client.Client) string {
	ctx, tr := context.Background(), &transcript{client: c}
	r := reservation("versions")
	tr.say("create", c.Create(ctx, r))
	old := r.DeepCopy()
	version := r.ResourceVersion
	tr.say("update without change", c.Update(ctx, r))
	fmt.Fprintf(tr, "  same version %t\n", r.ResourceVersion == version)
	r.Spec.PodSets[0].Count = 3
	tr.say("update", c.Update(ctx, r))
	fmt.Fprintf(tr, "  same version %t, generation %d\n", r.ResourceVersion == version, r.Generation)
	old.Spec.PodSets[0].Count = 4
	tr.say("update of an old version", c.Update(ctx, old))
	tr.say("status update of an old version", c.Status().Update(ctx, old))
	r.Labels["new"] = "label"
	tr.say("update of a label", c.Update(ctx, r))
	gone := reservation("gone")
	gone.ResourceVersion = r.ResourceVersion
	tr.say("update of what is missing", c.Update(ctx, gone))
	tr.show("versions")
	tr.say("delete", c.Delete(ctx, r))
	again := reservation("versions")
	tr.say("create again", c.Create(ctx, again))
	fmt.Fprintf(tr, "  same UID %t\n", again.UID == r.UID)
	stale := again.DeepCopy()
	stale.UID, stale.ResourceVersion = r.UID, ""
	stale.Spec.PodSets[0].Count = 9
	err := c.Status().Update(ctx, stale)
	tr.say("status update with the UID of an earlier object", err)
	tr.say("delete", c.Delete(ctx, again))
	return tr.String()
}

func statusAndSpec(c client.Client) string {
	ctx, tr := context.Background(), &transcript{client: c}
	r := reservation("status")
	tr.say("create", c.Create(ctx, r))
	r.Spec.PodSets[0].Count = 7
	r.Labels["changed"] = "with the status"
	r.Status.Phase, r.Status.Summary, r.Status.Attempt.Number = broker.ReservationReserved, "2 pods", 3
	r.Status.ReservedAt = &metav1.Time{Time: time.Date(2030, 1, 2, 3, 4, 5, 678, time.UTC)}
	meta.SetStatusCondition(&r.Status.Conditions, metav1.Condition{Type: "Ready", Status: metav1.ConditionTrue, Reason: "Test"})
	tr.say("update of the status", c.Status().Update(ctx, r))
	tr.show("status")
	r.Spec.PodSets[0].Count = 5
	r.Status.Summary = "not with the spec"
	tr.say("update of the spec", c.Update(ctx, r))
	fmt.Fprintf(tr, "  summary %q\n", r.Status.Summary)
	tr.show("status")
	tr.say("delete", c.Delete(ctx, r))
	return tr.String()
}

func finalizers(c client.Client) string {
	ctx, tr := context.Background(), &transcript{client: c}
	r := reservation("finalizers", "example.com/one", "example.com/two")
	tr.say("create", c.Create(ctx, r))
	tr.say("delete", c.Delete(ctx, r))
	tr.show("finalizers")
	tr.say("delete again", c.Delete(ctx, r))
	tr.say("get", c.Get(ctx, client.ObjectKeyFromObject(r), r))
	added := r.DeepCopy()
	added.Finalizers = append(added.Finalizers, "example.com/three")
	tr.say("add a finalizer", c.Update(ctx, added))
	r.Finalizers = []string{"example.com/two"}
	tr.say("remove one", c.Update(ctx, r))
	r.Status.Summary = "while it is deleted"
	tr.say("update of the status", c.Status().Update(ctx, r))
	tr.show("finalizers")
	tr.say("create again", c.Create(ctx, reservation("finalizers")))
	r.Finalizers = nil
	tr.say("remove the other", c.Update(ctx, r))
	tr.show("finalizers")
	return tr.String()
}

func preconditions(c client.Client) string {
	ctx, tr := context.Background(), &transcript{client: c}
	r := reservation("preconditions")
	tr.say("create", c.Create(ctx, r))
	uid, other, version := r.UID, r.UID[:len(r.UID)-1]+"x", "1"
	tr.say("delete with another UID", c.Delete(ctx, r, client.Preconditions{UID: &other}))
	tr.say("delete with another version", c.Delete(ctx, r, client.Preconditions{UID: &uid, ResourceVersion: &version}))
	tr.show("preconditions")
	tr.say("delete with its UID", c.Delete(ctx, r, client.Preconditions{UID: &uid}))
	tr.show("preconditions")
	return tr.String()
}

func patches(c client.Client) string {
	ctx, tr := context.Background(), &transcript{client: c}
	r := reservation("patches")
	tr.say("create", c.Create(ctx, r))
	old := r.DeepCopy()
	lock := client.MergeFromWithOptimisticLock{}
	before := r.DeepCopy()
	r.Spec.PodSets[0].Count, r.Status.Summary = 6, "not with the spec"
	tr.say("locked patch", c.Patch(ctx, r, client.MergeFromWithOptions(before, lock)))
	before = r.DeepCopy()
	r.Status.Summary = "patched"
	tr.say("locked patch of the status", c.Status().Patch(ctx, r, client.MergeFromWithOptions(before, lock)))
	tr.show("patches")
	late := old.DeepCopy()
	late.Spec.PodSets[0].Count = 1
	tr.say("locked patch of an old version", c.Patch(ctx, late, client.MergeFromWithOptions(old, lock)))
	late = old.DeepCopy()
	late.Labels["late"] = "label"
	tr.say("patch of an old version", c.Patch(ctx, late, client.MergeFrom(old)))
	tr.show("patches")
	tr.say("delete", c.Delete(ctx, r))
	return tr.String()
}
