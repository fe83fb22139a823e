package controlplane

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/rest"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// Line is what kubectl get prints of an object of Spillway, as "Name=web, Owner=Deployment/web";
// with -o wide it has the other columns, too. The namespace is empty for a kind without.
func Line(ctx context.Context, config *rest.Config, wide bool, resource, namespace, name string) (string, error) {
	client, err := discovery.NewDiscoveryClientForConfig(config)
	if err != nil {
		return "", err
	}
	path := []string{"/apis", broker.GroupVersion.String()}
	if namespace != "" {
		path = append(path, "namespaces", namespace)
	}
	raw, err := client.RESTClient().Get().AbsPath(append(path, resource, name)...).
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").DoRaw(ctx)
	var table metav1.Table
	if err := errors.Join(err, json.Unmarshal(raw, &table)); err != nil {
		return "", err
	}
	if len(table.Rows) != 1 {
		return "", fmt.Errorf("%d lines", len(table.Rows))
	}
	var cells []string
	for i, column := range table.ColumnDefinitions {
		if column.Priority > 0 && !wide {
			continue
		}
		cell := ""
		if value := table.Rows[0].Cells[i]; value != nil {
			cell = fmt.Sprint(value)
		}
		cells = append(cells, column.Name+"="+cell)
	}
	return strings.Join(cells, ", "), nil
}
