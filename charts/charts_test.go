// Package charts_test renders both charts and checks the result: schemas
// that reject mistakes, restricted pods, minimal roles, and flags that exist.
package charts_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
	"github.com/spillway-dev/spillway/e2e/manifests"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const namespace = "spillway-system"

// needed are the required values of the agent's chart.
var needed = []string{
	"clusterID=rome",
	"broker.url=https://broker.example.org:8443",
	"broker.caHash=sha256:" + strings.Repeat("0123456789abcdef", 4),
	"join.token=secret",
}

// everything sets all values that add an object or a flag, by chart.
var everything = map[string][]string{
	"broker": {
		"replicas=2", "service.type=NodePort", "service.nodePort=30443", "tls.sans={192.0.2.1,broker.example.org}",
		"config.weights.resources=60", "config.weights.cost=20", "config.weights.reliability=15", "config.weights.latency=5", "config.exchangeRates[0].currency=USD", "config.exchangeRates[0].rate=0.92", "config.exchangeRates[0].date=2026-11-28", "config.quotas.capacityPerCluster.cpu=100", "config.quotas.capacityPerCluster.gpu=0", "config.quotas.writeBurst=300", "config.staleAfter=5m", "config.freshFor=60s", "config.maxDuration=24h", "config.defaultDuration=8h", "config.joining.admission=Approval", "config.joining.allowed={rome,paris}", "tls.clientDuration=12h",
		"priorityClassName=system-cluster-critical", "imagePullSecrets[0].name=registry", "networkPolicy.enabled=true", "metrics.secure=true", "logLevel=1",
		"page.enabled=true", "page.expose=true", "page.tlsSecret=page-tls",
		"kubernetesTransport.enabled=true",
		"history.postgres.existingSecret=history", "history.referencePrices.cpu=0.04", "history.referencePrices.currency=EUR",
	},
	"agent": append(slices.Clone(needed),
		"clusterName=Rome", "apiServer.endpoint=https://192.0.2.2:6443", "region=it", "zone=it-1",
		"lend.headroom.cpu=2", "lend.headroom.memory=4Gi", "lend.consumers={paris,berlin}",
		"cost.cpu=0.04", "cost.memory=0", "cost.gpu=1", "cost.storage=0.001", "cost.currency=EUR", "cost.configMap=prices", "cost.rates[0].nodeSelector.spot=yes", "cost.rates[0].from=22:00", "cost.rates[0].to=06:00", "cost.rates[0].days={Sat,Sun}", "cost.rates[0].timeZone=Europe/Paris", "cost.rates[0].cpu=0.01",
		"guests.allowIngressFrom={10.1.0.0/16}", "guests.allowEgressTo={10.1.0.0/16,fd00::/8}",
		"peers.paris.fingerprint=sha256:"+strings.Repeat("0", 64),
		"replicas=2", "scheduler.replicas=2", "scheduler.overflow=BeforePreemption", "scheduler.askAfter=5m", "scheduler.gangTimeout=2m", "scheduler.priorityClassName=system-cluster-critical",
		"imagePullSecrets[0].name=registry", "networkPolicy.enabled=true", "metrics.secure=true", "liqo.podCIDRs={10.1.0.0/16}", "logLevel=1",
	),
}

// throughTheHub are the required values of the agent's chart with transport kubernetes.
var throughTheHub = []string{"clusterID=rome", "broker.transport=kubernetes", "broker.kubeconfigSecret=hub"}

// withDirect sets all values of the agent's chart for driver direct.
var withDirect = append(slices.Clone(everything["agent"]),
	"driver=direct", "direct.tokenTTL=20m",
	"virtualNode.clusterDNS={10.96.0.10}", "virtualNode.clusterDomain=rome.local", "virtualNode.kubeletPort=11250", "virtualNode.priorityClassName=system-cluster-critical",
	"apiServer.ca=-----BEGIN CERTIFICATE-----",
)

// source is the directory of each container's program.
var source = map[string]string{"broker": "broker", "agent": "agent", "scheduler": "scheduler-plugin", "virtual-node": "virtual-node"}

var helmPath = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	return binaries.Program(ctx, "helm", nil)
})

// helm runs Helm and returns its output, or an error with its error output.
func helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	program, err := helmPath()
	expect.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append(args, "--namespace", namespace)...)
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s", err, problem.String())
	}
	return out.String(), nil
}

// template renders a chart as helm template does.
func template(t *testing.T, chart string, values []string) (string, error) {
	t.Helper()
	text, err := manifests.Template(t.Context(), "spillway-"+chart, chart, set(values)...)
	return string(text), err
}

// set returns Helm's arguments for values.
func set(values []string) []string {
	var args []string
	for _, value := range values {
		args = append(args, "--set", value)
	}
	return args
}

// render returns the objects of a chart.
func render(t *testing.T, chart string, values []string) []unstructured.Unstructured {
	t.Helper()
	text, err := template(t, chart, values)
	if err != nil {
		t.Fatalf("rendering %s: %v", chart, err)
	}
	return decode(t, chart, text)
}

