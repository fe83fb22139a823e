package exposition_test

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"

	"github.com/spillway-dev/spillway/broker/exposition"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(zap.New(zap.WriteTo(io.Discard)))
	controlplane.Main(m)
}

// TestSecure: with TLS, only those read metrics whom the API server lets.
func TestSecure(t *testing.T) {
	config := controlplane.Start(t)
	port, err := cluster.FreePort()
	expect.NoError(t, err)
	address := cluster.Address(port)
	mgr, err := ctrl.NewManager(config, ctrl.Options{Metrics: exposition.Options(address, true)})
	expect.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	defer func() {
		cancel()
		expect.NoError(t, <-ended)
	}()

	c, err := client.New(config, client.Options{})
	expect.NoError(t, err)
	reader := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "metrics"}, Rules: []rbacv1.PolicyRule{{NonResourceURLs: []string{"/metrics"}, Verbs: []string{"get"}}}}
	expect.NoError(t, c.Create(t.Context(), reader))
	expect.NoError(t, c.Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "metrics"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: reader.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "scraper"}},
	}))
	token := func(name string) string {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		expect.NoError(t, c.Create(t.Context(), account))
		request := &authenticationv1.TokenRequest{}
		expect.NoError(t, c.SubResource("token").Create(t.Context(), account, request))
		return request.Status.Token
	}
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer transport.CloseIdleConnections()
	for name, tc := range map[string]struct {
		token  string
		status int
	}{
		"no token":          {"", http.StatusUnauthorized},
		"another account":   {token("stranger"), http.StatusForbidden},
		"one with the role": {token("scraper"), http.StatusOK},
		// So answers controller-runtime.
		"what is not a token": {"guess", http.StatusInternalServerError},
	} {
		expect.Eventually(t, fmt.Sprintf("%s to get %d", name, tc.status), func() (bool, string) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+address+"/metrics", nil)
			expect.NoError(t, err)
			if tc.token != "" {
				request.Header.Set("Authorization", "Bearer "+tc.token)
			}
			response, err := (&http.Client{Transport: transport}).Do(request)
			if err != nil {
				return false, err.Error()
			}
			defer response.Body.Close()
			return response.StatusCode == tc.status, response.Status
		})
	}
}
