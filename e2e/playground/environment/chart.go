package environment

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// Namespace of the charts' objects.
const Namespace = broker.SystemNamespace

// owner is the field manager of server-side apply.
const owner = client.FieldOwner("playground")

// chart is a rendered chart: Deployments apart from all other objects.
type chart struct {
	objects     []*unstructured.Unstructured
	deployments map[string]*appsv1.Deployment
}

// render renders a chart. Values are as after --set; secret ones are passed in a
// file below dir, so that no error message shows them.
func render(ctx context.Context, helm, dir, name string, values []string, secret string) (chart, error) {
	root, err := binaries.Root()
	if err != nil {
		return chart{}, err
	}
	home, err := os.MkdirTemp(dir, "helm-")
	if err != nil {
		return chart{}, err
	}
	defer os.RemoveAll(home)
	args := []string{"template", "spillway-" + name, filepath.Join(root, "charts", name), "--namespace", Namespace, "--include-crds"}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	if key, value, ok := strings.Cut(secret, "="); ok {
		file := filepath.Join(home, "secret")
		if err := os.WriteFile(file, []byte(value), 0o600); err != nil {
			return chart{}, err
		}
		args = append(args, "--set-file", key+"="+file)
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, helm, args...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		return chart{}, fmt.Errorf("rendering chart %s: %w: %s", name, err, problem.String())
	}
	return parse(&out)
}

func parse(text io.Reader) (chart, error) {
	c := chart{deployments: map[string]*appsv1.Deployment{}}
	decoder := yaml.NewYAMLOrJSONDecoder(text, 4096)
	for {
		object := &unstructured.Unstructured{}
		switch err := decoder.Decode(object); {
		case errors.Is(err, io.EOF):
			return c, nil
		case err != nil:
			return c, fmt.Errorf("reading a rendered chart: %w", err)
		case len(object.Object) == 0:
			continue
		}
		if object.GetKind() != "Deployment" {
			c.objects = append(c.objects, object)
			continue
		}
		deployment := &appsv1.Deployment{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, deployment); err != nil {
			return c, fmt.Errorf("reading Deployment %s: %w", object.GetName(), err)
		}
		c.deployments[deployment.Name] = deployment
	}
}

// first lists the kinds that others depend on, in the order of creation.
var first = []string{"Namespace", "CustomResourceDefinition", "ServiceAccount", "Secret", "ConfigMap"}

// apply applies all objects of the chart except its Deployments, which no kubelet
// here could run.
func (ch chart) apply(ctx context.Context, api client.Client) error {
	namespace := &unstructured.Unstructured{}
	namespace.SetAPIVersion("v1")
	namespace.SetKind("Namespace")
	namespace.SetName(Namespace)
	objects := append([]*unstructured.Unstructured{namespace}, ch.objects...)
	rank := func(o *unstructured.Unstructured) int {
		if i := slices.Index(first, o.GetKind()); i >= 0 {
			return i
		}
		return len(first)
	}
	slices.SortStableFunc(objects, func(a, b *unstructured.Unstructured) int { return rank(a) - rank(b) })
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for _, object := range objects {
		// A kind is served shortly after its CRD is created.
		err := retry(ctx, meta.IsNoMatchError, func() error {
			return api.Apply(ctx, client.ApplyConfigurationFromUnstructured(object.DeepCopy()), owner, client.ForceOwnership)
		})
		if err != nil {
			return fmt.Errorf("applying %s %s: %w", object.GetKind(), object.GetName(), err)
		}
	}
	return awaitKinds(ctx, api, objects)
}

// awaitKinds waits until the API server serves the kinds of all CRDs: programs that
// start before end with an error.
func awaitKinds(ctx context.Context, api client.Client, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		if object.GetKind() != "CustomResourceDefinition" {
			continue
		}
		group, _, _ := unstructured.NestedString(object.Object, "spec", "group")
		kind, _, _ := unstructured.NestedString(object.Object, "spec", "names", "kind")
		if err := retry(ctx, meta.IsNoMatchError, func() error {
			_, err := api.RESTMapper().RESTMapping(schema.GroupKind{Group: group, Kind: kind})
			return err
		}); err != nil {
			return fmt.Errorf("waiting for kind %s: %w", kind, err)
		}
	}
	return nil
}

// retry repeats an action while it fails with a temporary error.
func retry(ctx context.Context, passes func(error) bool, do func() error) error {
	for {
		err := do()
		if err == nil || !passes(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w, until %w", err, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// object returns a rendered object of the chart.
func (ch chart) object(kind, name string) *unstructured.Unstructured {
	for _, o := range ch.objects {
		if o.GetKind() == kind && o.GetName() == name {
			return o
		}
	}
	return nil
}