// decode returns the objects in what a chart renders.
func decode(t *testing.T, chart, text string) []unstructured.Unstructured {
	t.Helper()
	var objects []unstructured.Unstructured
	for document := range strings.SplitSeq("\n"+text, "\n---") {
		var object unstructured.Unstructured
		if err := yaml.UnmarshalStrict([]byte(document), &object.Object); err != nil {
			t.Fatalf("%s renders invalid YAML: %v\n%s", chart, err, document)
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
	if len(objects) == 0 {
		t.Fatalf("%s renders nothing", chart)
	}
	return objects
}

// only returns the objects of one kind as type T. A field that T does not have is an
// error.
func only[T any](t *testing.T, objects []unstructured.Unstructured, kind string) []T {
	t.Helper()
	var out []T
	for _, object := range objects {
		if object.GetKind() != kind {
			continue
		}
		var typed T
		if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(object.Object, &typed, true); err != nil {
			t.Fatalf("%s %s: %v", kind, object.GetName(), err)
		}
		out = append(out, typed)
	}
	return out
}

// eachChart runs a test on both charts, with the required and with all values.
func eachChart(t *testing.T, test func(t *testing.T, objects []unstructured.Unstructured)) {
	for _, variant := range []struct {
		chart, name string
		values      []string
	}{
		{"broker", "minimal", nil},
		{"broker", "everything", everything["broker"]},
		{"agent", "minimal", needed},
		{"agent", "everything", everything["agent"]},
		{"agent", "transport kubernetes", throughTheHub},
		{"agent", "direct/minimal", append(slices.Clone(needed), "driver=direct")},
		{"agent", "direct/everything", withDirect},
		{"agent", "the only scheduler", append(slices.Clone(needed), "scheduler.mode=only")},
		{"agent", "direct/lends only", append(slices.Clone(needed), "driver=direct", "scheduler.mode=none")},
	} {
		t.Run(variant.chart+"/"+variant.name, func(t *testing.T) { test(t, render(t, variant.chart, variant.values)) })
	}
}

func TestMistakesAreRejected(t *testing.T) {
	for name, c := range map[string]struct {
		chart  string
		values []string
		want   string
	}{
		"unknown key, broker":          {"broker", []string{"sans=x"}, "sans"},
		"unknown nested key, broker":   {"broker", []string{"tls.san=x"}, "san"},
		"an unknown service type":      {"broker", []string{"service.type=ExternalName"}, "/service/type"},
		"a node port of a ClusterIP":   {"broker", []string{"service.nodePort=30443"}, "service.nodePort requires"},
		"one of two weights":           {"broker", []string{"config.weights.cost=40"}, "set both"},
		"weights above 100":            {"broker", []string{"config.weights.cost=40", "config.weights.resources=70"}, "must add up to 100"},
		"weights below 100":            {"broker", []string{"config.weights.cost=40", "config.weights.resources=40", "config.weights.latency=10"}, "must add up to 100, not 90"},
		"a duration without unit":      {"broker", []string{"config.staleAfter=x"}, "/config/staleAfter"},
		"two replicas with SQLite":     {"broker", []string{"replicas=2", "history.enabled=true"}, "set history.enabled=false"},
		"a short retention":            {"broker", []string{"history.retention=23h"}, "/history/retention"},
		"prices in no currency":        {"broker", []string{"history.referencePrices.cpu=0.04"}, "set history.referencePrices.currency"},
		"a negative price, broker":     {"broker", []string{"history.referencePrices.cpu=-1"}, "/history/referencePrices/cpu"},
		"a port in a name":             {"broker", []string{"tls.sans={hub.example.com:8443}"}, "/tls/sans/0"},
		"an IPv6 address, no brackets": {"agent", append(slices.Clone(needed), "apiServer.endpoint=https://2001:db8::1:6443"), "/apiServer/endpoint"},
		"unknown key, agent":           {"agent", append(slices.Clone(needed), "clusterId=rome"), "clusterId"},
		"unknown nested key, agent":    {"agent", append(slices.Clone(needed), "lend.headrom.cpu=1"), "headrom"},
		"no cluster ID":                {"agent", needed[1:], "clusterID is required"},
		"upper-case letters in the ID": {"agent", append(slices.Clone(needed), "clusterID=Rome"), "/clusterID"},
		"no broker URL":                {"agent", append(slices.Clone(needed), "broker.url="), "broker.url is required"},
		"a broker without TLS":         {"agent", append(slices.Clone(needed), "broker.url=http://broker:8443"), "/broker/url"},
		"no CA hash":                   {"agent", append(slices.Clone(needed), "broker.caHash="), "broker.caHash is required"},
		"CA hash set to null":          {"agent", append(slices.Clone(needed), "broker.caHash=null"), "caHash"},
		"a CA hash that is too short":  {"agent", append(slices.Clone(needed), "broker.caHash=sha256:00"), "/broker/caHash"},
		"no token":                     {"agent", needed[:3], "join.token"},
		"a page that is off":           {"broker", []string{"page.expose=true"}, "page.expose requires page.enabled"},
		"TLS of a page at localhost":   {"broker", []string{"page.enabled=true", "page.tlsSecret=x"}, "page.tlsSecret requires page.expose"},
		"two certificates, broker":     {"broker", []string{"tls.existingSecret=mine", "tls.certManager.enabled=true"}, "set one of them"},
		"a life without unit":          {"broker", []string{"tls.clientDuration=24"}, "/tls/clientDuration"},
		"an unknown admission":         {"broker", []string{"config.joining.admission=magic"}, "/config/joining/admission"},
		"an ID that no cluster has":    {"broker", []string{"config.joining.allowed={Rome}"}, "/config/joining/allowed"},
		"two certificates, agent":      {"agent", append(slices.Clone(withoutJoining), "join.existingCertificate=mine", "join.certManager.enabled=true"), "set one of them"},
		"no issuer":                    {"agent", append(slices.Clone(withoutJoining), "join.certManager.enabled=true"), "join.certManager.issuerRef.name is required"},
		"an unknown transport":         {"agent", append(slices.Clone(needed), "broker.transport=pigeon"), "/broker/transport"},
		"no kubeconfig":                {"agent", throughTheHub[:2], "broker.kubeconfigSecret is required"},
		"a kubeconfig and a token":     {"agent", append(slices.Clone(throughTheHub), "join.token=secret"), "join.* is for broker.transport=http"},
		"polling too seldom":           {"agent", append(slices.Clone(needed), "broker.pollInterval=30s"), "/broker/pollInterval"},
		"two tokens":                   {"agent", append(slices.Clone(needed), "join.existingSecret=mine"), "set one of them"},
		"an unknown driver":            {"agent", append(slices.Clone(needed), "driver=magic"), "/driver"},
		"unknown key in direct":        {"agent", append(slices.Clone(needed), "driver=direct", "direct.tokenTTLs=1h"), "tokenTTLs"},
		"an invalid network":           {"agent", append(slices.Clone(needed), "guests.allowEgressTo={everything}"), "/guests/allowEgressTo"},
		"a kubelet port too high":      {"agent", append(slices.Clone(needed), "driver=direct", "virtualNode.kubeletPort=65530"), "/virtualNode/kubeletPort"},
		"an invalid CA":                {"agent", append(slices.Clone(needed), "driver=direct", "apiServer.ca=ca.crt"), "/apiServer/ca"},
		"an unknown mode":              {"agent", append(slices.Clone(needed), "scheduler.mode=magic"), "/scheduler/mode"},
		"the cluster's own ID as peer": {"agent", append(slices.Clone(needed), "peers.rome.fingerprint=sha256:"+strings.Repeat("0", 64)), "remove this cluster's own ID"},
		"an invalid price":             {"agent", append(slices.Clone(needed), "cost.cpu=cheap"), "/cost/cpu"},
		"a negative rate":              {"agent", append(slices.Clone(needed), "cost.rates[0].cpu=-1"), "/cost/rates/0/cpu"},
		"a day that is none":           {"agent", append(slices.Clone(needed), "cost.rates[0].days={Monday}"), "/cost/rates/0/days/0"},
		"an hour that is none":         {"agent", append(slices.Clone(needed), "cost.rates[0].from=24:00", "cost.rates[0].to=06:00"), "/cost/rates/0/from"},
		"a rate without an end":        {"agent", append(slices.Clone(needed), "cost.rates[0].from=22:00"), "/cost/rates/0"},
		"a selector that is none":      {"agent", append(slices.Clone(needed), "cost.rates[0].nodeSelector=spot"), "/cost/rates/0/nodeSelector"},
		"a rate of one node":           {"agent", append(slices.Clone(needed), `cost.rates[0].nodeSelector.kubernetes\.io/hostname=w1`), "/cost/rates/0/nodeSelector/kubernetes.io~1hostname"},
		"more than a day to leave":     {"agent", append(slices.Clone(needed), "lend.leaveWithin=24h1ms"), "lend.leaveWithin must be greater than 0 and at most 24h"},
		"many days to leave":           {"agent", append(slices.Clone(needed), "lend.leaveWithin=99999999h"), "lend.leaveWithin must be greater than 0 and at most 24h"},
		"a headroom of no amount":      {"agent", append(slices.Clone(needed), "lend.headroom.cpu=lots"), "/lend/headroom/cpu"},
		"a negative headroom":          {"agent", append(slices.Clone(needed), "lend.headroom.cpu=-1"), "/lend/headroom/cpu"},
		"a token that is too short":    {"agent", append(slices.Clone(needed), "driver=direct", "direct.tokenTTL=9m59s"), "direct.tokenTTL must be at least 10m"},
		"a request after hours":        {"agent", append(slices.Clone(needed), "scheduler.askAfter=61m"), "scheduler.askAfter must be at most 1h, and is 61m"},
		"a gang that waits too long":   {"agent", append(slices.Clone(needed), "scheduler.gangTimeout=15m1s"), "scheduler.gangTimeout must be 1s to 15m"},
		"a gang that does not wait":    {"agent", append(slices.Clone(needed), "scheduler.gangTimeout=999ms"), "scheduler.gangTimeout must be 1s to 15m"},
		"no time for proofs":           {"agent", append(slices.Clone(needed), "placeholders.timeout=0s"), "placeholders.timeout must be greater than 0"},
		"no interval":                  {"agent", append(slices.Clone(needed), "advertisement.requeueInterval=0s"), "advertisement.requeueInterval must be greater than 0"},
		"no network of pods":           {"agent", append(slices.Clone(needed), "liqo.podCIDRs={10.0.0.0/33}"), "/liqo/podCIDRs"},
		"no network of providers":      {"agent", append(slices.Clone(needed), "providerNetworks={300.0.0.0/8}"), "/providerNetworks"},
		"no IPv6 network":              {"agent", append(slices.Clone(needed), "guests.allowEgressTo={fd00::/129}"), "/guests/allowEgressTo"},
		"no time to leave":             {"agent", append(slices.Clone(needed), "lend.leaveWithin=0s"), "lend.leaveWithin must be greater than 0 and at most 24h"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := template(t, c.chart, c.values)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("want an error with %q, got %v", c.want, err)
			}
		})
	}
}

