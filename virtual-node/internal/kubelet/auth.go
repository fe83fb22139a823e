package kubelet

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/virtual-kubelet/virtual-kubelet/node/nodeutil"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
)

const (
	// The ConfigMap in which an API server publishes the CA of its clients.
	caNamespace = "kube-system"
	caConfigMap = "extension-apiserver-authentication"
	caKey       = "client-ca-file"

	// caTimeout bounds the first read of the CA.
	caTimeout          = 15 * time.Second
	tokenReviewTimeout = 10 * time.Second
)

// NewAuth delegates authentication and authorization of a node's kubelet API to
// this cluster's API server, as a kubelet does: client certificates are verified
// with the CA that the API server publishes, which is watched until ctx ends;
// tokens by TokenReview, cached for 2 minutes; access by SubjectAccessReview on
// the node's subresources, cached for 5 minutes if allowed and 30 s if denied.
//
// NewAuth fails if the CA cannot be read within 15 seconds. That needs Role
// extension-apiserver-authentication-reader in kube-system.
func NewAuth(ctx context.Context, client kubernetes.Interface, nodeName string) (nodeutil.Auth, error) {
	ca, err := dynamiccertificates.NewDynamicCAFromConfigMapController("client-ca", caNamespace, caConfigMap, caKey, client)
	if err != nil {
		return nil, fmt.Errorf("setting up the watch of ConfigMap %s/%s: %w", caNamespace, caConfigMap, err)
	}
	watchCtx, stop := context.WithCancel(ctx)
	go ca.Run(watchCtx, 1)
	if err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, caTimeout, true, func(context.Context) (bool, error) {
		return len(ca.CurrentCABundleContent()) > 0, nil
	}); err != nil {
		stop()
		return nil, fmt.Errorf("reading %s of ConfigMap %s/%s (get, list and watch must be allowed): %w", caKey, caNamespace, caConfigMap, err)
	}
	auth, err := nodeutil.WebhookAuth(client, nodeName, func(c *nodeutil.WebhookAuthConfig) error {
		c.AuthnConfig.ClientCertificateCAContentProvider = ca
		c.AuthnConfig.TokenAccessReviewTimeout = tokenReviewTimeout
		return nil
	})
	if err != nil {
		stop()
		return nil, fmt.Errorf("delegating authentication to the API server: %w", err)
	}
	context.AfterFunc(ctx, stop)
	return fineGrainedAuth{auth}, nil
}

// fineGrainedAuth accepts, as an alternative to nodes/proxy, the subresources that
// Kubernetes defines for some paths.
type fineGrainedAuth struct{ nodeutil.Auth }

// fineGrainedSubresources are the subresources for a path and those below it.
var fineGrainedSubresources = map[string]string{"/pods": "pods", "/healthz": "healthz"}

// Authorize checks the fine-grained subresource first, as a kubelet does.
func (f fineGrainedAuth) Authorize(ctx context.Context, attributes authorizer.Attributes) (authorizer.Decision, string, error) {
	if attributes.GetSubresource() != "proxy" {
		return f.Auth.Authorize(ctx, attributes)
	}
	for path, subresource := range fineGrainedSubresources {
		if attributes.GetPath() != path && !strings.HasPrefix(attributes.GetPath(), path+"/") {
			continue
		}
		decision, reason, err := f.Auth.Authorize(ctx, authorizer.AttributesRecord{
			User: attributes.GetUser(), Verb: attributes.GetVerb(), APIVersion: attributes.GetAPIVersion(),
			Resource: attributes.GetResource(), Name: attributes.GetName(), Subresource: subresource,
			ResourceRequest: true, Path: attributes.GetPath(),
		})
		if err == nil && decision == authorizer.DecisionAllow {
			return decision, reason, nil
		}
	}
	return f.Auth.Authorize(ctx, attributes)
}

// ConditionsAwareAuthorize decides as Authorize: that of the embedded Auth would not know the
// fine-grained subresources.
func (f fineGrainedAuth) ConditionsAwareAuthorize(ctx context.Context, attributes authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(f.Authorize(ctx, attributes))
}

// EvaluateConditions denies: no decision of this authorizer has conditions.
func (f fineGrainedAuth) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionDeny, "", authorizer.ErrorConditionEvaluationNotSupported
}
