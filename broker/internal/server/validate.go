package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// longExponent matches a decimal number whose exponent has three digits or more.
var longExponent = regexp.MustCompile(`^[+-]?[0-9.]+[eE][+-]?0*[0-9]{3,}$`)

// validateExponents refuses quantities such as 1e-2147483648 before they are parsed:
// parsing takes a step for each power of ten.
func validateExponents(body []byte) error {
	if !mayHaveExponent(body) {
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	for {
		token, err := decoder.Token()
		if err != nil {
			return nil // decoding reports syntax errors
		}
		var text string
		switch t := token.(type) {
		case string:
			text = strings.TrimSpace(t)
		case json.Number:
			text = t.String()
		}
		if longExponent.MatchString(text) {
			return refuse(protocol.CodeInvalid, "the quantity %s is invalid: its exponent must have at most two digits", short(text))
		}
	}
}

// mayHaveExponent is false for most bodies, which then need no second pass.
func mayHaveExponent(body []byte) bool {
	before := byte(0)
	for _, c := range body {
		if c == '\\' || (c == 'e' || c == 'E') && (before == '.' || '0' <= before && before <= '9') {
			return true
		}
		before = c
	}
	return false
}

// validateAmounts refuses negative quantities: they would add capacity that does not
// exist. The CRDs validate only some of them, because of the cost of CEL rules.
func validateAmounts(field string, amounts broker.ResourceQuantities) (err error) {
	amounts.Each(func(name corev1.ResourceName, amount resource.Quantity) {
		if err == nil && amount.Sign() < 0 {
			err = refuse(protocol.CodeInvalid, "%s: %s must not be negative", field, short(string(name)))
		}
	})
	return err
}

// validateUse limits what becomes part of the Reservation's status.
func validateUse(use *broker.Use) error {
	if use == nil {
		return nil
	}
	long := len(use.Summary) > maxAckMessage
	for _, pod := range use.Pods {
		long = long || len(pod) > 2*validation.DNS1123SubdomainMaxLength
	}
	if use.Count < 0 || len(use.Pods) > broker.MaxUsePods || long {
		return refuse(protocol.CodeInvalid, "used must have a count that is not negative, at most %d pods, and no longer text than names", broker.MaxUsePods)
	}
	return validateAmounts("used.resources", use.Resources)
}

const (
	// maxSpec is the maximum size of a Reservation's spec in bytes of JSON: what any quota for
	// a new one allows, and room for broker.MaxRetained entries of retained.
	maxSpec = 24 << 10
	// maxNodes is the maximum number of nodes in an advertisement.
	maxNodes = 20_000
)

// sourceOwner matches the kind and name of an owner, or nothing.
var sourceOwner = regexp.MustCompile(`^([A-Za-z0-9]{1,63}/[a-z0-9A-Z][-a-zA-Z0-9_.:]{0,252})?$`)

// validateRequest validates what the CRD cannot, and sets the requester.
func validateRequest(request *protocol.ReservationRequest, caller string) error {
	switch {
	case request.Spec.RequesterID != "" && request.Spec.RequesterID != caller:
		return refuse(protocol.CodeForbidden, "cluster %s cannot request capacity for cluster %q: spec.requesterID must be empty or its own", caller, short(request.Spec.RequesterID))
	case !protocol.ValidSourceUID(request.SourceUID):
		return refuse(protocol.CodeInvalid, "sourceUID must be the UID of the Reservation in the consumer's cluster")
	case len(validation.IsDNS1123Label(request.SourceNamespace)) > 0:
		return refuse(protocol.CodeInvalid, "sourceNamespace must be the namespace of the Reservation in the consumer's cluster")
	case len(validation.IsDNS1123Subdomain(request.SourceName)) > 0:
		return refuse(protocol.CodeInvalid, "sourceName must be the name of the Reservation in the consumer's cluster")
	case !sourceOwner.MatchString(request.SourceOwner):
		return refuse(protocol.CodeInvalid, "sourceOwner must be the kind and name of the owner of the Reservation in the consumer's cluster, such as Deployment/web")
	case request.SourceGeneration < 1:
		return refuse(protocol.CodeInvalid, "sourceGeneration must be the generation of the Reservation in the consumer's cluster, 1 or more")
	case len(request.Spec.Retained) > broker.MaxRetained:
		return refuse(protocol.CodeInvalid, "spec.retained has %d entries, the maximum is %d", len(request.Spec.Retained), broker.MaxRetained)
	}
	for _, retained := range request.Spec.Retained {
		if !protocol.ValidClusterID(retained.Cluster) || retained.Count < 0 {
			return refuse(protocol.CodeInvalid, "each entry of spec.retained must have a valid cluster ID and a count that is not negative")
		}
	}
	request.Spec.RequesterID = caller
	return validateSpec(&request.Spec)
}

// specSize is the size of a spec in bytes of JSON.
func specSize(spec *broker.ReservationSpec) (int, error) {
	text, err := json.Marshal(spec)
	if err != nil {
		return 0, fmt.Errorf("encoding spec: %w", err)
	}
	return len(text), nil
}

func validateSpec(spec *broker.ReservationSpec) error {
	size, err := specSize(spec)
	if err != nil {
		return err
	}
	if size > maxSpec {
		return refuse(protocol.CodeInvalid, "spec has %d bytes, the maximum is %d: shorten its node selectors, affinity or tolerations", size, maxSpec)
	}
	if _, err := metav1.LabelSelectorAsSelector(spec.PodSelector); err != nil {
		return refuse(protocol.CodeInvalid, "spec.podSelector: %v", err)
	}
	if spec.RequestedResources != nil {
		if err := validateAmounts("spec.requestedResources", *spec.RequestedResources); err != nil {
			return err
		}
	}
	for i, set := range spec.PodSets {
		if err := validateAmounts(fmt.Sprintf("spec.podSets[%d].requests", i), set.Requests); err != nil {
			return err
		}
	}
	return nil
}

func validateAdvertisement(spec *broker.ClusterAdvertisementSpec) error {
	amounts := map[string]broker.ResourceQuantities{
		"resources.capacity":    spec.Resources.Capacity,
		"resources.allocatable": spec.Resources.Allocatable,
		"resources.allocated":   spec.Resources.Allocated,
	}
	amounts["resources.available"], amounts["resources.reserved"] = ptr.Deref(spec.Resources.Available, broker.ResourceQuantities{}), ptr.Deref(spec.Resources.Reserved, broker.ResourceQuantities{})
	nodes := int64(0)
	for i, class := range spec.NodeClasses {
		// They are copied into the status of Reservations, whose size is bounded on that.
		if errs := metav1validation.ValidateLabels(class.Labels, field.NewPath("nodeClasses").Index(i).Child("labels")); len(errs) > 0 {
			return refuse(protocol.CodeInvalid, "%s", short(errs[0].Error()))
		}
		if class.LargestNode != nil {
			amounts[fmt.Sprintf("nodeClasses[%d].largestNode", i)] = *class.LargestNode
		}
		for j, shape := range class.FreeShapes {
			path := fmt.Sprintf("nodeClasses[%d].freeShapes[%d]", i, j)
			if shape.Nodes < 0 || shape.Pods < 0 {
				return refuse(protocol.CodeInvalid, "%s: nodes and pods must not be negative", path)
			}
			nodes += int64(shape.Nodes)
			amounts[path+".free"] = shape.Free
		}
	}
	if nodes > maxNodes {
		return refuse(protocol.CodeInvalid, "nodeClasses have %d nodes in total, the maximum is %d", nodes, maxNodes)
	}
	for i, hold := range spec.ObservedHolds {
		amounts[fmt.Sprintf("observedHolds[%d].used", i)] = hold.Used
	}
	for i, hold := range spec.UnlistedHolds {
		amounts[fmt.Sprintf("unlistedHolds[%d].held", i)] = hold.Held
	}
	for field, amount := range amounts {
		if err := validateAmounts(field, amount); err != nil {
			return err
		}
	}
	return nil
}
