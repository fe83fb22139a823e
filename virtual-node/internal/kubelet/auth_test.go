package kubelet

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Authentication and authorization against a real API server with its own CA,
// tokens and roles.
func TestAuth(t *testing.T) {
	t.Parallel()
	cluster := controlplane.StartBare(t)
	client := kubernetes.NewForConfigOrDie(cluster)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	auth, err := NewAuth(ctx, client, nodeName)
	expect.NoError(t, err)
	server := serve(t, &fakeGuests{}, auth, clock.RealClock{})

	admin, err := tls.X509KeyPair(cluster.CertData, cluster.KeyData)
	if err != nil {
		t.Fatalf("the test API server's admin has no client certificate: %v", err)
	}
	foreign, err := SelfSignedCertificate("foreign")
	expect.NoError(t, err)
	foreignCertificate, err := foreign(nil)
	expect.NoError(t, err)
	unauthorized := token(ctx, t, client, "unauthorized")
	scraper := token(ctx, t, client, "scraper", "nodes/metrics", "nodes/stats")
	lister := token(ctx, t, client, "lister", "nodes/pods")
	proxier := token(ctx, t, client, "proxier", "nodes/proxy")

	for name, c := range map[string]struct {
		path        string
		certificate []tls.Certificate
		token       string
		want        int
	}{
		"NoCredentials":                {"/metrics/resource", nil, "", http.StatusUnauthorized},
		"NoCredentialsHealth":          {"/healthz", nil, "", http.StatusUnauthorized},
		"NoCredentialsUnknownPath":     {"/unknown", nil, "", http.StatusUnauthorized},
		"CertificateOfOtherCA":         {"/metrics/resource", []tls.Certificate{*foreignCertificate}, "", http.StatusUnauthorized},
		"InvalidToken":                 {"/metrics/resource", nil, "invalid", http.StatusUnauthorized},
		"NoRights":                     {"/metrics/resource", nil, unauthorized, http.StatusForbidden},
		"NoRightsLogs":                 {"/containerLogs/work/job/c", nil, unauthorized, http.StatusForbidden},
		"NoRightsExec":                 {"/exec/work/job/c?output=1&command=id", nil, unauthorized, http.StatusForbidden},
		"ClientCertificate":            {"/metrics/resource", []tls.Certificate{admin}, "", http.StatusOK},
		"ClientCertificateHealth":      {"/healthz", []tls.Certificate{admin}, "", http.StatusOK},
		"ClientCertificatePods":        {"/pods", []tls.Certificate{admin}, "", http.StatusOK},
		"ClientCertificateUnknownPath": {"/unknown", []tls.Certificate{admin}, "", http.StatusNotFound},
		"ScraperMetrics":               {"/metrics/resource", nil, scraper, http.StatusOK},
		"ScraperStats":                 {"/stats/summary", nil, scraper, http.StatusOK},
		"ScraperMayNotReadLogs":        {"/containerLogs/work/job/c", nil, scraper, http.StatusForbidden},
		"ScraperMayNotForward":         {"/portForward/work/job", nil, scraper, http.StatusForbidden},
		"ListerPods":                   {"/pods", nil, lister, http.StatusOK},
		"ListerMayNotReadLogs":         {"/containerLogs/work/job/c", nil, lister, http.StatusForbidden},
		"ProxierPods":                  {"/pods", nil, proxier, http.StatusOK},
		"ProxierMayNotReadMetrics":     {"/metrics/resource", nil, proxier, http.StatusForbidden},
		"ProxierLogsOfOtherPod":        {"/containerLogs/work/other/c", nil, proxier, http.StatusNotFound},
		"DotsInPath":                   {"/metrics/../containerLogs/work/job/c", nil, scraper, http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+c.path, nil)
			expect.NoError(t, err)
			if c.token != "" {
				request.Header.Set("Authorization", "Bearer "+c.token)
			}
			response, err := insecureClient(c.certificate...).Do(request)
			expect.NoError(t, err)
			defer response.Body.Close()
			if body, _ := io.ReadAll(response.Body); response.StatusCode != c.want {
				t.Errorf("GET %s: got %s %q, want %d", c.path, response.Status, body, c.want)
			}
		})
	}
}

// onlySubresource allows one subresource. It would also find every condition true.
type onlySubresource string

