package pods

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

// missingReference says why a pod waits for a ConfigMap or Secret: the reason and the
// note of its event; the zero value if it does not wait. A note alone does not
// distinguish two events of a pod: client-go records the second as a repetition of the
// first.
type missingReference struct{ reason, message string }

// copyReferences creates and updates the provider's copies of the ConfigMaps and
// Secrets that a pod refers to. missing is a required one that cannot be copied.
func (h *Handler) copyReferences(ctx context.Context, pod *corev1.Pod, refs translate.References) (missing missingReference, err error) {
	h.mu.Lock()
	h.state(pod.UID).refs = &refs
	h.mu.Unlock()
	if refs.DownwardFiles != nil {
		if err := h.configMaps.write(ctx, refs.DownwardFiles); err != nil {
			return missing, err
		}
	}
	if len(refs.ConfigMaps)+len(refs.Secrets) == 0 {
		return missing, nil
	}
	source := h.sources.get(pod.Namespace)
	if !source.synced() {
		return missingReference{reasonWaitingForConfig, fmt.Sprintf("the ConfigMaps and Secrets of namespace %s cannot be read yet", pod.Namespace)}, nil
	}
	for _, ref := range refs.ConfigMaps {
		object, found, err := source.configMaps.GetByKey(pod.Namespace + "/" + ref.Name)
		switch {
		case err != nil:
			return missing, err
		case found:
			from := object.(*corev1.ConfigMap)
			if err := h.configMaps.write(ctx, &corev1.ConfigMap{ObjectMeta: h.copyMeta(from, "configmap"), Data: from.Data, BinaryData: from.BinaryData}); err != nil {
				return missing, err
			}
		case !ref.Optional:
			missing = missingReference{reasonWaitingForConfig, fmt.Sprintf("configmap %q not found", ref.Name)}
		}
	}
	for _, ref := range refs.Secrets {
		object, found, err := source.secrets.GetByKey(pod.Namespace + "/" + ref.Name)
		switch {
		case err != nil:
			return missing, err
		case found && object.(*corev1.Secret).Type == corev1.SecretTypeServiceAccountToken:
			if !ref.Optional {
				missing = missingReference{reasonSecretNotCopied,
					fmt.Sprintf("secret %q is a ServiceAccount token of this cluster, which is not copied to other clusters", ref.Name)}
			}
		case found:
			from := object.(*corev1.Secret)
			if err := h.secrets.write(ctx, &corev1.Secret{ObjectMeta: h.copyMeta(from, "secret"), Type: from.Type, Data: from.Data}); err != nil {
				return missing, err
			}
		case !ref.Optional:
			missing = missingReference{reasonWaitingForConfig, fmt.Sprintf("secret %q not found", ref.Name)}
		}
	}
	return missing, nil
}

func (h *Handler) copyMeta(from metav1.Object, kind string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: h.GuestNamespace, Name: translate.CopyName(from.GetNamespace(), from.GetName()),
		Labels:      map[string]string{translate.LabelCopy: kind, broker.LabelManagedBy: broker.ManagedBySpillway},
		Annotations: map[string]string{translate.AnnotationNamespace: from.GetNamespace(), translate.AnnotationName: from.GetName()},
	}
}

// copies are the copies of one kind at the provider.
type copies[T metav1.Object] struct {
	kind   string
	client interface {
		Create(context.Context, T, metav1.CreateOptions) (T, error)
		Update(context.Context, T, metav1.UpdateOptions) (T, error)
		Delete(context.Context, string, metav1.DeleteOptions) error
	}
	cache cache.Indexer
	// compare reports whether two objects are equal, and whether an immutable field
	// differs.
	compare func(existing, desired T) (equal, immutable bool)
}

func compareConfigMaps(existing, desired *corev1.ConfigMap) (equal, immutable bool) {
	return equality.Semantic.DeepEqual(existing.Data, desired.Data) && equality.Semantic.DeepEqual(existing.BinaryData, desired.BinaryData), false
}

func compareSecrets(existing, desired *corev1.Secret) (equal, immutable bool) {
	return equality.Semantic.DeepEqual(existing.Data, desired.Data), existing.Type != desired.Type
}

// write creates or updates a copy. A copy that cannot be updated is deleted; its
// event requeues the pod, which creates it again.
func (c *copies[T]) write(ctx context.Context, desired T) error {
	object, found, err := c.cache.GetByKey(desired.GetNamespace() + "/" + desired.GetName())
	if err != nil {
		return err
	}
	verb := "creating"
	if !found {
		// AlreadyExists: the cache is stale; its next event requeues the pod.
		if _, err = c.client.Create(ctx, desired, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
			return nil
		}
	} else if equal, immutable := c.compare(object.(T), desired); immutable {
		verb, err = "deleting", c.client.Delete(ctx, desired.GetName(), metav1.DeleteOptions{})
	} else if !equal {
		verb = "updating"
		_, err = c.client.Update(ctx, desired, metav1.UpdateOptions{})
	}
	if err != nil {
		return fmt.Errorf("%s %s %s: %w", verb, c.kind, desired.GetName(), err)
	}
	return nil
}

// prune deletes the copies that are not needed.
func (c *copies[T]) prune(ctx context.Context, needed map[string]bool) error {
	var errs []error
	for _, object := range c.cache.List() {
		found := object.(T)
		if found.GetLabels()[translate.LabelCopy] == "" || needed[found.GetName()] || found.GetDeletionTimestamp() != nil {
			continue
		}
		if err := c.client.Delete(ctx, found.GetName(), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("deleting %s %s: %w", c.kind, found.GetName(), err))
		}
	}
	return errors.Join(errs...)
}

// prune deletes the copies that no pod of the node refers to, and stops the caches
// of namespaces without pods.
func (h *Handler) prune(ctx context.Context) error {
	needed := map[string]bool{}
	namespaces := map[string]bool{}
	for _, object := range h.pods.List() {
		pod := object.(*encodedPod)
		namespaces[pod.Namespace] = true
		if pod.terminal {
			// The guest is kept for its logs, without what counts against the quota.
			continue
		}
		refs := h.references(pod)
		for _, ref := range slices.Concat(refs.ConfigMaps, refs.Secrets) {
			needed[translate.CopyName(pod.Namespace, ref.Name)] = true
		}
		if refs.DownwardFiles != nil {
			needed[refs.DownwardFiles.Name] = true
		}
	}
	h.sources.retain(namespaces)
	return errors.Join(h.configMaps.prune(ctx, needed), h.secrets.prune(ctx, needed))
}

// references returns what a pod refers to.
func (h *Handler) references(pod *encodedPod) translate.References {
	h.mu.Lock()
	defer h.mu.Unlock()
	if state := h.states[pod.UID]; state != nil && state.refs != nil {
		return *state.refs
	}
	_, refs, _ := translate.Pod(pod.decode(), h.GuestNamespace, h.DNS)
	return refs
}
