package main

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestInvite(t *testing.T) {
	config := controlplane.Start(t)
	hub := func() (*rest.Config, error) { return config, nil }
	scheme := runtime.NewScheme()
	expect.NoError(t, broker.AddToScheme(scheme))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(t, err)
	var tokens []string
	for range 2 {
		var out bytes.Buffer
		expect.NoError(t, invite(t.Context(), hub, []string{"--namespace=default", "--ttl=1h", "rome"}, &out))
		tokens = append(tokens, strings.TrimSpace(out.String()))
	}
	registration := &broker.ClusterRegistration{}
	expect.NoError(t, c.Get(t.Context(), client.ObjectKey{Namespace: "default", Name: "rome"}, registration))
	if left := time.Until(registration.Spec.Invitation.Expires.Time); left <= 0 || left > time.Hour || tokens[0] == tokens[1] || len(tokens[1]) < 40 {
		t.Errorf("invited with %v, which expire in %s", tokens, left)
	}
	for name, arguments := range map[string][]string{"no cluster": {}, "two": {"rome", "paris"}, "no cluster ID": {"Rome"}, "no time": {"--ttl=0s", "paris"}, "an unknown flag": {"--token=x", "paris"}} {
		var out bytes.Buffer
		if err := invite(t.Context(), hub, arguments, &out); err == nil || out.Len() > 0 {
			t.Errorf("%s: %v, printed %q", name, err, out.String())
		}
	}
	err = invite(t.Context(), func() (*rest.Config, error) { return nil, errors.New("none") }, []string{"paris"}, &bytes.Buffer{})
	if err == nil || !strings.Contains(err.Error(), "--kubeconfig") {
		t.Errorf("without a hub: %v", err)
	}
}
