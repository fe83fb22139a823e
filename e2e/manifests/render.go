package manifests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

// Chart renders one of the project's charts, as release spillway-<name> with its CRDs.
// Flags are --set and --set-file of helm template.
func Chart(ctx context.Context, name string, flags ...string) ([]*unstructured.Unstructured, error) {
	root, err := binaries.Root()
	if err != nil {
		return nil, err
	}
	text, err := Template(ctx, "spillway-"+name, filepath.Join(root, "charts", name), append(flags, "--include-crds")...)
	if err != nil {
		return nil, fmt.Errorf("rendering chart %s: %w", name, err)
	}
	var objects []*unstructured.Unstructured
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for {
		object := &unstructured.Unstructured{}
		switch err := decoder.Decode(object); {
		case errors.Is(err, io.EOF):
			return objects, nil
		case err != nil:
			return nil, fmt.Errorf("reading the rendered chart %s: %w", name, err)
		case len(object.Object) > 0:
			objects = append(objects, object)
		}
	}
}

// Template returns what helm template prints for a chart in a directory.
func Template(ctx context.Context, release, dir string, flags ...string) ([]byte, error) {
	program, err := binaries.Program(ctx, "render", nil)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, append([]string{release, dir, "--namespace", broker.SystemNamespace}, flags...)...)
	var out, problem bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problem
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, problem.String())
	}
	return out.Bytes(), nil
}
