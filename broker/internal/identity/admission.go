package identity

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Phase is the phase of the registration of a cluster that has shown that it may join, or had it
// before. An operator's decision goes before all else, and an approved cluster stays so.
func Phase(registration *broker.ClusterRegistration, admission broker.Admission) broker.RegistrationPhase {
	switch {
	case registration.Spec.Approval == broker.ApprovalRevoked:
		return broker.RegistrationRevoked
	case registration.Spec.Approval == broker.ApprovalApproved,
		registration.Status.Phase == broker.RegistrationApproved,
		admission == broker.AdmissionAutomatic:
		return broker.RegistrationApproved
	}
	return broker.RegistrationPending
}

// claim registers a cluster with a key, unless its ID is bound to another one; the key is empty
// if another authority has certified the cluster. Of concurrent keys only one can write the
// registration's status. Authorize decides whether the caller may be this cluster; invited is
// true if an operator has let in this one.
func (a *Authority) claim(ctx context.Context, clusterID, key string, authorize func(*broker.ClusterRegistration) (invited bool, err error)) (*broker.ClusterRegistration, error) {
	retriable := func(err error) bool {
		return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) || apierrors.IsNotFound(err)
	}
	joining, err := a.joining(ctx)
	if err != nil {
		return nil, err
	}
	var registration *broker.ClusterRegistration
	err = retry.OnError(retry.DefaultRetry, retriable, func() (err error) {
		registration, err = a.tryClaim(ctx, clusterID, key, joining, authorize)
		return err
	})
	switch {
	case retriable(err):
		return nil, refuse(protocol.CodeUnavailable, "the registration of %s was changed at the same time (%v): join again", clusterID, err)
	case err != nil:
		return nil, fmt.Errorf("registering %s: %w", clusterID, err)
	}
	return registration, refusalOf(registration)
}

func (a *Authority) tryClaim(ctx context.Context, clusterID, key string, joining broker.Joining, authorize func(*broker.ClusterRegistration) (bool, error)) (*broker.ClusterRegistration, error) {
	registration := &broker.ClusterRegistration{}
	err := a.Client.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: clusterID}, registration)
	unknown := apierrors.IsNotFound(err)
	if unknown {
		registration = &broker.ClusterRegistration{ObjectMeta: a.meta(clusterID), Spec: broker.ClusterRegistrationSpec{ClusterID: clusterID}}
	} else if err != nil {
		return nil, err
	}
	invited, err := authorize(registration)
	if err != nil {
		return nil, err
	}
	bound := registration.Status.KeyFingerprint
	switch {
	case !registration.DeletionTimestamp.IsZero():
		return nil, refuse(protocol.CodeUnavailable, "the broker is forgetting an earlier cluster %s: join again", clusterID)
	case registration.Spec.ClusterID != clusterID:
		return nil, refuse(protocol.CodeConflict, "ClusterRegistration %s/%s is for cluster %s: delete it in the hub", a.Namespace, clusterID, registration.Spec.ClusterID)
	case registration.Spec.Approval == broker.ApprovalRevoked:
		return registration, nil
	case key != "" && bound != "" && bound != key:
		return nil, refuse(protocol.CodeConflict, "another key has joined with cluster ID %s: choose another cluster ID or, if that key is lost, run kubectl -n %s delete clusterregistration %s in the hub", clusterID, a.Namespace, clusterID)
	case len(joining.Allowed) > 0 && !slices.Contains(joining.Allowed, clusterID) && !invited && registration.Spec.Approval == "":
		return nil, refuse(protocol.CodeForbidden, "cluster %s is not among the clusters that may join: add it to spec.joining.allowed of the BrokerConfig in the hub", clusterID)
	}
	if unknown {
		if err := a.createRegistration(ctx, registration); err != nil {
			return nil, err
		}
	}
	if key != "" && bound == "" {
		// What was approved before was no key.
		registration.Status.Phase = ""
	}
	phase := Phase(registration, joining.Admission)
	if invited {
		phase = broker.RegistrationApproved
	}
	if registration.Status.Phase == phase && bound == cmp.Or(key, bound) {
		return registration, nil
	}
	registration.Status.KeyFingerprint, registration.Status.Phase = cmp.Or(key, bound), phase
	return registration, a.Client.Status().Update(ctx, registration)
}

