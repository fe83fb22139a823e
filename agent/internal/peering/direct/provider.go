package direct

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// pollInterval is the pause between two looks at what controllers do in
// milliseconds.
const pollInterval = 20 * time.Millisecond

// Provider is the provider's side.
type Provider struct {
	Options

	mu sync.Mutex
	// totals that consumers may use, "pods" included, as last told. A consumer
	// without one is given nothing yet.
	totals map[string]corev1.ResourceList
	// verified is the endpoint and CA that were last seen to go together.
	verified string
}

var _ peering.Provider = (*Provider)(nil)

// NewProvider makes the provider's side.
func NewProvider(options Options) (*Provider, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if options.CA == nil {
		return nil, errors.New("direct: a CA is needed")
	}
	if options.TokenTTL < MinTokenTTL {
		return nil, fmt.Errorf("direct: tokens of %s are too short-lived: an API server grants none below %s", options.TokenTTL, MinTokenTTL)
	}
	for _, cidr := range slices.Concat(options.AllowIngressFrom, options.AllowEgressTo) {
		if err := validateCIDR(cidr); err != nil {
			return nil, fmt.Errorf("direct: networks that guests talk with: %w", err)
		}
	}
	return &Provider{Options: options, totals: map[string]corev1.ResourceList{}}, nil
}

// Handle answers one message of a consumer.
func (l *Provider) Handle(ctx context.Context, consumer peering.Peer, raw []byte) ([]byte, error) {
	if err := validateClusterID(consumer.ClusterID); err != nil {
		return nil, err
	}
	in, err := decode(raw, kindHello, kindTeardown)
	if err != nil {
		l.Log.Info("A consumer says what this driver cannot read: does it use another one?", "consumer", consumer.ClusterID, "reason", err.Error())
		return peering.Unreadable(driverName), nil
	}
	out, err := l.answer(ctx, consumer, in)
	if out == nil || err != nil {
		return nil, err
	}
	out.Session = in.Session
	if in.Kind == kindHello {
		out.Ask = in.Ask
	}
	return encode(*out)
}

func (l *Provider) answer(ctx context.Context, consumer peering.Peer, in message) (*message, error) {
	namespace, found, err := l.namespaceOf(ctx, consumer.ClusterID)
	if err != nil {
		return nil, err
	}
	var session int64
	if found && isGuests(namespace, consumer.ClusterID) {
		session = sessionOf(namespace)
	}
	switch {
	case in.Kind == kindTeardown && in.Session < session:
		return &message{Kind: kindGone}, nil // that one made way for a later one
	case in.Kind == kindTeardown:
		gone, err := l.torn(ctx, consumer.ClusterID)
		if err != nil || !gone {
			return nil, err // the consumer asks again
		}
		return &message{Kind: kindGone}, nil
	case !consumer.Holds:
		return refusal(reasonNoHold, consumer.ClusterID+" holds nothing here (yet)"), nil
	case in.Session < session:
		out := refusal(reasonStale, "a later session than this is known here")
		out.Current = session
		return out, nil
	case in.Session > session && session != 0:
		// The consumer has begun anew: so does this side, from nothing.
		gone, err := l.torn(ctx, consumer.ClusterID)
		if err != nil {
			return nil, err
		}
		if !gone {
			return refusal(reasonTerminating, "what an earlier link left is still going"), nil
		}
	}
	return l.grant(ctx, consumer.ClusterID, in.Session)
}

// torn tears a consumer's link down, and reports whether that was soon done.
func (l *Provider) torn(ctx context.Context, consumer string) (bool, error) {
	return l.soon(ctx, func() (bool, error) {
		progress, err := l.Teardown(ctx, consumer)
		return progress.Done, err
	})
}

// grant makes everything ready for a consumer's guests, in the order that never
// leaves it a right without its bound, and gives it a token.
func (l *Provider) grant(ctx context.Context, consumer string, session int64) (*message, error) {
	if l.Endpoint == "" {
		return refusal("NoEndpoint", l.ClusterID+" does not say where its API server is reached: set apiServer.endpoint there"), nil
	}
	ca, err := l.CA()
	if err == nil && len(ca) == 0 {
		err = errors.New("there is none")
	}
	if err != nil {
		l.Log.Error(err, "Reading the CA of this cluster's API server")
		return refusal("NoCA", l.ClusterID+" does not know its API server's CA: set apiServer.ca there"), nil
	}
	if err := l.verify(ctx, ca); err != nil {
		l.Log.Error(err, "Consumers would not trust this cluster's API server", "endpoint", l.Endpoint)
		return refusal("CertificateRefused", fmt.Sprintf("the certificate of %s does not go with its CA: %v", l.Endpoint, err)), nil
	}

	namespace, no, err := l.ensureNamespace(ctx, consumer, session)
	if no != nil || err != nil {
		return no, err
	}
	if err := l.ensureAgentAccess(ctx, namespace); err != nil {
		return nil, err
	}
	// The agent's rights and its quota count a moment after they are made: until
	// then the one refuses what follows, and the other bounds nothing.
	var progress peering.Progress
	done, err := l.soon(ctx, func() (bool, error) {
		var err error
		if progress, err = l.ensureQuota(ctx, consumer); apierrors.IsForbidden(err) {
			progress, err = peering.Waiting("AccessPending", "waiting for this agent's rights in namespace "+namespace.Name), nil
		}
		return progress.Done, err
	})
	if err != nil {
		return nil, err
	}
	if !done {
		return refusal(reasonNotReady, progress.Message), nil
	}
	for _, ensure := range []func(context.Context, *corev1.Namespace) error{l.ensureWalls, l.ensureAccount, l.ensureGuestAccess} {
		if err := ensure(ctx, namespace); err != nil {
			return nil, err
		}
	}
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(l.TokenTTL / time.Second))}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: guestAccount}}
	if err := l.Client.SubResource("token").Create(ctx, account, request); err != nil {
		return nil, fmt.Errorf("making a token for %s: %w", consumer, err)
	}
	l.Log.Info("Granted a token", "consumer", consumer, "namespace", namespace.Name, "seconds", *request.Spec.ExpirationSeconds)
	return &message{
		Kind: kindGrant, Namespace: namespace.Name, Token: request.Status.Token,
		// The API server may have granted less than was asked for, and says so here.
		Seconds: *request.Spec.ExpirationSeconds, Expires: ptr.To(request.Status.ExpirationTimestamp.UTC()),
		Endpoint: l.Endpoint, CA: ca,
	}, nil
}

