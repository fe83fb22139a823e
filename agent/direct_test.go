package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// TestDirectWithBroker runs two agents with driver direct and the real broker: from a
// Reservation to a virtual node with a valid token, and back to nothing. The
// virtual-node program and the clusters' controllers are simulated.
func TestDirectWithBroker(t *testing.T) {
	ctx := t.Context()
	hubConfig, romeConfig, parisConfig := controlplane.Start(t), controlplane.Start(t), controlplane.Start(t)
	hub, rome, paris := newClient(t, hubConfig), newClient(t, romeConfig), newClient(t, parisConfig)
	server, program := build(t, "broker"), build(t, "agent")
	address := freeAddress(t)
	ended := start(t, server, hubConfig, "--listen="+address, "--tls-san=127.0.0.1", "--health-probe-bind-address="+freeAddress(t))
	var ca corev1.ConfigMap
	var token corev1.Secret
	eventually(t, ended, "the broker has a CA and a token", func() error {
		return errors.Join(hub.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-broker-ca"}, &ca),
			hub.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-join-token"}, &token))
	})
	tokenFile := filepath.Join(t.TempDir(), "token")
	expect.NoError(t, os.WriteFile(tokenFile, token.Data["token"], 0o600))
	prepareProvider(t, paris)
	simulating, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { simulateControllers(simulating, t, rome, paris) })
	t.Cleanup(func() { stop(); running.Wait() })

	agent := func(config *rest.Config, id string, lending bool) {
		start(t, program, config, "--broker-transport=http", "--broker-url=https://"+address, "--broker-ca-hash="+ca.Data["caHash"], "--join-token-file="+tokenFile,
			"--cluster-id="+id, "--health-probe-bind-address="+freeAddress(t), "--api-server-endpoint="+config.Host, fmt.Sprintf("--lend-enabled=%t", lending),
			"--driver=direct", "--hold=none", "--peering-idle-time=2s", "--advertisement-requeue-interval=1s")
	}
	agent(romeConfig, "rome", false)
	agent(parisConfig, "paris", true)
	expect.NoError(t, rome.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}))
	reservation := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "ahead"}, Spec: broker.ReservationSpec{
		PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(expect.Resources("cpu", "500m"))}},
	}}
	expect.NoError(t, rome.Create(ctx, reservation))
	begun := time.Now()
	eventually(t, ended, "the reservation is ready", func() error {
		if err := rome.Get(ctx, client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(reservation.Status.Conditions, broker.ConditionVirtualNodeReady) {
			return fmt.Errorf("have %+v", reservation.Status.Conditions)
		}
		return nil
	})
	t.Logf("reservation to virtual node, cold: %s", time.Since(begun).Round(time.Millisecond))

	var quota corev1.ResourceQuota
	expect.NoError(t, paris.Get(ctx, client.ObjectKey{Namespace: "spillway-guests-rome", Name: "spillway-guests"}, &quota))
	if cpu := quota.Status.Hard[corev1.ResourceRequestsCPU]; cpu.String() != "1" {
		t.Errorf("the quota of rome's guests is %v", quota.Status.Hard)
	}
	var secret corev1.Secret
	expect.NoError(t, rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: nodeconfig.SecretName("paris")}, &secret))
	connection, err := nodeconfig.FromSecret(&secret)
	expect.NoError(t, err)
	access := &rest.Config{Host: connection.Connection.Endpoint, BearerToken: connection.Connection.Token, TLSClientConfig: rest.TLSClientConfig{CAData: connection.Connection.CA}}
	guests := newClient(t, access)
	expect.NoError(t, guests.List(ctx, &corev1.PodList{}, client.InNamespace(connection.Connection.Namespace)))

	expect.NoError(t, rome.Delete(ctx, reservation))
	id := protocol.ReservationID("rome", reservation.UID)
	eventually(t, ended, "everything is removed", func() error {
		var left []string
		for what, get := range map[string]error{
			"reservation":      rome.Get(ctx, client.ObjectKeyFromObject(reservation), &broker.Reservation{}),
			"peering":          rome.Get(ctx, client.ObjectKeyFromObject(&secret), &corev1.Secret{}),
			"virtual node":     rome.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &corev1.Node{}),
			"namespace access": rome.Get(ctx, client.ObjectKey{Namespace: "shop", Name: "spillway-virtual-node"}, &rbacv1.RoleBinding{}),
			"guest namespace":  paris.Get(ctx, client.ObjectKey{Name: "spillway-guests-rome"}, &corev1.Namespace{}),
			"hold":             paris.Get(ctx, client.ObjectKey{Namespace: "default", Name: id}, &broker.ProviderInstruction{}),
		} {
			if !apierrors.IsNotFound(get) {
				left = append(left, fmt.Sprintf("%s (%v)", what, get))
			}
		}
		if len(left) > 0 {
			slices.Sort(left)
			return fmt.Errorf("left: %v", left)
		}
		return nil
	})
}

