package charts_test

import (
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// warnings are those that the API server sends with its answers.
type warnings struct {
	sync.Mutex
	all []string
}

func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.Lock()
	defer w.Unlock()
	w.all = append(w.all, text)
}

// TestOtherNamespaces: who creates in another namespace what the broker reads in its own learns that
// it has no effect there, and who creates something else is not bothered.
func TestOtherNamespaces(t *testing.T) {
	config := controlplane.Start(t)
	access := kubeconfig(t, config)
	install(t, "install", "broker", access, nil)
	expect.NoError(t, as(t, config, "").Create(t.Context(), &corev1.Namespace{ObjectMeta: named("shop")}))
	const (
		reservation = "kind: Reservation\nspec: {requesterID: rome, requestedResources: {cpu: 1}}"
		local       = "kind: Reservation\nspec: {requestedResources: {cpu: 1}}"
		ad          = "kind: ClusterAdvertisement\nmetadata: {name: cluster-1}\nspec: {clusterID: cluster-1, resources: {capacity: {}, allocatable: {}, allocated: {}}, timestamp: \"2025-11-19T16:00:00Z\"}"
		settings    = "kind: BrokerConfig\nmetadata: {name: default}\nspec: {}"
		unless      = "in namespace default it has no effect, unless an agent runs in this cluster"
	)
	for name, tc := range map[string]struct {
		object, namespace, user, want string
	}{
		"the original's Reservation":         {reservation, "default", "", unless},
		"the same in the broker's namespace": {reservation, namespace, "", ""},
		"one of a consumer":                  {local, "shop", "", ""},
		"an advertisement":                   {ad, "default", "", "in namespace default it has no effect"},
		"the agent's copy":                   {ad, "shop", "system:serviceaccount:spillway-system:spillway-agent", ""},
		"a BrokerConfig":                     {settings, "shop", "", "create it there. In namespace shop it has no effect"},
		"a BrokerConfig of the broker's":     {settings, namespace, "", ""},
		"a Reservation by a GitOps program":  {reservation, "shop", "system:serviceaccount:argocd:argocd", ""},
		"a Reservation for another cluster":  {reservation, "shop", "", "the broker uses those in namespace spillway-system only"},
		"an advertisement of the broker's":   {ad, namespace, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			object := &unstructured.Unstructured{}
			expect.NoError(t, yaml.Unmarshal([]byte("apiVersion: "+broker.GroupVersion.String()+"\n"+tc.object), &object.Object))
			object.SetNamespace(tc.namespace)
			if object.GetName() == "" {
				object.SetName("some")
			}
			var got warnings
			asked := rest.CopyConfig(config)
			asked.WarningHandler = &got
			if tc.user != "" {
				asked.Impersonate = rest.ImpersonationConfig{UserName: tc.user, Groups: []string{"system:masters"}}
			}
			c, err := client.New(asked, client.Options{})
			expect.NoError(t, err)
			expect.NoError(t, c.Create(t.Context(), object, client.DryRunAll))
			found := slices.ContainsFunc(got.all, func(text string) bool { return strings.Contains(strings.ToLower(text), strings.ToLower(tc.want)) })
			if tc.want == "" && len(got.all) > 0 || tc.want != "" && !found {
				t.Errorf("the warnings are %q, want %q", got.all, tc.want)
			}
		})
	}
	uninstall(t, as(t, config, ""), "broker", access, nil)
}
