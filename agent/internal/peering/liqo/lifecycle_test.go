package liqo_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/go-logr/logr/testr"
	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/consumer"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// lifecycle is an environment with the capacities of TestLifecycle.
type lifecycle struct {
	*environment
	half, full corev1.ResourceList
	// first is the number of the first session.
	first int64
}

// labelMapping with the name of a namespace, on a virtual node, maps that namespace.
const labelMapping = "namespace.broker.fluidos.eu/"

// TestLifecycle goes from nothing to a virtual node and back, twice, with Liqo
// simulated on the objects of two real API servers.
func TestLifecycle(t *testing.T) {
	l := &lifecycle{environment: newEnvironment(t), half: expect.Resources("cpu", "500m", "memory", "512Mi"), full: expect.Resources("cpu", "1333m", "memory", "1234567891", "nvidia.com/gpu", "1")}
	l.refuseTakenIdentity()
	l.peerWithLostMessages()
	l.watch()
	l.expectNode()
	l.expectGuestAffinity()
	l.expectGuestsConfined()
	l.growWithinGrant()
	l.expectFinishedGuestsGranted()
	l.expectNamespaceConflicts()
	l.shrink()
	l.park()

	// Using the parked node, then removing everything that Spillway made.
	l.grant(2, l.half)
	l.capacity("Ready", peering.Capacity{Resources: l.half, Pods: 2, Namespaces: []string{"shop"}})
	l.teardown()
	l.ExpectNothingLeft()
	liqotest.Read(t, l.rome, "own", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})

	l.expectLaterSession()
	l.restartSession()
	l.teardown()
	l.ExpectNothingLeft()
}

// sessionOfRome is the session recorded in the consumer's tenant namespace.
func (l *lifecycle) sessionOfRome() int64 {
	l.t.Helper()
	return session.Number(liqotest.Read(l.t, l.rome, "", "liqo-tenant-paris", &corev1.Namespace{}), liqo.AnnotationSession)
}

// expectGuestAffinity checks that Liqo is asked to keep guests on nodes that run guests,
// since it drops what the pods themselves select.
func (l *lifecycle) expectGuestAffinity() {
	l.t.Helper()
	virtualNode := liqotest.Read(l.t, l.rome, "liqo-tenant-paris", "spillway-paris", &offloadingv1beta1.VirtualNode{})
	// A namespace is mapped only to providers that grant it capacity.
	if got := virtualNode.Spec.Labels; got[labelMapping+"shop"] != "true" || got[labelMapping+"tools"] != "true" || got[labelMapping+"own"] != "" {
		l.t.Errorf("the virtual node has labels %v", got)
	}
	// Liqo takes a selector without terms for one that selects every provider.
	offloading := liqotest.Read(l.t, l.rome, "shop", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
	selected := corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
		{Key: labelMapping + "shop", Operator: corev1.NodeSelectorOpExists},
	}}}}
	if !equality.Semantic.DeepEqual(offloading.Spec.ClusterSelector, selected) {
		l.t.Errorf("namespace shop is mapped to the providers that %+v selects, want %+v", offloading.Spec.ClusterSelector, selected)
	}
	ref := virtualNode.Spec.VkOptionsTemplateRef
	if ref == nil || liqotest.Read(l.t, l.rome, ref.Namespace, ref.Name, &offloadingv1beta1.VkOptionsTemplate{}).Spec.ReflectorsConfig["secret"].Type != offloadingv1beta1.AllowList {
		l.t.Errorf("the virtual kubelet has options %v", ref)
	}
	patch := virtualNode.Spec.OffloadingPatch
	if patch == nil || patch.Affinity == nil || !equality.Semantic.DeepEqual(patch.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution, guest.NodeAffinity(nil)) {
		l.t.Errorf("the offloading patch is %+v", patch)
	}
	if patch != nil && !slices.Contains(patch.AnnotationsNotReflected, guest.AnnotationEvict) {
		l.t.Errorf("pods can keep a node of the provider: all their annotations go there but %v", patch.AnnotationsNotReflected)
	}
}

