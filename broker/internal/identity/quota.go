package identity

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/settings"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// admissionTTL is the time after which a registration that the cache does not have was not
// created, or is deleted.
const admissionTTL = time.Minute

// admissions are the registrations that this process has created and that the cache does
// not have yet, so that concurrent joins stay within the quota.
type admissions struct {
	mutex sync.Mutex
	at    map[string]time.Time
}

// createRegistration creates the registration of a new cluster, within the quota.
func (a *Authority) createRegistration(ctx context.Context, registration *broker.ClusterRegistration) error {
	if err := a.admit(ctx, registration.Name); err != nil {
		return err
	}
	err := a.Client.Create(ctx, registration)
	if err != nil {
		a.admissions.mutex.Lock()
		defer a.admissions.mutex.Unlock()
		delete(a.admissions.at, registration.Name)
	}
	return err
}

// admit counts a new cluster, unless there are as many as the quota allows.
func (a *Authority) admit(ctx context.Context, clusterID string) error {
	config, err := a.config(ctx)
	if err != nil {
		return err
	}
	quota := settings.Of(&config.Spec).Clusters
	a.admissions.mutex.Lock()
	defer a.admissions.mutex.Unlock()
	var list broker.ClusterRegistrationList
	if err := a.Cache.List(ctx, &list, client.InNamespace(a.Namespace), client.UnsafeDisableDeepCopy); err != nil {
		return fmt.Errorf("counting the clusters: %w", err)
	}
	for i := range list.Items {
		delete(a.admissions.at, list.Items[i].Name)
	}
	now := a.Clock.Now()
	maps.DeleteFunc(a.admissions.at, func(_ string, at time.Time) bool { return now.Sub(at) >= admissionTTL })
	if len(list.Items)+len(a.admissions.at) >= quota {
		return refuse(protocol.CodeTooMany, "%d clusters have joined the broker, its quota: delete the ClusterRegistrations of those that are gone, or raise spec.quotas.clusters of the BrokerConfig in the hub", quota)
	}
	if a.admissions.at == nil {
		a.admissions.at = map[string]time.Time{}
	}
	a.admissions.at[clusterID] = now
	return nil
}
