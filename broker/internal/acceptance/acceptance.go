package acceptance

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/text"
)

// Reasons of condition Accepted.
const (
	ReasonUsed      = "Used"
	ReasonOtherName = "OtherName"
	ReasonNoEffect  = "NoEffect"
)

const (
	// configName is the name of the BrokerConfig that is used.
	configName = "default"
	// period is how often the statuses are compared.
	period = 10 * time.Second
	// maxMessage is the maximum size of a message, in bytes.
	maxMessage = 1024
)

// Writer writes the statuses, on the leader.
type Writer struct {
	Client    client.Client
	Namespace string
	Clock     clock.WithTicker
}

// NeedLeaderElection implements manager.LeaderElectionRunnable.
func (w *Writer) NeedLeaderElection() bool { return true }

// Start implements manager.Runnable.
func (w *Writer) Start(ctx context.Context) error {
	ticker := w.Clock.NewTicker(period)
	defer ticker.Stop()
	for {
		if err := w.write(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Failed to write the status of BrokerConfigs; retrying")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

// write writes the statuses that differ.
func (w *Writer) write(ctx context.Context) error {
	var list broker.BrokerConfigList
	if err := w.Client.List(ctx, &list, client.InNamespace(w.Namespace)); err != nil {
		return fmt.Errorf("listing BrokerConfigs: %w", err)
	}
	now := metav1.NewTime(w.Clock.Now())
	for _, config := range list.Items {
		if err := w.patch(ctx, config.Name, config.Status, statusOf(&config, now)); err != nil {
			return err
		}
	}
	return nil
}

// patch writes a status unless it is what it was.
func (w *Writer) patch(ctx context.Context, name string, before, status broker.BrokerConfigStatus) error {
	if equality.Semantic.DeepEqual(before, status) {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"status": status})
	if err != nil {
		return fmt.Errorf("encoding a status: %w", err)
	}
	object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Namespace: w.Namespace, Name: name}}
	object.SetGroupVersionKind(broker.GroupVersion.WithKind("BrokerConfig"))
	// The API server accepts no status of an object from before the CRD refused its spec.
	if err := w.Client.Status().Patch(ctx, object, client.RawPatch(types.MergePatchType, patch)); client.IgnoreNotFound(err) != nil && !apierrors.IsInvalid(err) {
		return fmt.Errorf("writing the status of BrokerConfig %s: %w", name, err)
	}
	return nil
}

// statusOf is the status of a BrokerConfig.
func statusOf(config *broker.BrokerConfig, now metav1.Time) broker.BrokerConfigStatus {
	status := *config.Status.DeepCopy()
	status.ObservedGeneration = config.Generation
	if config.Name != configName {
		accept(&status, metav1.ConditionFalse, ReasonOtherName, "The broker uses only the BrokerConfig named "+configName+": delete this one.", now)
	} else if why := unusable(&config.Spec); why != "" {
		accept(&status, metav1.ConditionFalse, ReasonNoEffect, why, now)
	} else {
		accept(&status, metav1.ConditionTrue, ReasonUsed, "The broker uses it.", now)
	}
	return status
}

// unusable says which value has no effect: what the CRD refuses, the API server does not store.
func unusable(spec *broker.BrokerConfigSpec) string {
	if config := settings.Of(spec); config.Queueing == broker.QueueingNone && config.KeepFreeFor > 0 {
		return fmt.Sprintf("keepFreeFor %s has no effect with queueing None: remove it, or set queueing to Conservative.", config.KeepFreeFor)
	}
	return ""
}

func accept(status *broker.BrokerConfigStatus, accepted metav1.ConditionStatus, reason, message string, now metav1.Time) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: broker.ConditionAccepted, Status: accepted, Reason: reason, Message: text.TruncateTo(message, maxMessage),
		ObservedGeneration: status.ObservedGeneration, LastTransitionTime: now,
	})
}
