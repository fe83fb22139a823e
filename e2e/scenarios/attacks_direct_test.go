//go:build e2e

package scenarios

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// directAttacks are those with the token that the provider gave rome, as virtual-node's
// configuration has it.
func directAttacks(ctx context.Context, t *testing.T, identity *corev1.Secret) []attack {
	t.Helper()
	config, err := nodeconfig.FromSecret(identity)
	if err != nil {
		t.Fatal(err)
	}
	guests := config.Connection.Namespace
	access := &rest.Config{
		Host: config.Connection.Endpoint, BearerToken: config.Connection.Token, TLSClientConfig: rest.TLSClientConfig{CAData: config.Connection.CA},
	}
	attacker, err := client.New(access, client.Options{Scheme: paris.Scheme()})
	if err != nil {
		t.Fatal(err)
	}
	var namespace corev1.Namespace
	if err := paris.Get(ctx, client.ObjectKey{Name: guests}, &namespace); err != nil {
		t.Fatal(err)
	}
	var quota corev1.ResourceQuota
	if err := paris.Get(ctx, client.ObjectKey{Namespace: guests, Name: "spillway-guests"}, &quota); err != nil {
		t.Fatal(err)
	}
	cpu := quota.Spec.Hard["requests.cpu"]
	guestPod := func(in string, change func(*corev1.PodSpec)) *corev1.Pod {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: in, Name: "attack"}, Spec: guestSpec()}
		if in == guests {
			p.Spec.PriorityClassName = "spillway-guest"
			p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: guests, UID: namespace.UID, Controller: ptr.To(true)}}
		}
		change(&p.Spec)
		return p
	}
	guest := func(in string, change func(*corev1.PodSpec)) func(context.Context) error {
		return creating(attacker, func() client.Object { return guestPod(in, change) })
	}
	unchanged := func(*corev1.PodSpec) {}
	if err := guest(guests, unchanged)(ctx); err != nil {
		t.Fatalf("an ordinary guest is refused: %v", err)
	}
	// By its memory limits the kubelet sizes what a pod has in memory.
	limited := guestPod(guests, func(s *corev1.PodSpec) { s.Containers[0].Resources.Limits = nil })
	if err := attacker.Create(ctx, limited, client.DryRunAll); err != nil || limited.Spec.Containers[0].Resources.Limits.Memory().IsZero() {
		t.Errorf("a container without a memory limit gets none: %v, %v", limited.Spec.Containers[0].Resources, err)
	}
	var attacks []attack
	for _, a := range specAttacks() {
		if a.name != "a ServiceAccount" { // there is none but those that the agent made
			attacks = append(attacks, attack{a.name, guest(guests, a.change), a.want})
		}
	}
	account := func(s *corev1.PodSpec) { s.ServiceAccountName = "spillway-virtual-node" }
	more := func(s *corev1.PodSpec) { s.Containers[0].Resources.Requests["cpu"] = *cpuPlusOne(cpu) }
	// With Liqo, the webhook excludes virtual nodes.
	inMemory := func(s *corev1.PodSpec) {
		s.Containers[0].Resources.Limits = requests("memory", "1Ti")
		s.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: corev1.StorageMediumMemory}}}}
	}
	lent := func(s *corev1.PodSpec) { s.Affinity.NodeAffinity = nil }
	return slices.Concat(attacks, foreignAttacks(ctx, t, attacker, access), []attack{
		{"granting itself capacity", func(ctx context.Context) error {
			return attacker.Patch(ctx, quota.DeepCopy(), client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"hard":{"requests.cpu":"5000"}}}`)), client.DryRunAll)
		}, "cannot patch resource"},
		{"more than the grant", guest(guests, more), "exceeded quota"},
		{"an emptyDir in memory, within a limit beyond the quota", guest(guests, inMemory), "limits.memory"},
		{"a ServiceAccount", guest(guests, account), "ServiceAccount"},
		{"running on a virtual node", guest(guests, lent), "virtual nodes"},
		{"a Service of type NodePort", creating(attacker, func() client.Object { return nodePort(guests) }), "cannot create resource"},
		{"a ServiceAccount token", creating(attacker, func() client.Object { return tokenSecret(guests) }), "service-account-token"},
		{"a guest in another namespace", guest("default", unchanged), "cannot create resource"},
	})
}
