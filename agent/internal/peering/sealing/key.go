package sealing

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"

	"golang.org/x/crypto/curve25519"
	"golang.org/x/crypto/nacl/box"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// KeySecret holds this cluster's key pair. If it is lost, peers that have pinned the
// public key refuse this cluster.
const KeySecret = "spillway-agent-peer-key"

const (
	dataPrivate = "private"
	dataPublic  = "public"
)

// Key is this cluster's X25519 key pair.
type Key struct{ private, public [32]byte }

// NewKey generates a key pair.
func NewKey() (*Key, error) {
	public, private, err := box.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("generating a peer key: %w", err)
	}
	return &Key{private: *private, public: *public}, nil
}

// Public is the public key in base64, as in advertisements.
func (k *Key) Public() string { return base64.StdEncoding.EncodeToString(k.public[:]) }

// LoadKey reads the key pair from its Secret, creating it if it does not exist. Of
// several replicas that create it, one succeeds and all use its key. The client must
// read from the API server, not from a cache.
func LoadKey(ctx context.Context, c client.Client, namespace string) (*Key, error) {
	name := types.NamespacedName{Namespace: namespace, Name: KeySecret}
	var secret corev1.Secret
	err := c.Get(ctx, name, &secret)
	if apierrors.IsNotFound(err) {
		made, err := NewKey()
		if err != nil {
			return nil, err
		}
		secret = corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: namespace, Name: KeySecret,
				Labels: map[string]string{broker.LabelManagedBy: broker.ManagedBySpillway},
			},
			Data: map[string][]byte{
				dataPrivate: []byte(base64.StdEncoding.EncodeToString(made.private[:])),
				dataPublic:  []byte(made.Public()),
			},
		}
		err = c.Create(ctx, &secret)
		if apierrors.IsAlreadyExists(err) {
			err = c.Get(ctx, name, &secret)
		}
		if err != nil {
			return nil, fmt.Errorf("storing the peer key in Secret %s: %w", name, err)
		}
	} else if err != nil {
		return nil, fmt.Errorf("reading the peer key from Secret %s: %w", name, err)
	}
	private, err := decode(string(secret.Data[dataPrivate]))
	if err != nil {
		return nil, fmt.Errorf("the peer key in Secret %s is not valid (%w); delete the Secret to generate another key, then remove the pin of this cluster from every peer", name, err)
	}
	public, err := curve25519.X25519(private[:], curve25519.Basepoint)
	if err != nil {
		return nil, fmt.Errorf("deriving the public key of Secret %s: %w", name, err)
	}
	return &Key{private: private, public: [32]byte(public)}, nil
}

// Fingerprint of a public key in base64, as "sha256:<hex>".
func Fingerprint(public string) (string, error) {
	key, err := decode(public)
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(key[:])
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

func decode(text string) (key [32]byte, err error) {
	raw, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || len(raw) != len(key) {
		return key, fmt.Errorf("not an X25519 key in base64 (%d characters)", len(text))
	}
	return [32]byte(raw), nil
}