// expectGuestsConfined checks what limits guests in the namespace that Liqo has created for
// them, and that a namespace of a peering by others is left alone.
func (l *lifecycle) expectGuestsConfined() {
	l.t.Helper()
	l.create(l.paris, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-oslo", Labels: map[string]string{consts.RemoteClusterID: "oslo"}}})
	expect.Eventually(l.t, "the guests are limited", func() (bool, string) {
		namespace, err := session.Find(l.t.Context(), l.paris, "", "shop-rome", &corev1.Namespace{})
		return err == nil && namespace != nil && namespace.Labels["broker.fluidos.eu/limited"] == "true" && namespace.Labels[consts.PodSecurityEnforceLevelLabel] == broker.PodSecurityRestricted, fmt.Sprint(namespace, err)
	})
	hard := liqotest.Read(l.t, l.paris, "shop-rome", "spillway-guests", &corev1.ResourceQuota{}).Spec.Hard
	for name, want := range map[corev1.ResourceName]int64{
		"services.nodeports": 0, "services.loadbalancers": 0, "count/persistentvolumeclaims": 0, "count/secrets": 240, "count/configmaps": 240, "count/services": 200,
		"count/shadowendpointslices.offloading.liqo.io": 1000, "count/shadowpods.offloading.liqo.io": 12502,
	} {
		if amount, ok := hard[name]; !ok || amount.Value() != want {
			l.t.Errorf("the quota limits %s to %v (%t), want %d", name, amount.Value(), ok, want)
		}
	}
	deny := liqotest.Read(l.t, l.paris, "shop-rome", "spillway-deny", &networkingv1.NetworkPolicy{})
	if len(deny.Spec.PolicyTypes) != 2 || len(deny.Spec.Ingress)+len(deny.Spec.Egress) > 0 {
		l.t.Errorf("the default policy does not deny everything: %+v", deny.Spec)
	}
	allow := liqotest.Read(l.t, l.paris, "shop-rome", "spillway-allow", &networkingv1.NetworkPolicy{})
	if len(allow.Spec.Ingress) != 1 || allow.Spec.Ingress[0].From[0].NamespaceSelector.MatchLabels[consts.RemoteClusterID] != "rome" {
		l.t.Errorf("ingress: %+v", allow.Spec.Ingress)
	}
	limits := liqotest.Read(l.t, l.paris, "shop-rome", "spillway-guests", &corev1.LimitRange{}).Spec.Limits
	if len(limits) != 1 || len(limits[0].DefaultRequest) != 3 || len(limits[0].Default) > 0 {
		l.t.Errorf("limits: %+v", limits)
	}
	if binding := liqotest.Read(l.t, l.paris, "shop-rome", "spillway-agent", &rbacv1.RoleBinding{}); binding.RoleRef.Name != "spillway-agent-guests" {
		l.t.Errorf("the agent's role is %s", binding.RoleRef.Name)
	}
	quota, err := session.Find(l.t.Context(), l.paris, "shop-oslo", "spillway-guests", &corev1.ResourceQuota{})
	expect.NoError(l.t, err)
	if quota != nil {
		l.t.Error("the namespace of a peering that a user made is limited")
	}
	expect.NoError(l.t, l.paris.Delete(l.t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop-oslo"}}))
}

func (l *lifecycle) node() *corev1.Node {
	l.t.Helper()
	return liqotest.Read(l.t, l.rome, "", "spillway-paris", &corev1.Node{})
}

func (l *lifecycle) expectQuota(want corev1.ResourceList, cordoned bool) {
	l.t.Helper()
	expect.Eventually(l.t, "the quota", func() (bool, string) {
		quota := liqotest.Read(l.t, l.paris, "liqo-tenant-rome", userOf("spillway-paris", "rome"), &offloadingv1beta1.Quota{})
		for _, name := range guest.Listed() {
			// Liqo refuses guests that request zero of what is not listed.
			if _, listed := quota.Spec.Resources[name]; !listed {
				return false, fmt.Sprintf("%s is not listed: %v", name, quota.Spec)
			}
		}
		return session.Equal(quota.Spec.Resources, want) && ptr.Deref(quota.Spec.Cordoned, false) == cordoned, fmt.Sprint(quota.Spec)
	})
}

// refuseTakenIdentity checks that no consumer gets the permissions of a group that has its name.
func (l *lifecycle) refuseTakenIdentity() {
	l.t.Helper()
	taken := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "admins"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "rome"}},
	}
	l.create(l.paris, taken)
	hello, err := liqo.Codec.Encode(&liqo.Message{Header: session.Header{Kind: session.Hello, Session: 1}})
	expect.NoError(l.t, err)
	reply, err := l.ProviderSide().Handle(l.t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, hello)
	expect.NoError(l.t, err)
	if m, err := liqo.Codec.Decode(reply, session.Offer, session.Refusal); err != nil || m.Kind != session.Refusal || m.Reason != "IdentityTaken" {
		l.t.Errorf("a consumer named like a group of administrators gets %+v, %v", m, err)
	}
	expect.NoError(l.t, l.paris.Delete(l.t.Context(), taken))
}

