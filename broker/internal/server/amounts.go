package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
)

// Amounts below zero would make room where there is none. The CRDs refuse them
// where rules are cheap enough; here they are refused everywhere, extended
// resources included.

// wildExponent is a decimal number whose exponent has three digits or more.
var wildExponent = regexp.MustCompile(`^[+-]?[0-9.]+[eE][+-]?0*[0-9]{3,}$`)

// checkExponents refuses amounts such as 1e-2147483648 before they are read as
// quantities: reading one takes a step for each power of ten.
func checkExponents(body []byte) error {
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	for {
		token, err := decoder.Token()
		if err != nil {
			return nil // what is wrong with the text is said where it is decoded
		}
		var text string
		switch t := token.(type) {
		case string:
			text = strings.TrimSpace(t)
		case json.Number:
			text = t.String()
		}
		if wildExponent.MatchString(text) {
			return refuse(protocol.CodeInvalid, "the amount %s has an exponent of more than two digits", bounded(text))
		}
	}
}

func checkAmounts(where string, amounts broker.ResourceQuantities) error {
	below := func(name string, amount *resource.Quantity) error {
		if amount != nil && amount.Sign() < 0 {
			return refuse(protocol.CodeInvalid, "%s: %s must not be negative", where, bounded(name))
		}
		return nil
	}
	for name, amount := range map[string]*resource.Quantity{"cpu": amounts.CPU, "memory": amounts.Memory, "gpu": amounts.GPU, "storage": amounts.Storage} {
		if err := below(name, amount); err != nil {
			return err
		}
	}
	for name, amount := range amounts.Extended {
		if err := below(string(name), &amount); err != nil {
			return err
		}
	}
	return nil
}

// maxAsk bounds what one reservation adds to a provider's ledger, in bytes of
// JSON: the ledger is one object of bounded size, shared by all.
const maxAsk = 16 << 10

// maxNodes bounds how many nodes an advertisement may describe.
const maxNodes = 20_000

func checkAsk(spec *broker.ReservationSpec) error {
	text, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("measuring an ask: %w", err)
	}
	if len(text) > maxAsk {
		return refuse(protocol.CodeInvalid, "the reservation's spec has %d bytes and may have %d: shorten its node selectors, affinity and tolerations", len(text), maxAsk)
	}
	if spec.RequestedResources != nil {
		if err := checkAmounts("spec.requestedResources", *spec.RequestedResources); err != nil {
			return err
		}
	}
	for i, set := range spec.PodSets {
		if err := checkAmounts(fmt.Sprintf("spec.podSets[%d].requests", i), set.Requests); err != nil {
			return err
		}
	}
	return nil
}

func checkOffer(spec *broker.ClusterAdvertisementSpec) error {
	amounts := map[string]broker.ResourceQuantities{
		"resources.capacity":    spec.Resources.Capacity,
		"resources.allocatable": spec.Resources.Allocatable,
		"resources.allocated":   spec.Resources.Allocated,
	}
	nodes := int64(0)
	for i, class := range spec.NodeClasses {
		for j, shape := range class.FreeShapes {
			where := fmt.Sprintf("nodeClasses[%d].freeShapes[%d]", i, j)
			if shape.Nodes < 0 || shape.Pods < 0 {
				return refuse(protocol.CodeInvalid, "%s: nodes and pods must not be negative", where)
			}
			nodes += int64(shape.Nodes)
			amounts[where+".free"] = shape.Free
		}
	}
	if nodes > maxNodes {
		return refuse(protocol.CodeInvalid, "nodeClasses describe %d nodes and may describe %d", nodes, maxNodes)
	}
	for i, hold := range spec.ObservedHolds {
		amounts[fmt.Sprintf("observedHolds[%d].used", i)] = hold.Used
	}
	for where, amount := range amounts {
		if err := checkAmounts(where, amount); err != nil {
			return err
		}
	}
	return nil
}