func TestPodsAreRestricted(t *testing.T) {
	eachChart(t, func(t *testing.T, objects []unstructured.Unstructured) {
		for _, deployment := range only[appsv1.Deployment](t, objects, "Deployment") {
			pod := deployment.Spec.Template.Spec
			check := func(ok bool, what string) {
				if !ok {
					t.Errorf("Deployment %s: %s", deployment.Name, what)
				}
			}
			check(!pod.HostNetwork && !pod.HostPID && !pod.HostIPC, "uses a namespace of its node")
			check(pod.EnableServiceLinks != nil && !*pod.EnableServiceLinks, "has service links")
			context := pod.SecurityContext
			check(context != nil && context.RunAsNonRoot != nil && *context.RunAsNonRoot, "may run as root")
			check(context != nil && context.RunAsUser != nil && *context.RunAsUser != 0, "has no user")
			check(context != nil && context.SeccompProfile != nil && context.SeccompProfile.Type == corev1.SeccompProfileTypeRuntimeDefault, "has no seccomp profile")
			for _, volume := range pod.Volumes {
				check(volume.HostPath == nil, "mounts "+volume.Name+" from its node")
			}
			for _, container := range slices.Concat(pod.InitContainers, pod.Containers) {
				context := container.SecurityContext
				if context == nil {
					t.Errorf("container %s has no security context", container.Name)
					continue
				}
				check(context.RunAsNonRoot != nil && *context.RunAsNonRoot, container.Name+" may run as root")
				check(context.ReadOnlyRootFilesystem != nil && *context.ReadOnlyRootFilesystem, container.Name+" may write to its root filesystem")
				check(context.AllowPrivilegeEscalation != nil && !*context.AllowPrivilegeEscalation, container.Name+" may escalate privileges")
				check(context.Capabilities != nil && slices.Equal(context.Capabilities.Drop, []corev1.Capability{"ALL"}) && len(context.Capabilities.Add) == 0, container.Name+" has capabilities")
				check(container.LivenessProbe != nil && container.ReadinessProbe != nil, container.Name+" lacks a probe")
				check(len(container.Resources.Requests) > 0, container.Name+" has no resource requests")
				check(!container.Resources.Limits.Memory().IsZero(), container.Name+" has no memory limit")
			}
		}
	})
}

