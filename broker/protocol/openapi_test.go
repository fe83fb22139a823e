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

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

var update = flag.Bool("update", false, "write openapi.json anew")

type object = map[string]any

// operation is one path and method of the document.
type operation struct {
	method, path, summary string
	// open operations need no client certificate.
	open bool
	// query parameters: "role!" is one that must be given.
	query []string
	// body and answer are values of the types; several are alternatives. An
	// operation without an answer says 204, or accepted.
	body, answer []any
	accepted     bool
	// refusals are the statuses that mean more here than they do everywhere.
	refusals map[int]string
}

var operations = []operation{
	{method: http.MethodGet, path: PathHealthz, open: true, summary: "The process answers.", answer: []any{map[string]string{}}},
	{method: http.MethodGet, path: PathReadyz, open: true, summary: "This replica leads and its caches are synced.", answer: []any{map[string]string{}}},
	{method: http.MethodGet, path: PathOpenAPI, open: true, summary: "This document.", answer: []any{map[string]any{}}},
	{method: http.MethodPost, path: PathJoin, open: true, summary: "Ask for a client certificate. The token stands for one; the first key under a cluster ID owns it, and may join again.",
		body: []any{JoinRequest{}}, answer: []any{JoinResponse{}}, refusals: map[int]string{http.StatusConflict: "Another key has joined under this cluster ID."}},
	{method: http.MethodPost, path: PathAdvertisements, summary: "Replace what the broker knows of the calling cluster. An advertisement that says nothing new is noted as received.",
		body: []any{broker.ClusterAdvertisementSpec{}}, answer: []any{AdvertisementAnswer{}}},
	{method: http.MethodGet, path: PathAdvertisements, summary: "List what the clusters offer; of holds and guests only the caller's.", answer: []any{AdvertisementList{}}},
	{method: http.MethodGet, path: PathAdvertisements + "/{id}", summary: "Read what one cluster offers.", answer: []any{AdvertisementView{}}},
	{method: http.MethodPost, path: PathReservations, summary: "Ask for capacity, or ask again with another amount: the same sourceUID is the same reservation.",
		body: []any{ReservationRequest{}}, answer: []any{ConsumerView{}}, refusals: map[int]string{http.StatusConflict: "The reservation is being released, or something other than an amount would change."}},
	{method: http.MethodGet, path: PathReservations, query: []string{"role!", "watch"}, summary: "List the reservations that the caller made or provides for; with watch=true a stream (application/x-ndjson) of Event, one a line, beginning with a Relist.",
		answer: []any{ConsumerList{}, ProviderList{}, Event{}}},
	{method: http.MethodGet, path: PathReservations + "/{id}", query: []string{"role!"}, summary: "Read one of them.", answer: []any{ConsumerView{}, ProviderView{}}},
	{method: http.MethodDelete, path: PathReservations + "/{id}", summary: "Let go of a reservation that the caller made. It is gone when its providers have let go, too."},
	{method: http.MethodPost, path: PathReservations + "/{id}/ack", query: []string{"role!"}, summary: "Answer a hold (as provider), or report on a reservation (as requester). One about an older attempt changes nothing.",
		body: []any{ProviderAck{}, RequesterAck{}}},
	{method: http.MethodPost, path: PathRelay, summary: "Hand a sealed message to another cluster. It is kept in memory for a short time, and may get lost.",
		body: []any{RelayMessage{}}, accepted: true, refusals: map[int]string{http.StatusTooManyRequests: "The receiver's mailbox is full, or the caller over its rate."}},
	{method: http.MethodGet, path: PathRelay, query: []string{"watch!"}, summary: "Stream (application/x-ndjson) the messages for the caller as Event, one a line.", answer: []any{Event{}}},
}

// TestOpenAPI keeps the document equal to what the wire types say.
func TestOpenAPI(t *testing.T) {
	want, err := json.MarshalIndent(document(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	if *update {
		if err := os.WriteFile("openapi.json", want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(want, OpenAPI) {
		t.Fatal("openapi.json is not what the wire types say: run go generate ./broker/protocol")
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
			"description": "What clusters say to the broker. Who speaks is taken from the client certificate. Request bodies are bounded to 1 MiB, and a field that is not in this document is refused. Every request may be repeated.",
		},
		"paths": paths,
		"components": object{
			"schemas":         schemas,
			"securitySchemes": object{"certificate": object{"type": "mutualTLS", "description": "The client certificate that joining gives."}},
			"responses":       object{"Error": object{"description": "Refused; the body says why and what to do.", "content": object{"application/json": object{"schema": refusal}}}},
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
		schema := object{"type": "string", "enum": []any{RoleRequester, RoleProvider}}
		if name == "watch" {
			schema = object{"type": "boolean"}
		}
		parameters = append(parameters, object{"name": name, "in": "query", "required": required, "schema": schema})
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
	case o.answer != nil:
		responses["200"] = object{"description": "Done.", "content": schemas.content(o.answer)}
	case o.accepted:
		responses["202"] = object{"description": "Taken."}
	default:
		responses["204"] = object{"description": "Done."}
	}
	out["responses"] = responses
	return out
}

func statusText(status int) string {
	encoded, _ := json.Marshal(status)
	return string(encoded)
}

// schemas are the document's, by name.
type schemas map[string]any

// content describes alternatives, events apart: those come as lines.
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

// of is the schema of a type, by reference where it has fields.
func (s schemas) of(t reflect.Type) object {
	switch t {
	case reflect.TypeFor[resource.Quantity]():
		return object{"type": "string", "description": "A Kubernetes quantity, as 500m or 1Gi."}
	case reflect.TypeFor[metav1.Time]():
		return object{"type": "string", "format": "date-time"}
	case reflect.TypeFor[metav1.Duration]():
		return object{"type": "string", "description": "A duration, as 1h30m."}
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
		if name == "" {
			panic(t.String() + "." + field.Name + " has no name on the wire")
		}
		properties[name] = s.of(field.Type)
		if !strings.Contains(options, "omitempty") {
			required = append(required, name)
		}
	}
	schema["properties"] = properties
	if required != nil {
		schema["required"] = required
	}
	return reference
}
