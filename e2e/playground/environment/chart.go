package environment

import (
	"context"
	"fmt"
	"os"

	appsv1 "k8s.io/api/apps/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/manifests"
)

// Namespace of the charts' objects.
const Namespace = broker.SystemNamespace

// chart is a rendered chart: Deployments, which no kubelet here could run, apart from all
// other objects.
type chart struct {
	objects     []*unstructured.Unstructured
	deployments map[string]*appsv1.Deployment
}

// render renders a chart. Values are as after --set; the value of secretKey is passed in a
// file below dir, so that no error message shows it.
func render(ctx context.Context, dir, name string, values []string, secretKey, secret string) (chart, error) {
	var flags []string
	for _, v := range values {
		flags = append(flags, "--set", v)
	}
	if secretKey != "" {
		file, err := os.CreateTemp(dir, "secret-")
		if err != nil {
			return chart{}, err
		}
		defer os.Remove(file.Name())
		if err := os.WriteFile(file.Name(), []byte(secret), 0o600); err != nil {
			return chart{}, err
		}
		flags = append(flags, "--set-file", secretKey+"="+file.Name())
	}
	objects, err := manifests.Chart(ctx, name, flags...)
	if err != nil {
		return chart{}, err
	}
	c := chart{deployments: map[string]*appsv1.Deployment{}}
	for _, object := range objects {
		if object.GetKind() != "Deployment" {
			c.objects = append(c.objects, object)
			continue
		}
		deployment := &appsv1.Deployment{}
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, deployment); err != nil {
			return chart{}, fmt.Errorf("reading Deployment %s: %w", object.GetName(), err)
		}
		c.deployments[deployment.Name] = deployment
	}
	return c, nil
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