func TestRolesAreMinimal(t *testing.T) {
	eachChart(t, func(t *testing.T, objects []unstructured.Unstructured) {
		rules := map[string][]rbacv1.PolicyRule{}
		for _, role := range only[rbacv1.ClusterRole](t, objects, "ClusterRole") {
			rules["ClusterRole "+role.Name] = role.Rules
		}
		for _, role := range only[rbacv1.Role](t, objects, "Role") {
			rules["Role "+role.Namespace+"/"+role.Name] = role.Rules
		}
		// Bound in the namespaces of a peer and of overflowed pods, or in the one with the
		// configuration of virtual nodes only.
		readSecrets := []string{
			"ClusterRole spillway-agent-tenant", "ClusterRole spillway-agent-namespace", "ClusterRole spillway-direct-guest", "ClusterRole spillway-virtual-node-namespace",
			"Role spillway-virtual-nodes/spillway-agent", "Role spillway-virtual-nodes/spillway-virtual-node",
		}
		for _, binding := range only[rbacv1.ClusterRoleBinding](t, objects, "ClusterRoleBinding") {
			if slices.Contains(readSecrets, "ClusterRole "+binding.RoleRef.Name) {
				t.Errorf("%s is bound in the whole cluster", binding.RoleRef.Name)
			}
		}
		if len(rules) == 0 {
			t.Fatal("no role at all")
		}
		for role, rules := range rules {
			for _, rule := range rules {
				if slices.Contains(slices.Concat(rule.Verbs, rule.Resources, rule.APIGroups, rule.NonResourceURLs), "*") {
					t.Errorf("%s has a wildcard: %v", role, rule)
				}
				for _, verb := range []string{"escalate", "impersonate"} {
					if slices.Contains(rule.Verbs, verb) {
						t.Errorf("%s may %s: %v", role, verb, rule)
					}
				}
				if !slices.Contains(readSecrets, role) && slices.Contains(rule.Resources, "secrets") && !slices.Equal(rule.Verbs, []string{"create"}) && len(rule.ResourceNames) == 0 {
					t.Errorf("%s permits access to Secrets without naming them: %v", role, rule)
				}
			}
		}
	})
}

