package hold

import (
	"context"
	"errors"
	"fmt"
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// writeAll writes statuses, and updates the instructions to what was written. The error
// is a conflict only if all errors are.
func (r *Reconciler) writeAll(ctx context.Context, writes []verdict.Write) error {
	errs := make([]error, len(writes))
	after := make([]*broker.ProviderInstruction, len(writes))
	_ = r.concurrently(ctx, len(writes), func(ctx context.Context, i int) error {
		after[i], errs[i] = r.writeStatus(ctx, writes[i].Instruction, writes[i].Status)
		return nil
	})
	var conflict error
	var others []error
	for i, err := range errs {
		switch {
		case apierrors.IsConflict(err):
			conflict = err
			delete(r.written, writes[i].Instruction.UID)
		case err != nil:
			others = append(others, err)
		case after[i] != nil:
			r.written[after[i].UID] = after[i]
			*writes[i].Instruction = *after[i]
		}
	}
	if len(others) > 0 {
		return errors.Join(others...)
	}
	return conflict
}

// writeStatus patches the status, records an event if the decision has changed, and
// returns the instruction as written, nil if nothing was to be written. It returns a
// conflict if the instruction was changed, or replaced by another one of its name,
// since it was judged.
func (r *Reconciler) writeStatus(ctx context.Context, judged *broker.ProviderInstruction, status broker.ProviderInstructionStatus) (*broker.ProviderInstruction, error) {
	if equality.Semantic.DeepEqual(judged.Status, status) {
		return nil, nil
	}
	instruction := judged.DeepCopy()
	instruction.Status = status
	if err := r.client.Status().Patch(ctx, instruction, client.MergeFromWithOptions(judged, client.MergeFromWithOptimisticLock{})); err != nil {
		if apierrors.IsNotFound(err) {
			return nil, nil
		}
		return nil, fmt.Errorf("writing the status of provider instruction %s: %w", instruction.Name, err)
	}
	old := meta.FindStatusCondition(judged.Status.Conditions, broker.ConditionEnforced)
	enforced := meta.FindStatusCondition(status.Conditions, broker.ConditionEnforced)
	if enforced.Reason == verdict.ReasonGrantPending || old != nil && old.Reason == enforced.Reason && old.Message == enforced.Message {
		return instruction, nil
	}
	kind := corev1.EventTypeNormal
	if enforced.Status == metav1.ConditionFalse && enforced.Reason != broker.ReasonReleased {
		kind = corev1.EventTypeWarning
	}
	r.recorder.Eventf(instruction, nil, kind, enforced.Reason, "Enforce", "%s", enforced.Message)
	log.FromContext(ctx).Info("Decided on a ProviderInstruction", "reservation", instruction.Spec.ReservationName, "consumer", instruction.Spec.RequesterClusterID,
		"attempt", instruction.Spec.Attempt, "reason", enforced.Reason, "message", enforced.Message)
	return instruction, nil
}

// written are the instructions as last written, by UID, until the cache shows them.
type written map[types.UID]*broker.ProviderInstruction

// merge replaces the cached instructions that are older than what was written.
func (w written) merge(cached []*broker.ProviderInstruction) []*broker.ProviderInstruction {
	exists := map[types.UID]bool{}
	for i, instruction := range cached {
		exists[instruction.UID] = true
		last := w[instruction.UID]
		if last == nil {
			continue
		}
		if order, err := resourceversion.CompareResourceVersion(instruction.ResourceVersion, last.ResourceVersion); err == nil && order < 0 {
			cached[i] = last.DeepCopy()
		} else {
			delete(w, instruction.UID)
		}
	}
	maps.DeleteFunc(w, func(uid types.UID, _ *broker.ProviderInstruction) bool { return !exists[uid] })
	return cached
}
