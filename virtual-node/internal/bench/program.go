package main

import (
	"context"
	"fmt"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/virtual-node/internal/controller"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

const (
	provider        = "paris"
	nodeName        = "spillway-paris"
	configNamespace = "spillway-virtual-nodes"
	podNamespace    = "crowd"
	guestNamespace  = "spillway-guests-rome"
)

// startController runs virtual-node's controller with one virtual node, as the program
// does, and returns when that is Ready.
func startController(ctx context.Context, api *cluster.Cluster) (stop func() error, err error) {
	config := controller.HomeConfig(api.Admin)
	secret, err := prepare(ctx, api)
	if err != nil {
		return nil, err
	}
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:  clientgoscheme.Scheme,
		Cache:   cache.Options{ByObject: map[client.Object]cache.ByObject{&corev1.Secret{}: {Namespaces: map[string]cache.Config{configNamespace: {}}}}},
		Metrics: metricsserver.Options{BindAddress: "0"},
	})
	if err != nil {
		return nil, err
	}
	set, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	if err := controller.New(controller.Options{
		Namespace: configNamespace, Client: set, Recorder: mgr.GetEventRecorder("spillway-virtual-node"),
		Address: "127.0.0.1", Clock: clock.RealClock{}, Log: logr.Discard(),
	}).SetupWithManager(mgr); err != nil {
		return nil, err
	}
	running, cancel := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() { stopped <- mgr.Start(running) }()
	stop = func() error {
		cancel()
		return <-stopped
	}
	if _, err := api.Set.CoreV1().Secrets(configNamespace).Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		return stop, err
	}
	err = wait.PollUntilContextTimeout(ctx, 100*time.Millisecond, expect.Deadline, true, func(ctx context.Context) (bool, error) {
		node, err := api.Set.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		if err != nil {
			return false, nil
		}
		for _, c := range node.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				return true, nil
			}
		}
		return false, nil
	})
	if err != nil {
		return stop, fmt.Errorf("waiting for Node %s: %w", nodeName, err)
	}
	return stop, nil
}

// prepare creates what the chart and the agents would, and returns the Secret of the
// virtual node.
func prepare(ctx context.Context, api *cluster.Cluster) (*corev1.Secret, error) {
	core := api.Set.CoreV1()
	for _, namespace := range []string{configNamespace, podNamespace, guestNamespace} {
		if _, err := core.Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace}}, metav1.CreateOptions{}); err != nil {
			return nil, err
		}
		if _, err := core.ServiceAccounts(namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}); err != nil {
			return nil, err
		}
	}
	if _, err := api.Set.SchedulingV1().PriorityClasses().Create(ctx, &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: "spillway-guest"}, PreemptionPolicy: ptr.To(corev1.PreemptNever),
	}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	if _, err := api.Set.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "bench"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: guestNamespace, Name: "default"}},
	}, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	token, err := core.ServiceAccounts(guestNamespace).CreateToken(ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	return nodeconfig.Config{
		Provider:   provider,
		Connection: nodeconfig.Connection{Endpoint: api.Endpoint, CA: api.CA.PEM, Namespace: guestNamespace, Token: token.Status.Token, Expires: token.Status.ExpirationTimestamp.Time},
		Capacity:   nodeconfig.Capacity{Resources: expect.Resources("cpu", "100k", "memory", "100Ti", "pods", "100k"), Namespaces: []string{podNamespace}},
	}.Secret(configNamespace)
}
