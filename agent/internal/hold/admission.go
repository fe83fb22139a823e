package hold

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/peering/confine"
	"github.com/spillway-dev/spillway/agent/internal/placeholder"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/capacity"
)

// maxParts is the number of parts that a divisible total is divided into, to try one, at most.
const maxParts = 4096

// maxTried is the number of a consumer's namespaces in which a guest is tried, one after
// the other, until one admits it: a hold does not say in which of them its guests run.
const maxTried = 4

// admit makes the API server admit a guest of each shape that is about to be accepted,
// without storing it, and turns the decisions about what it does not admit into refusals.
// Guests of a divisible total may be of any size: it is refused if none of several is admitted.
// Where the consumer has no namespace yet, nothing is tried: what only that namespace refuses,
// such as a policy that goes by its labels, shows when the guest is created. Placeholders show
// nothing of it, which are always under Pod Security Standard restricted; the standard of guests
// is compared by capacity.Admit. It reports whether it has refused any.
func (r *Reconciler) admit(ctx context.Context, consumer string, decisions []decision) (refused bool, err error) {
	if r.GuestNamespaces == nil {
		return false, nil
	}
	var namespaces []string
	tried := map[string]string{} // the API server's words by shape
	for i := range decisions {
		d := &decisions[i]
		if d.settled || d.smaller || d.refused != nil || d.proving() {
			continue
		}
		sets, divisible := d.held.PodSets, false
		if total := d.held.Totals; len(sets) == 0 && len(total.List()) > 0 {
			sets, divisible = []broker.PodSet{{Name: "total", Count: 1, Requests: total}}, true
		}
		for _, set := range sets {
			if namespaces == nil {
				if namespaces, err = r.GuestNamespaces(ctx, consumer); err != nil {
					return refused, fmt.Errorf("listing the namespaces for guests of %s: %w", consumer, err)
				}
			}
			shape, of := set, set.Requests.String()
			shape.Name, shape.Count = "", 0
			if divisible {
				shape.Name, of = set.Name, "any part of "+of
			}
			key, err := json.Marshal(shape)
			if err != nil {
				return refused, err
			}
			message, known := tried[string(key)]
			if !known {
				if message, err = r.tryGuests(ctx, set, divisible, namespaces[:min(len(namespaces), maxTried)]); err != nil {
					return refused, err
				}
				tried[string(key)] = message
			}
			if message == "" {
				continue
			}
			d.refused, refused = &capacity.Rejection{Reason: ReasonGuestNotAdmitted, Message: fmt.Sprintf("The API server does not admit pods of %s: %s.", of, message)}, true
			d.held = d.fallBack(placeholder.State{Missing: []placeholder.Missing{{Set: set, Wanted: set.Count}}}.Without(d.held))
			if d.instruction.Status.Accepted != nil {
				break
			}
		}
	}
	return refused, nil
}

// tryGuests tries a guest of a pod set, and of smaller and smaller parts of it, if it is
// divisible, until one is admitted. It returns the API server's words about the last.
func (r *Reconciler) tryGuests(ctx context.Context, set broker.PodSet, divisible bool, namespaces []string) (message string, err error) {
	message, err = r.tryGuest(ctx, set, namespaces)
	for n := int64(2); divisible && n <= maxParts && message != "" && err == nil; n *= 2 {
		part := set
		part.Requests = broker.FromList(nthOf(set.Requests.List(), n))
		message, err = r.tryGuest(ctx, part, namespaces)
	}
	return message, err
}

// nthOf returns an n-th of each amount in whole units, at least one unit.
func nthOf(total corev1.ResourceList, n int64) corev1.ResourceList {
	part := capacity.Floor(total)
	for name, amount := range part {
		unit := placeholder.Unit(name)
		part[name] = max(amount/n/unit*unit, unit)
	}
	return part.List()
}

// tryGuest creates a guest of a pod set without storing it. It returns the API server's
// words if none of the namespaces admits it.
func (r *Reconciler) tryGuest(ctx context.Context, set broker.PodSet, namespaces []string) (message string, err error) {
	for _, namespace := range namespaces {
		err := r.client.Create(ctx, placeholder.Guest(set, namespace), client.DryRunAll)
		switch answerOf(err) {
		case admitted:
			return "", nil
		case undecided:
			log.FromContext(ctx).Info("Cannot try whether guests are admitted", "namespace", namespace, "reason", err.Error())
			return "", nil
		case failed:
			return "", fmt.Errorf("trying a guest in namespace %s: %w", namespace, err)
		}
		message = strings.TrimSuffix(err.Error(), ".")
	}
	return message, nil
}

// answer is what the result of a dry run says about the pod.
type answer string

const (
	admitted    answer = "admitted"
	notAdmitted answer = "not admitted"
	// undecided: nothing.
	undecided answer = "undecided"
	// failed: nothing, and the next try may say more.
	failed answer = "failed"
)

// notAboutPod are words of refusals that say nothing about the pod: the agent's role, the
// quota or the ServiceAccount of the namespace does not exist yet, it is being deleted, a
// webhook cannot be asked without effect, a quota is not counted yet, or what the pod
// requests is granted only after this.
var notAboutPod = []string{`cannot create resource "pods"`, "no params found", "error looking up service account", "because it is being terminated", "does not support dry run", "status unknown for quota", "resources that are granted to its cluster"}

// ofQuota are words of refusals by a quota, before its name.
var ofQuota = []string{"exceeded quota: ", "status unknown for quota: ", "failed quota: "}

func answerOf(err error) answer {
	switch {
	// Quotas are the last that the API server asks. A new one may not be counted yet, and
	// be there before the LimitRange that gives each guest limits.
	case err == nil, apierrors.IsForbidden(err) && slices.ContainsFunc(ofQuota, func(words string) bool { return strings.Contains(err.Error(), words+confine.Quota) }):
		return admitted
	case apierrors.IsNotFound(err), slices.ContainsFunc(notAboutPod, func(words string) bool { return strings.Contains(err.Error(), words) }):
		return undecided
	case refuses(err):
		return notAdmitted
	}
	return failed
}

// refuses reports whether an error is a verdict about the pod. Admission webhooks may deny
// a request without a reason that client-go knows.
func refuses(err error) bool {
	return err != nil && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || strings.Contains(err.Error(), "denied the request"))
}
