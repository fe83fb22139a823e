package tenant

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestApproveWithoutKey: the ID of a cluster that was approved without a key is not free for who has
// the shared token, and an operator may invite a key later. One with a key needs no invitation.
func TestApproveWithoutKey(t *testing.T) {
	scheme := runtime.NewScheme()
	expect.NoError(t, broker.AddToScheme(scheme))
	joined := &broker.ClusterRegistration{
		ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "paris"}, Spec: broker.ClusterRegistrationSpec{ClusterID: "paris"},
		Status: broker.ClusterRegistrationStatus{KeyFingerprint: "key"},
	}
	hub := fake.NewClientBuilder().WithScheme(scheme).WithObjects(joined).Build()
	invitation := func(cluster string) *broker.Invitation {
		t.Helper()
		registration := &broker.ClusterRegistration{}
		expect.NoError(t, hub.Get(t.Context(), client.ObjectKey{Namespace: broker.SystemNamespace, Name: cluster}, registration))
		if registration.Spec.Approval != broker.ApprovalApproved {
			t.Errorf("%s is not approved", cluster)
		}
		return registration.Spec.Invitation
	}
	for range 2 {
		for _, cluster := range []string{"rome", "paris"} {
			expect.NoError(t, Approve(t.Context(), hub, broker.SystemNamespace, cluster))
		}
	}
	if invitation("paris") != nil {
		t.Error("paris has joined, and is invited")
	}
	none := invitation("rome")
	if none == nil || len(none.TokenHash) != 64 || none.Expires.After(time.Now()) {
		t.Fatalf("rome is invited: %+v", none)
	}
	_, err := identity.Invite(t.Context(), hub, broker.SystemNamespace, "rome", time.Now().Add(time.Hour))
	expect.NoError(t, err)
	if invited := invitation("rome"); invited.TokenHash == none.TokenHash || invited.Expires.Before(&none.Expires) {
		t.Errorf("rome is invited: %+v", invited)
	}
}