func TestNamesInTheContract(t *testing.T) {
	eachChart(t, func(t *testing.T, objects []unstructured.Unstructured) {
		for _, object := range objects {
			// Where a cluster keeps the address of its API server.
			ofAddress := object.GetName() == "spillway-agent-endpoint" && slices.Contains([]string{"default", "kube-public"}, object.GetNamespace())
			if !ofAddress && !slices.Contains([]string{"", namespace, "kube-system", "kube-node-lease", "liqo", "spillway-virtual-nodes", "spillway-holds"}, object.GetNamespace()) {
				t.Errorf("%s %s is in namespace %s", object.GetKind(), object.GetName(), object.GetNamespace())
			}
			for _, label := range []string{"app.kubernetes.io/name", "app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart"} {
				if object.GetLabels()[label] == "" {
					t.Errorf("%s %s lacks label %s", object.GetKind(), object.GetName(), label)
				}
			}
			for annotation := range object.GetAnnotations() {
				if strings.HasPrefix(annotation, "helm.sh/") {
					t.Errorf("%s %s has %s: helm uninstall would not delete it", object.GetKind(), object.GetName(), annotation)
				}
			}
		}
		for _, deployment := range only[appsv1.Deployment](t, objects, "Deployment") {
			image, _, _ := strings.Cut(deployment.Spec.Template.Spec.Containers[0].Image, ":")
			if image != deployment.Name {
				t.Errorf("Deployment %s runs image %s", deployment.Name, image)
			}
		}
	})
}

// A program does not start with a flag that it does not define.
func TestFlagsExist(t *testing.T) {
	root, err := binaries.Root()
	expect.NoError(t, err)
	// Flags of kube-scheduler and of controller-runtime's logger.
	inherited := map[string][]string{
		"scheduler":    {"config", "v"},
		"broker":       {"zap-log-level"},
		"agent":        {"zap-log-level"},
		"virtual-node": {"zap-log-level"},
	}
	eachChart(t, func(t *testing.T, objects []unstructured.Unstructured) {
		for _, deployment := range only[appsv1.Deployment](t, objects, "Deployment") {
			for _, container := range deployment.Spec.Template.Spec.Containers {
				known := append(flagsIn(t, filepath.Join(root, source[container.Name])), inherited[container.Name]...)
				for _, arg := range container.Args {
					name, value, ok := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
					if !ok || value == "" || !strings.HasPrefix(arg, "--") {
						t.Errorf("%s: %q is not --flag=value", container.Name, arg)
					}
					if !slices.ContainsFunc(known, func(pattern string) bool {
						ok, _ := path.Match(pattern, name)
						return ok
					}) {
						t.Errorf("%s is passed --%s, which %s/ does not define", container.Name, name, source[container.Name])
					}
				}
			}
		}
	})
}

// valuePattern is a reference to a value in a template.
var valuePattern = regexp.MustCompile(`\.Values\.([A-Za-z.]+)`)

// templates returns the lines of a chart's templates.
func templates(t *testing.T, chart string) (lines []string) {
	t.Helper()
	expect.NoError(t, filepath.WalkDir(filepath.Join(chart, "templates"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		lines = append(lines, strings.Split(string(text), "\n")...)
		return err
	}))
	return lines
}

// leaves returns the paths of all values that have no further values in them.
func leaves(values map[string]any, prefix string) (paths []string) {
	for name, value := range values {
		if nested, ok := value.(map[string]any); ok && len(nested) > 0 {
			paths = append(paths, leaves(nested, prefix+name+".")...)
		} else {
			paths = append(paths, prefix+name)
		}
	}
	return paths
}