// peerWithLostMessages peers the clusters although every second message is lost.
func (l *lifecycle) peerWithLostMessages() {
	l.t.Helper()
	l.DropEverySecond(true)
	l.grant(2, l.half)
	l.until("Peered", l.peering)
	l.DropEverySecond(false)
	if sent := l.Sent(); sent < 3 {
		l.t.Errorf("%d messages were enough with every second one lost", sent)
	}
	l.first = l.sessionOfRome()
	if number := session.Number(liqotest.Read(l.t, l.paris, "", "liqo-tenant-rome", &corev1.Namespace{}), liqo.AnnotationProviderSession); number != l.first {
		l.t.Errorf("rome is in session %d, paris in %d", l.first, number)
	}
}

// expectNode checks that the node carries exactly what is granted.
func (l *lifecycle) expectNode() {
	l.t.Helper()
	l.capacity("Ready", peering.Capacity{Resources: l.half, Pods: 2, Namespaces: []string{"shop", "tools"}})
	node := l.node()
	if !session.Equal(node.Status.Allocatable, expect.Resources("cpu", "500m", "memory", "512Mi", "pods", "2")) || node.Labels["type"] != "virtual-kubelet" || node.Spec.Unschedulable {
		l.t.Errorf("the node has %v and labels %v", node.Status.Allocatable, node.Labels)
	}
	for _, toleration := range l.Driver().Tolerations("paris") {
		if !slices.ContainsFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return toleration.ToleratesTaint(testr.New(l.t), &taint, false) }) {
			l.t.Errorf("no taint for toleration %v", toleration)
		}
	}
	l.expectQuota(expect.Resources("cpu", "500m", "memory", "512Mi", "pods", "2"), false)
	liqotest.Read(l.t, l.paris, "", "shop-rome", &corev1.Namespace{})
	closed := liqotest.Read(l.t, l.rome, "liqo-tenant-paris", "spillway-agent", &networkingv1.NetworkPolicy{})
	want := []networkingv1.NetworkPolicyIngressRule{{
		From: []networkingv1.NetworkPolicyPeer{
			{IPBlock: &networkingv1.IPBlock{CIDR: "0.0.0.0/0", Except: []string{"10.0.0.0/16"}}},
			{IPBlock: &networkingv1.IPBlock{CIDR: "::/0", Except: []string{"fd00::/64"}}},
		},
		Ports: []networkingv1.NetworkPolicyPort{{Protocol: ptr.To(corev1.ProtocolTCP), Port: ptr.To(intstr.FromInt32(10250))}},
	}}
	if !equality.Semantic.DeepEqual(closed.Spec.Ingress, want) || closed.Spec.PodSelector.MatchLabels[consts.OffloadingComponentKey] != consts.VirtualKubeletComponentValue {
		l.t.Errorf("the port of the virtual kubelets has policy %+v, want %+v", closed.Spec, want)
	}
}

// growWithinGrant checks that the node does not grow before the grant.
func (l *lifecycle) growWithinGrant() {
	l.t.Helper()
	l.capacity("GrantInsufficient", peering.Capacity{Resources: l.full, Pods: 3, Namespaces: []string{"shop", "tools"}})
	if cpu := l.node().Status.Allocatable.Cpu(); cpu.String() != "500m" {
		l.t.Errorf("the node has more than the grant: cpu %s", cpu)
	}
	l.grant(3, l.full)
	l.capacity("Ready", peering.Capacity{Resources: l.full, Pods: 3, Namespaces: []string{"shop", "tools"}})
}

// expectFinishedGuestsGranted checks that what finished guests hold of the Quota is
// granted on top.
func (l *lifecycle) expectFinishedGuestsGranted() {
	l.t.Helper()
	guest := &offloadingv1beta1.ShadowPod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop-rome", Name: "done", Labels: map[string]string{consts.CreatorLabelKey: userOf("spillway-paris", "rome"), "offloading.liqo.io/origin": "rome"}},
		Spec:       offloadingv1beta1.ShadowPodSpec{Pod: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "100m")}}}}},
	}
	l.create(l.paris, guest)
	guest.Status.Phase = corev1.PodSucceeded
	expect.NoError(l.t, l.paris.Status().Update(l.t.Context(), guest))
	l.expectQuota(expect.Resources("cpu", "1433m", "memory", "1234567891", "nvidia.com/gpu", "1", "pods", "3"), false)
	expect.NoError(l.t, l.paris.Delete(l.t.Context(), guest))
	l.expectQuota(expect.Resources("cpu", "1333m", "memory", "1234567891", "nvidia.com/gpu", "1", "pods", "3"), false)
}

