package v1alpha1_test

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

// crds are those of the charts by kind.
func crds(t *testing.T) map[string]*apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	files, err := filepath.Glob("../../../charts/*/crds/*.yaml")
	expect.NoError(t, err)
	all := map[string]*apiextensionsv1.CustomResourceDefinition{}
	for _, file := range files {
		content, err := os.ReadFile(file)
		expect.NoError(t, err)
		var crd apiextensionsv1.CustomResourceDefinition
		expect.NoError(t, yaml.UnmarshalStrict(content, &crd))
		all[crd.Spec.Names.Kind] = &crd
	}
	return all
}

// schemas are those of the CRDs by kind.
func schemas(t *testing.T) map[string]*apiextensionsv1.JSONSchemaProps {
	t.Helper()
	all := map[string]*apiextensionsv1.JSONSchemaProps{}
	for kind, crd := range crds(t) {
		all[kind] = crd.Spec.Versions[0].Schema.OpenAPIV3Schema
	}
	return all
}

// TestNames: kubectl get spillway lists every kind, and each has a short name of its own.
func TestNames(t *testing.T) {
	kinds := map[string]string{}
	for kind, crd := range crds(t) {
		names := crd.Spec.Names
		if !slices.Contains(names.Categories, "spillway") || len(names.ShortNames) != 1 {
			t.Errorf("%s has categories %v and short names %v", kind, names.Categories, names.ShortNames)
			continue
		}
		if other, taken := kinds[names.ShortNames[0]]; taken {
			t.Errorf("%s and %s have the short name %s", kind, other, names.ShortNames[0])
		}
		kinds[names.ShortNames[0]] = kind
		if len(crd.Spec.Versions[0].AdditionalPrinterColumns) == 0 {
			t.Errorf("%s has no columns", kind)
		}
	}
}

// decodedAmount is the pattern of .ci/crds: that of resource.Quantity lets pass what cannot be parsed.
const decodedAmount = `^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?$`

// need is what the schema of a field must have.
type need struct {
	what string
	met  func(*apiextensionsv1.JSONSchemaProps) bool
}

func ruled(with string) func(*apiextensionsv1.JSONSchemaProps) bool {
	return func(s *apiextensionsv1.JSONSchemaProps) bool {
		return slices.ContainsFunc(s.XValidations, func(r apiextensionsv1.ValidationRule) bool {
			return strings.Contains(r.Rule, with) && strings.Contains(r.Message, "such as ")
		})
	}
}

var (
	durations = need{"a CEL rule with duration(self) and an example in its message", ruled("duration(self)")}
	selectors = need{"CEL rules on matchExpressions and matchLabels with examples in their messages", func(s *apiextensionsv1.JSONSchemaProps) bool {
		return ruled("self.matchExpressions")(s) && ruled("self.matchLabels")(s)
	}}
	amounts = need{"the pattern of .ci/crds", func(s *apiextensionsv1.JSONSchemaProps) bool { return s.Pattern == decodedAmount }}
	texts   = need{"a pattern, or a CEL rule with an example in its message", func(s *apiextensionsv1.JSONSchemaProps) bool {
		return s.Pattern != "" || ruled("self.matches(")(s)
	}}
)

// namedTexts are the names of text fields that have a format: prices and networks.
var namedTexts = regexp.MustCompile(`(?i)price|cost$|cidr|network|subnet`)

// needOf returns what a field must have; nil if its type says nothing.
func needOf(of reflect.Type, name string) *need {
	switch {
	case of == reflect.TypeFor[metav1.Duration]():
		return &durations
	case of == reflect.TypeFor[resource.Quantity]():
		return &amounts
	case of == reflect.TypeFor[metav1.LabelSelector]():
		return &selectors
	case of.Kind() == reflect.String && namedTexts.MatchString(name):
		return &texts
	}
	return nil
}