// A value without a use would be accepted and ignored.
func TestValuesAreUsed(t *testing.T) {
	for _, chart := range []string{"broker", "agent"} {
		text, err := os.ReadFile(chart + "/values.yaml")
		expect.NoError(t, err)
		var values map[string]any
		expect.NoError(t, yaml.UnmarshalStrict(text, &values))
		used := map[string]bool{}
		for _, match := range valuePattern.FindAllStringSubmatch(strings.Join(templates(t, chart), "\n"), -1) {
			used[strings.Trim(match[1], ".")] = true
		}
		for _, leaf := range leaves(values, "") {
			path, found := leaf, used[leaf]
			// A template may use the object that a value is part of.
			for strings.Contains(path, ".") && !found {
				path = path[:strings.LastIndex(path, ".")]
				found = used[path]
			}
			if !found {
				t.Errorf("no template of chart %s uses value %s", chart, leaf)
			}
		}
	}
}

// A flag has the name of the value that it is set from: --direct-token-ttl is
// direct.tokenTTL.
func TestFlagsAreNamedAsTheirValues(t *testing.T) {
	// Flags of kube-scheduler and of controller-runtime's logger.
	inherited := []string{"v", "zap-log-level"}
	// The values of other programs begin with the program's name.
	programs := []string{"virtual-node-", "scheduler-"}
	flag := regexp.MustCompile(`^\s*- --([a-z-]+)=\{\{`)
	wordStart := regexp.MustCompile(`([a-z])([A-Z])`)
	checked := 0
	with := ""
	for _, line := range templates(t, "agent") {
		value := ""
		if reference := valuePattern.FindStringSubmatch(line); reference != nil {
			value = reference[1]
		}
		if strings.Contains(line, "{{- with ") {
			with = value
		}
		match := flag.FindStringSubmatch(line)
		if match == nil || slices.Contains(inherited, match[1]) {
			continue
		}
		if strings.Contains(line, "{{ . }}") || strings.Contains(line, `join "," .`) {
			value = with
		}
		if value == "" {
			continue
		}
		want := strings.ToLower(strings.ReplaceAll(wordStart.ReplaceAllString(value, "$1-$2"), ".", "-"))
		for _, program := range programs {
			want = strings.TrimPrefix(want, program)
		}
		checked++
		if match[1] != want {
			t.Errorf("--%s is set from value %s: name it --%s", match[1], value, want)
		}
	}
	if checked < 20 {
		t.Errorf("found %d flags only", checked)
	}
}

// flagsIn returns the names of the flags that the Go sources below a directory
// define: string literals among the first two arguments of calls such as
// StringVar(&v, "name", …). A concatenated name ("cost-"+kind) becomes a pattern.
func flagsIn(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || filepath.Ext(path) != ".go" || strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(node ast.Node) bool {
			call, ok := node.(*ast.CallExpr)
			if !ok {
				return true
			}
			function, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !definesFlag(function.Sel.Name) {
				return true
			}
			for _, argument := range call.Args[:min(2, len(call.Args))] {
				suffix := ""
				if sum, ok := argument.(*ast.BinaryExpr); ok {
					argument, suffix = sum.X, "*"
				}
				if literal, ok := argument.(*ast.BasicLit); ok && literal.Kind == token.STRING {
					if name, err := strconv.Unquote(literal.Value); err == nil && name != "" {
						names = append(names, name+suffix)
					}
				}
			}
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatalf("finding flags: %v", err)
	}
	return names
}

func definesFlag(function string) bool {
	kind := strings.TrimSuffix(strings.TrimSuffix(function, "P"), "Var")
	return slices.Contains([]string{"", "Bool", "Duration", "Float64", "Func", "BoolFunc", "Int", "Int32", "Int64", "Uint", "String", "StringSlice", "StringArray", "StringToString", "Text"}, kind)
}

func TestSchedulerIsOptional(t *testing.T) {
	for _, object := range render(t, "agent", append(slices.Clone(needed), "scheduler.mode=none")) {
		if strings.Contains(object.GetName(), "scheduler") {
			t.Errorf("mode none renders %s %s", object.GetKind(), object.GetName())
		}
	}
}

// The agent keeps capacity for the pods of the scheduler that the chart installs, and for
// those that the webhook assigns to it.
func TestAgentKnowsTheScheduler(t *testing.T) {
	for mode, want := range map[string]string{"beside": broker.SchedulerName, "only": corev1.DefaultSchedulerName, "none": "none"} {
		text, err := template(t, "agent", append(slices.Clone(needed), "scheduler.mode="+mode))
		expect.NoError(t, err)
		flags := []string{"- --scheduler-name=" + want + "\n"}
		if mode != "none" {
			flags = append(flags, "- --steering-scheduler-name="+want+"\n", "- schedulerName: "+want+"\n")
		}
		for _, flag := range flags {
			if strings.Count(text, flag) != 1 {
				t.Errorf("mode %s: %q stands %d times in the chart, want once", mode, flag, strings.Count(text, flag))
			}
		}
	}
}

