package manifest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/whatif"
)

// maxSize is the size of a manifest that is read, in bytes.
const maxSize = 16 << 20

// libraries is what those that read YAML write before what is wrong.
var libraries = strings.NewReplacer("error converting YAML to JSON: ", "", "yaml: ", "")

// Read reads the objects of files, of which "-" is standard input.
func Read(files []string, stdin io.Reader) (objects []*unstructured.Unstructured, err error) {
	for _, file := range files {
		in := stdin
		if file != "-" {
			opened, err := os.Open(file)
			if err != nil {
				return nil, fmt.Errorf("reading the manifest: %w", err)
			}
			defer opened.Close()
			in = opened
		}
		content, err := io.ReadAll(io.LimitReader(in, maxSize+1))
		if err != nil {
			return nil, fmt.Errorf("reading the manifest %s: %w", file, err)
		}
		if len(content) > maxSize {
			return nil, fmt.Errorf("the manifest %s is larger than %d MiB", file, maxSize>>20)
		}
		decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(content), 4096)
		for n := 1; ; n++ {
			var raw runtime.RawExtension
			err := decoder.Decode(&raw)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				err = fmt.Errorf("is neither YAML nor JSON: %s", libraries.Replace(err.Error()))
			}
			object := &unstructured.Unstructured{}
			if text := bytes.TrimSpace(raw.Raw); err == nil && (len(text) == 0 || string(text) == "null") {
				continue
			}
			if err == nil && object.UnmarshalJSON(raw.Raw) != nil {
				err = errors.New("is no Kubernetes object: each has apiVersion, kind and metadata")
			}
			if err == nil && object.IsList() {
				err = object.EachListItem(func(item runtime.Object) error {
					objects = append(objects, item.(*unstructured.Unstructured))
					return nil
				})
			} else {
				objects = append(objects, object)
			}
			if err != nil {
				return nil, fmt.Errorf("the manifest %s: document %d %w", file, n, err)
			}
		}
	}
	return objects, nil
}

// Admit lets the API server complete a pod of the workload, as if it were created: by LimitRanges, the
// PriorityClass and webhooks. If it does not, a note says why.
func Admit(ctx context.Context, c client.Client, w *whatif.Workload) (notes []string) {
	pod := &corev1.Pod{ObjectMeta: *w.Pod.ObjectMeta.DeepCopy(), Spec: *w.Pod.Spec.DeepCopy()}
	pod.Name, pod.GenerateName, pod.OwnerReferences, pod.ResourceVersion = "", "what-if-", nil, ""
	err := c.Create(ctx, pod, client.DryRunAll)
	if err == nil {
		w.Pod.Spec, w.Pod.Labels, w.Pod.Annotations = pod.Spec, pod.Labels, pod.Annotations
		return nil
	}
	notes = append(notes, fmt.Sprintf("Of the pods of %s it is not known what the API server adds, such as by LimitRanges: %s", w.Object, err))
	if class := w.Pod.Spec.PriorityClassName; class != "" && w.Pod.Spec.Priority == nil {
		priority := &schedulingv1.PriorityClass{}
		if err := c.Get(ctx, client.ObjectKey{Name: class}, priority); err != nil {
			return append(notes, fmt.Sprintf("The priority of %s is taken as 0: %s", w.Object, err))
		}
		w.Pod.Spec.Priority = &priority.Value
	}
	return notes
}
