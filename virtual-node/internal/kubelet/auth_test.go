package kubelet

import (
	"context"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/utils/clock"

	"github.com/spillway-dev/spillway/e2e/controlplane"
)

// Who may do what is the home API server's answer: a real one, with its own CA,
// tokens and roles.
func TestAuthIsTheAPIServers(t *testing.T) {
	t.Parallel()
	home := controlplane.StartBare(t)
	client := kubernetes.NewForConfigOrDie(home)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	auth, err := NewAuth(ctx, client, nodeName)
	if err != nil {
		t.Fatal(err)
	}
	server := serve(t, &oneGuest{}, auth, clock.RealClock{})

	admin, err := tls.X509KeyPair(home.CertData, home.KeyData)
	if err != nil {
		t.Fatalf("the test API server's admin has no client certificate: %v", err)
	}
	stranger, err := Certificate("stranger")
	if err != nil {
		t.Fatal(err)
	}
	nobody := token(ctx, t, client, "nobody")
	scraper := token(ctx, t, client, "scraper", "nodes/metrics", "nodes/stats")
	lister := token(ctx, t, client, "lister", "nodes/pods")
	proxier := token(ctx, t, client, "proxier", "nodes/proxy")

	for name, c := range map[string]struct {
		path        string
		certificate []tls.Certificate
		token       string
		want        int
	}{
		"NoCredentials":            {"/metrics/resource", nil, "", http.StatusUnauthorized},
		"NoCredentialsHealth":      {"/healthz", nil, "", http.StatusUnauthorized},
		"NoCredentialsNoSuchPath":  {"/nowhere", nil, "", http.StatusUnauthorized},
		"CertificateOfOtherCA":     {"/metrics/resource", []tls.Certificate{stranger}, "", http.StatusUnauthorized},
		"TokenOfNobody":            {"/metrics/resource", nil, "made-up", http.StatusUnauthorized},
		"NoRights":                 {"/metrics/resource", nil, nobody, http.StatusForbidden},
		"NoRightsLogs":             {"/containerLogs/work/job/c", nil, nobody, http.StatusForbidden},
		"NoRightsExec":             {"/exec/work/job/c?output=1&command=id", nil, nobody, http.StatusForbidden},
		"ClientCertificate":        {"/metrics/resource", []tls.Certificate{admin}, "", http.StatusOK},
		"ClientCertificateHealth":  {"/healthz", []tls.Certificate{admin}, "", http.StatusOK},
		"ClientCertificatePods":    {"/pods", []tls.Certificate{admin}, "", http.StatusOK},
		"ClientCertificateNoPath":  {"/nowhere", []tls.Certificate{admin}, "", http.StatusNotFound},
		"ScraperMetrics":           {"/metrics/resource", nil, scraper, http.StatusOK},
		"ScraperStats":             {"/stats/summary", nil, scraper, http.StatusOK},
		"ScraperMayNotReadLogs":    {"/containerLogs/work/job/c", nil, scraper, http.StatusForbidden},
		"ScraperMayNotForward":     {"/portForward/work/job", nil, scraper, http.StatusForbidden},
		"ListerPods":               {"/pods", nil, lister, http.StatusOK},
		"ListerMayNotReadLogs":     {"/containerLogs/work/job/c", nil, lister, http.StatusForbidden},
		"ProxierPods":              {"/pods", nil, proxier, http.StatusOK},
		"ProxierMayNotReadMetrics": {"/metrics/resource", nil, proxier, http.StatusForbidden},
		"ProxierLogsOfOtherPod":    {"/containerLogs/work/other/c", nil, proxier, http.StatusNotFound},
		"PathInDisguise":           {"/metrics/../containerLogs/work/job/c", nil, scraper, http.StatusForbidden},
	} {
		t.Run(name, func(t *testing.T) {
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+c.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.token != "" {
				request.Header.Set("Authorization", "Bearer "+c.token)
			}
			answer, err := anyClient(c.certificate...).Do(request)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			if words, _ := io.ReadAll(answer.Body); answer.StatusCode != c.want {
				t.Errorf("GET %s: got %s %q, want %d", c.path, answer.Status, words, c.want)
			}
		})
	}
}

// Without the right to read the CA there is no authentication, and whoever starts
// the node learns what is missing.
func TestAuthSaysWhatItMayNotRead(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	provider := played(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	began := time.Now()
	_, err := NewAuth(ctx, kubernetes.NewForConfigOrDie(provider), nodeName)
	if err == nil {
		t.Fatal("authentication was set up without a CA")
	}
	if took := time.Since(began); took > 2*caWithin {
		t.Errorf("it took %s to find out", took)
	}
}

// token is that of a new ServiceAccount that may get these resources.
func token(ctx context.Context, t *testing.T, client kubernetes.Interface, name string, resources ...string) string {
	t.Helper()
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := client.CoreV1().ServiceAccounts("default").Create(ctx, account, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if len(resources) > 0 {
		role := &rbacv1.ClusterRole{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Rules:      []rbacv1.PolicyRule{{APIGroups: []string{""}, Resources: resources, ResourceNames: []string{nodeName}, Verbs: []string{"get"}}},
		}
		if _, err := client.RbacV1().ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		binding := &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
			Subjects:   []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: "default", Name: name}},
		}
		if _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	made, err := client.CoreV1().ServiceAccounts("default").CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The API server's own roles are cached and arrive a moment later.
	if len(resources) > 0 {
		awaitRight(ctx, t, client, name, resources[0])
	}
	return made.Status.Token
}

// awaitRight waits until the API server knows of a ServiceAccount's new right.
func awaitRight(ctx context.Context, t *testing.T, client kubernetes.Interface, name, resource string) {
	t.Helper()
	_, subresource, _ := strings.Cut(resource, "/")
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: "system:serviceaccount:default:" + name,
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: "get", Resource: "nodes", Subresource: subresource, Name: nodeName,
		},
	}}
	var last *authorizationv1.SubjectAccessReview
	err := wait.PollUntilContextTimeout(ctx, 50*time.Millisecond, 20*time.Second, true, func(ctx context.Context) (bool, error) {
		var err error
		last, err = client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
		return err == nil && last.Status.Allowed, err
	})
	if err != nil {
		t.Fatalf("%s never got the right to %s: %v; last answer %+v", name, resource, err, last)
	}
}