// The only scheduler has the name that pods have by default, and nothing of the chart
// requires another name.
func TestOnlyScheduler(t *testing.T) {
	text, err := template(t, "agent", append(slices.Clone(needed), "scheduler.mode=only"))
	expect.NoError(t, err)
	for _, want := range []string{"- schedulerName: default-scheduler\n", "--steering-scheduler-name=default-scheduler\n", "object.spec.schedulerName != 'default-scheduler'", "set spec.schedulerName to default-scheduler"} {
		if strings.Count(text, want) != 1 {
			t.Errorf("%q stands %d times in the chart, want once", want, strings.Count(text, want))
		}
	}
	if strings.Contains(text, "schedulerName: spillway-scheduler") {
		t.Error("a profile or pod has the name spillway-scheduler")
	}
}

// A cluster has the objects and flags of one driver only.
func TestDriversAreSeparate(t *testing.T) {
	for driver, others := range map[string][]string{"direct": {"liqo"}, "liqo": {"driver=direct", "spillway-direct", "spillway-virtual-node-namespace", "guests-of: ", "--direct-", "spillway-virtual-nodes"}} {
		text, err := template(t, "agent", append(slices.Clone(needed), "driver="+driver))
		expect.NoError(t, err)
		for line := range strings.SplitSeq(text, "\n") {
			for _, other := range others {
				// Guests must not tolerate the virtual nodes of either driver.
				if strings.Contains(line, other) && !strings.Contains(line, "virtual-node.liqo.io/not-allowed") && !strings.HasPrefix(strings.TrimSpace(line), "#") {
					t.Errorf("driver %s renders %q", driver, line)
				}
			}
		}
	}
	for mode, want := range map[string]bool{"beside": true, "only": true, "none": false} {
		objects := render(t, "agent", append(slices.Clone(needed), "driver=direct", "scheduler.mode="+mode))
		deployments := only[appsv1.Deployment](t, objects, "Deployment")
		if got := slices.ContainsFunc(deployments, func(d appsv1.Deployment) bool { return d.Name == "spillway-virtual-node" }); got != want {
			t.Errorf("mode %s: virtual-node is deployed: %t", mode, got)
		}
	}
}

// webhooksOf are the webhooks of one MutatingWebhookConfiguration that the chart renders.
// None of them can keep pods from being created, and the API server trusts their servers.
func webhooksOf(t *testing.T, objects []unstructured.Unstructured, name string) []admissionv1.MutatingWebhook {
	t.Helper()
	all := only[admissionv1.MutatingWebhookConfiguration](t, objects, "MutatingWebhookConfiguration")
	i := slices.IndexFunc(all, func(c admissionv1.MutatingWebhookConfiguration) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("no webhooks %s", name)
	}
	for _, webhook := range all[i].Webhooks {
		longest, policy := int32(2), admissionv1.Ignore
		switch webhook.Name {
		case "steering.broker.fluidos.eu":
			longest = 10 // it is called for opted-in namespaces only; TestWebhookTimeouts has the reason
		case gangWebhook:
			longest, policy = 10, admissionv1.Fail // for pods with a workloadRef only; see TestGangWebhook
		}
		if *webhook.FailurePolicy != policy || *webhook.TimeoutSeconds > longest || *webhook.SideEffects != admissionv1.SideEffectClassNone {
			t.Errorf("webhook %s, if it does not respond, would delay or deny pods", webhook.Name)
		}
		service, trusted := webhook.ClientConfig.Service, false
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(webhook.ClientConfig.CABundle)
		for _, secret := range only[corev1.Secret](t, objects, "Secret") {
			if secret.Type != corev1.SecretTypeTLS {
				continue
			}
			pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
			if err != nil {
				t.Fatalf("the serving certificate %s: %v", secret.Name, err)
			}
			leaf, err := x509.ParseCertificate(pair.Certificate[0])
			expect.NoError(t, err)
			_, err = leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: service.Name + "." + service.Namespace + ".svc"})
			trusted = trusted || err == nil
		}
		if !trusted {
			t.Errorf("webhook %s has no serving certificate that the API server accepts", webhook.Name)
		}
	}
	return all[i].Webhooks
}

