package direct

import (
	"context"
	"errors"
	"fmt"
	"slices"
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
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// pollInterval is how often a reply checks what controllers do in milliseconds.
const pollInterval = 20 * time.Millisecond

// Provider is the provider's side.
type Provider struct {
	Options
	server session.Server[*message]
	grants session.Grants

	mu sync.Mutex
	// verified is the endpoint and CA that were last verified together.
	verified string
}

var _ peering.Provider = (*Provider)(nil)

// NewProvider returns the provider's side.
func NewProvider(options Options) (*Provider, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	if options.CA == nil {
		return nil, errors.New("direct: a CA is required")
	}
	if options.TokenTTL < MinTokenTTL {
		return nil, fmt.Errorf("direct: token TTL %s is below the minimum of %s", options.TokenTTL, MinTokenTTL)
	}
	if err := options.Networks.Validate(); err != nil {
		return nil, fmt.Errorf("direct: networks for guests: %w", err)
	}
	p := &Provider{Options: options}
	p.server = session.Server[*message]{
		Codec: codec, Requests: []session.Kind{session.Hello, session.Teardown}, PollInterval: pollInterval, Log: options.Log,
		Recorded: p.recordedSession, Teardown: p.Teardown, Answer: p.answer,
	}
	return p, nil
}

// Handle implements peering.Provider.
func (p *Provider) Handle(ctx context.Context, consumer peering.Peer, raw []byte) ([]byte, error) {
	return p.server.Handle(ctx, consumer, raw)
}

func (p *Provider) recordedSession(ctx context.Context, consumer string) (int64, error) {
	namespace, err := p.readNamespace(ctx, consumer)
	if err != nil || namespace == nil || !isGuestNamespace(namespace, consumer) {
		return 0, err
	}
	return session.Number(namespace, annotationSession), nil
}

func refuse(reason, text string) (*message, error) {
	return &message{Header: session.Refuse(reason, text)}, nil
}

// answer creates everything for a consumer's guests and grants a token. Quota and
// network policies exist before the consumer has any permission.
func (p *Provider) answer(ctx context.Context, consumer string, _ int64, hello *message) (*message, error) {
	ca, refusal := p.endpointCA(ctx)
	if refusal != nil {
		return refusal, nil
	}
	namespace, refusal, err := p.ensureNamespace(ctx, consumer, hello.Session)
	if refusal != nil || err != nil {
		return refusal, err
	}
	if err := p.ensureAgentAccess(ctx, namespace); err != nil {
		return nil, err
	}
	// Until the API server's caches have the agent's new permissions, quota writes
	// are forbidden; until the quota is counted, it bounds nothing.
	var quota peering.Progress
	done, err := p.server.Poll(ctx, func() (bool, error) {
		var err error
		quota, err = p.ensureQuotaOrWait(ctx, consumer)
		return quota.Done, err
	})
	if err != nil {
		return nil, err
	}
	if !done {
		return refuse(session.ReasonNotReady, quota.Message)
	}
	if err := p.ensureGuestAccess(ctx, namespace); err != nil {
		return nil, err
	}
	return p.grant(ctx, consumer, namespace.Name, ca)
}

// endpointCA returns the CA that consumers verify this cluster's API server with,
// or why it cannot be used.
func (p *Provider) endpointCA(ctx context.Context) ([]byte, *message) {
	no := func(reason, text string) ([]byte, *message) {
		return nil, &message{Header: session.Refuse(reason, text)}
	}
	if p.Endpoint == "" {
		return no("NoEndpoint", p.ClusterID+" has no API server endpoint for consumers; set apiServer.endpoint there")
	}
	ca, err := p.CA()
	if err == nil && len(ca) == 0 {
		err = errors.New("the CA is empty")
	}
	if err != nil {
		p.Log.Error(err, "Failed to read the CA of this cluster's API server")
		return no("NoCA", p.ClusterID+" does not know the CA of its API server; set apiServer.ca there")
	}
	if err := p.verifyEndpoint(ctx, ca); err != nil {
		p.Log.Error(err, "Failed to verify this cluster's API server endpoint", "endpoint", p.Endpoint)
		return no("CertificateInvalid", fmt.Sprintf("the certificate of %s does not match its CA: %v", p.Endpoint, err))
	}
	return ca, nil
}

// grant creates a token for a consumer's namespace.
func (p *Provider) grant(ctx context.Context, consumer, namespace string, ca []byte) (*message, error) {
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To(int64(p.TokenTTL / time.Second))}}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: guestAccount}}
	if err := p.Client.SubResource("token").Create(ctx, account, request); err != nil {
		return nil, fmt.Errorf("creating a token for %s: %w", consumer, err)
	}
	// The API server sets the lifetime that it granted, which may be shorter.
	seconds := *request.Spec.ExpirationSeconds
	p.Log.Info("Granted a token", "consumer", consumer, "namespace", namespace, "seconds", seconds)
	return &message{
		Header: session.Header{Kind: session.Grant}, Namespace: namespace, Token: request.Status.Token,
		Seconds: seconds, Expires: ptr.To(request.Status.ExpirationTimestamp.UTC()), Endpoint: p.Endpoint, CA: ca,
	}, nil
}

