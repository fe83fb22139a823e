package page_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/broker/internal/identity"
	"github.com/spillway-dev/spillway/broker/internal/page"
	"github.com/spillway-dev/spillway/broker/internal/page/session"
	"github.com/spillway-dev/spillway/broker/internal/store"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestTokens: the hub's API server says whose a token is, and what they may list.
func TestTokens(t *testing.T) {
	config := controlplane.Start(t)
	c, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	token := func(name string, audiences []string, resources ...string) string {
		account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
		expect.NoError(t, c.Create(t.Context(), account))
		if len(resources) > 0 {
			role := &rbacv1.Role{ObjectMeta: account.ObjectMeta, Rules: []rbacv1.PolicyRule{{APIGroups: []string{"broker.fluidos.eu"}, Resources: resources, Verbs: []string{"list"}}}}
			role.ResourceVersion = ""
			expect.NoError(t, c.Create(t.Context(), role))
			expect.NoError(t, c.Create(t.Context(), &rbacv1.RoleBinding{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: name},
				Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: name}},
			}))
		}
		request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: audiences}}
		expect.NoError(t, c.SubResource("token").Create(t.Context(), account, request))
		return request.Status.Token
	}
	tokens := map[string]string{
		"all": token("all", nil, "clusteradvertisements", "reservations"), "clusters": token("clusters", nil, "clusteradvertisements"),
		"reservations": token("reservations", nil, "reservations"), "stranger": token("stranger", nil), "elsewhere": token("elsewhere", []string{"elsewhere"}, "reservations"),
		"guess": "guess", "forged": "eyJhbGciOiJub25lIn0.eyJzdWIiOiJzeXN0ZW06YWRtaW4ifQ.",
	}
	s := serve(t, nil)
	s.put()
	s.review = session.Reviewer{Client: c, Namespace: "default"}.Review
	for who, want := range map[string]struct{ signIn, clusters, reservations int }{
		"all":          {http.StatusSeeOther, http.StatusOK, http.StatusOK},
		"clusters":     {http.StatusSeeOther, http.StatusOK, http.StatusForbidden},
		"reservations": {http.StatusSeeOther, http.StatusForbidden, http.StatusOK},
		"stranger":     {http.StatusForbidden, http.StatusSeeOther, http.StatusSeeOther},
		"elsewhere":    {http.StatusUnauthorized, http.StatusSeeOther, http.StatusSeeOther},
		"guess":        {http.StatusUnauthorized, http.StatusSeeOther, http.StatusSeeOther},
		"forged":       {http.StatusUnauthorized, http.StatusSeeOther, http.StatusSeeOther},
	} {
		b := browser(t)
		// A RoleBinding takes effect a moment after its creation, and attempts have a rate.
		expect.Eventually(t, who+" to sign in, or not", func() (bool, string) {
			a := do(t, b, http.MethodPost, s.url+"/sign-in", url.Values{"token": {tokens[who]}})
			return a.StatusCode == want.signIn, a.Status
		})
		if a := do(t, b, http.MethodGet, s.url+"/clusters", nil); a.StatusCode != want.clusters {
			t.Errorf("%s at clusters: %s", who, a.Status)
		}
		a := do(t, b, http.MethodGet, s.url+"/reservations", nil)
		if a.StatusCode != want.reservations || strings.Contains(a.body, "secret-web") != (want.reservations == http.StatusOK) {
			t.Errorf("%s at reservations: %s", who, a.Status)
		}
		if want.signIn == http.StatusSeeOther && strings.Contains(a.body, tokens[who]) {
			t.Errorf("%s: the token is in the document", who)
		}
	}

	// A token ends with its account, and the session with it.
	may, err := session.Reviewer{Client: c, Namespace: "default"}.Review(t.Context(), tokens["all"])
	if err != nil || may.Name != "system:serviceaccount:default:all" {
		t.Errorf("%+v, %v", may, err)
	}
	expect.NoError(t, c.Delete(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "all"}}))
	expect.Eventually(t, "the token of a deleted account to be refused", func() (bool, string) {
		user, err := session.Reviewer{Client: c, Namespace: "default"}.Review(t.Context(), tokens["all"])
		return err == session.ErrToken, user.Name
	})
}

// TestTLS: with the broker's certificate, the page asks for none of a client.
func TestTLS(t *testing.T) {
	config := controlplane.Start(t)
	c, err := client.New(config, client.Options{Scheme: scheme.Scheme})
	expect.NoError(t, err)
	authority, err := identity.New(t.Context(), identity.Options{Client: c, Namespace: "default"})
	expect.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	expect.NoError(t, err)
	served := page.New(page.Options{
		Listener: listener, Secure: authority.TLSConfig(), Namespace: "default", Store: store.New(clock.RealClock{}), Clock: clock.RealClock{}, Log: logr.Discard(),
		Ready: func() error { return nil }, Sessions: session.New(everyone, clock.RealClock{}),
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- served.Start(ctx) }()
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority.CAPEM())
	asked := false
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "spillway-broker.default.svc", GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
		asked = true
		return &tls.Certificate{}, nil
	}}}
	b := browser(t)
	b.Transport = transport
	a := do(t, b, http.MethodGet, "https://"+listener.Addr().String()+"/clusters", nil, "Host", "page.example.org")
	if a.StatusCode != http.StatusSeeOther || asked || a.TLS.Version < tls.VersionTLS12 {
		t.Errorf("%s, asked for a certificate: %t", a.Status, asked)
	}
	transport.CloseIdleConnections()
	cancel()
	expect.NoError(t, <-ended)
}
