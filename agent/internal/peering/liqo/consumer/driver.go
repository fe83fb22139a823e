package consumer

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilcache "k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// Driver peers this cluster with providers and keeps their virtual nodes.
type Driver struct {
	Options
	handshake *session.Client[*liqo.Message]

	mu sync.Mutex
	// wanted are the namespaces last requested for each provider.
	wanted map[string][]string
	// ended is when a provider's virtual node was last seen being deleted.
	ended map[string]time.Time
	// marked are the namespaces in which ConfigMaps and Secrets may be marked for
	// reflection, nil before they are read.
	marked map[string]bool
	// decided are the ConfigMaps and Secrets (sourceIn) that were seen to be marked or decided about
	// in the time of lookAgainAfter.
	decided *utilcache.LRUExpireCache
}

var (
	_ peering.Driver   = (*Driver)(nil)
	_ peering.Receiver = (*Driver)(nil)
)

// New returns a Driver.
func New(options Options) (*Driver, error) {
	if err := options.complete(); err != nil {
		return nil, err
	}
	return &Driver{
		Options: options, handshake: session.NewClient(liqo.Codec, options.Options.Options, session.Offer, session.Grant, session.Gone, session.Refusal),
		wanted: map[string][]string{}, ended: map[string]time.Time{}, decided: utilcache.NewLRUExpireCacheWithClock(maxDecided, options.Clock),
	}, nil
}

// Receive implements peering.Receiver.
func (d *Driver) Receive(provider string, raw []byte) { d.handshake.Receive(provider, raw) }

// EnsurePeering peers this cluster with a provider.
func (d *Driver) EnsurePeering(ctx context.Context, peer peering.Peer) (peering.Progress, error) {
	provider := peer.ClusterID
	if err := session.ValidateClusterID(provider); err != nil {
		return peering.Progress{}, err
	}
	namespace, waiting, err := d.EnsureTenantNamespace(ctx, provider, liqo.AnnotationSession, session.FirstNumber(d.Clock.Now()))
	if waiting != nil || err != nil {
		return ptr.Deref(waiting, peering.Progress{}), err
	}
	d.handshake.StopWaiting(provider) // a teardown that had begun is cancelled
	identity, err := session.Find(ctx, d.Client, namespace.Name, controlPlaneIdentity(provider), &authv1beta1.Identity{})
	switch {
	case err != nil:
		return peering.Progress{}, fmt.Errorf("reading the identity for %s: %w", provider, err)
	case identity == nil:
		if _, ended := d.handshake.Exchange(provider).Sent[session.Teardown]; ended {
			// The provider has received the end of this session.
			if err := d.nextSession(ctx, provider, namespace, 0); err != nil {
				return peering.Progress{}, err
			}
		}
		return d.advanceHandshake(ctx, peer, namespace)
	case !session.IsManaged(identity):
		return peering.Waiting(liqo.ReasonConflict, "Identity "+identity.Name+" is not managed by Spillway: "+provider+" was peered manually; unpeer it with liqoctl to let Spillway peer it"), nil
	case !identity.DeletionTimestamp.IsZero():
		return peering.Waiting(session.ReasonTerminating, "the identity of the previous peering is still being deleted"), nil
	case identity.Status.KubeconfigSecretRef == nil:
		return peering.Waiting("KubeconfigPending", "waiting for Liqo to store the credentials for "+provider), nil
	}
	return peering.Done("Peered", "peered with "+provider), nil
}

// nextSession replaces a session by one that is later than the provider's.
func (d *Driver) nextSession(ctx context.Context, provider string, namespace *corev1.Namespace, providers int64) error {
	d.handshake.Reset(provider)
	return liqo.SetSession(ctx, d.Client, namespace, liqo.AnnotationSession, session.Next(session.Number(namespace, liqo.AnnotationSession), providers))
}

// step is the next thing to do in a handshake.
type step struct {
	// send is the kind of message to send, "" for none.
	send session.Kind
	// reply is the provider's message to act on, nil if there is none.
	reply    *liqo.Message
	progress peering.Progress
}

// nextStep decides the next step of a session. After a refusal it begins again.
func nextStep(e session.Exchange[*liqo.Message], provider string, number int64, now time.Time, resendAfter time.Duration) step {
	var next step
	if refused := e.Refused(number, provider, liqo.Codec.Driver); refused != nil {
		next.reply, _ = e.Reply(session.Refusal, number)
		next.progress = *refused
		if e.HelloDue(number, now, resendAfter) {
			next.send = session.Hello
		}
		return next
	}
	if grant, ok := e.Reply(session.Grant, number); ok {
		return step{reply: grant, progress: peering.Waiting("CertificateIssued", "provider "+provider+" signed a certificate for this cluster")}
	}
	next.send = session.Hello
	next.progress = peering.Waiting("ResponsePending", "waiting for provider "+provider+" to respond")
	if offer, ok := e.Reply(session.Offer, number); ok {
		next = step{send: session.Request, reply: offer, progress: peering.Waiting("CertificatePending", "waiting for provider "+provider+" to sign a certificate")}
	}
	if !e.Due(next.send, now, resendAfter) {
		next.send = ""
	}
	return next
}