// expectNamespaceConflicts checks that namespaces that cannot be mapped are reported,
// and that an owner's NamespaceOffloading is not changed.
func (l *lifecycle) expectNamespaceConflicts() {
	l.t.Helper()
	l.create(l.rome, &offloadingv1beta1.NamespaceOffloading{
		ObjectMeta: metav1.ObjectMeta{Namespace: "own", Name: consts.DefaultNamespaceOffloadingName},
		Spec: offloadingv1beta1.NamespaceOffloadingSpec{
			NamespaceMappingStrategy: offloadingv1beta1.DefaultNameMappingStrategyType,
			PodOffloadingStrategy:    offloadingv1beta1.RemotePodOffloadingStrategyType,
			ClusterSelector: corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "elsewhere", Operator: corev1.NodeSelectorOpExists}},
			}}},
		},
	})
	long := strings.Repeat("n", 60)
	l.create(l.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: long}})
	l.create(l.rome, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "quota"}})
	none := expect.Resources("count/namespaceoffloadings.offloading.liqo.io", "0")
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "quota", Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: none}}
	l.create(l.rome, quota)
	quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
	expect.NoError(l.t, l.rome.Status().Update(l.t.Context(), quota))
	want := map[string]string{"own": "NamespaceOffloadingConflict", long: "NamespaceNameTooLong", l.Refused(): "NamespaceRejected", "quota": "NamespaceOffloadingRefused"}
	expect.Eventually(l.t, "those that cannot be mapped, and no other", func() (bool, string) {
		progress, err := l.Driver().EnsureCapacity(l.t.Context(), l.Provider(), peering.Capacity{Resources: l.full, Pods: 3, Namespaces: append(slices.Sorted(maps.Keys(want)), "shop")})
		got := map[string]string{}
		for namespace, why := range progress.Namespaces {
			if got[namespace] = why.Reason; !why.Final {
				got[namespace] += ", which may pass"
			}
		}
		return err == nil && progress.Done && maps.Equal(got, want), fmt.Sprintf("%+v, %v", progress, err)
	})
	if got := liqotest.Read(l.t, l.rome, "liqo-tenant-paris", "spillway-paris", &offloadingv1beta1.VirtualNode{}).Spec.Labels; got[labelMapping+"shop"] == "" || got[labelMapping+l.Refused()] == "" || got[labelMapping+"own"] != "" || got[labelMapping+"quota"] != "" || got[labelMapping+long] != "" {
		l.t.Errorf("the virtual node has labels %v", got)
	}
	if offloading, err := session.Find(l.t.Context(), l.rome, long, consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{}); err != nil || offloading != nil {
		l.t.Errorf("a namespace whose name is too long is offloaded: %v, %v", offloading, err)
	}
	l.expectUnmappable(long)
}

// expectUnmappable checks which namespaces fit no provider: with a strategy of its user, one
// may have another name there.
func (l *lifecycle) expectUnmappable(long string) {
	l.t.Helper()
	why, err := l.Driver().Unmappable(l.t.Context(), long)
	if err != nil || !strings.Contains(why, long+"-rome") || !strings.Contains(why, "a shorter name") {
		l.t.Errorf("a namespace whose name is too long: %q, %v", why, err)
	}
	own := &offloadingv1beta1.NamespaceOffloading{
		ObjectMeta: metav1.ObjectMeta{Namespace: long, Name: consts.DefaultNamespaceOffloadingName},
		Spec: offloadingv1beta1.NamespaceOffloadingSpec{
			NamespaceMappingStrategy: offloadingv1beta1.EnforceSameNameMappingStrategyType, PodOffloadingStrategy: offloadingv1beta1.LocalPodOffloadingStrategyType,
			// The simulated Liqo, which knows no strategies, must not map it meanwhile.
			ClusterSelector: corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "elsewhere", Operator: corev1.NodeSelectorOpExists}},
			}}},
		},
	}
	l.create(l.rome, own)
	if why, err := l.Driver().Unmappable(l.t.Context(), long); err != nil || why != "" {
		l.t.Errorf("a namespace with a name of its user's strategy: %q, %v", why, err)
	}
	expect.NoError(l.t, l.rome.Delete(l.t.Context(), own))
}

