package sealing

import (
	"context"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// PinsConfigMap holds the public key of every peer that was ever met, by cluster
// ID. Public keys are no secret; who may write it decides whom to trust.
const PinsConfigMap = "spillway-peer-pins"

// ErrKeyRefused marks a peer's key that is not the expected one.
var ErrKeyRefused = errors.New("peer key refused")

// Pins remembers peers' keys.
type Pins struct {
	client    client.Client
	namespace string
	expected  map[string]string
}

// NewPins keeps pins in a namespace. Expected maps cluster IDs to fingerprints
// that only a certain key has. The client must read from the API server, so that
// a pin that a person removes is gone at once.
func NewPins(c client.Client, namespace string, expected map[string]string) *Pins {
	return &Pins{client: c, namespace: namespace, expected: expected}
}

// Prepare makes the empty record where there is none, so that meeting a first
// peer adds an entry and no object. It may be called by several replicas.
func (p *Pins) Prepare(ctx context.Context) error {
	err := p.client.Create(ctx, p.record(nil))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("making ConfigMap %s for peers' keys: %w", p.name(), err)
	}
	return nil
}

func (p *Pins) record(keys map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.namespace, Name: PinsConfigMap,
			Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Data: keys,
	}
}

// ParseFingerprints reads "paris=sha256:<hex>,berlin=sha256:<hex>".
func ParseFingerprints(text string) (map[string]string, error) {
	out := map[string]string{}
	for entry := range strings.SplitSeq(text, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		peer, fingerprint, ok := strings.Cut(entry, "=")
		digits, isSHA := strings.CutPrefix(fingerprint, "sha256:")
		if !ok || peer == "" || !isSHA || len(digits) != 64 || strings.Trim(strings.ToLower(digits), "0123456789abcdef") != "" {
			return nil, fmt.Errorf("%q is not <cluster ID>=sha256:<64 hexadecimal digits>", entry)
		}
		out[peer] = strings.ToLower(fingerprint)
	}
	return out, nil
}

// Lookup returns the key pinned for a peer, if there is one.
func (p *Pins) Lookup(ctx context.Context, peer string) (key string, ok bool, err error) {
	var pins corev1.ConfigMap
	err = p.client.Get(ctx, p.name(), &pins)
	if apierrors.IsNotFound(err) {
		return "", false, nil
	}
	if err != nil {
		return "", false, fmt.Errorf("reading pinned peer keys: %w", err)
	}
	key, ok = pins.Data[peer]
	return key, ok, nil
}

// Resolve returns the key to use for a peer. Announced is its key as the broker
// says; at first contact it is pinned, later it must be the pinned one. Empty
// means that the broker says nothing: then there must be a pin.
func (p *Pins) Resolve(ctx context.Context, peer, announced string) (string, error) {
	if want, ok := p.expected[peer]; ok && announced != "" {
		if got, err := Fingerprint(announced); err != nil || got != want {
			return "", fmt.Errorf("%w: the broker says that %s has a key with fingerprint %s, but --peer-fingerprints wants %s: compare with the agent's log in %s, and distrust the broker if they differ", ErrKeyRefused, peer, got, want, peer)
		}
	}
	var key string
	err := retry.OnError(retry.DefaultRetry, raced, func() error {
		pinned, ok, err := p.Lookup(ctx, peer)
		switch {
		case err != nil:
			return err
		case !ok && announced == "":
			return fmt.Errorf("no key of %s is known: its agent has not advertised one yet", peer)
		case !ok:
			key = announced
			return p.pin(ctx, peer, announced)
		}
		key = pinned
		return p.check(peer, pinned, announced)
	})
	if err != nil {
		return "", err
	}
	return key, nil
}

// check compares what is pinned with what is announced and expected.
func (p *Pins) check(peer, pinned, announced string) error {
	got, err := Fingerprint(pinned)
	if err != nil {
		return fmt.Errorf("%w: the key pinned for %s in ConfigMap %s is %w: delete that entry", ErrKeyRefused, peer, p.name(), err)
	}
	if want, ok := p.expected[peer]; ok && got != want {
		return fmt.Errorf("%w: the key pinned for %s in ConfigMap %s has fingerprint %s, but --peer-fingerprints wants %s: delete that entry", ErrKeyRefused, peer, p.name(), got, want)
	}
	if announced == "" || announced == pinned {
		return nil
	}
	now, err := Fingerprint(announced)
	if err != nil {
		now = "unknown (" + err.Error() + ")"
	}
	return fmt.Errorf("%w: %s now shows a key with fingerprint %s, pinned is %s: if the agent in %s really has a new key (it logs the fingerprint when it starts), delete the entry %q from ConfigMap %s; otherwise distrust the broker",
		ErrKeyRefused, peer, now, got, peer, peer, p.name())
}

func (p *Pins) pin(ctx context.Context, peer, key string) error {
	if _, err := Fingerprint(key); err != nil {
		return fmt.Errorf("%w: the key that %s advertises is %w", ErrKeyRefused, peer, err)
	}
	var pins corev1.ConfigMap
	err := p.client.Get(ctx, p.name(), &pins)
	if apierrors.IsNotFound(err) {
		if err := p.client.Create(ctx, p.record(map[string]string{peer: key})); err != nil {
			return fmt.Errorf("pinning the key of %s: %w", peer, err)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("pinning the key of %s: %w", peer, err)
	}
	if have, ok := pins.Data[peer]; ok {
		return p.check(peer, have, key)
	}
	if pins.Data == nil {
		pins.Data = map[string]string{}
	}
	pins.Data[peer] = key
	if err := p.client.Update(ctx, &pins); err != nil {
		return fmt.Errorf("pinning the key of %s: %w", peer, err)
	}
	return nil
}

func (p *Pins) name() types.NamespacedName {
	return types.NamespacedName{Namespace: p.namespace, Name: PinsConfigMap}
}

// raced reports whether another writer of the pins came first.
func raced(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