// soon repeats an attempt until it is done, fails, or has taken too long.
func (l *Provider) soon(ctx context.Context, attempt func() (done bool, err error)) (bool, error) {
	for deadline := l.Clock.Now().Add(l.Patience); ; {
		if done, err := attempt(); done || err != nil || l.Clock.Now().After(deadline) {
			return done, err
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(pollInterval):
		}
	}
}

// EnsureGrant lets a consumer use up to total and pods, and no more. It is done
// when the API server holds the consumer to it.
func (l *Provider) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if err := validateClusterID(consumer); err != nil {
		return peering.Progress{}, err
	}
	l.setTotal(consumer, total, pods)
	namespace, found, err := l.namespaceOf(ctx, consumer)
	switch {
	case err != nil:
		return peering.Progress{}, err
	case !found || !isGuests(namespace, consumer):
		return peering.Done("NoLink", consumer+" has no link here yet"), nil
	case !namespace.DeletionTimestamp.IsZero():
		return peering.Done("NamespaceGoing", "no guest of "+consumer+" starts any more: its namespace is going"), nil
	}
	progress, err := l.ensureQuota(ctx, consumer)
	if apierrors.IsForbidden(err) {
		// The namespace is not furnished yet, and no guest can start in it.
		return peering.Waiting("AccessPending", "waiting for this agent's rights in namespace "+namespace.Name), nil
	}
	return progress, err
}

// Consumers lists the consumers for which anything exists here.
func (l *Provider) Consumers(ctx context.Context) ([]string, error) {
	var namespaces corev1.NamespaceList
	if err := l.Client.List(ctx, &namespaces, client.HasLabels{broker.LabelGuestsOf}); err != nil {
		return nil, fmt.Errorf("listing namespaces for guests: %w", err)
	}
	var consumers []string
	for i := range namespaces.Items {
		if consumer := namespaces.Items[i].Labels[broker.LabelGuestsOf]; isGuests(&namespaces.Items[i], consumer) {
			consumers = append(consumers, consumer)
		}
	}
	slices.Sort(consumers)
	return consumers, nil
}

// Teardown removes everything that was made for a consumer here: its rights
// first, then its token, then its guests and all the rest with the namespace.
func (l *Provider) Teardown(ctx context.Context, consumer string) (peering.Progress, error) {
	fail := func(err error) (peering.Progress, error) {
		return peering.Progress{}, fmt.Errorf("removing what was made for %s: %w", consumer, err)
	}
	if err := validateClusterID(consumer); err != nil {
		return fail(err)
	}
	namespace, found, err := l.namespaceOf(ctx, consumer)
	switch {
	case err != nil:
		return fail(err)
	case !found:
		return peering.Done("Gone", "nothing is left of "+consumer), nil
	case !isGuests(namespace, consumer):
		return peering.Done("NotOurs", "what there is of "+consumer+" is not Spillway's"), nil
	}
	if namespace.DeletionTimestamp.IsZero() {
		for _, object := range []client.Object{&rbacv1.RoleBinding{}, &corev1.ServiceAccount{}} {
			object, found, err := get(ctx, l.Client, namespace.Name, guestAccount, object)
			if apierrors.IsForbidden(err) {
				// This agent was cut off before it gave itself rights there, and so
				// before it gave the consumer any.
				continue
			}
			if err != nil {
				return fail(err)
			}
			if found {
				if err := remove(ctx, l.Client, object); err != nil {
					return fail(err)
				}
			}
		}
		if err := remove(ctx, l.Client, namespace); err != nil {
			return fail(err)
		}
	}
	return peering.Waiting("NamespaceGoing", "waiting for namespace "+namespace.Name+" and the guests in it to go"), nil
}

func (l *Provider) namespaceOf(ctx context.Context, consumer string) (*corev1.Namespace, bool, error) {
	name := broker.GuestNamespace(consumer)
	namespace, found, err := get(ctx, l.Client, "", name, &corev1.Namespace{})
	if err != nil {
		return nil, false, fmt.Errorf("reading namespace %s: %w", name, err)
	}
	return namespace, found, nil
}

// isGuests reports whether a namespace is the one that Spillway made for a
// consumer's guests.
func isGuests(namespace *corev1.Namespace, consumer string) bool {
	return isOurs(namespace) && consumer != "" && namespace.Labels[broker.LabelGuestsOf] == consumer && namespace.Name == broker.GuestNamespace(consumer)
}

// sessionOf is the session of a namespace for guests, 0 where none is noted.
func sessionOf(namespace *corev1.Namespace) int64 {
	session, err := strconv.ParseInt(namespace.Annotations[annotationSession], 10, 64)
	if err != nil {
		return 0
	}
	return session
}
