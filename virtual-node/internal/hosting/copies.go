package hosting

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
)

const (
	copyOfConfigMap = "configmap"
	copyOfSecret    = "secret"
)

// provide sees to it that all a pod refers to is beside its guest, as it is at
// home. missing is a sentence, "" where nothing lacks.
func (h *Host) provide(ctx context.Context, home *corev1.Pod, refs guest.References) (missing string, err error) {
	h.mu.Lock()
	h.refs[home.UID] = refs
	h.mu.Unlock()
	if files := guest.Files(home, h.Namespace); files != nil {
		if err := h.putConfigMap(ctx, files); err != nil {
			return "", err
		}
	}
	if len(refs.ConfigMaps)+len(refs.Secrets) == 0 {
		return "", nil
	}
	source := h.sources.of(home.Namespace)
	if !source.synced() {
		return fmt.Sprintf("the ConfigMaps and Secrets of namespace %s cannot be read yet", home.Namespace), nil
	}
	for _, ref := range refs.ConfigMaps {
		object, found, err := source.configMaps.GetByKey(home.Namespace + "/" + ref.Name)
		switch {
		case err != nil:
			return "", err
		case found:
			if err := h.putConfigMap(ctx, h.copyOfConfigMap(object.(*corev1.ConfigMap))); err != nil {
				return "", err
			}
		case !ref.Optional:
			missing = fmt.Sprintf("configmap %q not found", ref.Name)
		}
	}
	for _, ref := range refs.Secrets {
		object, found, err := source.secrets.GetByKey(home.Namespace + "/" + ref.Name)
		switch {
		case err != nil:
			return "", err
		case found && object.(*corev1.Secret).Type == corev1.SecretTypeServiceAccountToken:
			if !ref.Optional {
				missing = fmt.Sprintf("secret %q is a token for this cluster's API server, which is given to no other cluster", ref.Name)
			}
		case found:
			if err := h.putSecret(ctx, h.copyOfSecret(object.(*corev1.Secret))); err != nil {
				return "", err
			}
		case !ref.Optional:
			missing = fmt.Sprintf("secret %q not found", ref.Name)
		}
	}
	return missing, nil
}

func (h *Host) copyMeta(namespace, name, kind string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: h.Namespace, Name: guest.CopyName(namespace, name),
		Labels:      map[string]string{guest.LabelCopy: kind, broker.LabelManagedBy: broker.ManagedBySpillway},
		Annotations: map[string]string{guest.AnnotationNamespace: namespace, guest.AnnotationName: name},
	}
}

func (h *Host) copyOfConfigMap(from *corev1.ConfigMap) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: h.copyMeta(from.Namespace, from.Name, copyOfConfigMap), Data: from.Data, BinaryData: from.BinaryData}
}

func (h *Host) copyOfSecret(from *corev1.Secret) *corev1.Secret {
	return &corev1.Secret{ObjectMeta: h.copyMeta(from.Namespace, from.Name, copyOfSecret), Type: from.Type, Data: from.Data}
}

func (h *Host) putConfigMap(ctx context.Context, want *corev1.ConfigMap) error {
	api := h.Remote.CoreV1().ConfigMaps(h.Namespace)
	object, found, err := h.configMaps.GetByKey(h.Namespace + "/" + want.Name)
	if err != nil {
		return err
	}
	if found {
		have := object.(*corev1.ConfigMap)
		if equality.Semantic.DeepEqual(have.Data, want.Data) && equality.Semantic.DeepEqual(have.BinaryData, want.BinaryData) {
			return nil
		}
		_, err = api.Update(ctx, want, metav1.UpdateOptions{})
		return inWords(err, "updating", "ConfigMap", want.Name)
	}
	_, err = api.Create(ctx, want, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil // the cache is behind; its news brings the pod here again
	}
	return inWords(err, "copying", "ConfigMap", want.Name)
}

func (h *Host) putSecret(ctx context.Context, want *corev1.Secret) error {
	api := h.Remote.CoreV1().Secrets(h.Namespace)
	object, found, err := h.secrets.GetByKey(h.Namespace + "/" + want.Name)
	if err != nil {
		return err
	}
	if found {
		have := object.(*corev1.Secret)
		switch {
		case have.Type != want.Type:
			// It cannot change: the next look makes it anew.
			return inWords(api.Delete(ctx, want.Name, metav1.DeleteOptions{}), "replacing", "Secret", want.Name)
		case equality.Semantic.DeepEqual(have.Data, want.Data):
			return nil
		}
		_, err = api.Update(ctx, want, metav1.UpdateOptions{})
		return inWords(err, "updating", "Secret", want.Name)
	}
	_, err = api.Create(ctx, want, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return inWords(err, "copying", "Secret", want.Name)
}

// inWords adds what was tried. The status of an API error stays legible.
func inWords(err error, doing, kind, name string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %s %s: %w", doing, kind, name, err)
}

func over(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// prune removes the copies that no pod of the node needs any more, and stops
// watching namespaces that have no pod here.
func (h *Host) prune(ctx context.Context) error {
	pods, err := h.pods.List(labels.Everything())
	if err != nil {
		return fmt.Errorf("listing pods: %w", err)
	}
	needed := map[string]bool{}
	namespaces := map[string]bool{}
	for _, pod := range pods {
		namespaces[pod.Namespace] = true
		if over(pod) {
			// It stays for its logs. Its copies would count against those to come.
			continue
		}
		h.mu.Lock()
		refs, known := h.refs[pod.UID]
		h.mu.Unlock()
		if !known {
			_, refs, _ = guest.Translate(pod, h.Namespace, h.DNS)
		}
		for _, ref := range slices.Concat(refs.ConfigMaps, refs.Secrets) {
			needed[guest.CopyName(pod.Namespace, ref.Name)] = true
		}
		if files := guest.Files(pod, h.Namespace); files != nil {
			needed[files.Name] = true
		}
	}
	h.sources.only(namespaces)
	var errs []error
	each := func(indexer cache.Indexer, remove func(name string) error) {
		for _, object := range indexer.List() {
			meta := object.(metaObject)
			if meta.GetLabels()[guest.LabelCopy] == "" || needed[meta.GetName()] || meta.GetDeletionTimestamp() != nil {
				continue
			}
			if err := remove(meta.GetName()); err != nil && !apierrors.IsNotFound(err) {
				errs = append(errs, fmt.Errorf("removing copy %s: %w", meta.GetName(), err))
			}
		}
	}
	each(h.configMaps, func(name string) error {
		return h.Remote.CoreV1().ConfigMaps(h.Namespace).Delete(ctx, name, metav1.DeleteOptions{})
	})
	each(h.secrets, func(name string) error {
		return h.Remote.CoreV1().Secrets(h.Namespace).Delete(ctx, name, metav1.DeleteOptions{})
	})
	return errors.Join(errs...)
}
