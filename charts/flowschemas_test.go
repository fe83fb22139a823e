package charts_test

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// flowFixture is an API server that says how it classifies requests.
type flowFixture struct {
	config *rest.Config
	admin  client.Client
}

// classify makes a request of a ServiceAccount, given as namespace:name, and returns the
// FlowSchema and the priority level that it was handled by. The API server classifies a
// request before it decides on it: this one has no body and changes nothing.
func (f *flowFixture) classify(t *testing.T, account, method, path string) (string, error) {
	t.Helper()
	namespace, name, _ := strings.Cut(account, ":")
	config := rest.CopyConfig(f.config)
	config.Impersonate = rest.ImpersonationConfig{
		UserName: "system:serviceaccount:" + namespace + ":" + name,
		Groups:   []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"},
	}
	transport, err := rest.HTTPClientFor(config)
	if err != nil {
		return "", err
	}
	defer transport.CloseIdleConnections()
	request, err := http.NewRequestWithContext(t.Context(), method, strings.TrimSuffix(config.Host, "/")+path, nil)
	if err != nil {
		return "", err
	}
	response, err := transport.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, response.Body)
	var schemas flowcontrolv1.FlowSchemaList
	if err := f.admin.List(t.Context(), &schemas); err != nil {
		return "", err
	}
	uid := response.Header.Get(flowcontrolv1.ResponseHeaderMatchedFlowSchemaUID)
	i := slices.IndexFunc(schemas.Items, func(s flowcontrolv1.FlowSchema) bool { return string(s.UID) == uid })
	if i < 0 {
		return "", fmt.Errorf("no FlowSchema has UID %q; status %s", uid, response.Status)
	}
	return schemas.Items[i].Name + " " + schemas.Items[i].Spec.PriorityLevelConfiguration.Name, nil
}

// The API server handles what keeps Spillway running, and what pods wait for, apart from the
// requests of all other ServiceAccounts; events do not delay either.
func TestPriorityOfRequests(t *testing.T) {
	config := controlplane.Start(t)
	f := &flowFixture{config: config, admin: as(t, config, "")}
	install(t, "install", "agent", kubeconfig(t, config), withDirect)
	install(t, "install", "broker", kubeconfig(t, config), everything["broker"])

	lease := func(namespace, name string) string {
		return "/apis/coordination.k8s.io/v1/namespaces/" + namespace + "/leases/" + name
	}
	agent, scheduler, virtualNode, broker := namespace+":spillway-agent", namespace+":spillway-scheduler", namespace+":spillway-virtual-node", namespace+":spillway-broker"
	const leases, high = "spillway-leases leader-election", "spillway-programs workload-high"
	const pod, event, others = "/api/v1/namespaces/default/pods/x", "spillway-events workload-low", "service-accounts workload-low"
	for name, c := range map[string]struct{ account, method, path, want string }{
		"the agent's Lease":                      {agent, "PUT", lease(namespace, "spillway-agent"), leases},
		"the scheduler's Lease":                  {scheduler, "PUT", lease(namespace, "spillway-scheduler"), leases},
		"virtual-node's Lease":                   {virtualNode, "PUT", lease(configNamespace, "spillway-virtual-node"), leases},
		"the broker's Lease":                     {broker, "PUT", lease(namespace, "spillway-broker"), "spillway-broker-leases leader-election"},
		"the Lease of a virtual node":            {virtualNode, "PUT", lease("kube-node-lease", "spillway-paris"), "spillway-virtual-node-heartbeats node-high"},
		"the status of a virtual node":           {virtualNode, "PATCH", "/api/v1/nodes/spillway-paris/status", "spillway-virtual-node-heartbeats node-high"},
		"binding a pod":                          {scheduler, "POST", pod + "/binding", high},
		"a pending pod's condition":              {scheduler, "PATCH", pod + "/status", high},
		"requesting capacity":                    {scheduler, "POST", "/apis/broker.fluidos.eu/v1alpha1/namespaces/default/reservations", high},
		"a placeholder":                          {agent, "POST", "/api/v1/namespaces/spillway-holds/pods", high},
		"what an instruction came to":            {agent, "PATCH", "/apis/broker.fluidos.eu/v1alpha1/namespaces/" + namespace + "/providerinstructions/x/status", high},
		"looking for kinds":                      {agent, "GET", "/apis", high},
		"the status of an overflowed pod":        {virtualNode, "PATCH", pod + "/status", high},
		"a provider's ledger":                    {broker, "PUT", "/apis/broker.fluidos.eu/v1alpha1/namespaces/" + namespace + "/clusteradvertisements/paris/status", "spillway-broker workload-high"},
		"an event of the scheduler":              {scheduler, "POST", "/apis/events.k8s.io/v1/namespaces/default/events", event},
		"an event of the agent":                  {agent, "POST", "/api/v1/namespaces/default/events", event},
		"an event of virtual-node":               {virtualNode, "PATCH", "/api/v1/namespaces/default/events/x", event},
		"an event of the broker":                 {broker, "POST", "/api/v1/namespaces/" + namespace + "/events", "spillway-broker-events workload-low"},
		"a guest that a consumer creates":        {guests + ":spillway-virtual-node", "POST", "/api/v1/namespaces/" + guests + "/pods", others},
		"another ServiceAccount of that name":    {"default:spillway-scheduler", "POST", pod + "/binding", others},
		"another ServiceAccount's Lease":         {namespace + ":default", "PUT", lease(namespace, "spillway-agent"), others},
		"a ServiceAccount of the cluster itself": {"kube-system:endpointslice-controller", "GET", pod, "kube-system-service-accounts workload-high"},
	} {
		t.Run(name, func(t *testing.T) {
			expect.Eventually(t, "classification as "+c.want, func() (bool, string) {
				got, err := f.classify(t, c.account, c.method, c.path)
				return err == nil && got == c.want, fmt.Sprintf("%s %v", got, err)
			})
		})
	}
}

// Without the right to create FlowSchemas the charts can be installed, and a program that is
// not installed has none.
func TestFlowSchemasAreOptional(t *testing.T) {
	schemas := func(chart string, values ...string) (names []string) {
		if chart == "agent" {
			values = append(slices.Clone(needed), values...)
		}
		for _, schema := range only[flowcontrolv1.FlowSchema](t, render(t, chart, values), "FlowSchema") {
			names = append(names, schema.Name)
		}
		return names
	}
	for _, chart := range []string{"agent", "broker"} {
		if got := schemas(chart, "flowSchemas.enabled=false"); len(got) > 0 {
			t.Errorf("chart %s renders %v without them", chart, got)
		}
		if got := schemas(chart); len(got) != 3 {
			t.Errorf("chart %s renders %v", chart, got)
		}
	}
	text, err := template(t, "agent", append(slices.Clone(needed), "scheduler.mode=none"))
	expect.NoError(t, err)
	if _, rules, _ := strings.Cut(text, "kind: FlowSchema"); strings.Contains(rules, "name: spillway-scheduler") {
		t.Error("a FlowSchema has a scheduler that does not run")
	}
}
