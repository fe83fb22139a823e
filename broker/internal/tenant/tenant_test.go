package tenant

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	crconfig "sigs.k8s.io/controller-runtime/pkg/config"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/yaml"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	controlplane.Main(m)
}

// hub has the controller, with the permissions of the chart.
type hub struct {
	client.Client
	*testing.T
	// config is the API server's admin's, broker the broker's.
	config, broker *rest.Config
	tenants        *Tenants
	stop           func()
}

func start(t *testing.T) *hub {
	h := &hub{T: t, config: controlplane.Start(t)}
	controlplane.StartControllers(t, h.config, "resourcequota-controller")
	h.Client = h.as(h.config)
	expect.NoError(t, h.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: broker.SystemNamespace}}))
	h.broker = h.limited()
	h.run()
	return h
}

// run runs the controller until stop, or the end of the test.
func (h *hub) run() {
	h.Helper()
	mgr, err := ctrl.NewManager(h.broker, ctrl.Options{
		Scheme: h.Scheme(), Metrics: metricsserver.Options{BindAddress: "0"}, Cache: cache.Options{DefaultNamespaces: map[string]cache.Config{broker.SystemNamespace: {}}},
		Controller: crconfig.Controller{SkipNameValidation: ptr.To(true), UsePriorityQueue: ptr.To(false)},
	})
	expect.NoError(h, err)
	h.tenants = &Tenants{Client: mgr.GetClient(), Live: h.as(h.broker), Namespace: broker.SystemNamespace}
	expect.NoError(h, h.tenants.SetupWithManager(mgr))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- mgr.Start(ctx) }()
	h.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			h.Errorf("running the controller: %v", err)
		}
	})
	h.Cleanup(h.stop)
}

func (h *hub) as(config *rest.Config) client.Client {
	h.Helper()
	scheme := runtime.NewScheme()
	expect.NoError(h, errors.Join(clientgoscheme.AddToScheme(scheme), broker.AddToScheme(scheme)))
	c, err := client.New(config, client.Options{Scheme: scheme})
	expect.NoError(h, err)
	return c
}

// limited is the broker's access to the API server: it may give no more than it has.
func (h *hub) limited() *rest.Config {
	const name = "spillway-broker"
	root, err := binaries.Root()
	expect.NoError(h, err)
	content, err := os.ReadFile(filepath.Join(root, "charts/broker/templates/namespaces.yaml"))
	expect.NoError(h, err)
	_, after, _ := strings.Cut(string(content), "\nrules:\n")
	text, _, _ := strings.Cut(after, "\n---")
	var rules []rbacv1.PolicyRule
	expect.NoError(h, yaml.UnmarshalStrict([]byte(text), &rules))
	// Those in its own namespace are of another role.
	rules = append(rules, rbacv1.PolicyRule{APIGroups: []string{broker.Group}, Resources: []string{"clusterregistrations"}, Verbs: []string{"get", "list", "watch", "create", "update"}})
	expect.NoError(h, h.Create(h.Context(), &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}, Rules: rules}))
	expect.NoError(h, h.Create(h.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}},
	}))
	config := rest.CopyConfig(h.config)
	config.Impersonate.UserName = name
	return config
}

// access is what a cluster may do, with the kubeconfig that the command prints.
func (h *hub) access(cluster string) client.Client {
	h.Helper()
	expect.NoError(h, Approve(h.Context(), h.as(h.broker), broker.SystemNamespace, cluster))
	kubeconfig, err := Kubeconfig(h.Context(), h.as(h.broker), h.broker, "", cluster, time.Hour)
	expect.NoError(h, err)
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	expect.NoError(h, err)
	loaded, err := clientcmd.Load(kubeconfig)
	expect.NoError(h, err)
	if namespace := loaded.Contexts[loaded.CurrentContext].Namespace; namespace != objects.Namespace(cluster) {
		h.Errorf("the kubeconfig of %s is for namespace %s", cluster, namespace)
	}
	return h.as(config)
}

func reservationOf(cluster, name string) *broker.Reservation {
	total := broker.FromList(expect.Resources("cpu", "1"))
	return &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: objects.Namespace(cluster), Name: name}, Spec: broker.ReservationSpec{RequestedResources: &total}}
}

func advertisementOf(namespace, name string) *broker.ClusterAdvertisement {
	return &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: broker.ClusterAdvertisementSpec{ClusterID: name, Timestamp: metav1.Now()}}
}

