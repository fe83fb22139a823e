package charts_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// withoutJoining are the values of an agent that gets its certificate from another authority.
var withoutJoining = []string{needed[0], needed[1], "broker.caHash=", "join.token="}

// mounted returns the Secret that a container's flag names by its mount; empty without the flag.
func mounted(t *testing.T, deployment *appsv1.Deployment, flag string) string {
	t.Helper()
	pod := deployment.Spec.Template.Spec
	for _, mount := range pod.Containers[0].VolumeMounts {
		if slices.Contains(pod.Containers[0].Args, flag+"="+mount.MountPath) {
			i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == mount.Name })
			return pod.Volumes[i].Secret.SecretName
		}
	}
	return ""
}

// deploymentOf returns the Deployment of a name.
func deploymentOf(t *testing.T, objects []unstructured.Unstructured, name string) *appsv1.Deployment {
	t.Helper()
	for _, deployment := range only[appsv1.Deployment](t, objects, "Deployment") {
		if deployment.Name == name {
			return &deployment
		}
	}
	t.Fatalf("there is no Deployment %s", name)
	return nil
}

// certificateFor returns the Certificate for a Secret.
func certificateFor(t *testing.T, objects []unstructured.Unstructured, secret string) map[string]any {
	t.Helper()
	for _, object := range objects {
		if spec, _, _ := unstructured.NestedMap(object.Object, "spec"); object.GetKind() == "Certificate" && spec["secretName"] == secret {
			return spec
		}
	}
	t.Fatalf("there is no Certificate for Secret %s", secret)
	return nil
}

// TestCertManager: cert-manager issues what the broker serves with, and the name by which it knows
// an agent, from one issuer.
func TestCertManager(t *testing.T) {
	broker := render(t, "broker", []string{"tls.certManager.enabled=true", "tls.sans={192.0.2.1,broker.example.org}"})
	secret := mounted(t, deploymentOf(t, broker, "spillway-broker"), "--tls-cert-path")
	serving := certificateFor(t, broker, secret)
	for field, want := range map[string]any{"usages": "server auth", "dnsNames": "broker.example.org", "ipAddresses": "192.0.2.1"} {
		if list, _ := serving[field].([]any); !slices.Contains(list, want) {
			t.Errorf("%s of the broker's Certificate are %v, without %s", field, list, want)
		}
	}
	issuer := serving["issuerRef"].(map[string]any)["name"].(string)
	if ca := certificateFor(t, broker, issuer); ca["isCA"] != true {
		t.Errorf("the Certificate of issuer %s is not a CA's: %v", issuer, ca)
	}
	own := render(t, "broker", []string{"tls.certManager.enabled=true", "tls.certManager.issuerRef.name=hub", "tls.certManager.issuerRef.kind=ClusterIssuer"})
	if ref := certificateFor(t, own, secret)["issuerRef"].(map[string]any); ref["name"] != "hub" || ref["kind"] != "ClusterIssuer" {
		t.Errorf("the issuer is %v", ref)
	}
	for _, object := range own {
		if object.GetKind() == "Issuer" {
			t.Errorf("there is an Issuer %s beside it", object.GetName())
		}
	}

	agent := render(t, "agent", append(slices.Clone(withoutJoining), "join.certManager.enabled=true", "join.certManager.issuerRef.name=hub", "join.certManager.issuerRef.kind=ClusterIssuer"))
	secret = mounted(t, deploymentOf(t, agent, "spillway-agent"), "--broker-cert-path")
	certificate := certificateFor(t, agent, secret)
	if usages := certificate["usages"].([]any); certificate["commonName"] != "rome" || len(usages) != 1 || usages[0] != "client auth" {
		t.Errorf("the agent's Certificate is %v", certificate)
	}
	for chart, values := range map[string][]string{
		"broker": {"tls.existingSecret=mine"},
		"agent":  append(slices.Clone(withoutJoining), "join.existingCertificate=mine"),
	} {
		flag := map[string]string{"broker": "--tls-cert-path", "agent": "--broker-cert-path"}[chart]
		if secret := mounted(t, deploymentOf(t, render(t, chart, values), "spillway-"+chart), flag); secret != "mine" {
			t.Errorf("chart %s: %s names Secret %q", chart, flag, secret)
		}
	}
	joining := deploymentOf(t, render(t, "agent", needed), "spillway-agent")
	if slices.ContainsFunc(joining.Spec.Template.Spec.Volumes, func(v corev1.Volume) bool { return v.Name == "certificate" }) || mounted(t, joining, "--broker-cert-path") != "" {
		t.Error("an agent that joins has another certificate")
	}
}

// TestCertManagerExamples applies the folders of certificates as users do, to a real API server with
// cert-manager's CRDs. What they name fits together, and with the charts.
func TestCertManagerExamples(t *testing.T) {
	module, _, err := binaries.ModuleDir(t.Context(), "github.com/cert-manager/cert-manager")
	expect.NoError(t, err)
	config := controlplane.Start(t, filepath.Join(module, "deploy/crds"))
	admin, access := as(t, config, ""), kubeconfig(t, config)
	expect.NoError(t, admin.Create(t.Context(), &corev1.Namespace{ObjectMeta: named("cert-manager")}))
	kubectl, err := binaries.Program(t.Context(), "kubectl", t.Logf)
	expect.NoError(t, err)
	list := func(kind string) []unstructured.Unstructured {
		list := &unstructured.UnstructuredList{}
		list.SetGroupVersionKind(schema.GroupVersionKind{Group: "cert-manager.io", Version: "v1", Kind: kind + "List"})
		expect.NoError(t, admin.List(t.Context(), list))
		return list.Items
	}
	for chart, values := range map[string][]string{
		"broker": {"tls.existingSecret=broker-server-tls"},
		"agent":  append(slices.Clone(withoutJoining), "join.existingCertificate=agent-client-tls"),
	} {
		out, err := exec.CommandContext(t.Context(), kubectl, access, "apply", "-k", chart+"/examples/certmanager").CombinedOutput()
		if err != nil {
			t.Fatalf("kubectl apply -k: %v\n%s", err, out)
		}
		flag := map[string]string{"broker": "--tls-cert-path", "agent": "--broker-cert-path"}[chart]
		certificateFor(t, list("Certificate"), mounted(t, deploymentOf(t, render(t, chart, values), "spillway-"+chart), flag))
	}
	certificates, issuers := list("Certificate"), list("ClusterIssuer")
	for _, certificate := range certificates {
		issuer, _, _ := unstructured.NestedString(certificate.Object, "spec", "issuerRef", "name")
		if !slices.ContainsFunc(issuers, func(o unstructured.Unstructured) bool { return o.GetName() == issuer }) {
			t.Errorf("Certificate %s has no issuer %s", certificate.GetName(), issuer)
		}
	}
	for _, issuer := range issuers {
		if secret, ok, _ := unstructured.NestedString(issuer.Object, "spec", "ca", "secretName"); ok && certificateFor(t, certificates, secret)["isCA"] != true {
			t.Errorf("the Certificate of issuer %s is not a CA's", issuer.GetName())
		}
	}
}
