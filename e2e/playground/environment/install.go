package environment

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/manifests"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
)

// hubAccess is what a member needs to join.
type hubAccess struct{ url, caHash, token string }

// installBroker applies the broker's chart to the hub and runs the broker.
func (p *Playground) installBroker(ctx context.Context, c *cluster.Cluster) (hubAccess, error) {
	values := slices.Concat([]string{"tls.sans={127.0.0.1}"}, p.times(impatientBroker), p.options.BrokerValues)
	chart, err := render(ctx, p.Dir, "broker", values, "", "")
	if err != nil {
		return hubAccess{}, err
	}
	if err := manifests.Apply(ctx, c.Client, chart.objects); err != nil {
		return hubAccess{}, fmt.Errorf("installing the broker: %w", err)
	}
	ports, err := p.run(ctx, c, chart, "spillway-broker", patientLeader)
	if err != nil {
		return hubAccess{}, err
	}
	access := hubAccess{url: "https://" + cluster.Address(ports["listen"])}
	return access, p.await(ctx, "the broker has a CA and a token", 2*time.Minute, func(ctx context.Context) error {
		var ca corev1.ConfigMap
		var token corev1.Secret
		err := errors.Join(
			c.Client.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: "spillway-broker-ca"}, &ca),
			c.Client.Get(ctx, client.ObjectKey{Namespace: Namespace, Name: "spillway-join-token"}, &token))
		access.caHash, access.token = ca.Data["caHash"], string(token.Data["token"])
		return err
	})
}

// installAgent applies the agent's chart to a member and runs its programs.
func (p *Playground) installAgent(ctx context.Context, c *cluster.Cluster, m Member, hub hubAccess) error {
	mode := "none"
	if m.Overflows {
		mode = "beside"
	}
	values := slices.Concat([]string{
		"clusterID=" + m.Name, "broker.url=" + hub.url, "broker.caHash=" + hub.caHash,
		"driver=direct", "apiServer.endpoint=" + c.Endpoint, "scheduler.mode=" + mode,
		// The pods are ordinary ones, without a securityContext.
		"guests.podSecurity=baseline",
	}, p.times(impatientAgent), m.Values)
	chart, err := render(ctx, p.Dir, "agent", values, "join.token", hub.token)
	if err != nil {
		return err
	}
	steering, err := chart.useLocalWebhook(c)
	if err != nil {
		return err
	}
	if err := chart.connectScheduler(accessPath(c, "spillway-scheduler")); err != nil {
		return err
	}
	if err := manifests.Apply(ctx, c.Client, chart.objects); err != nil {
		return fmt.Errorf("installing the agent in %s: %w", m.Name, err)
	}
	if _, err := p.run(ctx, c, chart, "spillway-agent", m.AgentFlags); err != nil || !m.Overflows {
		return err
	}
	if _, err := p.run(ctx, c, chart, "spillway-virtual-node", map[string]string{"kubelet-port": "0"}); err != nil {
		return err
	}
	_, err = p.run(ctx, c, chart, "spillway-scheduler", map[string]string{"steering-listen": steering, "secure-port": "0"})
	return err
}

// Upgrade installs the agent's chart in a member again, with values beside those of its
// Options, and starts its programs again. Values of an earlier Upgrade are not kept.
func (p *Playground) Upgrade(ctx context.Context, name string, values ...string) error {
	i := slices.IndexFunc(p.options.Members, func(m Member) bool { return m.Name == name })
	if i < 0 {
		return fmt.Errorf("no member is called %s", name)
	}
	m, c := p.options.Members[i], p.Cluster(name)
	m.Values = slices.Concat(m.Values, values)
	for _, program := range c.Processes() {
		if strings.HasPrefix(program.Name(), "spillway-") {
			program.Stop(10 * time.Second)
		}
	}
	return p.installAgent(ctx, c, m, p.hub)
}

// times returns the values that shorten timings, unless the defaults are wanted.
func (p *Playground) times(values []string) []string {
	if p.options.DefaultTimings {
		return nil
	}
	return values
}

