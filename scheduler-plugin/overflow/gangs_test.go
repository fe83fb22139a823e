package overflow_test

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/envtest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
)

// installPodGroups installs the PodGroups of the coscheduling plugins, without their
// validation.
func (c *testCluster) installPodGroups() {
	c.t.Helper()
	c.installKind("scheduling.x-k8s.io", "v1alpha1", "PodGroup", "podgroups")
}

// installKind installs a kind without validation.
func (c *testCluster) installKind(group, version, kind, plural string) {
	c.t.Helper()
	crd := &apiextensionsv1.CustomResourceDefinition{
		ObjectMeta: metav1.ObjectMeta{Name: plural + "." + group, Annotations: map[string]string{"api-approved.kubernetes.io": "unapproved, for tests"}},
		Spec: apiextensionsv1.CustomResourceDefinitionSpec{
			Group: group, Scope: apiextensionsv1.NamespaceScoped,
			Names: apiextensionsv1.CustomResourceDefinitionNames{Plural: plural, Kind: kind},
			Versions: []apiextensionsv1.CustomResourceDefinitionVersion{{Name: version, Served: true, Storage: true, Schema: &apiextensionsv1.CustomResourceValidation{
				OpenAPIV3Schema: &apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: ptr.To(true)}}}},
		},
	}
	_, err := envtest.InstallCRDs(c.config, envtest.CRDInstallOptions{CRDs: []*apiextensionsv1.CustomResourceDefinition{crd}})
	expect.NoError(c.t, err)
}

// gang creates a PodGroup, and as many pods as it requires.
func (c *testCluster) gang(ns string, pods int) {
	c.t.Helper()
	c.create(&unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "scheduling.x-k8s.io/v1alpha1", "kind": "PodGroup",
		"metadata": map[string]any{"namespace": ns, "name": "ring"}, "spec": map[string]any{"minMember": int64(pods)},
	}})
	// The scheduler watches pods and PodGroups separately.
	c.create(schedulerPod(ns, "first", "100", inPool(ns)))
	c.expectMessage(ns, "first", "Insufficient cpu")
	for i := range pods {
		c.create(schedulerPod(ns, fmt.Sprint("ring-", i), "1", inPool(ns), tolerating(ns), func(p *corev1.Pod) {
			p.Labels = map[string]string{demand.LabelPodGroup: "ring"}
		}))
	}
}

// expectGang waits for a Reservation for a whole gang.
func (c *testCluster) expectGang(ns string, pods int32) *broker.Reservation {
	c.t.Helper()
	r := c.expectReservation(ns, "ring", pods)
	if r.Spec.MinAvailable != pods {
		c.t.Errorf("minAvailable is %d, want %d", r.Spec.MinAvailable, pods)
	}
	if ref := r.OwnerReferences[0]; ref.Kind != "PodGroup" || ref.Name != "ring" {
		c.t.Errorf("owned by %+v, want the PodGroup", ref)
	}
	return r
}

func gangTooLarge(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "10")
	c.gang(ns, 3)
	r := c.expectGang(ns, 3)
	c.setStatus(r, refused("oslo"))
	// The pod that fits loses its place.
	c.create(schedulerPod(ns, "other", "1", inPool(ns)))
	c.expectPods(ns, "other", map[string]int{home: 1})
	expect.Consistently(c.t, 2*time.Second, "the gang to wait", func() (bool, string) {
		pods := c.pods(ns, "ring")
		return len(pods[""]) == 3, fmt.Sprint(len(pods[""]), " of 3 pods wait")
	})
	c.setStatus(r, grantedIn(r, ns, 3))
	c.expectPods(ns, "ring", map[string]int{virtual: 3})
}

func gangInBoth(c *testCluster, ns string) {
	home, virtual := c.poolNode(ns, "1"), c.virtualPoolNode(ns, "10")
	c.gang(ns, 3)
	r := c.expectGang(ns, 3)
	if n := len(c.pods(ns, "ring")[home]); n != 0 {
		c.t.Errorf("%d pods were bound before all had places", n)
	}
	c.setStatus(r, grantedIn(r, ns, 2))
	c.expectPods(ns, "ring", map[string]int{home: 1, virtual: 2})
}
