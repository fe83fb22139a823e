package tenant

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/source"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/internal/watch"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
)

// ServiceAccount of a cluster in its namespace. The broker may create tokens of no other.
const ServiceAccount = "spillway-tenant"

// maxReservations is the maximum number of Reservations in a cluster's namespace, refused ones
// included: the quota of the BrokerConfig decides how many the broker takes. maxAdvertisements is
// that of ClusterAdvertisements, of which it has one: of concurrent creations of that, each counts
// until the quota is counted again.
const (
	maxReservations   = 5000
	maxAdvertisements = 10
)

// annotationRegistration of a namespace is the UID of the registration that it was made for. The
// namespace of a registration that is gone is not that of the next cluster with the ID.
const annotationRegistration = broker.Group + "/registration-uid"

const (
	// retryAfter is when it is looked again whether an earlier namespace is gone.
	retryAfter = 2 * time.Second
	// repairAfter is when it is looked again whether a namespace has all that is in it.
	repairAfter = 5 * time.Minute
)

// Tenants keeps the namespaces.
type Tenants struct {
	// Client reads registrations from a cache. Live reads and writes what is in the namespaces.
	Client, Live client.Client
	// Namespace of the broker's objects.
	Namespace string

	// made has the clusters whose namespace this process has found to be the broker's, with the UIDs
	// of their registrations.
	made sync.Map
}

// SetupWithManager adds the controller to a manager, whose leader runs it.
func (t *Tenants) SetupWithManager(mgr manager.Manager) error {
	err := ctrl.NewControllerManagedBy(mgr).Named("tenants").For(&broker.ClusterRegistration{}).
		WithEventFilter(watch.Namespace(t.Namespace)).WatchesRawSource(source.Func(t.existing)).Complete(watch.ByName(t.reconcile))
	if err != nil {
		return fmt.Errorf("adding the controller of the clusters' namespaces: %w", err)
	}
	return nil
}

// existing enqueues the clusters with a namespace: the registrations of some may have been deleted
// while no broker led.
func (t *Tenants) existing(ctx context.Context, queue workqueue.TypedRateLimitingInterface[ctrl.Request]) error {
	var namespaces corev1.NamespaceList
	if err := t.Live.List(ctx, &namespaces, client.HasLabels{objects.LabelTenant}); err != nil {
		return fmt.Errorf("listing the namespaces of clusters: %w", err)
	}
	for _, namespace := range namespaces.Items {
		if cluster := namespace.Labels[objects.LabelTenant]; namespace.Name == objects.Namespace(cluster) {
			queue.Add(ctrl.Request{NamespacedName: types.NamespacedName{Namespace: t.Namespace, Name: cluster}})
		}
	}
	return nil
}

// Admitted returns why a cluster may not use its namespace, nil if it may.
func (t *Tenants) Admitted(ctx context.Context, cluster string) error {
	approved, err := t.approved(ctx, cluster)
	if err != nil {
		return err
	}
	if approved == "" {
		return &protocol.Error{Code: protocol.CodeForbidden, Message: fmt.Sprintf("cluster %s is not approved: spec.approval of its ClusterRegistration in the hub must be Approved", cluster)}
	}
	if of, _ := t.made.Load(cluster); of != approved {
		return &protocol.Error{Code: protocol.CodeUnavailable, Message: fmt.Sprintf("the broker has not made namespace %s yet, or another one is in its place", objects.Namespace(cluster))}
	}
	return nil
}

// approved returns the UID of the registration of a cluster, empty if it is not approved.
func (t *Tenants) approved(ctx context.Context, cluster string) (types.UID, error) {
	var registration broker.ClusterRegistration
	if err := t.Client.Get(ctx, client.ObjectKey{Namespace: t.Namespace, Name: cluster}, &registration); apierrors.IsNotFound(err) {
		return "", nil
	} else if err != nil {
		return "", fmt.Errorf("reading the registration of %s: %w", cluster, err)
	}
	if !registration.DeletionTimestamp.IsZero() || registration.Spec.ClusterID != cluster || registration.Spec.Approval != broker.ApprovalApproved {
		return "", nil
	}
	return registration.UID, nil
}

