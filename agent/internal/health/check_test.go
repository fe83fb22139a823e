package health_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// certificate ends after some time.
func certificate(t testing.TB, after time.Duration) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: now.Add(after)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	expect.NoError(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// installed is an installation in a consumer in which all is well.
func installed(t *testing.T) *health.Installation {
	in := &health.Installation{
		Observed: *rome(), Version: "1.37", OptedIn: 3,
		Kinds:           []string{"ClusterAdvertisement", "OverflowPolicy", "ProviderInstruction", "Reservation", "ReservationInstruction"},
		Permissions:     []health.Permission{{Who: health.Agent, What: "patch reservations/status", Allowed: true}, {Who: health.Scheduler, What: "create reservations", Allowed: true}},
		NetworkPolicies: make([]networkingv1.NetworkPolicy, 2),
		EndpointSlices:  []discoveryv1.EndpointSlice{{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{discoveryv1.LabelServiceName: health.Scheduler}}, Endpoints: make([]discoveryv1.Endpoint, 1)}},
		Webhooks: []admissionv1.MutatingWebhookConfiguration{{ObjectMeta: metav1.ObjectMeta{Name: health.Scheduler}, Webhooks: []admissionv1.MutatingWebhook{
			{Name: health.SteeringWebhook, ClientConfig: admissionv1.WebhookClientConfig{CABundle: certificate(t, 3650*24*time.Hour), Service: &admissionv1.ServiceReference{Namespace: "spillway-system", Name: health.Scheduler}}}}}},
		ClockAhead:     ptr.To(2 * time.Second),
		NetworkPlugins: []appsv1.DaemonSet{{ObjectMeta: metav1.ObjectMeta{Name: "kube-proxy"}}, {ObjectMeta: metav1.ObjectMeta{Name: "cilium"}}},
		Endpoints: []health.Endpoint{{Subject: "the broker", URL: "https://hub.example.com:30443", Ends: now.Add(90 * 24 * time.Hour)},
			{Subject: "API server of paris", URL: "https://paris.example.com:6443", Problem: "i/o timeout"}},
		Identity: &corev1.Secret{Data: map[string][]byte{corev1.TLSCertKey: certificate(t, 60*24*time.Hour)}},
	}
	for i := range in.Deployments {
		in.Deployments[i].Labels = map[string]string{"app.kubernetes.io/version": "0.1.0"}
	}
	return in
}

func TestCheck(t *testing.T) {
	for name, of := range map[string]struct {
		pre, well bool
		change    func(*health.Installation)
	}{
		"well": {well: true, change: func(*health.Installation) {}},
		"broken": {change: func(in *health.Installation) {
			in.VersionProblem = "this build of Spillway supports Kubernetes 1.35 to 1.37, and the cluster has 1.34: upgrade the cluster"
			in.Kinds = in.Kinds[1:]
			in.Deployments[0].Labels["app.kubernetes.io/version"] = "0.2.0"
			in.Permissions[1].Allowed = false
			in.EndpointSlices, in.NetworkPolicies, in.OptedIn = nil, nil, 0
			in.Identity.Data[corev1.TLSCertKey] = certificate(t, -time.Hour)
			in.Advertisements[0].Spec.Unreachable = []string{"paris"}
			in.ClockAhead, in.NetworkPlugins = ptr.To(-time.Hour), nil
		}},
		"old-crds": {change: func(in *health.Installation) {
			in.LacksFields, in.Plugin = []string{"Reservation.spec.minAvailable", "Reservation.status.where"}, "0.2.0"
			in.ClockAhead = ptr.To(5 * time.Minute)
			in.Endpoints[0].Ends = now.Add(-time.Hour)
		}},
		"no-permission": {well: true, change: func(in *health.Installation) {
			*in = health.Installation{Observed: health.Observed{Now: now, System: in.System}, Version: in.Version, Kinds: in.Kinds, Permissions: []health.Permission{{Unknown: "you may not create subjectaccessreviews"}}}
			for _, what := range []string{health.Deployments, health.Leases, health.Webhooks, health.Secrets, health.NetworkPolicies, health.Advertisements, explain.Namespaces} {
				in.Unreadable = append(in.Unreadable, explain.Unreadable{What: what, Permission: "list " + what})
			}
		}},
		"pre": {pre: true, well: true, change: func(in *health.Installation) {
			*in = health.Installation{Observed: health.Observed{Now: now, System: in.System}, Version: in.Version, Permissions: []health.Permission{{What: "create namespaces", Allowed: true}}}
		}},
		"pre-refused": {pre: true, change: func(in *health.Installation) {
			in.Permissions = []health.Permission{{What: "create namespaces"}, {What: "create clusterroles.rbac.authorization.k8s.io", Allowed: true}}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			in := installed(t)
			of.change(in)
			report := health.Check(in, of.pre)
			expectGolden(t, "check-"+name, report.Text(explain.Style{Width: 80}))
			if report.Well != of.well {
				t.Errorf("all is well: %t", report.Well)
			}
		})
	}
}