// TestAccess: a cluster reads and writes in its namespace, and does nothing else: not in that of
// another cluster, not in the broker's, and no status, until its approval ends.
func TestAccess(t *testing.T) {
	h := start(t)
	ctx := t.Context()
	rome, paris := h.access("rome"), h.access("paris")
	expect.Eventually(t, "rome to write in its namespace", func() (bool, string) {
		err := rome.Create(ctx, reservationOf("rome", "own"))
		return err == nil, fmt.Sprint(err)
	})
	expect.Eventually(t, "paris to write in its namespace", func() (bool, string) {
		err := paris.Create(ctx, advertisementOf(objects.Namespace("paris"), "paris"))
		return err == nil, fmt.Sprint(err)
	})
	expect.NoError(t, rome.List(ctx, &broker.ReservationList{}, client.InNamespace(objects.Namespace("rome"))))
	annotated := client.RawPatch("application/merge-patch+json", []byte(`{"metadata":{"annotations":{"a":"b"}}}`))
	expect.NoError(t, rome.Patch(ctx, reservationOf("rome", "own"), annotated))
	own := reservationOf("rome", "own")
	status := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"phase":"Active"}}`))
	hold := client.RawPatch("application/merge-patch+json", []byte(`{"status":{"active":true}}`))
	for what, err := range map[string]error{
		"list the Reservations of another cluster":  rome.List(ctx, &broker.ReservationList{}, client.InNamespace(objects.Namespace("paris"))),
		"list all Reservations":                     rome.List(ctx, &broker.ReservationList{}),
		"read the advertisement of another cluster": rome.Get(ctx, client.ObjectKey{Namespace: objects.Namespace("paris"), Name: "paris"}, &broker.ClusterAdvertisement{}),
		"write in the namespace of another cluster": rome.Create(ctx, reservationOf("paris", "forged")),
		"change an object of another cluster":       rome.Patch(ctx, advertisementOf(objects.Namespace("paris"), "paris"), annotated),
		"advertise in the broker's namespace":       rome.Create(ctx, advertisementOf(broker.SystemNamespace, "rome")),
		"read the ledgers":                          rome.List(ctx, &broker.ClusterAdvertisementList{}, client.InNamespace(broker.SystemNamespace)),
		"write the status of its Reservation":       rome.Status().Patch(ctx, own, status),
		"write the status of an advertisement":      paris.Status().Patch(ctx, advertisementOf(objects.Namespace("paris"), "paris"), hold),
		"create an instruction":                     rome.Create(ctx, &broker.ProviderInstruction{ObjectMeta: own.ObjectMeta}),
		"delete its Reservation":                    rome.Delete(ctx, own),
		"approve a cluster":                         rome.Create(ctx, &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "oslo"}, Spec: broker.ClusterRegistrationSpec{ClusterID: "oslo"}}),
		"read Secrets":                              rome.List(ctx, &corev1.SecretList{}, client.InNamespace(objects.Namespace("rome"))),
		"read the broker's Secrets":                 rome.List(ctx, &corev1.SecretList{}, client.InNamespace(broker.SystemNamespace)),
		"give itself permissions":                   rome.Create(ctx, &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Namespace: objects.Namespace("rome"), Name: "more"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "admin"}}),
		"run a pod":                                 rome.Create(ctx, &corev1.Pod{ObjectMeta: own.ObjectMeta}),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("rome can %s: %v", what, err)
		}
	}
	expect.Eventually(t, "rome to have as many advertisements as it may", func() (bool, string) {
		err := rome.Create(ctx, &broker.ClusterAdvertisement{ObjectMeta: metav1.ObjectMeta{Namespace: objects.Namespace("rome"), GenerateName: "more-"}, Spec: advertisementOf("", "rome").Spec})
		return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"), fmt.Sprint(err)
	})
	expect.NoError(t, h.tenants.Admitted(ctx, "rome"))
	expect.NoError(t, h.tenants.Admitted(ctx, "paris"))

	revoked := &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "rome"}}
	expect.NoError(t, h.Patch(ctx, revoked, client.RawPatch("application/merge-patch+json", []byte(`{"spec":{"approval":"Revoked"}}`))))
	h.ended("rome", rome)
	if err := Approve(ctx, h.Client, broker.SystemNamespace, "rome"); err == nil || !strings.Contains(err.Error(), "revoked") {
		t.Errorf("approving a revoked cluster: %v", err)
	}
	expect.NoError(t, h.Delete(ctx, &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "paris"}}))
	h.ended("paris", paris)
}

// ended waits until a cluster has no access any more, and its namespace ends.
func (h *hub) ended(cluster string, access client.Client) {
	h.Helper()
	expect.Eventually(h, "the access of "+cluster+" to end", func() (bool, string) {
		err := access.List(h.Context(), &broker.ReservationList{}, client.InNamespace(objects.Namespace(cluster)))
		// Its tokens end with the ServiceAccount.
		return apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err), fmt.Sprint(err)
	})
	expect.Eventually(h, "the namespace of "+cluster+" to end", func() (bool, string) {
		namespace := &corev1.Namespace{}
		err := h.Get(h.Context(), client.ObjectKey{Name: objects.Namespace(cluster)}, namespace)
		return apierrors.IsNotFound(err) || !namespace.DeletionTimestamp.IsZero(), fmt.Sprint(err)
	})
	if err := h.tenants.Admitted(h.Context(), cluster); !protocol.HasCode(err, protocol.CodeForbidden) {
		h.Errorf("%s is admitted: %v", cluster, err)
	}
}

// TestDeletedWithoutLeader: access that was given with a registration ends with it, also if no broker
// led when it was deleted, and is none of the next cluster with the ID.
func TestDeletedWithoutLeader(t *testing.T) {
	h := start(t)
	ctx := t.Context()
	access := map[string]client.Client{"rome": h.access("rome"), "paris": h.access("paris")}
	before := map[string]types.UID{}
	for cluster, as := range access {
		expect.Eventually(t, cluster+" to have access", func() (bool, string) {
			err := as.List(ctx, &broker.ReservationList{}, client.InNamespace(objects.Namespace(cluster)))
			return err == nil, fmt.Sprint(err)
		})
		namespace := &corev1.Namespace{}
		expect.NoError(t, h.Get(ctx, client.ObjectKey{Name: objects.Namespace(cluster)}, namespace))
		before[cluster] = namespace.UID
	}
	h.stop()
	for cluster := range access {
		expect.NoError(t, h.Delete(ctx, &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: cluster}}))
	}
	expect.NoError(t, Approve(ctx, h.Client, broker.SystemNamespace, "paris"))
	h.run()
	h.ended("rome", access["rome"])
	expect.Eventually(t, "the namespace of paris to end", func() (bool, string) {
		namespace := &corev1.Namespace{}
		err := h.Get(ctx, client.ObjectKey{Name: objects.Namespace("paris")}, namespace)
		return apierrors.IsNotFound(err) || namespace.UID != before["paris"] || !namespace.DeletionTimestamp.IsZero(), fmt.Sprint(err)
	})
	if err := h.tenants.Admitted(ctx, "paris"); err != nil && !protocol.HasCode(err, protocol.CodeUnavailable) {
		t.Errorf("paris is approved: %v", err)
	}
}

// TestOfSomebodyElse: a namespace that exists is not the cluster's, and stays.
func TestOfSomebodyElse(t *testing.T) {
	h := start(t)
	ctx := t.Context()
	expect.NoError(t, h.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: objects.Namespace("rome")}}))
	expect.NoError(t, Approve(ctx, h.Client, broker.SystemNamespace, "rome"))
	expect.NoError(t, Approve(ctx, h.Client, broker.SystemNamespace, "paris"))
	binding := &rbacv1.RoleBinding{}
	expect.Eventually(t, "the namespace of paris", func() (bool, string) {
		err := h.Get(ctx, client.ObjectKey{Namespace: objects.Namespace("paris"), Name: ServiceAccount}, binding)
		return err == nil, fmt.Sprint(err)
	})
	if err := h.Get(ctx, client.ObjectKey{Namespace: objects.Namespace("rome"), Name: ServiceAccount}, binding); !apierrors.IsNotFound(err) {
		t.Errorf("rome has access to a namespace of somebody else: %v", err)
	}
	if err := h.tenants.Admitted(ctx, "rome"); !protocol.HasCode(err, protocol.CodeUnavailable) {
		t.Errorf("what somebody else writes there is rome's: %v", err)
	}
	expect.NoError(t, h.Delete(ctx, &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "rome"}}))
	expect.NoError(t, h.Delete(ctx, &broker.ClusterRegistration{ObjectMeta: metav1.ObjectMeta{Namespace: broker.SystemNamespace, Name: "paris"}}))
	expect.Eventually(t, "the namespace of paris to end", func() (bool, string) {
		namespace := &corev1.Namespace{}
		err := h.Get(ctx, client.ObjectKey{Name: objects.Namespace("paris")}, namespace)
		return apierrors.IsNotFound(err) || !namespace.DeletionTimestamp.IsZero(), fmt.Sprint(err)
	})
	namespace := &corev1.Namespace{}
	if err := h.Get(ctx, client.ObjectKey{Name: objects.Namespace("rome")}, namespace); err != nil || !namespace.DeletionTimestamp.IsZero() {
		t.Errorf("the namespace of somebody else: %+v, %v", namespace, err)
	}
}