// EnsureGrant lets a consumer use up to total and pods, and no more. It is done
// when the API server enforces that.
func (p *Provider) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if err := session.ValidateClusterID(consumer); err != nil {
		return peering.Progress{}, err
	}
	p.grants.Set(consumer, total, pods)
	namespace, err := p.readNamespace(ctx, consumer)
	switch {
	case err != nil:
		return peering.Progress{}, err
	case namespace == nil || !isGuestNamespace(namespace, consumer):
		return peering.Done("NotPeered", consumer+" has no peering with this cluster yet"), nil
	case !namespace.DeletionTimestamp.IsZero():
		return peering.Done("NamespaceTerminating", "namespace "+namespace.Name+" is being deleted; no guest starts in it"), nil
	}
	if err := p.ensureSettings(ctx, namespace); err != nil {
		return peering.Progress{}, err
	}
	return p.ensureQuotaOrWait(ctx, consumer)
}

// Consumers lists the consumers for which anything exists here.
func (p *Provider) Consumers(ctx context.Context) ([]string, error) {
	var namespaces corev1.NamespaceList
	if err := p.Client.List(ctx, &namespaces, client.HasLabels{broker.LabelGuestsOf}); err != nil {
		return nil, fmt.Errorf("listing namespaces for guests: %w", err)
	}
	var consumers []string
	for i := range namespaces.Items {
		if consumer := namespaces.Items[i].Labels[broker.LabelGuestsOf]; isGuestNamespace(&namespaces.Items[i], consumer) {
			consumers = append(consumers, consumer)
		}
	}
	slices.Sort(consumers)
	return consumers, nil
}

// Teardown removes everything that was made for a consumer: its permissions and
// its token first, then its namespace with the guests.
func (p *Provider) Teardown(ctx context.Context, consumer string) (progress peering.Progress, err error) {
	defer func() {
		if err != nil {
			progress, err = peering.Progress{}, fmt.Errorf("removing the peering with consumer %s: %w", consumer, err)
		}
	}()
	if err := session.ValidateClusterID(consumer); err != nil {
		return progress, err
	}
	namespace, err := p.readNamespace(ctx, consumer)
	switch {
	case err != nil:
		return progress, err
	case namespace == nil:
		return peering.Done("Removed", "the peering with consumer "+consumer+" is removed"), nil
	case !isGuestNamespace(namespace, consumer):
		return peering.Done("NotManaged", "namespace "+namespace.Name+" is not managed by Spillway"), nil
	}
	if namespace.DeletionTimestamp.IsZero() {
		for _, object := range []client.Object{&rbacv1.RoleBinding{}, &corev1.ServiceAccount{}} {
			object, err := session.Find(ctx, p.Client, namespace.Name, guestAccount, object)
			if apierrors.IsForbidden(err) {
				// The agent binds its own role there before the consumer's: neither is
				// bound yet.
				continue
			}
			if err == nil && object != nil {
				err = session.Delete(ctx, p.Client, object)
			}
			if err != nil {
				return progress, err
			}
		}
		if err := session.Delete(ctx, p.Client, namespace); err != nil {
			return progress, err
		}
	}
	return peering.Waiting("NamespaceTerminating", "waiting for namespace "+namespace.Name+" and its guests to terminate"), nil
}