// shrink checks that a removed resource is zero and that a namespace that is no
// longer needed is unmapped.
func (l *lifecycle) shrink() {
	l.t.Helper()
	l.capacity("Ready", peering.Capacity{Resources: l.half, Pods: 1, Namespaces: []string{"shop"}})
	node := l.node()
	if gpu := node.Status.Allocatable["nvidia.com/gpu"]; !gpu.IsZero() || node.Status.Allocatable.Pods().Value() != 1 {
		l.t.Errorf("the node has %v", node.Status.Allocatable)
	}
	expect.Eventually(l.t, "namespace tools is unmapped", func() (bool, string) {
		namespace, err := session.Find(l.t.Context(), l.paris, "", "tools-rome", &corev1.Namespace{})
		expect.NoError(l.t, err)
		offloading, err := session.Find(l.t.Context(), l.rome, "tools", consts.DefaultNamespaceOffloadingName, &offloadingv1beta1.NamespaceOffloading{})
		expect.NoError(l.t, err)
		return namespace == nil && offloading == nil, fmt.Sprintf("namespace %v, offloading %v", namespace, offloading)
	})
}

// park parks the node without any hold; no guest may start.
func (l *lifecycle) park() {
	l.t.Helper()
	l.capacity("Ready", peering.Capacity{})
	l.grant(0, nil)
	node := l.node()
	if !session.Equal(node.Status.Allocatable, expect.Resources("cpu", "1m", "memory", "1Mi")) {
		l.t.Errorf("the node is not parked: %v", node.Status.Allocatable)
	}
	l.expectQuota(expect.Resources("cpu", "1m", "memory", "1Mi"), true)
	peerings, err := l.Driver().Observe(l.t.Context())
	if err != nil || !slices.Equal(peerings, []string{"paris"}) {
		l.t.Errorf("peerings: %+v, %v", peerings, err)
	}
	if consumers, err := l.ProviderSide().Consumers(l.t.Context()); err != nil || !slices.Equal(consumers, []string{"rome"}) {
		l.t.Errorf("consumers: %v, %v", consumers, err)
	}
}

// expectLaterSession checks that messages of the first session do not affect the
// second.
func (l *lifecycle) expectLaterSession() {
	l.t.Helper()
	l.until("Peered", l.peering)
	l.capacity("Ready", peering.Capacity{Resources: l.half, Pods: 2, Namespaces: []string{"shop"}})
	if second := l.sessionOfRome(); second <= l.first {
		l.t.Errorf("session %d follows %d", second, l.first)
	}
	for kind, want := range map[session.Kind]session.Kind{session.Teardown: session.Gone, session.Hello: session.Refusal} {
		late, err := liqo.Codec.Encode(&liqo.Message{Header: session.Header{Kind: kind, Session: l.first}})
		expect.NoError(l.t, err)
		reply, err := l.ProviderSide().Handle(l.t.Context(), peering.Peer{ClusterID: "rome", Holds: true}, late)
		expect.NoError(l.t, err)
		if m, err := liqo.Codec.Decode(reply, session.Gone, session.Refusal); err != nil || m.Kind != want || m.Session != l.first {
			l.t.Errorf("reply to a late %s: %+v, %v", kind, m, err)
		}
	}
	if tenant := liqotest.Read(l.t, l.paris, "liqo-tenant-rome", "rome", &authv1beta1.Tenant{}); !tenant.DeletionTimestamp.IsZero() {
		l.t.Error("a late message ended a later session")
	}
}

// restartSession checks that both sides begin again after the consumer has lost its
// session.
func (l *lifecycle) restartSession() {
	l.t.Helper()
	second := l.sessionOfRome()
	expect.NoError(l.t, change(l.t.Context(), l.rome, liqotest.Read(l.t, l.rome, "", "liqo-tenant-paris", &corev1.Namespace{}), func(n *corev1.Namespace) { n.Annotations[liqo.AnnotationSession] = "1" }))
	expect.NoError(l.t, l.rome.Delete(l.t.Context(), liqotest.Read(l.t, l.rome, "liqo-tenant-paris", "controlplane-paris", &authv1beta1.Identity{})))
	driver, side := l.Sides()
	again, err := consumer.New(driver.Options)
	expect.NoError(l.t, err)
	l.Start(l.t, again, side)
	l.until("Peered", l.peering)
	if third := l.sessionOfRome(); third <= second {
		l.t.Errorf("session %d follows %d", third, second)
	}
}
