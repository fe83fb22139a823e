package direct

import (
	"context"
	"fmt"
	"maps"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// A link is one Secret, from its first question to the provider's word that
// nothing is left. The label by which virtual-node finds Secrets says how far it
// is; with any other value virtual-node does not see it.
const (
	// stateBegun: the provider is asked, or has answered and no capacity is wanted
	// yet.
	stateBegun = nodeconfig.Component + "-begun"
	// stateLinked: virtual-node keeps a Node by it. With nodeconfig.Config's Ending it
	// lets go of that.
	stateLinked = nodeconfig.Component
	// stateOver: the Node is gone and the token erased; the provider is to say
	// that nothing is left there.
	stateOver = nodeconfig.Component + "-over"
)

const (
	// annotationSession is the link's session.
	annotationSession = broker.Group + "/direct-session"
	// annotationRenew and annotationExpires are when the token is to be renewed
	// and when it ends, annotationGranted when it came, by this cluster's clock.
	annotationRenew   = broker.Group + "/direct-renew"
	annotationExpires = broker.Group + "/direct-expires"
	annotationGranted = broker.Group + "/direct-granted"
)

// record is a link as it is stored.
type record struct {
	nodeconfig.Config
	state   string
	session int64
	// granted, renew and expires are zero where there is no connection yet.
	granted, renew, expires time.Time
	secret                  *corev1.Secret
}

// connected reports whether the provider has granted the link.
func (r *record) connected() bool { return r.Connection.Token != "" }

// ending reports whether the link is on its way out.
func (r *record) ending() bool { return r.Ending || r.state == stateOver }

// parse reads a record of its Secret. What cannot be read counts as not granted:
// the provider is asked again.
func parse(secret *corev1.Secret) *record {
	r := &record{secret: secret, state: secret.Labels[nodeconfig.LabelComponent]}
	as := secret.DeepCopy()
	as.Labels[nodeconfig.LabelComponent] = nodeconfig.Component
	if stored, err := nodeconfig.FromSecret(as); err == nil {
		r.Config = stored
	}
	r.Provider = secret.Labels[broker.LabelProvider]
	session, err := strconv.ParseInt(secret.Annotations[annotationSession], 10, 64)
	if err == nil {
		r.session = session
	}
	for at, annotation := range map[*time.Time]string{&r.granted: annotationGranted, &r.renew: annotationRenew, &r.expires: annotationExpires} {
		if parsed, err := time.Parse(time.RFC3339, secret.Annotations[annotation]); err == nil {
			*at = parsed
		}
	}
	return r
}

// load reads the link to a provider. The record is nil where there is none, and
// foreign is true where the Secret of that name is not Spillway's.
func (d *Driver) load(ctx context.Context, provider string) (r *record, foreign bool, err error) {
	secret, found, err := get(ctx, d.Client, d.LinkNamespace, nodeconfig.SecretName(provider), &corev1.Secret{})
	if err != nil {
		return nil, false, fmt.Errorf("reading the link to %s: %w", provider, err)
	}
	if !found {
		return nil, false, nil
	}
	if !isOurs(secret) || secret.Labels[broker.LabelProvider] != provider {
		return nil, true, nil
	}
	return parse(secret), false, nil
}

// store writes a record, or makes its Secret. It fails with a conflict where
// somebody else has written since it was read.
func (d *Driver) store(ctx context.Context, r *record) error {
	made, err := r.Config.Secret(d.LinkNamespace)
	if err != nil {
		return err
	}
	made.Labels[nodeconfig.LabelComponent] = r.state
	if made.Annotations == nil {
		made.Annotations = map[string]string{}
	}
	made.Annotations[annotationSession] = strconv.FormatInt(r.session, 10)
	for annotation, at := range map[string]time.Time{annotationGranted: r.granted, annotationRenew: r.renew, annotationExpires: r.expires} {
		if !at.IsZero() {
			made.Annotations[annotation] = at.UTC().Format(time.RFC3339)
		}
	}
	if r.secret == nil {
		if err := d.Client.Create(ctx, made); err != nil {
			return fmt.Errorf("storing the link to %s: %w", r.Provider, err)
		}
		r.secret = made
		return nil
	}
	secret := r.secret.DeepCopy()
	secret.Data = made.Data
	maps.Copy(secret.Labels, made.Labels)
	for _, annotation := range []string{annotationGranted, annotationRenew, annotationExpires} {
		delete(secret.Annotations, annotation)
	}
	if secret.Annotations == nil {
		secret.Annotations = map[string]string{}
	}
	maps.Copy(secret.Annotations, made.Annotations)
	if err := d.Client.Update(ctx, secret); err != nil {
		return fmt.Errorf("storing the link to %s: %w", r.Provider, err)
	}
	r.secret = secret
	return nil
}

// records lists every link.
func (d *Driver) records(ctx context.Context) ([]*record, error) {
	var secrets corev1.SecretList
	if err := d.Client.List(ctx, &secrets, client.InNamespace(d.LinkNamespace), client.HasLabels{broker.LabelProvider},
		client.MatchingLabels{broker.LabelManagedBy: broker.ManagedBySpillway}); err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	var records []*record
	for i := range secrets.Items {
		if secrets.Items[i].Name == nodeconfig.SecretName(secrets.Items[i].Labels[broker.LabelProvider]) {
			records = append(records, parse(&secrets.Items[i]))
		}
	}
	return records, nil
}
