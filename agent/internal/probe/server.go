package probe

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/agent/internal/health"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/scheduler-plugin/compatibility"
)

// Server reads the version of the API server, its clock, and which of Spillway's kinds it serves, which
// everyone may.
func Server(config *rest.Config, in *health.Installation) error {
	clocked := &clocked{}
	config = rest.CopyConfig(config)
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { clocked.next = next; return clocked })
	server, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return fmt.Errorf("connecting to the API server: %w", err)
	}
	minor, err := compatibility.Of(server)
	if err != nil {
		return err
	}
	in.Version, in.VersionProblem, in.ClockAhead = minor.String(), minor.Problem(), clocked.ahead
	resources, err := server.ServerResourcesForGroupVersion(broker.GroupVersion.String())
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if resources != nil {
		for _, resource := range resources.APIResources {
			if !strings.Contains(resource.Name, "/") && !slices.Contains(in.Kinds, resource.Kind) {
				in.Kinds = append(in.Kinds, resource.Kind)
			}
		}
	}
	if build, ok := debug.ReadBuildInfo(); ok && strings.HasPrefix(build.Main.Version, "v") && !strings.Contains(build.Main.Version, "-0.") {
		in.Plugin = strings.TrimPrefix(build.Main.Version, "v")
	}
	paths, err := server.OpenAPIV3().Paths()
	if err != nil {
		return nil // what is not known is not compared
	}
	if path := paths["apis/"+broker.GroupVersion.String()]; path != nil {
		if schema, err := path.Schema("application/json"); err == nil {
			in.LacksFields, _ = Lacks(schema)
		}
	}
	return nil
}

// clocked notes by how much the clock of the server is ahead of this machine's, as the last response says.
type clocked struct {
	next  http.RoundTripper
	ahead *time.Duration
}

func (c *clocked) RoundTrip(r *http.Request) (*http.Response, error) {
	sent := time.Now()
	response, err := c.next.RoundTrip(r)
	if err != nil {
		return response, err
	}
	if at, err := http.ParseTime(response.Header.Get("Date")); err == nil {
		// It is of a whole second, within the time that the request took.
		c.ahead = ptr.To(at.Add(500 * time.Millisecond).Sub(sent.Add(time.Since(sent) / 2)))
	}
	return response, nil
}

// kinds are those that the program knows.
var kinds = map[string]any{
	"BrokerConfig": broker.BrokerConfig{}, "ClusterAdvertisement": broker.ClusterAdvertisement{}, "ClusterRegistration": broker.ClusterRegistration{},
	"OverflowPolicy": broker.OverflowPolicy{}, "ProviderInstruction": broker.ProviderInstruction{}, "Reservation": broker.Reservation{}, "ReservationInstruction": broker.ReservationInstruction{},
}

// property is a part of an OpenAPI schema.
type property struct {
	Properties map[string]property     `json:"properties"`
	Items      *property               `json:"items"`
	Additional json.RawMessage         `json:"additionalProperties"`
	Kinds      []struct{ Kind string } `json:"x-kubernetes-group-version-kind"`
}

// Lacks returns the fields of Spillway's kinds that an OpenAPI document of the API server lacks: its CRDs
// are older than this program. Kinds that are not in it are not looked at.
func Lacks(document []byte) (fields []string, err error) {
	var served struct {
		Components struct {
			Schemas map[string]property `json:"schemas"`
		} `json:"components"`
	}
	if err := json.Unmarshal(document, &served); err != nil {
		return nil, errors.New("the API server's OpenAPI document cannot be read")
	}
	for _, schema := range served.Components.Schemas {
		for _, of := range schema.Kinds {
			if known := kinds[of.Kind]; known != nil {
				for _, name := range []string{"Spec", "Status"} {
					if field, has := reflect.TypeOf(known).FieldByName(name); has {
						fields = append(fields, lacks(of.Kind+"."+strings.ToLower(name), schema.Properties[strings.ToLower(name)], field.Type)...)
					}
				}
			}
		}
	}
	slices.Sort(fields)
	return fields, nil
}

// lacks compares a schema with a type of this project. Others' types are compared by their name only.
func lacks(path string, schema property, of reflect.Type) (fields []string) {
	for of.Kind() == reflect.Pointer || of.Kind() == reflect.Slice {
		if of.Kind() == reflect.Slice && schema.Items != nil {
			schema = *schema.Items
		}
		of = of.Elem()
	}
	if of.Kind() != reflect.Struct || of.PkgPath() != reflect.TypeFor[broker.Reservation]().PkgPath() {
		return nil
	}
	for field := range of.Fields() {
		name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
		switch inner, there := schema.Properties[name]; {
		case name == "" && field.Anonymous:
			fields = append(fields, lacks(path, schema, field.Type)...)
		case name == "" || name == "-":
		case !there:
			fields = append(fields, path+"."+name)
		default:
			fields = append(fields, lacks(path+"."+name, inner, field.Type)...)
		}
	}
	return fields
}
