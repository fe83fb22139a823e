package direct

import (
	"context"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// A peering is one Secret, from the first Hello until the provider has confirmed
// that nothing is left. The label by which virtual-node finds Secrets has the
// peering's state; virtual-node sees only those in stateActive.
const (
	// statePending: the provider has not granted the peering, or has and no
	// capacity is wanted yet.
	statePending = nodeconfig.Component + "-pending"
	// stateActive: virtual-node keeps a Node by the Secret, or removes it once
	// nodeconfig.Config's Terminating is set.
	stateActive = nodeconfig.Component
	// stateEnded: the Node and the token are gone; the provider has yet to confirm
	// that nothing is left there.
	stateEnded = nodeconfig.Component + "-ended"
)

const (
	// annotationSession is the peering's session number.
	annotationSession = broker.Group + "/direct-session"
	// annotationGranted is when the token arrived, annotationRenew and
	// annotationExpires when it is to be renewed and when it expires, all by this
	// cluster's clock.
	annotationGranted = broker.Group + "/direct-granted"
	annotationRenew   = broker.Group + "/direct-renew"
	annotationExpires = broker.Group + "/direct-expires"
)

// record is a peering as it is stored.
type record struct {
	nodeconfig.Config
	state   string
	session int64
	// granted, renew and expires are zero if there is no token.
	granted, renew, expires time.Time
	// secret is nil before the first store.
	secret *corev1.Secret
}

// times are the fields of a record that are stored as annotations.
func (r *record) times() map[string]*time.Time {
	return map[string]*time.Time{annotationGranted: &r.granted, annotationRenew: &r.renew, annotationExpires: &r.expires}
}

// connected reports whether the provider has granted the peering.
func (r *record) connected() bool { return r.Connection.Token != "" }

// ending reports whether the peering's teardown has begun.
func (r *record) ending() bool { return r.Terminating || r.state == stateEnded }

// isRecord reports whether a Secret is the one that Spillway created for a peering.
func isRecord(secret *corev1.Secret) bool {
	provider := secret.Labels[broker.LabelProvider]
	return session.IsManaged(secret) && provider != "" && secret.Name == nodeconfig.SecretName(provider)
}

// parse reads a record from its Secret. Content that cannot be decoded counts as
// not granted, so that a token is requested again.
func parse(secret *corev1.Secret) *record {
	r := &record{secret: secret, state: secret.Labels[nodeconfig.LabelComponent], session: session.Number(secret, annotationSession)}
	active := secret.DeepCopy()
	active.Labels[nodeconfig.LabelComponent] = stateActive
	if stored, err := nodeconfig.FromSecret(active); err == nil {
		r.Config = stored
	}
	r.Provider = secret.Labels[broker.LabelProvider]
	for annotation, at := range r.times() {
		if parsed, err := time.Parse(time.RFC3339, secret.Annotations[annotation]); err == nil {
			*at = parsed
		}
	}
	return r
}

// load reads the peering with a provider. The record is nil if there is none, and
// taken is true if another Secret has its name.
func (d *Driver) load(ctx context.Context, provider string) (r *record, taken bool, err error) {
	secret, err := session.Find(ctx, d.Client, d.VirtualNodeNamespace, nodeconfig.SecretName(provider), &corev1.Secret{})
	switch {
	case err != nil:
		return nil, false, fmt.Errorf("reading the peering with %s: %w", provider, err)
	case secret == nil:
		return nil, false, nil
	case !isRecord(secret) || secret.Labels[broker.LabelProvider] != provider:
		return nil, true, nil
	}
	return parse(secret), false, nil
}

// store creates or updates a record's Secret. It fails with a conflict if the
// Secret has changed since it was read.
func (d *Driver) store(ctx context.Context, r *record) error {
	secret, err := r.Config.Secret(d.VirtualNodeNamespace)
	if err != nil {
		return err
	}
	secret.Labels[nodeconfig.LabelComponent] = r.state
	metav1.SetMetaDataAnnotation(&secret.ObjectMeta, annotationSession, session.FormatNumber(r.session))
	for annotation, at := range r.times() {
		if !at.IsZero() {
			secret.Annotations[annotation] = at.UTC().Format(time.RFC3339)
		}
	}
	if r.secret == nil {
		err = d.Client.Create(ctx, secret)
	} else {
		desired := secret
		secret = r.secret.DeepCopy()
		secret.Data = desired.Data
		maps.Copy(secret.Labels, desired.Labels)
		for annotation := range r.times() {
			delete(secret.Annotations, annotation)
		}
		for annotation, value := range desired.Annotations {
			metav1.SetMetaDataAnnotation(&secret.ObjectMeta, annotation, value)
		}
		err = d.Client.Update(ctx, secret)
	}
	if err != nil {
		return fmt.Errorf("storing the peering with %s: %w", r.Provider, err)
	}
	r.secret = secret
	return nil
}

// records lists every peering.
func (d *Driver) records(ctx context.Context) ([]*record, error) {
	var secrets corev1.SecretList
	if err := d.Client.List(ctx, &secrets, client.InNamespace(d.VirtualNodeNamespace), session.Managed); err != nil {
		return nil, fmt.Errorf("listing peerings: %w", err)
	}
	var records []*record
	for i := range secrets.Items {
		if isRecord(&secrets.Items[i]) {
			records = append(records, parse(&secrets.Items[i]))
		}
	}
	return records, nil
}