// advanceHandshake takes the handshake one message further.
func (d *Driver) advanceHandshake(ctx context.Context, peer peering.Peer, namespace *corev1.Namespace) (peering.Progress, error) {
	provider, number := peer.ClusterID, session.Number(namespace, liqo.AnnotationSession)
	next := nextStep(d.handshake.Exchange(provider), provider, number, d.Clock.Now(), d.ResendAfter)
	request := &liqo.Message{Header: session.Header{Kind: next.send, Session: number}}
	switch {
	case next.reply == nil:
	case next.reply.Kind == session.Grant:
		return next.progress, d.createIdentity(ctx, provider, namespace, next.reply)
	case next.reply.Kind == session.Refusal && next.reply.Reason == session.ReasonStale:
		if err := d.nextSession(ctx, provider, namespace, next.reply.Current); err != nil {
			return peering.Progress{}, err
		}
		return d.advanceHandshake(ctx, peer, namespace)
	case next.reply.Kind == session.Refusal && next.send != "":
		d.handshake.Reset(provider)
	}
	if next.send == session.Request {
		keys, err := session.Find(ctx, d.Client, d.LiqoNamespace, consts.AuthKeysSecretName, &corev1.Secret{})
		if err != nil {
			return peering.Progress{}, fmt.Errorf("reading Liqo's keys: %w", err)
		}
		if keys == nil {
			return peering.Waiting("LiqoNotReady", fmt.Sprintf("Liqo has not created Secret %s/%s yet; check that Liqo is installed and running", d.LiqoNamespace, consts.AuthKeysSecretName)), nil
		}
		if err := request.Prove(keys, d.ClusterID, next.reply.Nonce); err != nil {
			return peering.Progress{}, fmt.Errorf("answering the nonce of %s: %w", provider, err)
		}
	}
	if next.send == "" {
		return next.progress, nil
	}
	return next.progress, d.handshake.Send(ctx, peer, request)
}

// createIdentity gives Liqo the credentials for a provider; the ForeignCluster
// follows by itself.
func (d *Driver) createIdentity(ctx context.Context, provider string, namespace *corev1.Namespace, grant *liqo.Message) error {
	identity := &authv1beta1.Identity{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: controlPlaneIdentity(provider), Labels: liqo.ManagedLabels(provider)},
		Spec: authv1beta1.IdentitySpec{
			ClusterID: liqov1beta1.ClusterID(provider),
			Type:      authv1beta1.ControlPlaneIdentityType,
			AuthParams: authv1beta1.AuthParams{
				CA: grant.CA, SignedCRT: grant.Certificate, APIServer: grant.APIServer,
			},
			Namespace: &grant.TenantNamespace,
		},
	}
	if grant.ProxyURL != "" {
		identity.Spec.AuthParams.ProxyURL = &grant.ProxyURL
	}
	if err := d.Client.Create(ctx, identity); err != nil {
		return fmt.Errorf("creating the identity for %s: %w", provider, err)
	}
	return nil
}

// Observe lists the peerings that exist in any state.
func (d *Driver) Observe(ctx context.Context) ([]string, error) {
	var namespaces corev1.NamespaceList
	if err := d.Client.List(ctx, &namespaces, session.Managed, client.MatchingLabels{consts.TenantNamespaceLabel: "true"}); err != nil {
		return nil, fmt.Errorf("listing tenant namespaces: %w", err)
	}
	var virtualNodes offloadingv1beta1.VirtualNodeList
	if err := d.Client.List(ctx, &virtualNodes, session.Managed); err != nil {
		return nil, fmt.Errorf("listing virtual nodes: %w", err)
	}
	providers := map[string]bool{}
	for i := range namespaces.Items {
		if session.Number(&namespaces.Items[i], liqo.AnnotationSession) != 0 {
			providers[namespaces.Items[i].Labels[consts.RemoteClusterID]] = true
		}
	}
	for i := range virtualNodes.Items {
		providers[string(virtualNodes.Items[i].Spec.ClusterID)] = true
	}
	return slices.Sorted(maps.Keys(providers)), nil
}

// Tolerations for a provider's virtual node: Spillway's taint and Liqo's.
func (d *Driver) Tolerations(clusterID string) []corev1.Toleration {
	return []corev1.Toleration{
		session.Toleration(clusterID),
		{Key: consts.VirtualNodeTolerationKey, Operator: corev1.TolerationOpEqual, Value: "true", Effect: corev1.TaintEffectNoExecute},
	}
}

// RecognizeVirtualNode reports whether a node is one of Liqo's virtual nodes.
func RecognizeVirtualNode(node *corev1.Node) bool {
	return node.Labels[consts.TypeLabel] == consts.TypeNode
}

// reasonOffloadingBackOff is the status reason that Liqo's virtual kubelet gives
// a pod that it rejects.
const reasonOffloadingBackOff = "OffloadingBackOff"

// RefusedReason implements peering.Driver.
func (d *Driver) RefusedReason(pod *corev1.Pod) string {
	if pod.Status.Reason == reasonOffloadingBackOff {
		return reasonOffloadingBackOff
	}
	return ""
}
