package scenarios_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// TestSelectedNodes has pods that only some of the providers' nodes admit: a tainted node
// with GPUs and the nodes of a zone.
func TestSelectedNodes(t *testing.T) {
	zone := map[string]string{corev1.LabelTopologyZone: "eu-west-1a"}
	inZone := func(g environment.NodeGroup) environment.NodeGroup { g.Labels = zone; return g }
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {inZone(group("paris", 1, "cpu", "2", "memory", "4Gi"))},
		"berlin": {group("berlin", 1, "cpu", "2", "memory", "4Gi")},
	})
	s.addGPUs("paris", inZone(group("paris-gpu", 1, "cpu", "2", "memory", "4Gi", gpu, "2")))
	ns := s.optedIn("selected")
	s.createIn(ns, "gpu", "100m", func(spec *corev1.PodSpec) { requestGPU(spec); tolerate(spec) })
	s.createIn(ns, "zone", "100m", func(spec *corev1.PodSpec) { spec.NodeSelector = zone })
	for app, node := range map[string]string{"gpu": "paris-gpu-1", "zone": "paris-1"} {
		_, away := s.allReady(ns, app, 1)
		if len(away) != 1 || away[0].Spec.NodeName != broker.VirtualNodeName("paris") {
			t.Fatalf("pod %s does not run in paris: %v", app, describe(away))
		}
		if guests := s.guestsOf("paris", app); len(guests) != 1 || guests[0].Spec.NodeName != node {
			t.Errorf("pod %s does not run on %s: %v", app, node, describe(guests))
		}
	}

	// The events of a pod that no provider can run say why.
	elsewhere := s.createIn(ns, "elsewhere", "100m", func(spec *corev1.PodSpec) {
		spec.NodeSelector = map[string]string{corev1.LabelTopologyZone: "us-east-1b"}
	})
	s.expectMessages(elsewhere, "paris", "berlin", "us-east-1b")
	arm := s.createIn(ns, "arm", "100m", func(spec *corev1.PodSpec) {
		spec.NodeSelector = map[string]string{corev1.LabelArchStable: "arm64"}
	})
	s.expectMessages(arm, corev1.LabelArchStable)

	// The other node of paris has room for it, and the taint.
	s.fill("berlin", "berlin-1", "1990m")
	empty := s.fill("paris", "paris-1", "1890m")
	ordinary := s.createIn(ns, "ordinary", "100m", nil)
	s.expectMessages(ordinary, "paris: 0 of 1 pods", "berlin: 0 of 1 pods")
	if pods, err := s.podsOf(ns, "ordinary"); err != nil || len(pods) != 1 || pods[0].Spec.NodeName != "" {
		t.Errorf("the pod has a node: %v (%v)", describe(pods), err)
	}
	empty()
	if _, away := s.allReady(ns, "ordinary", 1); len(away) != 1 || away[0].Spec.NodeName != broker.VirtualNodeName("paris") {
		t.Errorf("the pod does not run in paris: %v", describe(away))
	}
}
