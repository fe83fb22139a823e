package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// TestDeploymentOverflowsAndReturns scales a Deployment beyond the capacity of rome. The pods
// that do not fit overflow to nodes of exactly the size granted, and nothing is left when the
// Deployment fits at home again.
func TestDeploymentOverflowsAndReturns(t *testing.T) {
	s := begin(t, nodes{
		"rome":   {group("rome", 1, "cpu", "2", "memory", "1Gi")},
		"paris":  {group("paris", 2, "cpu", "2", "memory", "1Gi")},
		"berlin": {group("berlin", 1, "cpu", "500m", "memory", "1Gi")},
	})
	ns, began := s.optedIn("shop"), time.Now()
	timing := func(what string) { t.Logf("timing: %-40s %6.1fs", what, time.Since(began).Seconds()) }
	expect.NoError(t, s.rome.Create(t.Context(), deploymentOf(ns, "web", 2, "1", nil)))
	first, away := s.allReady(ns, "web", 2)
	if len(away) > 0 {
		t.Fatalf("pods overflowed though rome has free capacity: %v", describe(away))
	}
	before := s.census()
	t.Logf("census: %d objects in four clusters", len(before))

	s.scale(ns, "web", 4)
	home, away := s.allReady(ns, "web", 4)
	timing("cold: two more pods overflowed")
	if len(home) != 2 || len(away) != 2 {
		t.Fatalf("want two pods at home and two in paris, have %v", describe(slices.Concat(home, away)))
	}
	for _, pod := range away {
		if pod.Spec.NodeName != broker.VirtualNodeName("paris") {
			t.Errorf("%s is on %s, and berlin has no room", pod.Name, pod.Spec.NodeName)
		}
	}
	guests := s.guestsOf("paris", "web")
	for _, guest := range guests {
		if !strings.HasPrefix(guest.Spec.NodeName, "paris-") || guest.Status.Phase != corev1.PodRunning {
			t.Errorf("guest %s is %s on %q", guest.Name, guest.Status.Phase, guest.Spec.NodeName)
		}
	}
	if len(guests) != 2 {
		t.Errorf("paris has %d guests", len(guests))
	}
	s.eventually("each virtual node is as large as what is granted there", s.sizesAreGranted)
	s.confined("2")

	s.scale(ns, "web", 2)
	home, away = s.allReady(ns, "web", 2)
	if len(away) > 0 || !slices.Equal(uids(home), uids(first)) {
		t.Errorf("the overflowed pods should have gone first: %v", describe(slices.Concat(home, away)))
	}
	s.eventually("all but the warm peering is gone", func() error { return s.differs(before, keptWarm) })
	timing("released")
	s.eventually("the virtual node is gone", func() error {
		return errors.Join(s.gone(s.rome, &corev1.Node{}, "", broker.VirtualNodeName("paris")), s.gone(s.paris, &corev1.Namespace{}, "", broker.GuestNamespace("rome")))
	})
	s.eventually("after its idle time the peering is gone, too", func() error { return s.differs(before, func(string) bool { return false }) })
	timing("torn down: nothing is left in any cluster")

	stray := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "stray"}}
	expect.NoError(t, s.paris.Create(t.Context(), stray))
	t.Cleanup(func() { expect.NoError(t, s.paris.Delete(context.Background(), stray)) })
	if added, _ := compare(before, s.census()); len(added) != 1 || !strings.Contains(added[0], "paris configmaps. default/stray") {
		t.Errorf("the census does not count a stray object, or more: %v", added)
	}
}

// sizesAreGranted compares the virtual nodes in use with what the hub's Reservations allot rome.
func (s *playgroundTest) sizesAreGranted() error {
	var list corev1.NodeList
	if err := s.rome.List(s.t.Context(), &list, client.HasLabels{broker.LabelProvider}); err != nil {
		return err
	}
	var reservations broker.ReservationList
	if err := s.hub.List(s.t.Context(), &reservations); err != nil {
		return err
	}
	used := 0
	for _, node := range list.Items {
		total, pods := corev1.ResourceList{}, int64(0)
		for _, r := range reservations.Items {
			for _, a := range r.Status.Allocations {
				if r.Spec.RequesterID != "rome" || a.Cluster != node.Labels[broker.LabelProvider] {
					continue
				}
				broker.AddTo(total, a.Resources.List())
				for _, set := range a.PodSets {
					pods += int64(set.Count)
				}
			}
		}
		have := node.Status.Allocatable
		if have.Cpu().Cmp(*total.Cpu()) != 0 || have.Memory().Cmp(*total.Memory()) != 0 || have.Pods().Value() != pods {
			return fmt.Errorf("%s has %v, granted are %v for %d pods", node.Name, have, total, pods)
		}
		if pods > 0 {
			used++
		}
	}
	if used == 0 {
		return errors.New("no virtual node has capacity")
	}
	return nil
}

// confined expects that rome's guests in paris have a quota of cpu, and that rome's access to
// paris is good for their namespace.
func (s *playgroundTest) confined(cpu string) {
	s.t.Helper()
	ctx := s.t.Context()
	quota := &corev1.ResourceQuota{}
	expect.NoError(s.t, s.paris.Get(ctx, client.ObjectKey{Namespace: broker.GuestNamespace("rome"), Name: "spillway-guests"}, quota))
	if hard := quota.Status.Hard[corev1.ResourceRequestsCPU]; hard.String() != cpu {
		s.t.Errorf("the quota of rome's guests is %v, want cpu %s", quota.Status.Hard, cpu)
	}
	secret := &corev1.Secret{}
	expect.NoError(s.t, s.rome.Get(ctx, client.ObjectKey{Namespace: "spillway-virtual-nodes", Name: nodeconfig.SecretName("paris")}, secret))
	config, err := nodeconfig.FromSecret(secret)
	expect.NoError(s.t, err)
	access := config.Connection
	guests, err := client.New(&rest.Config{Host: access.Endpoint, BearerToken: access.Token, TLSClientConfig: rest.TLSClientConfig{CAData: access.CA}}, client.Options{})
	expect.NoError(s.t, err)
	var pods corev1.PodList
	expect.NoError(s.t, guests.List(ctx, &pods, client.InNamespace(access.Namespace)))
	if len(pods.Items) != 2 || access.Namespace != broker.GuestNamespace("rome") {
		s.t.Errorf("rome's access shows %d pods in %s", len(pods.Items), access.Namespace)
	}
}

// gone returns an error while an object exists.
func (s *playgroundTest) gone(c client.Client, o client.Object, ns, name string) error {
	err := c.Get(s.t.Context(), client.ObjectKey{Namespace: ns, Name: name}, o)
	if err == nil {
		return fmt.Errorf("%T %s still exists", o, name)
	}
	return client.IgnoreNotFound(err)
}