// TestWebhook: it is judged by what it names, and by a dry run where there is one.
func TestWebhook(t *testing.T) {
	url := func(in *health.Installation) {
		in.EndpointSlices, in.Webhooks[0].Webhooks[0].ClientConfig.Service = nil, nil
		in.Webhooks[0].Webhooks[0].ClientConfig.URL = ptr.To("https://192.0.2.7:9443/steer")
	}
	for name, of := range map[string]struct {
		change func(*health.Installation)
		state  explain.State
		says   string
	}{
		"pods of its Service":   {func(*health.Installation) {}, explain.OK, "pods answer for it"},
		"no pod of its Service": {func(in *health.Installation) { in.EndpointSlices = nil }, explain.Failed, "no ready pod answers for Service spillway-scheduler"},
		"a Service elsewhere": {func(in *health.Installation) {
			in.EndpointSlices, in.Webhooks[0].Webhooks[0].ClientConfig.Service.Namespace = nil, "edge"
		}, explain.OK, "at Service edge/spillway-scheduler"},
		"an address":             {url, explain.OK, "at https://192.0.2.7:9443/steer"},
		"an address that steers": {func(in *health.Installation) { url(in); in.Trial = &health.Trial{Namespace: "shop", Steered: true} }, explain.OK, "a dry run in namespace shop was steered"},
		"an address that does not steer": {func(in *health.Installation) { url(in); in.Trial = &health.Trial{Namespace: "shop"} }, explain.Failed,
			"a dry run in namespace shop was not steered"},
		"pods that do not steer": {func(in *health.Installation) { in.Trial = &health.Trial{Namespace: "shop"} }, explain.Failed, "new pods stay with the default scheduler"},
		"no dry run": {func(in *health.Installation) {
			url(in)
			in.Trial = &health.Trial{Namespace: "shop", Unknown: "was refused: exceeded quota"}
		}, explain.OK, "a dry run in namespace shop was refused: exceeded quota"},
	} {
		in := installed(t)
		of.change(in)
		for _, step := range health.Check(in, false).Steps {
			if step.Name == "Webhook" && (step.State != of.state || !strings.Contains(step.Message, of.says)) {
				t.Errorf("%s: it is %s: %s", name, step.State, step.Message)
			}
		}
	}
}

// FuzzExpiry: what is no certificate is a failed step.
func FuzzExpiry(f *testing.F) {
	f.Add(certificate(f, time.Hour))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, content []byte) {
		in := &health.Installation{Observed: *rome(), Identity: &corev1.Secret{Data: map[string][]byte{corev1.TLSCertKey: content}}}
		if report := health.Check(in, false); len(report.Steps) != 11 {
			t.Errorf("%d steps", len(report.Steps))
		}
	})
}

// TestLinks: what reports, explanations and this package's steps link to is there.
func TestLinks(t *testing.T) {
	texts := ""
	report := health.Check(installed(t), false)
	for _, step := range report.Steps {
		if step.See == "" {
			t.Errorf("step %s links to nothing", step.Name)
		}
		texts += step.See + "\n"
	}
	for _, pattern := range []string{"*.go", "../explain/*.go", "testdata/*.golden"} {
		files, err := filepath.Glob(pattern)
		expect.NoError(t, err)
		for _, file := range files {
			content, err := os.ReadFile(file)
			expect.NoError(t, err)
			texts += string(content)
		}
	}
	links := regexp.MustCompile(`([a-z-]+/README\.md)#([a-z0-9-]+)`).FindAllStringSubmatch(texts, -1)
	if len(links) < 20 {
		t.Errorf("there are %d links", len(links))
	}
	anchors := map[string]map[string]bool{}
	for _, link := range links {
		file, anchor := link[1], link[2]
		if anchors[file] == nil {
			anchors[file] = map[string]bool{}
			content, err := os.ReadFile(filepath.Join("../../..", file))
			expect.NoError(t, err)
			for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(content), -1) {
				name := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
				anchors[file][strings.ReplaceAll(name, " ", "-")] = true
			}
		}
		if !anchors[file][anchor] {
			t.Errorf("%s has no heading for #%s", file, anchor)
		}
	}
}