// unmet appends the paths of the fields below one whose schemas lack what they need, and counts
// those that have it.
func unmet(of reflect.Type, s *apiextensionsv1.JSONSchemaProps, path, name string, checked map[string]int) (missing []string) {
	if s == nil {
		return []string{path + ": no schema"}
	}
	if of.Kind() == reflect.Pointer {
		return unmet(of.Elem(), s, path, name, checked)
	}
	if need := needOf(of, name); need != nil {
		checked[need.what]++
		if !need.met(s) {
			return []string{path + " needs " + need.what}
		}
		return nil
	}
	switch of.Kind() {
	case reflect.Slice:
		if s.Items != nil {
			return unmet(of.Elem(), s.Items.Schema, path+"[]", name, checked)
		}
	case reflect.Map:
		if s.AdditionalProperties != nil {
			return unmet(of.Elem(), s.AdditionalProperties.Schema, path+"{}", name, checked)
		}
	case reflect.Struct:
		for i := range of.NumField() {
			field := of.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if property, exists := s.Properties[name]; exists && name != "metadata" {
				missing = append(missing, unmet(field.Type, &property, path+"."+name, name, checked)...)
			}
		}
	}
	return missing
}

// kinds are the types of all kinds of the API group but lists.
func kinds(t *testing.T) map[string]reflect.Type {
	t.Helper()
	scheme := runtime.NewScheme()
	expect.NoError(t, broker.AddToScheme(scheme))
	all := maps.Clone(scheme.KnownTypes(broker.GroupVersion))
	maps.DeleteFunc(all, func(kind string, of reflect.Type) bool {
		_, object := reflect.New(of).Interface().(client.Object)
		return !object || !strings.HasPrefix(of.PkgPath(), "github.com/spillway-dev/")
	})
	return all
}

// TestFieldsHaveRules fails for a duration, a quantity, a price, a network or a label selector of
// any kind that the API server would accept although no program can decode it.
func TestFieldsHaveRules(t *testing.T) {
	all, checked := schemas(t), map[string]int{}
	for kind, of := range kinds(t) {
		if all[kind] == nil {
			t.Errorf("%s has no CRD", kind)
			continue
		}
		for _, missing := range unmet(of, all[kind], kind, "", checked) {
			t.Error(missing)
		}
	}
	for _, need := range []need{durations, selectors, amounts, texts} {
		if checked[need.what] == 0 {
			t.Errorf("found no field that needs %s", need.what)
		}
	}
}

// TestRemovedRulesAreMissed removes each rule in turn.
func TestRemovedRulesAreMissed(t *testing.T) {
	all := schemas(t)
	for kind, path := range map[string][]string{
		"BrokerConfig":           {"spec", "staleAfter"},
		"OverflowPolicy":         {"spec", "namespaceSelector"},
		"Reservation":            {"spec", "budget", "maxPricePerHour"},
		"ReservationInstruction": {"spec", "requestedCPU"},
		"ProviderInstruction":    {"spec", "answerWithin"},
	} {
		s := all[kind].DeepCopy()
		strip(s, path)
		got := unmet(kinds(t)[kind], s, kind, "", map[string]int{})
		if want := kind + "." + strings.Join(path, "."); len(got) != 1 || !strings.HasPrefix(got[0], want+" needs ") {
			t.Errorf("without the rule of %s: have %q", want, got)
		}
	}
}

// strip removes the rules of the schema at a path.
func strip(s *apiextensionsv1.JSONSchemaProps, path []string) {
	if len(path) == 0 {
		s.Pattern, s.XValidations = "", nil
		return
	}
	next := s.Properties[path[0]]
	strip(&next, path[1:])
	s.Properties[path[0]] = next
}