// prepareProvider creates a node with free capacity, and the chart's role and PriorityClass of guests.
func prepareProvider(t *testing.T, paris client.Client) {
	t.Helper()
	ctx := t.Context()
	capacity := expect.Resources("cpu", "4", "memory", "8Gi", "pods", "110")
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "big", Labels: map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"}}}
	expect.NoError(t, paris.Create(ctx, node))
	node.Status = corev1.NodeStatus{Capacity: capacity, Allocatable: capacity, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	expect.NoError(t, paris.Status().Update(ctx, node))
	// New nodes are tainted until the node lifecycle controller, which does not run.
	node.Spec.Taints = nil
	expect.NoError(t, paris.Update(ctx, node))
	createPriorityClass(t, paris)
	expect.NoError(t, paris.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "spillway-direct-guest"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "create"}},
	}}))
}

// simulateControllers simulates virtual-node in the consumer's cluster, and the quota
// and namespace controllers in the provider's.
func simulateControllers(ctx context.Context, t *testing.T, rome, paris client.Client) {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		err := errors.Join(simulateVirtualNode(ctx, rome), simulateQuotas(ctx, paris), simulateNamespaces(ctx, paris))
		if err != nil && ctx.Err() == nil {
			t.Logf("simulating: %v", err)
		}
	}, 50*time.Millisecond)
}

func simulateVirtualNode(ctx context.Context, rome client.Client) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris", Labels: map[string]string{
		broker.LabelProvider: "paris", broker.LabelNodeType: broker.NodeTypeVirtual, broker.LabelManagedBy: broker.ManagedBySpillway,
	}}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: "paris", Effect: corev1.TaintEffectNoSchedule}}}}
	var secret corev1.Secret
	err := rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: nodeconfig.SecretName("paris")}, &secret)
	config, unreadable := nodeconfig.FromSecret(&secret)
	if apierrors.IsNotFound(err) || err == nil && (unreadable != nil || config.Terminating) {
		return client.IgnoreNotFound(rome.Delete(ctx, node))
	}
	if err != nil {
		return err
	}
	if err := rome.Get(ctx, client.ObjectKeyFromObject(node), node); apierrors.IsNotFound(err) {
		err = rome.Create(ctx, node)
		if err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key != broker.TaintOverflow })
	if err := rome.Update(ctx, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	node.Status.Capacity, node.Status.Allocatable = config.Capacity.Resources, config.Capacity.Resources
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return client.IgnoreNotFound(rome.Status().Update(ctx, node))
}

func simulateQuotas(ctx context.Context, paris client.Client) error {
	var quotas corev1.ResourceQuotaList
	if err := paris.List(ctx, &quotas); err != nil {
		return err
	}
	for i := range quotas.Items {
		quota := &quotas.Items[i]
		quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: corev1.ResourceList{}}
		for name := range quota.Spec.Hard {
			quota.Status.Used[name] = resource.MustParse("0")
		}
		if err := paris.Status().Update(ctx, quota); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func simulateNamespaces(ctx context.Context, paris client.Client) error {
	var namespaces corev1.NamespaceList
	if err := paris.List(ctx, &namespaces); err != nil {
		return err
	}
	for i := range namespaces.Items {
		if namespaces.Items[i].DeletionTimestamp.IsZero() {
			continue
		}
		namespaces.Items[i].Spec.Finalizers = nil
		if err := paris.SubResource("finalize").Update(ctx, &namespaces.Items[i]); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}
