package hold

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/peering"
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

// GuestNamespaces are the namespaces of the guests of each consumer.
type GuestNamespaces interface {
	// GuestNamespaces returns the namespaces that exist for the guests of a consumer.
	GuestNamespaces(ctx context.Context, consumer string) ([]string, error)
	// EnsureTrialNamespace makes a namespace in which a guest of a consumer that has none yet is
	// admitted or not as in those that its guests will have. The progress says what it waits for.
	// If it is done without a name, guests cannot be tried.
	EnsureTrialNamespace(ctx context.Context, consumer string) (name string, progress peering.Progress, err error)
	// RemoveTrialNamespace removes that of a consumer that is promised nothing any more, unless
	// it has become one of its guests.
	RemoveTrialNamespace(ctx context.Context, consumer string) error
}

// trialRetryAfter is the delay before guests are tried again that could not be: roles, quotas
// and accounts of a new namespace take effect without an event.
const trialRetryAfter = 200 * time.Millisecond

// minTrial is how long guests of an attempt are tried at least, however long its proof took.
const minTrial = 3 * time.Second

// prepareTrials begins to make the namespace in which guests of the decisions are to be tried, so
// that a consumer without one waits for it and for the scheduler at the same time.
func (r *Reconciler) prepareTrials(ctx context.Context, consumer string, decisions []decision) {
	if r.GuestNamespaces == nil || r.prepared[consumer] || !slices.ContainsFunc(decisions, decision.undecided) {
		return
	}
	r.prepared[consumer] = true
	if _, _, err := r.tryIn(ctx, consumer); err != nil {
		// It is repeated when a guest is to be tried.
		log.FromContext(ctx).Info("Cannot prepare to try guests", "consumer", consumer, "reason", err.Error())
	}
}

// tryIn returns the namespaces in which guests of a consumer are tried: those that it has or else
// one that is made for it. waits is why there is none yet. If it is empty, there will be none.
func (r *Reconciler) tryIn(ctx context.Context, consumer string) (namespaces []string, waits string, err error) {
	namespaces, err = r.GuestNamespaces.GuestNamespaces(ctx, consumer)
	if err != nil {
		return nil, "", fmt.Errorf("listing the namespaces for guests of %s: %w", consumer, err)
	}
	if len(namespaces) > 0 {
		return namespaces[:min(len(namespaces), maxTried)], "", nil
	}
	name, progress, err := r.GuestNamespaces.EnsureTrialNamespace(ctx, consumer)
	switch {
	case err != nil:
		// It must not keep the consumer's other holds from being decided.
		return nil, err.Error(), nil
	case !progress.Done:
		return nil, progress.Message, nil
	case name == "":
		log.FromContext(ctx).Info("Cannot try whether guests are admitted", "consumer", consumer, "reason", progress.Message)
		return nil, "", nil
	}
	return []string{name}, "", nil
}

// trial is what the API server says about a guest.
type trial struct {
	answer answer
	// words of the API server, unless it admits the guest, or why it cannot be asked.
	words string
}

// refusal is why pods with some requests are refused.
func (t trial) refusal(of string) string {
	if t.answer == notAdmitted {
		return fmt.Sprintf("The API server does not admit pods of %s: %s.", of, t.words)
	}
	return fmt.Sprintf("It is not known whether the API server admits pods of %s: %s.", of, t.words)
}