// good is an object of a kind that the API server accepts.
func good(kind string) map[string]any {
	switch kind {
	case "BrokerConfig":
		return map[string]any{}
	case "OverflowPolicy":
		return map[string]any{"budget": map[string]any{"maxPricePerHour": "0.25", "currency": "EUR"}, "returnHome": map[string]any{}, "maxResources": map[string]any{"extended": map[string]any{}}}
	}
	return map[string]any{
		"podSets":     []any{map[string]any{"name": "web", "count": int64(1), "requests": map[string]any{"cpu": "1", "extended": map[string]any{}}}},
		"podSelector": map[string]any{}, "budget": map[string]any{"maxPricePerHour": "0.25", "currency": "EUR"},
	}
}

// TestRules: a real API server accepts what programs can decode, and refuses anything else with an
// example of what is right.
func TestRules(t *testing.T) {
	c, err := client.New(controlplane.Start(t), client.Options{})
	expect.NoError(t, err)
	expression := func(operator string, values ...any) []any {
		return []any{map[string]any{"key": "team", "operator": operator, "values": values}}
	}
	quantities := func(field, example string) []value {
		return []value{
			{field: field, good: []any{"1", int64(2), "500m", "1.5", ".5", "1e3", "1E", "16Gi", "0"}, bad: []any{"1e1.5", "-1", int64(-1), "1 Gi", "abc"}, example: example},
			{field: field, bad: []any{"1e1000000", strings.Repeat("1", 65)}}, // a quantity for CEL, but not for the schema
		}
	}
	duration := func(field, example string) []value {
		return []value{{field: field, good: []any{"1s", "90s", "1h30m", "24h", "1.5h"}, bad: []any{"1d", "-1h", "1h 30m", "10", "", "0s"}, example: example}}
	}
	prices := value{field: "budget.maxPricePerHour", good: []any{"0", "0.25", "12"}, bad: []any{"abc", "-1", "0,25", "1e3", "0.25 EUR", ""}, example: "0.25"}
	data := func(price, currency string) map[string]any {
		return map[string]any{"dataRegions": []any{"eu"}, "transferPrice": map[string]any{"pricePerHour": price, "currency": currency}}
	}
	places := []value{
		{field: "placement.spread.over", good: []any{"cluster", "zone", "region"}, bad: []any{"node", "Zone", ""}, example: `"cluster", "zone", "region"`},
		{field: "placement.spread", good: []any{map[string]any{"over": "zone", "maxSkew": int64(3)}}, bad: []any{map[string]any{"over": "zone", "maxSkew": int64(0)}}, example: "greater than or equal to 1"},
		{field: "placement.spread", bad: []any{map[string]any{"maxSkew": int64(1)}}, example: "over"},
		{field: "placement", good: []any{data("0.02", "EUR"), data("0", "USD")}, bad: []any{data("abc", "EUR"), data("-1", "EUR"), data("0.02 EUR", "EUR"), data("", "EUR")}, example: "0.02"},
		{field: "placement", bad: []any{data("0.02", "euro")}, example: "currency"},
		{field: "placement", bad: []any{map[string]any{"dataRegions": []any{"eu"}}}, example: "set both dataRegions and transferPrice"},
	}
	keyed := func(key string) []any {
		return []any{map[string]any{"key": key, "operator": "Exists"}}
	}
	label := func(key, value string) map[string]any { return map[string]any{key: value} }
	selector := func(field string) []value {
		return []value{{
			field: field + ".matchExpressions", example: "operator: In",
			good: []any{expression("In", "a"), expression("In", ""), expression("DoesNotExist"), []any{}, keyed("example.com/Team_1"), keyed(strings.Repeat("a", 253) + "/" + strings.Repeat("b", 63))},
			bad:  []any{expression("Foo", "a"), expression("In"), expression("Exists", "a"), expression("in", "a"), expression("NotIn", "a", "shop floor"), keyed("a b"), keyed(""), keyed("Example.com/team"), keyed("a/b/c"), keyed(strings.Repeat("a", 254) + "/b")},
		}, {
			field: field + ".matchLabels", example: "{team: shop}",
			good: []any{label("team", "shop"), label("example.com/team", ""), map[string]any{}},
			bad:  []any{label("team", "shop floor"), label("team", "-"), label("te am", "shop"), label("", "shop"), label("/team", "shop")},
		}, {field: field + ".matchLabels", bad: []any{label("team", strings.Repeat("a", 64))}, example: "63"}}
	}
	// A list that is empty selects nothing.
	few := "should have at least 1 "
	groups := []value{{field: "placement.preferredProviders", bad: []any{[]any{map[string]any{}}}, example: few}}
	for _, by := range []string{"clusters", "regions", "zones"} {
		group := func(values []any) []any { return []any{map[string]any{by: values}} }
		groups = append(groups, value{field: "placement.preferredProviders", good: []any{group([]any{"a"})}, bad: []any{group([]any{})}, example: few})
	}
	lists := map[string][]value{"OverflowPolicy": groups, "Reservation": append(groups, value{field: "podSets", bad: []any{[]any{}}, example: few})}
	for kind, values := range map[string][]value{
		"BrokerConfig": slices.Concat(duration("staleAfter", "10m"), duration("freshFor", "90s"), duration("maxDuration", "24h"), duration("defaultDuration", "1h"), duration("defaultLease", "1h"), duration("proofDeadline", "30s"), duration("retryAfter", "30s"),
			[]value{{field: "keepFreeFor", good: []any{"0s", "30m"}, bad: []any{"1d", "-1h"}, example: "30m"}}),
		"OverflowPolicy": slices.Concat(duration("duration", "24h"), duration("returnHome.after", "5m"), duration("returnHome.minimumStay", "10m"),
			quantities("maxResources.cpu", "500m"), quantities("maxResources.memory", "16Gi"), quantities("maxResources.gpu", "2"), quantities("maxResources.storage", "10Gi"),
			quantities("maxResources.extended.example~com/fpga", ""), selector("namespaceSelector"), []value{prices}, places),
		"Reservation": slices.Concat(duration("duration", "24h"), duration("deadline", "10m"), quantities("podSets.0.requests.cpu", "500m"), quantities("podSets.0.requests.extended.example~com/fpga", ""),
			selector("podSelector"), []value{prices}, places),
	} {
		t.Run(kind, func(t *testing.T) {
			create := func(field string, value any) error {
				spec := good(kind)
				if strings.HasPrefix(field, "placement.spread") {
					delete(spec, "budget")
				}
				set(spec, strings.Split(field, "."), value)
				object := &unstructured.Unstructured{Object: map[string]any{"spec": spec}}
				object.SetGroupVersionKind(broker.GroupVersion.WithKind(kind))
				object.SetName("default")
				if kind != "OverflowPolicy" {
					object.SetNamespace("default")
				}
				return c.Create(t.Context(), object, client.DryRunAll)
			}
			for _, v := range slices.Concat(values, lists[kind]) {
				for _, accepted := range v.good {
					if err := create(v.field, accepted); err != nil {
						t.Errorf("%s: %v: %v", v.field, accepted, err)
					}
				}
				for _, refused := range v.bad {
					err := create(v.field, refused)
					if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), v.example) {
						t.Errorf("%s: %v: have %v, want a refusal with the example %q", v.field, refused, err, v.example)
					}
				}
			}
		})
	}
}

// value is a field with what it may and may not have, and the example of the message.
type value struct {
	field     string
	good, bad []any
	example   string
}

// set sets the field of an object at a path, in which ~ stands for a dot.
func set(in any, path []string, value any) {
	switch in := in.(type) {
	case []any:
		set(in[0], path[1:], value)
	case map[string]any:
		name := strings.ReplaceAll(path[0], "~", ".")
		if len(path) == 1 {
			in[name] = value
			return
		}
		if in[name] == nil {
			in[name] = map[string]any{}
		}
		set(in[name], path[1:], value)
	default:
		panic(fmt.Sprintf("no field %v in %T", path, in))
	}
}
