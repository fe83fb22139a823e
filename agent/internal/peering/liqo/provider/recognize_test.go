package provider

import (
	"crypto/sha256"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

func TestRecognizeGuest(t *testing.T) {
	namespaceLabels := func(name string) map[string]string {
		for _, consumer := range []string{"rome", "berlin"} {
			if name == "shop-"+consumer {
				return map[string]string{"liqo.io/remote-cluster-id": consumer}
			}
		}
		return nil
	}
	cases := map[string]struct {
		reason string
		change func(*corev1.Pod)
		want   string
	}{
		"a guest":                      {reason: "as Liqo makes it of a ShadowPod", change: func(*corev1.Pod) {}, want: "rome"},
		"no ShadowPod":                 {reason: "labels alone prove nothing", change: func(p *corev1.Pod) { p.OwnerReferences = nil }},
		"another controller":           {reason: "not made by Liqo", change: func(p *corev1.Pod) { p.OwnerReferences[0].Kind = "ReplicaSet" }},
		"another group's ShadowPod":    {reason: "not Liqo's", change: func(p *corev1.Pod) { p.OwnerReferences[0].APIVersion = "example.com/v1" }},
		"the cluster's own namespace":  {reason: "not created for a consumer", change: func(p *corev1.Pod) { p.Namespace = "home" }},
		"another consumer's namespace": {reason: "creator and namespace must agree", change: func(p *corev1.Pod) { p.Namespace = "shop-berlin" }},
		"no creator":                   {reason: "Liqo's admission did not see it", change: func(p *corev1.Pod) { p.Labels = nil }},
		"labels of the consumer": {reason: "its own labels do not count", change: func(p *corev1.Pod) {
			p.Labels[broker.LabelRequester] = "berlin"
			p.Labels["offloading.liqo.io/origin"] = "berlin"
		}, want: "rome"},
		"part of a hash": {reason: "the complete hash must be at the end", change: func(p *corev1.Pod) { p.Labels["liqo.io/creator-user"] += "0" }},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			sum := sha256.Sum256([]byte("rome"))
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
				Name: "p", Namespace: "shop-rome",
				Labels:          map[string]string{"liqo.io/creator-user": fmt.Sprintf("spillway-paris-%x", sum[:6])},
				OwnerReferences: []metav1.OwnerReference{{APIVersion: "offloading.liqo.io/v1beta1", Kind: "ShadowPod", Name: "p", Controller: ptr.To(true)}},
			}}
			tc.change(p)
			if got, ok := RecognizeGuest(p, namespaceLabels); got != tc.want || ok != (tc.want != "") {
				t.Errorf("%s: got %q %v, want %q", tc.reason, got, ok, tc.want)
			}
		})
	}
}