func TestSteeringIsSafe(t *testing.T) {
	for driver, system := range map[string]string{"liqo": "liqo", "direct": "spillway-virtual-nodes"} {
		webhooks := webhooksOf(t, render(t, "agent", append(slices.Clone(needed), "driver="+driver)), "spillway-scheduler")
		for _, webhook := range webhooks {
			if len(webhook.MatchConditions) == 0 && webhook.NamespaceSelector.MatchLabels["broker.fluidos.eu/overflow"] != "enabled" {
				t.Errorf("webhook %s is called for every pod", webhook.Name)
			}
		}
		// called are the paths of the webhooks that select a namespace.
		called := func(name string, labelled labels.Set) (paths []string) {
			for _, webhook := range webhooks {
				selector, err := metav1.LabelSelectorAsSelector(webhook.NamespaceSelector)
				expect.NoError(t, err)
				if selector.Matches(labels.Merge(labelled, labels.Set{corev1.LabelMetadataName: name})) {
					if webhook.ObjectSelector != nil {
						t.Errorf("webhook %s does not get the pods that opted out, which avoid virtual nodes", webhook.Name)
					}
					paths = append(paths, *webhook.ClientConfig.Service.Path)
				}
			}
			return paths
		}
		const optIn, guestsOf = "broker.fluidos.eu/overflow", "broker.fluidos.eu/guests-of"
		for _, name := range []string{"shop", "kube-system", namespace, system} {
			for labelled, steered := range map[*labels.Set]bool{
				{}:                                   false,
				{optIn: "disabled"}:                  false,
				{guestsOf: "oslo"}:                   false,
				{optIn: "enabled"}:                   name == "shop",
				{optIn: "enabled", guestsOf: "oslo"}: false,
			} {
				paths := called(name, *labelled)
				if slices.Contains(paths, "/steer") != steered || slices.Contains(paths, "/avoid") == steered {
					t.Errorf("driver %s: namespace %s with labels %v is selected for %v, want steered %t", driver, name, *labelled, paths, steered)
				}
			}
		}
		if paths := called("spillway-holds", nil); len(paths) > 0 {
			t.Errorf("placeholders are sent to %v", paths)
		}
	}
}

// With driver liqo the agent completes guests, if the cluster lends; with driver direct the
// consumer must.
func TestGuestsWebhook(t *testing.T) {
	webhooks := webhooksOf(t, render(t, "agent", append(slices.Clone(needed), "liqo.otherPeers={oslo}")), "spillway-agent-guests")
	if len(webhooks) != 2 || !slices.Equal(webhooks[0].Rules[0].Resources, []string{"shadowpods"}) || !slices.ContainsFunc(webhooks[0].NamespaceSelector.MatchExpressions, func(r metav1.LabelSelectorRequirement) bool {
		return r.Operator == metav1.LabelSelectorOpNotIn && slices.Equal(r.Values, []string{"oslo"})
	}) {
		t.Errorf("want a webhook for the guests of Spillway's own peerings and one for addresses, got %+v", webhooks)
	}
	for value, served := range map[string]bool{"driver=direct": false, "lend.enabled=false": true, "lend.enabled=false,scheduler.mode=none": false} {
		text, err := template(t, "agent", append(slices.Clone(needed), value))
		expect.NoError(t, err)
		if got := strings.Contains(text, "guests-webhook"); got != served {
			t.Errorf("with %s the agent serves webhooks: %t", value, got)
		}
		if strings.Contains(text, "name: guests.broker.fluidos.eu") {
			t.Errorf("%s renders the webhook for guests", value)
		}
	}
}

func TestCRDsAreIdentical(t *testing.T) {
	copies, err := filepath.Glob("agent/crds/*.yaml")
	if err != nil || len(copies) == 0 {
		t.Fatalf("no CRDs in agent/crds: %v", err)
	}
	for _, path := range copies {
		copied, err := os.ReadFile(path)
		expect.NoError(t, err)
		original, err := os.ReadFile(filepath.Join("broker/crds", filepath.Base(path)))
		expect.NoError(t, err)
		if !bytes.Equal(copied, original) {
			t.Errorf("%s differs from the broker's: run make generate", path)
		}
	}
}

// The join token is in its Secret only.
func TestTokenStaysSecret(t *testing.T) {
	text, err := template(t, "agent", append(slices.Clone(needed), "join.token=very-secret-token"))
	expect.NoError(t, err)
	if strings.Contains(text, "very-secret-token") || strings.Count(text, base64.StdEncoding.EncodeToString([]byte("very-secret-token"))) != 1 {
		t.Error("the token is rendered outside of its Secret")
	}
}

// TestTemplateIsHelms: users run helm, and the tests a program with helm's engine.
func TestTemplateIsHelms(t *testing.T) {
	made := regexp.MustCompile(`(?m)^( *)(caBundle|ca\.crt|tls\.crt|tls\.key): .*$`) // certificates are made each time
	for name, c := range map[string]struct {
		chart  string
		values []string
	}{
		"broker": {"broker", nil}, "broker with all values": {"broker", everything["broker"]},
		"agent": {"agent", needed}, "agent with all values": {"agent", everything["agent"]}, "agent with direct": {"agent", withDirect},
	} {
		t.Run(name, func(t *testing.T) {
			want, err := helm(t, append([]string{"template", "spillway-" + c.chart, c.chart}, set(c.values)...)...)
			expect.NoError(t, err)
			got, err := template(t, c.chart, c.values)
			expect.NoError(t, err)
			documents := func(text string) []string {
				var list []string
				for document := range strings.SplitSeq("\n"+made.ReplaceAllString(text, "$1$2: made"), "\n---") {
					if document = strings.TrimSpace(document); document != "" {
						list = append(list, document)
					}
				}
				slices.Sort(list)
				return list
			}
			if diff := cmp.Diff(documents(want), documents(got)); diff != "" {
				t.Errorf("helm template gives other manifests (-helm +render):\n%s", diff)
			}
		})
	}
}
