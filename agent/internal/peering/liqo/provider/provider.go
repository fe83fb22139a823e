package provider

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"time"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

const (
	// nonceSecret is the name that Liqo gives the Secret.
	nonceSecret = "liqo-nonce"
	// pollInterval is how often a reply checks what Liqo does: it signs in less than
	// a second and releases a Tenant in a few.
	pollInterval = 50 * time.Millisecond
)

// Provider answers the consumers of this cluster's capacity and limits their guests.
type Provider struct {
	Options
	server session.Server[*liqo.Message]
	grants session.Grants
}

var _ peering.Provider = (*Provider)(nil)

// New returns a Provider.
func New(options Options) (*Provider, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	p := &Provider{Options: options}
	p.server = session.Server[*liqo.Message]{
		Codec: liqo.Codec, Requests: []session.Kind{session.Hello, session.Request, session.Teardown}, PollInterval: pollInterval, Log: options.Log,
		Recorded: p.recordedSession, Teardown: p.Teardown, Answer: p.answer,
	}
	return p, nil
}

// Handle implements peering.Provider.
func (p *Provider) Handle(ctx context.Context, consumer peering.Peer, raw []byte) ([]byte, error) {
	return p.server.Handle(ctx, consumer, raw)
}

func (p *Provider) recordedSession(ctx context.Context, consumer string) (int64, error) {
	namespace, err := session.Find(ctx, p.Client, "", liqo.TenantNamespace(consumer), &corev1.Namespace{})
	if err != nil {
		return 0, fmt.Errorf("reading namespace %s: %w", liqo.TenantNamespace(consumer), err)
	}
	if namespace == nil || !session.IsManaged(namespace) {
		return 0, nil
	}
	return session.Number(namespace, liqo.AnnotationProviderSession), nil
}

func refuse(reason, text string) (*liqo.Message, error) {
	return &liqo.Message{Header: session.Refuse(reason, text)}, nil
}

// answer replies to a Hello or a Request.
func (p *Provider) answer(ctx context.Context, consumer string, recorded int64, request *liqo.Message) (*liqo.Message, error) {
	if request.Kind == session.Hello {
		return p.offer(ctx, consumer, request.Session)
	}
	nonce, err := p.nonce(ctx, consumer)
	switch {
	case err != nil:
		return nil, err
	case recorded == 0 || nonce == nil:
		return refuse("UnknownSession", "the session must begin with Hello")
	}
	if err := request.CheckProof(consumer, nonce.Data[consts.NonceSecretField]); err != nil {
		p.Log.Info("Refusing a consumer's certificate signing request", "consumer", consumer, "reason", err.Error())
		return refuse("ProofInvalid", err.Error())
	}
	return p.grant(ctx, consumer, request)
}

// nonce reads the Secret with a consumer's nonce, nil if it does not exist.
func (p *Provider) nonce(ctx context.Context, consumer string) (*corev1.Secret, error) {
	nonce, err := session.Find(ctx, p.Client, liqo.TenantNamespace(consumer), nonceSecret, &corev1.Secret{})
	if err != nil {
		return nil, fmt.Errorf("reading the nonce for %s: %w", consumer, err)
	}
	return nonce, nil
}

// newNonce returns a nonce in the form that Liqo generates.
func newNonce() []byte { return []byte(rand.Text() + rand.Text() + rand.Text()) }

// offer prepares a consumer's namespace and returns a nonce to sign.
func (p *Provider) offer(ctx context.Context, consumer string, number int64) (*liqo.Message, error) {
	// Once there is a Tenant, Liqo's own bindings are for these names.
	if tenant, err := p.tenant(ctx, consumer); err != nil {
		return nil, err
	} else if tenant == nil {
		binding, err := p.identityTaken(ctx, consumer)
		if err != nil {
			return nil, err
		}
		if binding != "" {
			return refuse("IdentityTaken", fmt.Sprintf("a user or group %s already has permissions in this cluster (%s), which the consumer would get; use another cluster ID", consumer, binding))
		}
	}
	namespace, waiting, err := p.EnsureTenantNamespace(ctx, consumer, liqo.AnnotationProviderSession, number)
	switch {
	case err != nil:
		return nil, err
	case waiting != nil && waiting.Reason == liqo.ReasonConflict:
		return refuse(waiting.Reason, waiting.Message)
	case waiting != nil:
		return nil, session.ErrNoReply
	}
	nonce, err := p.nonce(ctx, consumer)
	if err != nil {
		return nil, err
	}
	if nonce == nil {
		nonce = &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: nonceSecret, Labels: liqo.ManagedLabels(consumer, map[string]string{consts.NonceSecretLabelKey: "true"})},
			Data:       map[string][]byte{consts.NonceSecretField: newNonce()},
		}
		if err := p.Client.Create(ctx, nonce); err != nil {
			return nil, fmt.Errorf("storing the nonce for %s: %w", consumer, err)
		}
	}
	return &liqo.Message{Header: session.Header{Kind: session.Offer}, TenantNamespace: namespace.Name, Nonce: nonce.Data[consts.NonceSecretField]}, nil
}

