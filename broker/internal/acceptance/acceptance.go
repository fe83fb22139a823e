package acceptance

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/internal/watch"
	"github.com/spillway-dev/spillway/broker/text"
)

// Reasons of condition Accepted.
const (
	ReasonUsed     = "Used"
	reasonNoEffect = "NoEffect"
)

// maxMessage is the maximum size of a message, in bytes.
const maxMessage = 1024

// Writer writes the statuses.
type Writer struct {
	Client    client.Client
	Namespace string
	Clock     clock.PassiveClock
}

// SetupWithManager adds the controller to a manager, whose leader runs it.
func (w *Writer) SetupWithManager(mgr manager.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("brokerconfigs").For(&broker.BrokerConfig{}).
		WithEventFilter(watch.Namespace(w.Namespace)).Complete(watch.ByName(w.reconcile))
	if err != nil {
		return fmt.Errorf("adding the controller of BrokerConfigs: %w", err)
	}
	return nil
}

// reconcile writes the status of a BrokerConfig unless it is what it was.
func (w *Writer) reconcile(ctx context.Context, name string) (ctrl.Result, error) {
	var config broker.BrokerConfig
	if err := w.Client.Get(ctx, client.ObjectKey{Namespace: w.Namespace, Name: name}, &config); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	status := statusOf(&config, metav1.NewTime(w.Clock.Now()))
	if equality.Semantic.DeepEqual(config.Status, status) {
		return ctrl.Result{}, nil
	}
	before := config.DeepCopy()
	config.Status = status
	// The API server accepts no status of an object from before the CRD refused its spec, and has none
	// before the CRD is updated.
	err := w.Client.Status().Patch(ctx, &config, client.MergeFrom(before))
	if client.IgnoreNotFound(err) != nil && !apierrors.IsInvalid(err) {
		return ctrl.Result{}, fmt.Errorf("writing the status of BrokerConfig %s: %w", name, err)
	}
	return ctrl.Result{}, nil
}

// statusOf is the status of a BrokerConfig.
func statusOf(config *broker.BrokerConfig, now metav1.Time) broker.BrokerConfigStatus {
	status := *config.Status.DeepCopy()
	status.ObservedGeneration = config.Generation
	if why := unusable(&config.Spec); why != "" {
		accept(&status, metav1.ConditionFalse, reasonNoEffect, why, now)
	} else {
		accept(&status, metav1.ConditionTrue, ReasonUsed, "The broker uses it.", now)
	}
	return status
}

// unusable says which value has no effect: what the CRD refuses, the API server does not store.
func unusable(spec *broker.BrokerConfigSpec) string {
	switch config := settings.Of(spec); {
	case config.Queueing == broker.QueueingNone && config.KeepFreeFor > 0:
		return fmt.Sprintf("keepFreeFor %s has no effect with queueing None: remove it, or set queueing to Conservative.", config.KeepFreeFor)
	case config.MaxDuration > 0 && config.DefaultDuration > config.MaxDuration:
		return fmt.Sprintf("defaultDuration %s has no effect with maxDuration %s: remove it, or raise maxDuration.", config.DefaultDuration, config.MaxDuration)
	}
	return ""
}

func accept(status *broker.BrokerConfigStatus, accepted metav1.ConditionStatus, reason, message string, now metav1.Time) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: broker.ConditionAccepted, Status: accepted, Reason: reason, Message: text.TruncateTo(message, maxMessage),
		ObservedGeneration: status.ObservedGeneration, LastTransitionTime: now,
	})
}
