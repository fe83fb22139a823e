package kubelet

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
)

const (
	// The ConfigMap in which an API server says by which CA it knows its clients.
	caNamespace = "kube-system"
	caConfigMap = "extension-apiserver-authentication"
	caKey       = "client-ca-file"

	// caWithin is how long the CA may take to be read first.
	caWithin = 15 * time.Second
	// tokenReviewWithin is how long the API server may take over a token.
	tokenReviewWithin = 10 * time.Second
)

// NewAuth leaves it to the home API server who may use the kubelet API of a node.
// Client certificates are checked with the CA that the API server publishes, which
// is watched until ctx ends; tokens by TokenReview; rights by SubjectAccessReview
// on the node's subresources, as for a kubelet. Answers are kept for a while:
// tokens for 2 minutes, rights for 5, refusals for half a minute.
//
// It fails where that CA cannot be read within 15 seconds: try again, having
// granted Role extension-apiserver-authentication-reader in kube-system.
func NewAuth(ctx context.Context, client kubernetes.Interface, nodeName string) (nodeutil.Auth, error) {
	ca, err := dynamiccertificates.NewDynamicCAFromConfigMapController("client-ca", caNamespace, caConfigMap, caKey, client)
	if err != nil {
		return nil, fmt.Errorf("preparing to watch ConfigMap %s/%s: %w", caNamespace, caConfigMap, err)
	}
	watching, stop := context.WithCancel(ctx)
	if err := startCA(watching, ca); err != nil {
		stop()
		return nil, err
	}
	context.AfterFunc(ctx, stop)

	auth, err := nodeutil.WebhookAuth(client, nodeName, func(c *nodeutil.WebhookAuthConfig) error {
		c.AuthnConfig.ClientCertificateCAContentProvider = ca
		c.AuthnConfig.TokenAccessReviewTimeout = tokenReviewWithin
		return nil
	})
	if err != nil {
		stop()
		return nil, fmt.Errorf("delegating authentication to the API server: %w", err)
	}
	return fineGrained{auth}, nil
}

// startCA watches the CA and returns when it was read first.
func startCA(ctx context.Context, ca *dynamiccertificates.ConfigMapCAController) error {
	read := make(heard, 1)
	ca.AddListener(read)
	go ca.Run(ctx, 1)
	deadline := time.NewTimer(caWithin)
	defer deadline.Stop()
	for len(ca.CurrentCABundleContent()) == 0 {
		select {
		case <-read:
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("%s of ConfigMap %s/%s was not read within %s: may this process get, list and watch it, and does it hold a CA?",
				caKey, caNamespace, caConfigMap, caWithin)
		}
	}
	return nil
}

// heard notes that something changed.
type heard chan struct{}

func (h heard) Enqueue() {
	select {
	case h <- struct{}{}:
	default:
	}
}

// fineGrained accepts, beside nodes/proxy, the narrower rights that Kubernetes
// knows for some paths.
type fineGrained struct{ nodeutil.Auth }

// narrower are the subresources that suffice for a path and those below it.
var narrower = map[string]string{"/pods": "pods", "/healthz": "healthz"}

// Authorize asks for the narrower right first, as a kubelet does.
func (f fineGrained) Authorize(ctx context.Context, asked authorizer.Attributes) (authorizer.Decision, string, error) {
	if asked.GetSubresource() != "proxy" {
		return f.Auth.Authorize(ctx, asked)
	}
	for path, subresource := range narrower {
		if asked.GetPath() != path && !strings.HasPrefix(asked.GetPath(), path+"/") {
			continue
		}
		decision, reason, err := f.Auth.Authorize(ctx, authorizer.AttributesRecord{
			User: asked.GetUser(), Verb: asked.GetVerb(), APIVersion: asked.GetAPIVersion(),
			Resource: asked.GetResource(), Name: asked.GetName(), Subresource: subresource,
			ResourceRequest: true, Path: asked.GetPath(),
		})
		if err == nil && decision == authorizer.DecisionAllow {
			return decision, reason, nil
		}
	}
	return f.Auth.Authorize(ctx, asked)
}