// reconcile makes the namespace of a cluster, or removes it.
func (t *Tenants) reconcile(ctx context.Context, cluster string) (ctrl.Result, error) {
	registration, err := t.approved(ctx, cluster)
	if err != nil {
		return ctrl.Result{}, err
	}
	namespace := &corev1.Namespace{}
	err = t.Live.Get(ctx, client.ObjectKey{Name: objects.Namespace(cluster)}, namespace)
	missing := apierrors.IsNotFound(err)
	if err != nil && !missing {
		return ctrl.Result{}, fmt.Errorf("reading the namespace of %s: %w", cluster, err)
	}
	own := missing || namespace.Labels[objects.LabelTenant] == cluster
	valid := registration != "" && (missing || namespace.Annotations[annotationRegistration] == string(registration))
	if !own || !valid || !namespace.DeletionTimestamp.IsZero() {
		t.made.Delete(cluster)
	}
	switch {
	case !own:
		if registration != "" {
			log.FromContext(ctx).Error(nil, "The namespace of a cluster exists, and this broker has not made it: the cluster cannot use it", "namespace", namespace.Name)
		}
		return ctrl.Result{}, nil
	case registration == "" && (missing || !namespace.DeletionTimestamp.IsZero()):
		return ctrl.Result{}, nil
	case !missing && !namespace.DeletionTimestamp.IsZero():
		return ctrl.Result{RequeueAfter: retryAfter}, nil
	case !valid:
		return ctrl.Result{RequeueAfter: retryAfter}, t.remove(ctx, namespace)
	}
	if err := t.ensure(ctx, cluster, registration); err != nil {
		return ctrl.Result{}, err
	}
	t.made.Store(cluster, registration)
	return ctrl.Result{RequeueAfter: repairAfter}, nil
}

// remove ends the cluster's access at once, and then removes what it was to.
func (t *Tenants) remove(ctx context.Context, namespace *corev1.Namespace) error {
	binding := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: namespace.Name, Name: ServiceAccount}}
	for _, object := range []client.Object{binding, namespace} {
		if err := t.Live.Delete(ctx, object); client.IgnoreNotFound(err) != nil {
			return fmt.Errorf("removing namespace %s: %w", namespace.Name, err)
		}
	}
	return nil
}

// ensure makes a cluster's namespace and what is in it, and repairs that.
func (t *Tenants) ensure(ctx context.Context, cluster string, registration types.UID) error {
	meta := metav1.ObjectMeta{Namespace: objects.Namespace(cluster), Name: ServiceAccount}
	namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: meta.Namespace, Annotations: map[string]string{annotationRegistration: string(registration)}}}
	account, role := &corev1.ServiceAccount{ObjectMeta: meta}, &rbacv1.Role{ObjectMeta: meta}
	binding, quota := &rbacv1.RoleBinding{ObjectMeta: meta}, &corev1.ResourceQuota{ObjectMeta: meta}
	for _, object := range []client.Object{namespace, quota, account, role, binding} {
		_, err := controllerutil.CreateOrUpdate(ctx, t.Live, object, func() error {
			labels := object.GetLabels()
			if labels == nil {
				labels = map[string]string{}
			}
			labels[objects.LabelTenant], labels[broker.LabelManagedBy] = cluster, broker.ManagedBySpillway
			object.SetLabels(labels)
			role.Rules = rules()
			quota.Spec.Hard = corev1.ResourceList{
				corev1.ResourceName("count/reservations." + broker.Group):          *resource.NewQuantity(maxReservations, resource.DecimalSI),
				corev1.ResourceName("count/clusteradvertisements." + broker.Group): *resource.NewQuantity(maxAdvertisements, resource.DecimalSI),
			}
			binding.RoleRef = rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: ServiceAccount}
			binding.Subjects = []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: meta.Namespace, Name: ServiceAccount}}
			return nil
		})
		if err != nil {
			return fmt.Errorf("making the namespace of %s: %T: %w", cluster, object, err)
		}
	}
	return nil
}

// rules are what a cluster may do in its namespace. The broker writes statuses, and deletes.
func rules() []rbacv1.PolicyRule {
	return []rbacv1.PolicyRule{
		{APIGroups: []string{broker.Group}, Resources: []string{"clusteradvertisements", "reservations"}, Verbs: []string{"get", "list", "watch", "create", "patch"}},
		{APIGroups: []string{broker.Group}, Resources: []string{"providerinstructions"}, Verbs: []string{"get", "list", "watch", "patch"}},
	}
}