func (o onlySubresource) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetSubresource() == string(o) {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "another subresource", nil
}

func (o onlySubresource) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	return authorizer.ConditionsAwareDecisionFromParts(o.Authorize(ctx, a))
}

func (onlySubresource) EvaluateConditions(context.Context, authorizer.ConditionsAwareDecision, authorizer.ConditionsData) (authorizer.Decision, string, error) {
	return authorizer.DecisionAllow, "", nil
}

// TestEveryMethodDecidesTheSame: a caller that knows conditions gets the decision of one that
// does not.
func TestEveryMethodDecidesTheSame(t *testing.T) {
	for _, c := range []struct {
		path, allowed string
		want          authorizer.Decision
	}{
		{"/pods", "pods", authorizer.DecisionAllow},
		{"/pods/x", "pods", authorizer.DecisionAllow},
		{"/healthz", "healthz", authorizer.DecisionAllow},
		{"/pods", "proxy", authorizer.DecisionAllow},
		{"/podsandmore", "pods", authorizer.DecisionNoOpinion},
		{"/healthz", "pods", authorizer.DecisionNoOpinion},
		{"/containerLogs/work/job/c", "pods", authorizer.DecisionNoOpinion},
	} {
		auth := fineGrainedAuth{struct {
			authenticator.Request
			authorizer.RequestAttributesGetter
			authorizer.Authorizer
		}{Authorizer: onlySubresource(c.allowed)}}
		attributes := authorizer.AttributesRecord{Verb: "get", Resource: "nodes", Subresource: "proxy", Name: nodeName, ResourceRequest: true, Path: c.path}
		if got, reason, err := auth.Authorize(t.Context(), attributes); got != c.want || err != nil {
			t.Errorf("%s with nodes/%s: got %v (%s, %v), want %v", c.path, c.allowed, got, reason, err, c.want)
		}
		if got := auth.ConditionsAwareAuthorize(t.Context(), attributes); got.IsAllow() != (c.want == authorizer.DecisionAllow) || !got.IsUnconditional() {
			t.Errorf("%s with nodes/%s: got %s, want %v", c.path, c.allowed, got, c.want)
		}
		if got, _, err := auth.EvaluateConditions(t.Context(), authorizer.ConditionsAwareDecision{}, nil); got != authorizer.DecisionDeny || err == nil {
			t.Errorf("conditions evaluate to %v (%v), and this authorizer sets none", got, err)
		}
	}
}

// Without access to the CA there is no authentication.
func TestAuthFailsWithoutCA(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), expect.Deadline)
	defer cancel()
	server := fakeProvider(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	if _, err := NewAuth(ctx, kubernetes.NewForConfigOrDie(server), nodeName); err == nil || !strings.Contains(err.Error(), caConfigMap) {
		t.Fatalf("got %v, want an error that names ConfigMap %s", err, caConfigMap)
	}
	if ctx.Err() != nil {
		t.Errorf("NewAuth did not fail after %s", caTimeout)
	}
}

// token returns the token of a new ServiceAccount that may get these subresources of
// the node.
func token(ctx context.Context, t *testing.T, client kubernetes.Interface, name string, resources ...string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := client.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{})
	expect.NoError(t, err)
	if len(resources) > 0 {
		role := &rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, ResourceNames: []string{nodeName}, Verbs: []string{"get"}}},
		}
		_, err := client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{})
		expect.NoError(t, err)
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: name}},
		}
		_, err = client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{})
		expect.NoError(t, err)
		awaitAccess(ctx, t, client, name, resources[0])
	}
	created, err := client.CoreV1().ServiceAccounts("default").CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	expect.NoError(t, err)
	return created.Status.Token
}

// awaitAccess waits until the API server's cache of roles allows a ServiceAccount
// access.
func awaitAccess(ctx context.Context, t *testing.T, client kubernetes.Interface, name, resource string) {
	t.Helper()
	_, subresource, _ := strings.Cut(resource, "/")
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: "system:serviceaccount:default:" + name,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: "get", Resource: "nodes", Subresource: subresource, Name: nodeName,
		},
	}}
	expect.Eventually(t, name+" may get "+resource, func() (bool, string) {
		result, err := client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		expect.NoError(t, err)
		return result.Status.Allowed, fmt.Sprintf("%+v", result.Status)
	})
}
