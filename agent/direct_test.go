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
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// TestDirectWithTheBroker has two agents with driver direct lend and borrow
// through the real broker, with sealed messages: from the wish to a virtual node
// with a token that works, and back to nothing. The controllers of a cluster and
// virtual-node are played.
func TestDirectWithTheBroker(t *testing.T) {
	ctx := t.Context()
	hubConfig, romeConfig, parisConfig := controlplane.Start(t), controlplane.Start(t), controlplane.Start(t)
	hub, rome, paris := newClient(t, hubConfig), newClient(t, romeConfig), newClient(t, parisConfig)
	address := freeAddress(t)
	ended := start(t, build(t, "broker"), hubConfig, "--listen="+address, "--tls-san=127.0.0.1", "--health-probe-bind-address="+freeAddress(t))
	var ca corev1.ConfigMap
	var token corev1.Secret
	eventually(t, ended, "the broker has a CA and a token", func() error {
		return errors.Join(hub.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-broker-ca"}, &ca),
			hub.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-join-token"}, &token))
	})
	tokenFile := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(tokenFile, token.Data["token"], 0o600); err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	room := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceMemory: resource.MustParse("8Gi"), corev1.ResourcePods: resource.MustParse("110")}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "big", Labels: map[string]string{corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux"}}}
	must(paris.Create(ctx, node))
	node.Status = corev1.NodeStatus{Capacity: room, Allocatable: room, Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}
	must(paris.Status().Update(ctx, node))
	// New nodes are tainted until a controller, which is not here, has seen them.
	node.Spec.Taints = nil
	must(paris.Update(ctx, node))
	// What the chart brings.
	must(paris.Create(ctx, &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "spillway-direct-guest"}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods"}, Verbs: []string{"get", "list", "create"}},
	}}))

	playing, stop := context.WithCancel(context.Background())
	var played sync.WaitGroup
	played.Go(func() { playCluster(playing, t, rome, paris) })
	t.Cleanup(func() { stop(); played.Wait() })

	program := build(t, "agent")
	agent := func(config *rest.Config, id string, lend bool) {
		start(t, program, config, "--broker-transport=http", "--broker-url=https://"+address, "--broker-ca-hash="+ca.Data["caHash"], "--join-token-file="+tokenFile,
			"--cluster-id="+id, "--health-probe-bind-address="+freeAddress(t), "--api-server-endpoint="+config.Host, fmt.Sprintf("--lend-enabled=%t", lend),
			"--driver=direct", "--peering-idle-time=2s", "--advertisement-requeue-interval=1s")
	}
	agent(romeConfig, "rome", false)
	agent(parisConfig, "paris", true)
	wish := &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "wish"}, Spec: broker.ReservationSpec{
		PodSets: []broker.PodSet{{Name: "pods", Count: 2, Requests: broker.FromList(corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m")})}},
	}}
	must(rome.Create(ctx, wish))
	begun := time.Now()
	eventually(t, ended, "rome has what it wished for", func() error {
		if err := rome.Get(ctx, client.ObjectKeyFromObject(wish), wish); err != nil {
			return err
		}
		if !meta.IsStatusConditionTrue(wish.Status.Conditions, broker.ConditionVirtualNodeReady) {
			return fmt.Errorf("have %+v", wish.Status.Conditions)
		}
		return nil
	})
	t.Logf("wish to virtual node, cold: %s", time.Since(begun).Round(time.Millisecond))

	var quota corev1.ResourceQuota
	must(paris.Get(ctx, client.ObjectKey{Namespace: "spillway-guests-rome", Name: "spillway-guests"}, &quota))
	if cpu := quota.Status.Hard[corev1.ResourceRequestsCPU]; cpu.String() != "1" {
		t.Errorf("the guests of rome may use %v", quota.Status.Hard)
	}
	var secret corev1.Secret
	must(rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: nodeconfig.SecretName("paris")}, &secret))
	connection, err := nodeconfig.FromSecret(&secret)
	must(err)
	access := &rest.Config{Host: connection.Connection.Endpoint, BearerToken: connection.Connection.Token, TLSClientConfig: rest.TLSClientConfig{CAData: connection.Connection.CA}}
	guests := newClient(t, access)
	must(guests.List(ctx, &corev1.PodList{}, client.InNamespace(connection.Connection.Namespace)))

	// The need is gone, and with it everything.
	must(rome.Delete(ctx, wish))
	id := protocol.ReservationID("rome", wish.UID)
	eventually(t, ended, "nothing is left", func() error {
		var left []string
		for what, get := range map[string]error{
			"reservation":     rome.Get(ctx, client.ObjectKeyFromObject(wish), &broker.Reservation{}),
			"link":            rome.Get(ctx, client.ObjectKeyFromObject(&secret), &corev1.Secret{}),
			"virtual node":    rome.Get(ctx, client.ObjectKey{Name: "spillway-paris"}, &corev1.Node{}),
			"open namespace":  rome.Get(ctx, client.ObjectKey{Namespace: "default", Name: "spillway-virtual-node"}, &rbacv1.RoleBinding{}),
			"guest namespace": paris.Get(ctx, client.ObjectKey{Name: "spillway-guests-rome"}, &corev1.Namespace{}),
			"hold":            paris.Get(ctx, client.ObjectKey{Namespace: "default", Name: id}, &broker.ProviderInstruction{}),
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

// playCluster plays virtual-node in one cluster, and in the other the
// controllers that count quotas and empty namespaces.
func playCluster(ctx context.Context, t *testing.T, home, away client.Client) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		err := errors.Join(playVirtualNode(ctx, home), playQuotas(ctx, away), playNamespaces(ctx, away))
		if err != nil && ctx.Err() == nil {
			t.Logf("playing: %v", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func playVirtualNode(ctx context.Context, home client.Client) error {
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "spillway-paris", Labels: map[string]string{
		broker.LabelProvider: "paris", broker.LabelNodeType: broker.NodeTypeVirtual, broker.LabelManagedBy: broker.ManagedBySpillway,
	}}, Spec: corev1.NodeSpec{Taints: []corev1.Taint{{Key: broker.TaintOverflow, Value: "paris", Effect: corev1.TaintEffectNoSchedule}}}}
	var secret corev1.Secret
	err := home.Get(ctx, client.ObjectKey{Namespace: "default", Name: nodeconfig.SecretName("paris")}, &secret)
	l, unreadable := nodeconfig.FromSecret(&secret)
	if apierrors.IsNotFound(err) || err == nil && (unreadable != nil || l.Terminating) {
		return client.IgnoreNotFound(home.Delete(ctx, node))
	}
	if err != nil {
		return err
	}
	if err := home.Get(ctx, client.ObjectKeyFromObject(node), node); apierrors.IsNotFound(err) {
		err = home.Create(ctx, node)
		if err != nil {
			return err
		}
	} else if err != nil {
		return err
	}
	node.Spec.Unschedulable = l.Capacity.Parked
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(taint corev1.Taint) bool { return taint.Key != broker.TaintOverflow })
	if err := home.Update(ctx, node); err != nil {
		return client.IgnoreNotFound(err)
	}
	node.Status.Capacity, node.Status.Allocatable = l.Capacity.Resources, l.Capacity.Resources
	node.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return client.IgnoreNotFound(home.Status().Update(ctx, node))
}

func playQuotas(ctx context.Context, away client.Client) error {
	var quotas corev1.ResourceQuotaList
	if err := away.List(ctx, &quotas); err != nil {
		return err
	}
	for i := range quotas.Items {
		quota := &quotas.Items[i]
		quota.Status = corev1.ResourceQuotaStatus{Hard: quota.Spec.Hard, Used: corev1.ResourceList{}}
		for name := range quota.Spec.Hard {
			quota.Status.Used[name] = resource.MustParse("0")
		}
		if err := away.Status().Update(ctx, quota); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func playNamespaces(ctx context.Context, away client.Client) error {
	var namespaces corev1.NamespaceList
	if err := away.List(ctx, &namespaces); err != nil {
		return err
	}
	for i := range namespaces.Items {
		if namespaces.Items[i].DeletionTimestamp.IsZero() {
			continue
		}
		namespaces.Items[i].Spec.Finalizers = nil
		if err := away.SubResource("finalize").Update(ctx, &namespaces.Items[i]); err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}
