package protocol

import (
	"bytes"
	"encoding/json"
	"flag"
	"net/http"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var update = flag.Bool("update", false, "write openapi.json")

type object = map[string]any

// operation is one path and method of the document.
type operation struct {
	method, path, summary string
	// open operations need no client certificate.
	open bool
	// query parameters: "role!" is one that must be given.
	query []string
	// body and response are values of the types; several are alternatives. Without a
	// response the status is 204, or 202 if accepted.
	body, response []any
	accepted       bool
	// csv is whether the response may be CSV instead.
	csv bool
	// refusals are the statuses with a meaning of their own for the operation.
	refusals map[int]string
}

// noHistory are the refusals of calls for history.
var noHistory = map[int]string{http.StatusNotFound: "The broker keeps no history.", http.StatusServiceUnavailable: "Its database does not answer."}

// queries are the schemas of query parameters.
var queries = map[string]object{
	"role":      {"type": "string", "enum": []any{RoleRequester, RoleProvider}},
	"watch":     {"type": "boolean"},
	"namespace": {"type": "string", "description": "Of this namespace only."},
	"since":     {"type": "string", "description": "What ended at or after a day, or a time as in RFC 3339."},
	"until":     {"type": "string", "description": "What ended before a day, or a time as in RFC 3339."},
	"from":      {"type": "string", "description": "The first day, such as 2026-01-31."},
	"to":        {"type": "string", "description": "The last day; by default today."},
	"period":    {"type": "string", "enum": []any{"day", "month"}, "default": "day"},
	"limit":     {"type": "integer", "minimum": 1, "maximum": 1000, "default": 500},
	"continue":  {"type": "string", "description": "Where the page begins: that of the page before."},
	"format":    {"type": "string", "enum": []any{"json", "csv"}},
}

var operations = []operation{
	{method: http.MethodGet, path: PathHealthz, open: true, summary: "Liveness of the process.", response: []any{map[string]string{}}},
	{method: http.MethodGet, path: PathReadyz, open: true, summary: "Readiness: this replica is the leader and its caches are synced.", response: []any{map[string]string{}}},
	{method: http.MethodGet, path: PathOpenAPI, open: true, summary: "This document.", response: []any{map[string]any{}}},
	{method: http.MethodPost, path: PathJoin, open: true, summary: "Request a client certificate with a join token. The first key that joins with a cluster ID owns the ID, and may join again.",
		body: []any{JoinRequest{}}, response: []any{JoinResponse{}}, refusals: map[int]string{http.StatusConflict: "Another key has joined with this cluster ID."}},
	{method: http.MethodPost, path: PathAdvertisements, summary: "Replace the advertisement of the calling cluster.",
		body: []any{broker.ClusterAdvertisementSpec{}}, response: []any{AdvertisementResponse{}}},
	{method: http.MethodPost, path: PathBeat, summary: "State that the advertisement of the calling cluster has not changed.",
		body: []any{Beat{}}, response: []any{BeatResponse{}}},
	{method: http.MethodGet, path: PathAdvertisements, summary: "List the advertisements. Those of other clusters have only the caller's holds and guests.", response: []any{AdvertisementList{}}},
	{method: http.MethodGet, path: PathAdvertisements + "/{id}", summary: "Get the advertisement of a cluster.", response: []any{AdvertisementView{}}},
	{method: http.MethodPost, path: PathReservations, summary: "Create a reservation, or update its amounts: requests with the same sourceUID are for the same reservation.",
		body: []any{ReservationRequest{}}, response: []any{ConsumerView{}}, refusals: map[int]string{http.StatusConflict: "The reservation is being released, or something other than its amounts would change."}},
	{method: http.MethodGet, path: PathReservations, query: []string{"role", "watch"}, summary: "List the caller's reservations (as requester) or the holds on it (as provider), or both without a role. With a role and watch=true a stream (application/x-ndjson) of Event, one per line, beginning with a Relist. A list has an ETag: with it as If-None-Match, the response to the same list is 304, without a body.",
		response: []any{ConsumerList{}, ProviderList{}, ReservationList{}, Event{}}},
	{method: http.MethodGet, path: PathReservations + "/{id}", query: []string{"role!"}, summary: "Get one of the caller's reservations (as requester) or a hold on it (as provider).", response: []any{ConsumerView{}, ProviderView{}}},
	{method: http.MethodGet, path: PathReservations + "/{id}/decision", summary: "Explain for one of the caller's reservations why each cluster that lends to the caller is not chosen now.", response: []any{DecisionView{}},
		refusals: map[int]string{http.StatusTooManyRequests: "Another decision is being explained, or the caller exceeds its rate."}},
	{method: http.MethodDelete, path: PathReservations + "/{id}", summary: "Release one of the caller's reservations. It is deleted when all providers have confirmed."},
	{method: http.MethodPost, path: PathReservations + "/{id}/ack", query: []string{"role!"}, summary: "Accept or refuse a hold (as provider), or report the virtual nodes that are ready (as requester). An ack with another reservationUID or attempt than the current one changes nothing.",
		body: []any{ProviderAck{}, RequesterAck{}}},
	{method: http.MethodPost, path: PathReservations + "/{id}/renew", query: []string{"role!"}, summary: "Renew the lease of one of the caller's reservations (as requester) that is in use. A renewal with another reservationUID than the current one changes nothing.",
		body: []any{Renewal{}}},
	{method: http.MethodGet, path: PathHistory, query: []string{"namespace", "since", "until", "limit", "continue", "format"}, csv: true, response: []any{HistoryList{}}, refusals: noHistory,
		summary: "List what has ended of the calling cluster's reservations, the latest first. CSV, by format or header Accept, has one line for each provider, and the next page in header " + HeaderContinue + "."},
	{method: http.MethodGet, path: PathUsage, query: []string{"namespace", "from", "to", "period", "limit", "continue", "format"}, csv: true, response: []any{UsageList{}}, refusals: noHistory,
		summary: "Sum up what the calling cluster's pods were given, by day or month (UTC), namespace, owner, provider and currency: by default of the last 31 days. What is still in use is some minutes old."},
	{method: http.MethodPost, path: PathRelay, summary: "Send a sealed message to another cluster. It is kept in memory for a limited time; delivery is not guaranteed.",
		body: []any{RelayMessage{}}, accepted: true, refusals: map[int]string{http.StatusTooManyRequests: "The receiver's mailbox is full, or the caller exceeds its rate."}},
	{method: http.MethodGet, path: PathRelay, query: []string{"watch"}, summary: "Take the messages to the caller. With watch=true a stream (application/x-ndjson) of them as Event, one per line.", response: []any{RelayList{}, Event{}}},
}

// TestOpenAPI compares the document with the wire types.
func TestOpenAPI(t *testing.T) {
	want, err := json.MarshalIndent(document(), "", "  ")
	expect.NoError(t, err)
	want = append(want, '\n')
	if *update {
		expect.NoError(t, os.WriteFile("openapi.json", want, 0o644))
		return
	}
	if !bytes.Equal(want, OpenAPI) {
		t.Fatal("openapi.json is outdated: run go generate ./broker/protocol")
	}
}

func document() object {
	schemas := schemas{}
	paths := object{}
	for _, o := range operations {
		item, _ := paths[o.path].(object)
		if item == nil {
			item = object{}
			paths[o.path] = item
		}
		item[strings.ToLower(o.method)] = o.describe(schemas)
	}
	refusal := schemas.of(reflect.TypeFor[Error]())
	return object{
		"openapi": "3.1.0",
		"info": object{
			"title":       "Spillway broker",
			"version":     "v1",
			"description": "REST interface between the agents and the broker. The caller is identified by its client certificate. A request body has at most 1 MiB. All requests are idempotent. A client states the version of the protocol that it speaks in header " + HeaderVersion + ", which is " + Version + "; another one is refused. Fields and event types that a side does not know are ignored; only in the body of a client that states no version an unknown field is an error.",
		},
		"paths": paths,
		"components": object{
			"schemas":         schemas,
			"securitySchemes": object{"certificate": object{"type": "mutualTLS", "description": "The client certificate that is issued when a cluster joins."}},
			"responses": object{"Error": object{
				"description": "An error with its reason and what to do.",
				"headers":     object{"Retry-After": object{"description": "With status 429: the seconds to wait, if the caller exceeds a rate.", "schema": object{"type": "integer"}}},
				"content":     object{"application/json": object{"schema": refusal}},
			}},
		},
	}
}

func (o operation) describe(schemas schemas) object {
	out := object{"summary": o.summary}
	if !o.open {
		out["security"] = []any{object{"certificate": []string{}}}
	}
	var parameters []any
	if strings.Contains(o.path, "{id}") {
		parameters = append(parameters, object{"name": "id", "in": "path", "required": true, "schema": object{"type": "string"}})
	}
	for _, name := range o.query {
		name, required := strings.CutSuffix(name, "!")
		parameters = append(parameters, object{"name": name, "in": "query", "required": required, "schema": queries[name]})
	}
	if parameters != nil {
		out["parameters"] = parameters
	}
	if o.body != nil {
		out["requestBody"] = object{"required": true, "content": schemas.content(o.body)}
	}
	responses := object{"default": object{"$ref": "#/components/responses/Error"}}
	for status, what := range o.refusals {
		responses[statusText(status)] = object{"description": what, "content": schemas.content([]any{Error{}})}
	}
	switch {
	case o.response != nil:
		content := schemas.content(o.response)
		if o.csv {
			content["text/csv"] = object{"schema": object{"type": "string"}}
		}
		responses["200"] = object{"description": "OK", "content": content}
	case o.accepted:
		responses["202"] = object{"description": "Accepted"}
	default:
		responses["204"] = object{"description": "OK"}
	}
	out["responses"] = responses
	return out
}

func statusText(status int) string {
	encoded, _ := json.Marshal(status)
	return string(encoded)
}

// schemas of the document by name.
type schemas map[string]any

// content describes alternative bodies; those of type Event are lines of a stream.
func (s schemas) content(values []any) object {
	out := object{}
	var plain []any
	for _, value := range values {
		schema := s.of(reflect.TypeOf(value))
		if _, line := value.(Event); line {
			out["application/x-ndjson"] = object{"schema": schema}
		} else {
			plain = append(plain, schema)
		}
	}
	switch len(plain) {
	case 0:
	case 1:
		out["application/json"] = object{"schema": plain[0]}
	default:
		out["application/json"] = object{"schema": object{"oneOf": plain}}
	}
	return out
}

// of is the schema of a type; a reference for a struct.
func (s schemas) of(t reflect.Type) object {
	switch t {
	case reflect.TypeFor[resource.Quantity]():
		return object{"type": "string", "description": "A Kubernetes quantity, such as 500m or 1Gi."}
	case reflect.TypeFor[metav1.Time](), reflect.TypeFor[metav1.MicroTime](), reflect.TypeFor[time.Time]():
		return object{"type": "string", "format": "date-time"}
	case reflect.TypeFor[metav1.Duration]():
		return object{"type": "string", "description": "A duration, such as 1h30m."}
	case reflect.TypeFor[[]byte]():
		return object{"type": "string", "format": "byte"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return s.of(t.Elem())
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Int32, reflect.Int64:
		return object{"type": "integer", "format": t.Kind().String()}
	case reflect.Slice:
		return object{"type": "array", "items": s.of(t.Elem())}
	case reflect.Map:
		return object{"type": "object", "additionalProperties": s.of(t.Elem())}
	case reflect.Interface:
		return object{}
	case reflect.Struct:
	default:
		panic("no schema for " + t.String())
	}
	reference := object{"$ref": "#/components/schemas/" + t.Name()}
	if _, known := s[t.Name()]; known {
		return reference
	}
	schema := object{"type": "object"}
	s[t.Name()] = schema
	properties := object{}
	var required []string
	for i := range t.NumField() {
		field := t.Field(i)
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		if name == "-" {
			continue
		}
		if name == "" {
			panic(t.String() + "." + field.Name + " has no JSON name")
		}
		properties[name] = s.of(field.Type)
		if !strings.Contains(options, "omitempty") && !strings.Contains(options, "omitzero") {
			required = append(required, name)
		}
	}
	schema["properties"] = properties
	if required != nil {
		schema["required"] = required
	}
	return reference
}
