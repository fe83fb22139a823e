package consumer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/liqotech/liqo/pkg/consts"
	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/guest"
)

// addressesPath is the path of the webhook that addressesHandler serves.
const addressesPath = "/addresses"

// networksConfigMap in the agent's namespace has the networks of each provider's pods, separated by
// spaces, at the name of its virtual node. Policy spillway-pod-addresses reads it.
const networksConfigMap = "spillway-provider-networks"

// networksInterval is how often Liqo is asked which clusters' networks it has connected.
const networksInterval = time.Minute

// configurationList is the kind of Liqo's Configurations: their Go package imports that of Prometheus.
var configurationList = schema.GroupVersionKind{Group: "networking.liqo.io", Version: "v1beta1", Kind: "ConfigurationList"}

// ProviderNetworks are the networks of the providers' pods, as this cluster reaches them.
type ProviderNetworks struct {
	client client.Client
	// namespace of the ConfigMap.
	namespace string
	// always are those of every provider.
	always []netip.Prefix
	// connected are those that Liqo has connected, by cluster.
	connected atomic.Pointer[map[string][]netip.Prefix]
	// changed is called with a cluster when they have changed; nil if nothing follows from it.
	changed func(cluster string)
}

// NewProviderNetworks returns networks that are always those of every provider; Liqo's are not known
// yet. The client has no cache, and namespace is that of the ConfigMap.
func NewProviderNetworks(c client.Client, namespace string, always []netip.Prefix) *ProviderNetworks {
	return &ProviderNetworks{client: c, namespace: namespace, always: always}
}

// Of returns the networks of the pods behind a virtual node; known is false before they were read.
func (n *ProviderNetworks) Of(virtualNode string) (networks []netip.Prefix, known bool) {
	connected := n.connected.Load()
	if connected == nil {
		return nil, false
	}
	return slices.Concat(n.always, (*connected)[strings.TrimPrefix(virtualNode, broker.VirtualNodePrefix)]), true
}

// none reports whether there are no networks of a provider's pods, so that no guest of it has an
// address.
func (n *ProviderNetworks) none(ctx context.Context, provider string) (bool, error) {
	if n == nil {
		return false, nil
	}
	node := broker.VirtualNodeName(provider)
	if networks, known := n.Of(node); known && len(networks) > 0 {
		return false, nil
	}
	if err := n.update(ctx); err != nil { // they may just have been connected
		return false, err
	}
	networks, _ := n.Of(node)
	return len(networks) == 0, nil
}

// NeedLeaderElection is false: each replica may answer the webhook.
func (n *ProviderNetworks) NeedLeaderElection() bool { return false }

// Start reads what Liqo has connected, and writes it for the policy, until ctx ends.
func (n *ProviderNetworks) Start(ctx context.Context) error {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if err := n.update(ctx); err != nil && ctx.Err() == nil {
			log.FromContext(ctx).Error(err, "Failed to update the networks of providers")
		}
	}, networksInterval)
	return nil
}

func (n *ProviderNetworks) update(ctx context.Context) error {
	connected, err := connectedNetworks(ctx, n.client)
	if err != nil {
		return err
	}
	data := map[string]string{}
	for cluster, networks := range connected {
		var texts []string
		for _, network := range networks {
			texts = append(texts, network.String())
		}
		data[broker.VirtualNodeName(cluster)] = strings.Join(texts, " ")
	}
	stored := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: n.namespace, Name: networksConfigMap}}
	err = n.client.Get(ctx, client.ObjectKeyFromObject(stored), stored)
	switch {
	case apierrors.IsNotFound(err):
		stored.Data = data
		err = n.client.Create(ctx, stored)
	case err == nil && !equality.Semantic.DeepEqual(stored.Data, data):
		before := stored.DeepCopy()
		stored.Data = data
		err = n.client.Patch(ctx, stored, client.MergeFrom(before))
	}
	if err != nil {
		return fmt.Errorf("writing the networks of providers to ConfigMap %s/%s: %w", n.namespace, networksConfigMap, err)
	}
	before := ptr.Deref(n.connected.Swap(&connected), connected)
	for _, clusters := range []map[string][]netip.Prefix{before, connected} {
		for cluster := range clusters {
			if n.changed != nil && !slices.Equal(before[cluster], connected[cluster]) {
				n.changed(cluster)
			}
		}
	}
	return nil
}

