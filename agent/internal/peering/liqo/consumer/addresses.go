package consumer

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"

	"github.com/liqotech/liqo/pkg/consts"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/spillway-dev/spillway/broker/guest"
)

// AddressesPath is the path of the webhook that AddressesHandler serves.
const AddressesPath = "/addresses"

// networkKind is that of Liqo's Networks. Their Go package imports Liqo's networking and what
// that needs.
var networkKind = schema.GroupVersionKind{Group: "ipam.liqo.io", Version: "v1alpha1", Kind: "Network"}

// PodNetworks returns the CIDRs of this cluster's pods that Liqo in a namespace was installed
// with. It needs them whether or not it connects the clusters.
func PodNetworks(ctx context.Context, c client.Reader, namespace string) ([]string, error) {
	var networks unstructured.UnstructuredList
	networks.SetGroupVersionKind(networkKind)
	err := c.List(ctx, &networks, client.InNamespace(namespace), client.MatchingLabels{consts.NetworkTypeLabelKey: string(consts.NetworkTypePodCIDR)})
	if err != nil && !meta.IsNoMatchError(err) && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("reading Liqo's networks in namespace %s: %w", namespace, err)
	}
	var cidrs []string
	for i := range networks.Items {
		if cidr, found, err := unstructured.NestedString(networks.Items[i].Object, "spec", "cidr"); err == nil && found {
			cidrs = append(cidrs, cidr)
		}
	}
	return cidrs, nil
}

// AddressesHandler answers AdmissionReviews of the statuses that Liqo's virtual kubelet writes
// of overflowed pods. It takes off the addresses that no guest can have, among them those in
// this cluster's own networks: without a network between the clusters, a provider with the same
// pod network reports them in good faith. The pod runs without an address then. What the
// handler misses, the chart's policy refuses.
func AddressesHandler(own func() []netip.Prefix) http.Handler {
	return (&webhook.Admission{Handler: admission.HandlerFunc(func(ctx context.Context, request admission.Request) admission.Response {
		if request.Kind.Kind != "Pod" || request.SubResource != "status" {
			return admission.Allowed("")
		}
		changed, err := changeAddresses(request.Object.Raw, own())
		if err != nil {
			log.FromContext(ctx).Info("Cannot decode the status of a pod; it stays as it is", "namespace", request.Namespace, "name", request.Name, "reason", err.Error())
			return admission.Allowed("")
		}
		return admission.PatchResponseFromRaw(request.Object.Raw, changed)
	})}).WithRecoverPanic(false)
}

// changeAddresses leaves an encoded pod the addresses that a guest can have, and changes
// nothing else of it.
func changeAddresses(raw []byte, own []netip.Prefix) ([]byte, error) {
	var pod, status map[string]json.RawMessage
	var reported corev1.PodStatus
	if err := json.Unmarshal(raw, &pod); err != nil {
		return nil, err
	}
	for _, into := range []any{&status, &reported} {
		if err := json.Unmarshal(pod["status"], into); err != nil {
			return nil, fmt.Errorf("status: %w", err)
		}
	}
	all := []string{reported.PodIP}
	if len(reported.PodIPs) > 0 {
		all = nil
	}
	for _, p := range reported.PodIPs {
		all = append(all, p.IP)
	}
	delete(status, "podIP")
	delete(status, "podIPs")
	var kept []corev1.PodIP
	for _, ip := range guest.Addresses(all, own) {
		kept = append(kept, corev1.PodIP{IP: ip})
	}
	var err error
	if len(kept) > 0 {
		if status["podIP"], err = json.Marshal(kept[0].IP); err != nil {
			return nil, err
		}
		if status["podIPs"], err = json.Marshal(kept); err != nil {
			return nil, err
		}
	}
	if pod["status"], err = json.Marshal(status); err != nil {
		return nil, err
	}
	return json.Marshal(pod)
}