// refusalOf is why a registered cluster may not use the broker; nil if it may.
func refusalOf(registration *broker.ClusterRegistration) error {
	id := registration.Spec.ClusterID
	switch {
	case registration.Spec.Approval == broker.ApprovalRevoked:
		return refuse(protocol.CodeForbidden, "an operator of the hub has revoked the access of cluster %s (spec.approval of its ClusterRegistration)", id)
	case registration.Status.Phase != broker.RegistrationApproved:
		return refuse(protocol.CodeForbidden, `cluster %s with key %.16s waits for approval: in the hub, kubectl -n %s patch clusterregistration %s --type merge -p '{"spec":{"approval":"Approved"}}'`, id, cmp.Or(registration.Status.KeyFingerprint, "(any)"), registration.Namespace, id)
	}
	return nil
}

// authorizeJoin decides whether the sender of a join request may be its cluster: by a key that has
// joined before, by an invitation, or by the shared token.
func (a *Authority) authorizeJoin(ctx context.Context, registration *broker.ClusterRegistration, key, token string) (invited bool, err error) {
	// The request is signed with the key.
	invitation := registration.Spec.Invitation
	if registration.Status.KeyFingerprint == key {
		return invitation != nil && registration.Status.Phase == broker.RegistrationApproved, nil
	}
	unused := registration.Status.KeyFingerprint == ""
	switch {
	case invitation == nil:
	case matchesInvitation(invitation, token) && unused && a.Clock.Now().After(invitation.Expires.Time):
		return false, refuse(protocol.CodeUnauthorized, "the invitation of cluster %s expired at %s: ask for a new one (spillway-broker invite)", registration.Spec.ClusterID, invitation.Expires.UTC().Format(time.RFC3339))
	case matchesInvitation(invitation, token):
		return unused, nil
	case unused:
		return false, refuse(protocol.CodeUnauthorized, "cluster %s is invited: set the agent chart's value join.token to the token of its invitation", registration.Spec.ClusterID)
	}
	joining, err := a.joining(ctx)
	if err != nil {
		return false, err
	}
	if joining.Admission == broker.AdmissionInvitation {
		return false, refuse(protocol.CodeUnauthorized, "cluster %s needs an invitation: in the hub, kubectl -n %s exec deploy/%s -- /spillway-broker invite %s", registration.Spec.ClusterID, a.Namespace, serviceName, registration.Spec.ClusterID)
	}
	return false, a.checkToken(ctx, token)
}

func matchesInvitation(invitation *broker.Invitation, token string) bool {
	return len(token) <= maxToken && subtle.ConstantTimeCompare([]byte(invitation.TokenHash), []byte(tokenHash(token))) == 1
}

// tokenHash is how a ClusterRegistration has the token of an invitation.
func tokenHash(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// joining is what the BrokerConfig says, with its default.
func (a *Authority) joining(ctx context.Context) (broker.Joining, error) {
	config, err := a.config(ctx)
	if err != nil {
		return broker.Joining{}, err
	}
	joining := ptr.Deref(config.Spec.Joining, broker.Joining{})
	joining.Admission = settings.Of(&config.Spec).Admission
	return joining, nil
}

// config is the BrokerConfig in use; empty if there is none.
func (a *Authority) config(ctx context.Context) (*broker.BrokerConfig, error) {
	var config broker.BrokerConfig
	if err := a.Cache.Get(ctx, client.ObjectKey{Namespace: a.Namespace, Name: settings.Name}, &config); client.IgnoreNotFound(err) != nil {
		return nil, fmt.Errorf("reading the BrokerConfig: %w", err)
	}
	return &config, nil
}

// Invite creates the registration of a cluster with an invitation, or replaces that of one that has
// not joined, and returns the token.
func Invite(ctx context.Context, hub client.Client, namespace, clusterID string, expires time.Time) (token string, err error) {
	if !protocol.ValidClusterID(clusterID) {
		return "", fmt.Errorf("%q is not a cluster ID: it must have 1 to %d lower-case letters, digits and dashes, and must not begin or end with a dash", clusterID, protocol.MaxClusterID)
	}
	if token, err = newToken(); err != nil {
		return "", err
	}
	registration := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: clusterID, Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway}}}
	_, err = controllerutil.CreateOrUpdate(ctx, hub, registration, func() error {
		if registration.Status.KeyFingerprint != "" || registration.Spec.Approval == broker.ApprovalRevoked {
			return fmt.Errorf("cluster %s has joined, or is revoked: to let another key join, first run kubectl -n %s delete clusterregistration %s", clusterID, namespace, clusterID)
		}
		registration.Spec.ClusterID = clusterID
		registration.Spec.Invitation = &broker.Invitation{TokenHash: tokenHash(token), Expires: metav1.NewTime(expires)}
		return nil
	})
	if err == nil && registration.Spec.Invitation == nil {
		err = errors.New("the hub has CRDs of an earlier version: update them")
	}
	if err != nil {
		return "", fmt.Errorf("inviting cluster %s: %w", clusterID, err)
	}
	return token, nil
}
