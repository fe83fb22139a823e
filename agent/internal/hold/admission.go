package hold

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	"github.com/spillway-dev/spillway/agent/internal/hold/verdict"
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

// prepareTrials begins to make the namespace in which guests of the decisions are to be tried, so
// that a consumer without one waits for it and for the scheduler at the same time.
func (r *Reconciler) prepareTrials(ctx context.Context, consumer string, decisions []verdict.Decision) {
	if r.GuestNamespaces == nil || r.of(consumer).prepared || !slices.ContainsFunc(decisions, verdict.Decision.Open) {
		return
	}
	r.of(consumer).prepared = true
	if _, _, err := r.tryIn(ctx, consumer); err != nil {
		// It is repeated when a guest is to be tried.
		log.FromContext(ctx).Info("Cannot prepare to try guests", "consumer", consumer, "reason", err.Error())
	}
}

// tryIn returns the namespaces in which guests of a consumer are tried: those that it has or else
// one that is made for it. otherwise is what is said of all guests if there is none.
func (r *Reconciler) tryIn(ctx context.Context, consumer string) (namespaces []string, otherwise verdict.Trial, err error) {
	namespaces, err = r.GuestNamespaces.GuestNamespaces(ctx, consumer)
	if err != nil {
		return nil, otherwise, fmt.Errorf("listing the namespaces for guests of %s: %w", consumer, err)
	}
	if len(namespaces) > 0 {
		return namespaces[:min(len(namespaces), maxTried)], otherwise, nil
	}
	name, progress, err := r.GuestNamespaces.EnsureTrialNamespace(ctx, consumer)
	switch {
	case err != nil:
		// It must not keep the consumer's other holds from being decided.
		return nil, verdict.Trial{Answer: verdict.Undecided, Words: err.Error()}, nil
	case !progress.Done:
		return nil, verdict.Trial{Answer: verdict.Undecided, Words: progress.Message}, nil
	case name == "":
		log.FromContext(ctx).Info("Cannot try whether guests are admitted", "consumer", consumer, "reason", progress.Message)
		return nil, verdict.Trial{Answer: verdict.Admitted}, nil
	}
	return []string{name}, otherwise, nil
}

// try asks the API server about a guest of each shape that is about to be accepted, without
// storing it, once for each shape. It reports whether that refuses any decision.
func (r *Reconciler) try(ctx context.Context, consumer string, decisions []verdict.Decision) (tried []verdict.Decision, refused bool, err error) {
	if r.GuestNamespaces == nil || !slices.ContainsFunc(decisions, verdict.Decision.Tries) {
		return decisions, false, nil
	}
	namespaces, otherwise, err := r.tryIn(ctx, consumer)
	if err != nil {
		return nil, false, err
	}
	trials, known := map[types.UID][]verdict.Trial{}, map[string]verdict.Trial{}
	for _, d := range decisions {
		sets, divisible := d.Guests()
		for _, set := range sets {
			shape := set
			if shape.Count = 0; !divisible {
				shape.Name = ""
			}
			key, err := json.Marshal(shape)
			if err != nil {
				return nil, false, err
			}
			trial, tried := known[string(key)]
			if !tried {
				if trial = otherwise; len(namespaces) > 0 {
					trial, err = r.tryGuests(ctx, set, divisible, namespaces)
				}
				if err != nil {
					return nil, false, err
				}
				known[string(key)] = trial
			}
			uid := d.Instruction().UID
			if trials[uid] = append(trials[uid], trial); trial.Answer != verdict.Admitted && d.Instruction().Status.Accepted != nil {
				break
			}
		}
	}
	tried, refused = verdict.Try(decisions, trials, r.Clock.Now(), r.ProofTimeout)
	r.memory.Note(tried)
	return tried, refused, nil
}

// tryGuests tries a guest of a pod set, and of smaller and smaller parts of it, if it is
// divisible, until one is admitted. It returns what the API server says about the last.
func (r *Reconciler) tryGuests(ctx context.Context, set broker.PodSet, divisible bool, namespaces []string) (result verdict.Trial, err error) {
	result, err = r.tryGuest(ctx, set, namespaces)
	for n := int64(2); divisible && n <= maxParts && result.Answer == verdict.NotAdmitted && err == nil; n *= 2 {
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
func (r *Reconciler) tryGuest(ctx context.Context, set broker.PodSet, namespaces []string) (result verdict.Trial, err error) {
	for _, namespace := range namespaces {
		err := r.client.Create(ctx, placeholder.Guest(set, namespace), client.DryRunAll)
		switch answer := answerOf(err); answer {
		case verdict.Admitted:
			return verdict.Trial{Answer: answer}, nil
		case untriable:
			log.FromContext(ctx).Info("Cannot try whether guests are admitted", "namespace", namespace, "reason", err.Error())
			return verdict.Trial{Answer: verdict.Admitted}, nil
		case failed:
			return verdict.Trial{}, fmt.Errorf("trying a guest in namespace %s: %w", namespace, err)
		default:
			if result.Answer == "" || result.Answer == verdict.NotAdmitted {
				result = verdict.Trial{Answer: answer, Words: strings.TrimSuffix(err.Error(), ".")}
			}
		}
	}
	return result, nil
}

// What the result of a dry run says besides.
const (
	// untriable: nothing, nor will the next try.
	untriable verdict.Answer = "untriable"
	// failed: nothing, and not because of the namespace.
	failed verdict.Answer = "failed"
)

// notAboutPod are words of refusals that say nothing about the pod. Until a namespace is
// complete: the agent's role, the quota or the ServiceAccount does not exist, or a quota is not
// counted yet, or it is being deleted.
var notAboutPod = map[verdict.Answer][]string{
	verdict.Undecided:  {`cannot create resource "pods"`, "no params found", "error looking up service account", "because it is being terminated", "status unknown for quota"},
	verdict.NotGranted: {"resources that are granted to its cluster"},
	// A webhook that cannot be asked without effect.
	untriable: {"does not support dry run"},
}

// ofQuota are words of refusals by a quota, before its name.
var ofQuota = []string{"exceeded quota: ", "status unknown for quota: ", "failed quota: "}

func answerOf(err error) verdict.Answer {
	switch {
	// Quotas are the last that the API server asks. A new one may not be counted yet, and
	// be there before the LimitRange that gives each guest limits.
	case err == nil, apierrors.IsForbidden(err) && slices.ContainsFunc(ofQuota, func(words string) bool { return strings.Contains(err.Error(), words+confine.Quota) }):
		return verdict.Admitted
	case apierrors.IsNotFound(err):
		return verdict.Undecided
	}
	for answer, all := range notAboutPod {
		if slices.ContainsFunc(all, func(words string) bool { return strings.Contains(err.Error(), words) }) {
			return answer
		}
	}
	if refuses(err) {
		return verdict.NotAdmitted
	}
	return failed
}

// refuses reports whether an error is a verdict about the pod. Admission webhooks may deny
// a request without a reason that client-go knows.
func refuses(err error) bool {
	return err != nil && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || strings.Contains(err.Error(), "denied the request"))
}
