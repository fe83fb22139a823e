package provider

import (
	"context"
	"fmt"
	"time"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// trialEndsWithin is how long a trial waits for the end of the namespace of an earlier one, which
// usually takes some seconds.
const trialEndsWithin = 10 * time.Second

// trialNamespace is the name of the namespace in which guests of a consumer are tried for which
// Liqo has created none yet. It ends with the consumer's ID, as the names of those do.
func trialNamespace(consumer string) string { return "spillway-trial-" + consumer }

// isTrial reports whether a namespace was made to try guests.
func isTrial(namespace *corev1.Namespace) bool {
	return session.IsManaged(namespace) && namespace.Name == trialNamespace(namespace.Labels[consts.RemoteClusterID])
}

// EnsureTrialNamespace makes a namespace as Liqo creates them for the guests of a consumer, and
// limits it as those. The consumer has no permissions in it. If that of an earlier trial is
// still being deleted after trialEndsWithin, there is none, since that may take for ever.
func (p *Provider) EnsureTrialNamespace(ctx context.Context, consumer string) (name string, progress peering.Progress, err error) {
	if err := session.ValidateClusterID(consumer); err != nil {
		return "", progress, err
	}
	name = trialNamespace(consumer)
	namespace, err := session.Find(ctx, p.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return "", progress, fmt.Errorf("reading namespace %s: %w", name, err)
	}
	if namespace == nil {
		namespace = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: liqo.ManagedLabels(consumer)}}
		if err := p.Client.Create(ctx, namespace); err != nil {
			return "", progress, fmt.Errorf("creating namespace %s: %w", name, err)
		}
	}
	switch {
	case !isTrial(namespace):
		return "", peering.Waiting("NamespaceTaken", "namespace "+name+" already exists and is not managed by Spillway; rename or delete it"), nil
	case !namespace.DeletionTimestamp.IsZero() && p.Clock.Since(namespace.DeletionTimestamp.Time) < trialEndsWithin:
		return "", peering.Waiting(session.ReasonTerminating, "waiting until namespace "+name+" of an earlier trial is deleted"), nil
	case !namespace.DeletionTimestamp.IsZero():
		return "", peering.Done(session.ReasonTerminating, "namespace "+name+" of an earlier trial is being deleted"), nil
	case !p.isLimited(namespace):
		if err := p.confine(ctx, namespace, consumer); apierrors.IsForbidden(err) {
			return "", peering.Waiting("AccessPending", "waiting for this agent's permissions in namespace "+name), nil
		} else if err != nil {
			return "", progress, fmt.Errorf("limiting the guests of namespace %s: %w", name, err)
		}
	}
	return name, peering.Done("TrialNamespaceReady", "guests can be tried in namespace "+name), nil
}

// RemoveTrialNamespace deletes that namespace.
func (p *Provider) RemoveTrialNamespace(ctx context.Context, consumer string) error {
	namespace, err := session.Find(ctx, p.Client, "", trialNamespace(consumer), &corev1.Namespace{})
	if err != nil || namespace == nil || !isTrial(namespace) {
		return err
	}
	if err := session.Delete(ctx, p.Client, namespace); err != nil {
		return fmt.Errorf("deleting namespace %s: %w", namespace.Name, err)
	}
	return nil
}