func (p *Playground) run(ctx context.Context, c *cluster.Cluster, chart chart, name string, override map[string]string) (map[string]int, error) {
	deployment := chart.deployments[name]
	if deployment == nil {
		return nil, fmt.Errorf("the chart for %s has no Deployment %s", c.Name, name)
	}
	own, err := p.own.wait(ctx)
	if err != nil {
		return nil, err
	}
	ports, err := run(ctx, c, deployment, own[name], override)
	if err != nil {
		return nil, fmt.Errorf("running %s in %s: %w", name, c.Name, err)
	}
	return ports, nil
}

// useLocalWebhook makes the API server reach the steering webhook by an address
// instead of a Service, which needs pods, and returns the address; "" if the chart
// has no webhook.
func (ch chart) useLocalWebhook(c *cluster.Cluster) (string, error) {
	hook := ch.object("MutatingWebhookConfiguration", "spillway-scheduler")
	secret := ch.object("Secret", "spillway-scheduler-steering")
	if hook == nil || secret == nil {
		return "", nil
	}
	port, err := cluster.FreePort()
	if err != nil {
		return "", err
	}
	cert, key, err := c.CA.Issue("spillway-scheduler", nil, []string{"127.0.0.1"})
	if err != nil {
		return "", err
	}
	data := map[string]any{}
	for name, content := range map[string][]byte{"tls.crt": cert, "tls.key": key, "ca.crt": c.CA.PEM} {
		data[name] = base64.StdEncoding.EncodeToString(content)
	}
	secret.Object["data"] = data
	hooks, _, err := unstructured.NestedSlice(hook.Object, "webhooks")
	if err != nil {
		return "", fmt.Errorf("reading the steering webhook: %w", err)
	}
	for _, h := range hooks {
		config := h.(map[string]any)
		path, _, err := unstructured.NestedString(config, "clientConfig", "service", "path")
		if err != nil {
			return "", fmt.Errorf("reading the steering webhook: %w", err)
		}
		config["clientConfig"] = map[string]any{
			"url":      "https://" + cluster.Address(port) + path,
			"caBundle": data["ca.crt"],
		}
	}
	return cluster.Address(port), unstructured.SetNestedSlice(hook.Object, hooks, "webhooks")
}

// connectScheduler sets the kubeconfig in the scheduler's configuration, its only
// source outside a pod.
func (ch chart) connectScheduler(kubeconfig string) error {
	config := ch.object("ConfigMap", "spillway-scheduler")
	if config == nil {
		return nil
	}
	text, _, err := unstructured.NestedString(config.Object, "data", "config.yaml")
	if err != nil {
		return fmt.Errorf("reading the scheduler's configuration: %w", err)
	}
	parsed := map[string]any{}
	if err := yaml.Unmarshal([]byte(text), &parsed); err != nil {
		return fmt.Errorf("reading the scheduler's configuration: %w", err)
	}
	if err := unstructured.SetNestedField(parsed, kubeconfig, "clientConnection", "kubeconfig"); err != nil {
		return err
	}
	edited, err := yaml.Marshal(parsed)
	if err != nil {
		return err
	}
	return unstructured.SetNestedField(config.Object, string(edited), "data", "config.yaml")
}

// joined returns an error for the first member whose nodes are not all advertised.
func (p *Playground) joined(ctx context.Context) error {
	var all broker.ClusterAdvertisementList
	if err := p.Cluster(Hub).Client.List(ctx, &all, client.InNamespace(Namespace)); err != nil {
		return err
	}
	for _, m := range p.options.Members {
		want := corev1.ResourceList{}
		for _, nodes := range m.Nodes {
			for range nodes.Count {
				broker.AddTo(want, nodes.Resources)
			}
		}
		i := slices.IndexFunc(all.Items, func(a broker.ClusterAdvertisement) bool { return a.Spec.ClusterID == m.Name })
		if i < 0 {
			return fmt.Errorf("%s has not advertised yet", m.Name)
		}
		a := all.Items[i]
		have := a.Spec.Resources.Capacity.List()
		if cpu := want[corev1.ResourceCPU]; have.Cpu().Cmp(cpu) < 0 || !a.Status.Active {
			return fmt.Errorf("%s advertises %s cores of %s (active: %t)", m.Name, have.Cpu(), cpu.String(), a.Status.Active)
		}
	}
	return nil
}