// admit makes the API server admit a guest of each shape that is about to be accepted,
// without storing it, and turns the decisions about what it does not admit into refusals.
// Guests of a divisible total may be of any size: it is refused if none of several is admitted.
// A decision whose guests cannot be tried yet waits for that, and is refused if it waits for too
// long. It reports whether it has refused any.
func (r *Reconciler) admit(ctx context.Context, consumer string, decisions []decision) (refused bool, err error) {
	if r.GuestNamespaces == nil {
		return false, nil
	}
	var namespaces []string
	var waits string
	listed, tried := false, map[string]trial{}
	for i := range decisions {
		d := &decisions[i]
		if !d.undecided() {
			continue
		}
		a := r.attemptOf(d.instruction)
		if d.proving() {
			continue // also if it could not be tried before another one was refused
		}
		sets, divisible := d.held.PodSets, false
		if total := d.held.Totals; len(sets) == 0 && len(total.List()) > 0 {
			sets, divisible = []broker.PodSet{{Name: "total", Count: 1, Requests: total}}, true
		}
		for _, set := range sets {
			if !listed {
				if namespaces, waits, err = r.tryIn(ctx, consumer); err != nil {
					return refused, err
				}
				listed = true
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
			result, known := tried[string(key)]
			switch {
			case known:
			case len(namespaces) == 0 && waits == "":
				result = trial{answer: admitted}
			case len(namespaces) == 0:
				result = trial{undecided, waits}
			default:
				if result, err = r.tryGuests(ctx, set, divisible, namespaces); err != nil {
					return refused, err
				}
				tried[string(key)] = result
			}
			if result.answer == admitted {
				continue
			}
			if !r.waitsForTrial(d, a, result) {
				d.refused, refused = &capacity.Rejection{Reason: ReasonGuestNotAdmitted, Message: result.refusal(of)}, true
				d.held = d.fallBack(placeholder.State{Missing: []placeholder.Missing{{Set: set, Wanted: set.Count}}}.Without(d.held))
			}
			if d.untried != "" || d.instruction.Status.Accepted != nil {
				break
			}
		}
		if d.untried == "" {
			a.untried = time.Time{}
		}
	}
	return refused, nil
}

// waitsForTrial notes in a decision that its guests cannot be tried yet, and why. It reports
// false if they could, or could not in the time that the attempt has: proof and trial share it,
// because the broker waits for both.
func (r *Reconciler) waitsForTrial(d *decision, a *attempt, result trial) bool {
	if result.answer == notAdmitted {
		return false
	}
	now := r.Clock.Now()
	if a.untried.IsZero() {
		a.untried = now
	}
	if r.late(d.instruction) || now.Sub(a.since) >= r.ProofTimeout && now.Sub(a.untried) >= min(minTrial, r.ProofTimeout) {
		return false
	}
	d.untried, d.granting, d.proofTakes = result.words, result.answer == notGranted, max(d.proofTakes, now.Sub(a.untried))
	return true
}

// tryGuests tries a guest of a pod set, and of smaller and smaller parts of it, if it is
// divisible, until one is admitted. It returns what the API server says about the last.
func (r *Reconciler) tryGuests(ctx context.Context, set broker.PodSet, divisible bool, namespaces []string) (result trial, err error) {
	result, err = r.tryGuest(ctx, set, namespaces)
	for n := int64(2); divisible && n <= maxParts && result.answer == notAdmitted && err == nil; n *= 2 {
		part := set
		part.Requests = broker.FromList(nthOf(set.Requests.List(), n))
		result, err = r.tryGuest(ctx, part, namespaces)
	}
	return result, err
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

// tryGuest creates a guest of a pod set without storing it. One namespace that admits it
// suffices. One of which that is open leaves it open.
func (r *Reconciler) tryGuest(ctx context.Context, set broker.PodSet, namespaces []string) (result trial, err error) {
	for _, namespace := range namespaces {
		err := r.client.Create(ctx, placeholder.Guest(set, namespace), client.DryRunAll)
		switch answer := answerOf(err); answer {
		case admitted:
			return trial{answer: admitted}, nil
		case untriable:
			log.FromContext(ctx).Info("Cannot try whether guests are admitted", "namespace", namespace, "reason", err.Error())
			return trial{answer: admitted}, nil
		case failed:
			return trial{}, fmt.Errorf("trying a guest in namespace %s: %w", namespace, err)
		default:
			if result.answer == "" || result.answer == notAdmitted {
				result = trial{answer, strings.TrimSuffix(err.Error(), ".")}
			}
		}
	}
	return result, nil
}

// answer is what the result of a dry run says about the pod.
type answer string

const (
	admitted    answer = "admitted"
	notAdmitted answer = "not admitted"
	// undecided: nothing yet.
	undecided answer = "undecided"
	// notGranted: nothing before what it requests is granted.
	notGranted answer = "not granted"
	// untriable: nothing, nor will the next try.
	untriable answer = "untriable"
	// failed: nothing, and not because of the namespace.
	failed answer = "failed"
)

// notAboutPod are words of refusals that say nothing about the pod. Until a namespace is
// complete: the agent's role, the quota or the ServiceAccount does not exist, or a quota is not
// counted yet, or it is being deleted.
var notAboutPod = map[answer][]string{
	undecided:  {`cannot create resource "pods"`, "no params found", "error looking up service account", "because it is being terminated", "status unknown for quota"},
	notGranted: {"resources that are granted to its cluster"},
	// A webhook that cannot be asked without effect.
	untriable: {"does not support dry run"},
}

// ofQuota are words of refusals by a quota, before its name.
var ofQuota = []string{"exceeded quota: ", "status unknown for quota: ", "failed quota: "}

func answerOf(err error) answer {
	switch {
	// Quotas are the last that the API server asks. A new one may not be counted yet, and
	// be there before the LimitRange that gives each guest limits.
	case err == nil, apierrors.IsForbidden(err) && slices.ContainsFunc(ofQuota, func(words string) bool { return strings.Contains(err.Error(), words+confine.Quota) }):
		return admitted
	case apierrors.IsNotFound(err):
		return undecided
	}
	for answer, all := range notAboutPod {
		if slices.ContainsFunc(all, func(words string) bool { return strings.Contains(err.Error(), words) }) {
			return answer
		}
	}
	if refuses(err) {
		return notAdmitted
	}
	return failed
}

// refuses reports whether an error is a verdict about the pod. Admission webhooks may deny
// a request without a reason that client-go knows.
func refuses(err error) bool {
	return err != nil && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || strings.Contains(err.Error(), "denied the request"))
}