// connectedNetworks returns the pod networks of the clusters that Liqo has connected, as it has mapped
// them here, by cluster. Its mapping keeps them apart from this cluster's pods and Services.
func connectedNetworks(ctx context.Context, c client.Reader) (map[string][]netip.Prefix, error) {
	var list unstructured.UnstructuredList
	list.SetGroupVersionKind(configurationList)
	if err := c.List(ctx, &list); err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("reading Liqo's Configurations: %w", err)
	}
	connected := map[string][]netip.Prefix{}
	for i := range list.Items {
		cluster := list.Items[i].GetLabels()[consts.RemoteClusterID]
		cidrs, _, err := unstructured.NestedStringSlice(list.Items[i].Object, "status", "remote", "cidr", "pod")
		if err != nil || list.Items[i].GetNamespace() != liqo.TenantNamespace(cluster) {
			continue
		}
		for _, cidr := range cidrs {
			if network, err := netip.ParsePrefix(cidr); err == nil {
				connected[cluster] = append(connected[cluster], network.Masked())
			}
		}
	}
	return connected, nil
}

// addressesHandler answers AdmissionReviews of the statuses that Liqo's virtual kubelet writes
// of overflowed pods. It takes off the addresses outside of the networks of a virtual node's guests:
// without a network between the clusters, a provider reports what here may be another pod, in good
// faith. The pod runs without an address then. What the handler misses, the chart's policy refuses.
func addressesHandler(networksOf func(virtualNode string) (networks []netip.Prefix, known bool)) http.Handler {
	return (&webhook.Admission{Handler: admission.HandlerFunc(func(ctx context.Context, request admission.Request) admission.Response {
		if request.Kind.Kind != "Pod" || request.SubResource != "status" {
			return admission.Allowed("")
		}
		corrections, err := correct(request.OldObject.Raw, request.Object.Raw, networksOf)
		if err != nil {
			log.FromContext(ctx).Info("Cannot decode the status of a pod; it stays as it is", "namespace", request.Namespace, "name", request.Name, "reason", err.Error())
			return admission.Allowed("")
		}
		return admission.Patched("", corrections...)
	})}).WithRecoverPanic(false)
}

// reportedPod is what is read of an encoded pod, of which only this is changed.
type reportedPod struct {
	Spec struct {
		NodeName string `json:"nodeName"`
	} `json:"spec"`
	Status struct {
		PodIP      string            `json:"podIP"`
		PodIPs     []corev1.PodIP    `json:"podIPs"`
		Conditions []json.RawMessage `json:"conditions"`
	} `json:"status"`
}

// correct leaves a pod the addresses that a guest can have, and the condition of this cluster's
// scheduler that it had: Liqo replaces the status by the provider's, which says nothing of it, or
// what it likes.
func correct(before, reported []byte, networksOf func(virtualNode string) ([]netip.Prefix, bool)) (corrections []jsonpatch.Operation, err error) {
	var had, has reportedPod
	if err := errors.Join(utiljson.Unmarshal(before, &had), utiljson.Unmarshal(reported, &has)); err != nil {
		return nil, err
	}
	set := func(field string, value any) {
		corrections = append(corrections, jsonpatch.NewOperation("add", "/status/"+field, value))
	}
	if networks, known := networksOf(has.Spec.NodeName); known {
		first, all := guest.Addresses(has.Status.PodIP, has.Status.PodIPs, networks)
		if first != has.Status.PodIP || !slices.Equal(all, has.Status.PodIPs) {
			set("podIP", first)
			set("podIPs", append([]corev1.PodIP{}, all...))
		}
	}
	own := func(condition json.RawMessage) bool {
		var c corev1.PodCondition
		return utiljson.Unmarshal(condition, &c) == nil && c.Type == broker.PodOverflow
	}
	others := slices.DeleteFunc(slices.Clone(has.Status.Conditions), own)
	kept := slices.DeleteFunc(had.Status.Conditions, func(c json.RawMessage) bool { return !own(c) })
	if len(kept) > 0 || len(others) < len(has.Status.Conditions) {
		set("conditions", slices.Concat([]json.RawMessage{}, others, kept))
	}
	return corrections, nil
}
