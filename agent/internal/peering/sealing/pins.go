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

// PinsConfigMap holds the public key of every known peer, by cluster ID. The keys are
// not secret; write access to it decides which keys are trusted.
const PinsConfigMap = "spillway-peer-pins"

// errKeyRefused marks a peer's key that is not the expected one.
var errKeyRefused = errors.New("peer key refused")

// Pins stores peers' keys.
type Pins struct {
	client    client.Client
	namespace string
	expected  map[string]string
}

// NewPins returns the Pins in a namespace. Expected maps cluster IDs to the required
// fingerprints. The client must read from the API server, so that the removal of a
// pin takes effect at once.
func NewPins(c client.Client, namespace string, expected map[string]string) *Pins {
	return &Pins{client: c, namespace: namespace, expected: expected}
}

// Prepare creates the empty ConfigMap if it does not exist, so that the first peer
// adds an entry and no object. Several replicas may call it.
func (p *Pins) Prepare(ctx context.Context) error {
	err := p.client.Create(ctx, p.configMap(nil))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating ConfigMap %s: %w", p.name(), err)
	}
	return nil
}

func (p *Pins) configMap(keys map[string]string) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: p.namespace, Name: PinsConfigMap,
			Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
		},
		Data: keys,
	}
}

// ParseFingerprints parses "paris=sha256:<hex>,berlin=sha256:<hex>".
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

// Resolve returns the key to use for a peer. Announced is its key according to the
// broker: at first contact it is pinned, later it must be the pinned one. If it is
// empty, there must be a pin.
func (p *Pins) Resolve(ctx context.Context, peer, announced string) (string, error) {
	if want, ok := p.expected[peer]; ok && announced != "" {
		if got, err := Fingerprint(announced); err != nil || got != want {
			return "", fmt.Errorf("%w: according to the broker the key of %s has fingerprint %s, but --peer-fingerprints requires %s; compare with the agent's log in %s, and do not trust the broker if they differ", errKeyRefused, peer, got, want, peer)
		}
	}
	var key string
	err := retry.OnError(retry.DefaultRetry, raced, func() error {
		pinned, ok, err := p.Lookup(ctx, peer)
		switch {
		case err != nil:
			return err
		case !ok && announced == "":
			return fmt.Errorf("no key of %s is known; its agent has not advertised one yet", peer)
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

// check compares the pinned key with the announced and the expected one.
func (p *Pins) check(peer, pinned, announced string) error {
	got, err := Fingerprint(pinned)
	if err != nil {
		return fmt.Errorf("%w: key pinned for %s in ConfigMap %s: %w; delete that entry", errKeyRefused, peer, p.name(), err)
	}
	if want, ok := p.expected[peer]; ok && got != want {
		return fmt.Errorf("%w: the key pinned for %s in ConfigMap %s has fingerprint %s, but --peer-fingerprints requires %s; delete that entry", errKeyRefused, peer, p.name(), got, want)
	}
	if announced == "" || announced == pinned {
		return nil
	}
	now, err := Fingerprint(announced)
	if err != nil {
		now = "unknown (" + err.Error() + ")"
	}
	return fmt.Errorf("%w: the key of %s now has fingerprint %s, pinned is %s; if the agent in %s has a new key (it logs the fingerprint at startup), delete the entry %q from ConfigMap %s; otherwise do not trust the broker",
		errKeyRefused, peer, now, got, peer, peer, p.name())
}

func (p *Pins) pin(ctx context.Context, peer, key string) error {
	if _, err := Fingerprint(key); err != nil {
		return fmt.Errorf("%w: key advertised by %s: %w", errKeyRefused, peer, err)
	}
	var pins corev1.ConfigMap
	err := p.client.Get(ctx, p.name(), &pins)
	pinned, exists := pins.Data[peer]
	switch {
	case apierrors.IsNotFound(err):
		err = p.client.Create(ctx, p.configMap(map[string]string{peer: key}))
	case err == nil && exists:
		return p.check(peer, pinned, key)
	case err == nil:
		if pins.Data == nil {
			pins.Data = map[string]string{}
		}
		pins.Data[peer] = key
		err = p.client.Update(ctx, &pins)
	}
	if err != nil {
		return fmt.Errorf("pinning the key of %s: %w", peer, err)
	}
	return nil
}

func (p *Pins) name() types.NamespacedName {
	return types.NamespacedName{Namespace: p.namespace, Name: PinsConfigMap}
}

// raced reports whether another replica wrote the ConfigMap first.
func raced(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }
