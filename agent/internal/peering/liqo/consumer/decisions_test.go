package consumer

import (
	"strings"
	"testing"
	"time"

	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/google/go-cmp/cmp"
	authv1beta1 "github.com/liqotech/liqo/apis/authentication/v1beta1"
	liqov1beta1 "github.com/liqotech/liqo/apis/core/v1beta1"
	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestNextStep(t *testing.T) {
	now := time.Unix(1000, 0)
	const interval = 3 * time.Second
	received := func(kinds ...session.Kind) map[session.Kind]*liqo.Message {
		out := map[session.Kind]*liqo.Message{}
		for _, k := range kinds {
			out[k] = &liqo.Message{Header: session.Header{Kind: k, Session: 7, Reason: session.ReasonStale}}
		}
		return out
	}
	sent := func(kind session.Kind, ago time.Duration) map[session.Kind]time.Time {
		return map[session.Kind]time.Time{kind: now.Add(-ago)}
	}
	cases := map[string]struct {
		reason   string
		received map[session.Kind]*liqo.Message
		sent     map[session.Kind]time.Time
		send     session.Kind
		reply    session.Kind
		want     string
	}{
		"nothing yet":      {reason: "the handshake begins with Hello", send: session.Hello, want: "ResponsePending"},
		"just sent":        {reason: "a reply takes time", sent: sent(session.Hello, time.Second), want: "ResponsePending"},
		"no reply":         {reason: "messages get lost", sent: sent(session.Hello, interval), send: session.Hello, want: "ResponsePending"},
		"offered":          {reason: "an Offer is answered", received: received(session.Offer), send: session.Request, reply: session.Offer, want: "CertificatePending"},
		"requested":        {reason: "signing takes time", received: received(session.Offer), sent: sent(session.Request, time.Second), reply: session.Offer, want: "CertificatePending"},
		"no certificate":   {reason: "messages get lost", received: received(session.Offer), sent: sent(session.Request, interval), send: session.Request, reply: session.Offer, want: "CertificatePending"},
		"granted":          {reason: "a Grant ends the handshake", received: received(session.Offer, session.Grant), reply: session.Grant, want: "CertificateIssued"},
		"refused":          {reason: "the refusal is reported, Hello comes later", received: received(session.Offer, session.Refusal), sent: sent(session.Hello, 2*interval), reply: session.Refusal, want: "PeeringRefused"},
		"refused long ago": {reason: "the cause may be gone", received: received(session.Refusal), sent: sent(session.Hello, 5*interval), send: session.Hello, reply: session.Refusal, want: "PeeringRefused"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			exchange := session.Exchange[*liqo.Message]{Received: tc.received, Sent: tc.sent}
			got := nextStep(exchange, "paris", 7, now, interval)
			if (got.reply == nil) != (tc.reply == "") || got.reply != nil && got.reply.Kind != tc.reply {
				t.Errorf("%s: acts on %+v, want %s", tc.reason, got.reply, tc.reply)
			}
			if got.send != tc.send || got.progress.Reason != tc.want || got.progress.Done {
				t.Errorf("%s: got %+v", tc.reason, got)
			}
			if other := nextStep(exchange, "paris", 8, now, interval); other.reply != nil {
				t.Errorf("a reply to session 7 counts for session 8: %+v", other)
			}
		})
	}
}