// grant makes Liqo sign a consumer's certificate.
func (p *Provider) grant(ctx context.Context, consumer string, request *liqo.Message) (*liqo.Message, error) {
	tenant, err := p.tenant(ctx, consumer)
	if err != nil {
		return nil, err
	}
	switch {
	case tenant == nil:
		tenant = &authv1beta1.Tenant{
			ObjectMeta: metav1.ObjectMeta{Namespace: liqo.TenantNamespace(consumer), Name: consumer, Labels: liqo.ManagedLabels(consumer)},
			Spec: authv1beta1.TenantSpec{
				ClusterID: liqov1beta1.ClusterID(consumer),
				PublicKey: request.PublicKey, CSR: request.CSR, Signature: request.Signature,
			},
		}
		if err := p.Client.Create(ctx, tenant); err != nil {
			return nil, fmt.Errorf("creating tenant %s: %w", consumer, err)
		}
	case !session.IsManaged(tenant):
		return refuse(liqo.ReasonConflict, "Tenant "+consumer+" already exists at the provider and is not managed by Spillway; delete it there")
	case !tenant.DeletionTimestamp.IsZero():
		return nil, session.ErrNoReply
	case !bytes.Equal(tenant.Spec.PublicKey, request.PublicKey):
		refusal, _ := refuse(session.ReasonStale, "the session began with another key")
		refusal.Current = request.Session
		return refusal, nil
	}
	var reply *liqo.Message
	_, err = p.server.Poll(ctx, func() (bool, error) {
		tenant, err := p.tenant(ctx, consumer)
		if err != nil || tenant == nil {
			return tenant == nil, err
		}
		params := tenant.Status.AuthParams
		switch {
		case params == nil || len(params.SignedCRT) == 0 || tenant.Status.TenantNamespace == "":
			return false, nil
		case params.AwsConfig != nil:
			reply, _ = refuse("AuthenticationUnsupported", "Liqo of this provider authenticates with AWS, which Spillway does not support")
		default:
			reply = &liqo.Message{
				Header: session.Header{Kind: session.Grant}, TenantNamespace: tenant.Status.TenantNamespace,
				Certificate: params.SignedCRT, CA: params.CA, APIServer: params.APIServer, ProxyURL: ptr.Deref(params.ProxyURL, ""),
			}
		}
		return true, nil
	})
	if err == nil && reply == nil {
		err = session.ErrNoReply
	}
	return reply, err
}

// tenant reads a consumer's Tenant, nil if it does not exist.
func (p *Provider) tenant(ctx context.Context, consumer string) (*authv1beta1.Tenant, error) {
	tenant, err := session.Find(ctx, p.Client, liqo.TenantNamespace(consumer), consumer, &authv1beta1.Tenant{})
	if err != nil {
		return nil, fmt.Errorf("reading tenant %s: %w", consumer, err)
	}
	return tenant, nil
}

// EnsureGrant lets a consumer use up to total and pods.
func (p *Provider) EnsureGrant(ctx context.Context, consumer string, total corev1.ResourceList, pods int32) (peering.Progress, error) {
	if err := session.ValidateClusterID(consumer); err != nil {
		return peering.Progress{}, err
	}
	p.grants.Set(consumer, total, pods)
	return p.apply(ctx, consumer)
}

// apply makes what exists for a consumer match what it is granted.
func (p *Provider) apply(ctx context.Context, consumer string) (peering.Progress, error) {
	if err := p.confineGuests(ctx, consumer); apierrors.IsForbidden(err) {
		return peering.Waiting("AccessPending", "waiting for this agent's permissions in the namespaces of "+consumer+"'s guests"), nil
	} else if err != nil {
		return peering.Progress{}, err
	}
	return p.answerSlices(ctx, consumer)
}

// Consumers lists the consumers for which anything exists here.
func (p *Provider) Consumers(ctx context.Context) ([]string, error) {
	var namespaces corev1.NamespaceList
	if err := p.Client.List(ctx, &namespaces, session.Managed, client.HasLabels{consts.RemoteClusterID}); err != nil {
		return nil, fmt.Errorf("listing tenant namespaces: %w", err)
	}
	var consumers []string
	for i := range namespaces.Items {
		if namespace := &namespaces.Items[i]; isTrial(namespace) || namespace.Labels[consts.TenantNamespaceLabel] == "true" && session.Number(namespace, liqo.AnnotationProviderSession) != 0 {
			consumers = append(consumers, namespace.Labels[consts.RemoteClusterID])
		}
	}
	slices.Sort(consumers)
	return slices.Compact(consumers), nil
}