func TestAllocatableFor(t *testing.T) {
	cases := map[string]struct {
		capacity peering.Capacity
		known    corev1.ResourceList
		want     corev1.ResourceList
	}{
		"exact":                       {capacity: peering.Capacity{Resources: expect.Resources("cpu", "1333m", "memory", "1234567891"), Pods: 3}, want: expect.Resources("cpu", "1333m", "memory", "1234567891", "pods", "3")},
		"parked":                      {want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0")},
		"parked, whatever the pods":   {capacity: peering.Capacity{Pods: 3}, want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0")},
		"a GPU":                       {capacity: peering.Capacity{Resources: expect.Resources("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "2"), Pods: 1}, want: expect.Resources("cpu", "1", "memory", "1Gi", "nvidia.com/gpu", "2", "pods", "1")},
		"a former resource is zero":   {known: expect.Resources("nvidia.com/gpu", "2", "cpu", "4"), want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "0", "nvidia.com/gpu", "0")},
		"pods without cpu and memory": {capacity: peering.Capacity{Resources: expect.Resources("ephemeral-storage", "1Gi"), Pods: 2}, want: expect.Resources("cpu", "1m", "memory", "1Mi", "pods", "2", "ephemeral-storage", "1Gi")},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			got := allocatableFor(tc.capacity, tc.known)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestNextStage(t *testing.T) {
	virtualNode := &offloadingv1beta1.VirtualNode{Spec: offloadingv1beta1.VirtualNodeSpec{Template: &offloadingv1beta1.DeploymentTemplate{}}}
	left := remaining{
		virtualNode: virtualNode, pods: make([]corev1.Pod, 1), kubelets: make([]corev1.Pod, 1), node: &corev1.Node{}, slice: &authv1beta1.ResourceSlice{},
		maps: make([]offloadingv1beta1.NamespaceMap, 1), offloadings: make([]offloadingv1beta1.NamespaceOffloading, 1),
		credentials: []client.Object{&authv1beta1.Identity{}}, namespace: &corev1.Namespace{}, foreignCluster: &liqov1beta1.ForeignCluster{}, session: 7,
	}
	steps := []struct {
		want stage
		done func()
	}{
		{stagePods, func() { left.pods = nil }},
		{stageKubelet, func() {
			virtualNode.Labels = map[string]string{labelWebhookSkip: "true"}
			virtualNode.Spec.Template.Spec.Replicas = new(int32)
		}},
		{stageKubelet, func() { left.kubelets = nil }},
		{stageVirtualNode, func() { left.virtualNode = nil }},
		{stageNode, func() { left.node = nil }},
		{stageSlice, func() { left.slice = nil }},
		{stageMaps, func() { left.maps = nil }},
		{stageOffloadings, func() { left.offloadings = nil }},
		{stageIdentity, func() { left.credentials = nil }},
		{stageProvider, func() { left.released = true }},
		{stageNamespace, func() { left.namespace = nil }},
		{stageForeignCluster, func() { left.foreignCluster = nil }},
		{stageDone, func() {}},
	}
	for _, step := range steps {
		if got := left.next(); got != step.want {
			t.Fatalf("got %s, want %s", got, step.want)
		}
		step.done()
	}
	for name, tc := range map[string]struct {
		left remaining
		want stage
	}{
		"manual peering":                    {remaining{}, stageDone},
		"before Hello":                      {remaining{namespace: &corev1.Namespace{}, session: 7}, stageProvider},
		"also a provider, session recorded": {remaining{namespace: &corev1.Namespace{}, foreignCluster: &liqov1beta1.ForeignCluster{}, session: 7, released: true, shared: true}, stageNamespace},
		"also a provider":                   {remaining{namespace: &corev1.Namespace{}, foreignCluster: &liqov1beta1.ForeignCluster{}, shared: true}, stageDone},
		"ForeignCluster left":               {remaining{foreignCluster: &liqov1beta1.ForeignCluster{}}, stageForeignCluster},
		"networks connected":                {remaining{foreignCluster: &liqov1beta1.ForeignCluster{}, shared: true}, stageDone},
		"VirtualNode deleted by others":     {remaining{virtualNode: &offloadingv1beta1.VirtualNode{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: time.Unix(1, 0)}}}, kubelets: make([]corev1.Pod, 1)}, stageVirtualNode},
		"node without a VirtualNode":        {remaining{node: &corev1.Node{}}, stageNode},
	} {
		if got := tc.left.next(); got != tc.want {
			t.Errorf("%s: got %s, want %s", name, got, tc.want)
		}
	}
}

func TestMapping(t *testing.T) {
	maps := []offloadingv1beta1.NamespaceMap{{
		Spec: offloadingv1beta1.NamespaceMapSpec{DesiredMapping: map[string]string{"a": "a-rome", "b": "b-rome"}},
		Status: offloadingv1beta1.NamespaceMapStatus{CurrentMapping: map[string]offloadingv1beta1.RemoteNamespaceStatus{
			"a": {Phase: offloadingv1beta1.MappingAccepted}, "c": {Phase: offloadingv1beta1.MappingAccepted},
		}},
	}}
	for namespace, want := range map[string]offloadingv1beta1.MappingPhase{"a": offloadingv1beta1.MappingAccepted, "b": "", "c": ""} {
		if got := mapping(maps, namespace); got != want {
			t.Errorf("%s: got %q, want %q", namespace, got, want)
		}
	}
	maps[0].DeletionTimestamp = &metav1.Time{Time: time.Unix(1, 0)}
	if got := mapping(maps, "a"); got != "" {
		t.Errorf("a map that is being deleted still counts: %q", got)
	}
}

// A provider refuses the mapping of a namespace beyond its limit, and only the log of Liqo's
// crd-replicator says so: what waits for the namespace says how many there are, and what to do.
func TestNamespaceBeyondTheLimit(t *testing.T) {
	c := liqotest.NewClient(t, controlplane.Start(t, liqotest.CRDs(t)))
	d := &Driver{Options: Options{Options: liqo.Options{Options: session.Options{Client: c, ClusterID: "rome"}}}}
	for _, name := range []string{"shop", liqo.TenantNamespace("paris")} {
		expect.NoError(t, c.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}))
	}
	mapped := &offloadingv1beta1.NamespaceMap{
		ObjectMeta: metav1.ObjectMeta{Namespace: liqo.TenantNamespace("paris"), Name: "paris", Labels: map[string]string{
			consts.ReplicationDestinationLabel: "paris", consts.ReplicationRequestedLabel: consts.ReplicationRequestedLabelValue,
		}},
		Spec: offloadingv1beta1.NamespaceMapSpec{DesiredMapping: map[string]string{"shop": "shop-rome", "tools": "tools-rome"}},
	}
	expect.NoError(t, c.Create(t.Context(), mapped))
	mapped.Status.CurrentMapping = map[string]offloadingv1beta1.RemoteNamespaceStatus{"tools": {Phase: offloadingv1beta1.MappingAccepted}, "former": {Phase: offloadingv1beta1.MappingTerminating}}
	expect.NoError(t, c.Status().Update(t.Context(), mapped))
	node := &offloadingv1beta1.VirtualNode{Spec: offloadingv1beta1.VirtualNodeSpec{Labels: map[string]string{labelMapping + "tools": "true", labelMapping + "shop": "true"}}}
	got, err := d.mapNamespaces(t.Context(), "paris", node, []string{"tools", "shop"})
	expect.NoError(t, err)
	why := got.unmapped["shop"]
	if len(got.unmapped) != 1 || why.Reason != "NamespacePending" || why.Final || !strings.Contains(why.Message, "shop-rome at provider paris, one of 3 namespaces") || !strings.Contains(why.Message, "liqo.maxNamespaces") {
		t.Errorf("the namespaces that are not created: %+v", got.unmapped)
	}
}

func TestRecognizeVirtualNode(t *testing.T) {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"liqo.io/type": "virtual-node"}}}
	if !RecognizeVirtualNode(node) || RecognizeVirtualNode(&corev1.Node{}) {
		t.Error("a node is Liqo's by label liqo.io/type=virtual-node")
	}
}
