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
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

// drained are the nodes of paris that guests run on.
var drained = []string{"paris-1", "paris-2"}

// TestProviderIsDrained drains all nodes of a provider that have guests and reserved capacity.
// The provider says what it no longer holds, and the pods run elsewhere.
func TestProviderIsDrained(t *testing.T) {
	s := begin(t, nodes{
		"rome":   full,
		"paris":  {group("paris", 2, "cpu", "500m", "memory", "1Gi")},
		"berlin": {group("berlin", 1, "cpu", "1", "memory", "4Gi")},
	})
	ns := s.optedIn("drained")
	emptyBerlin := s.fill("berlin", "berlin-1", "990m")
	total := broker.FromList(expect.Resources("cpu", "200m", "memory", "32Mi"))
	expect.NoError(t, errors.Join(
		// One that is not used.
		s.rome.Create(t.Context(), &broker.Reservation{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "spare"}, Spec: broker.ReservationSpec{
			TargetClusterID: "paris", RequestedResources: &total, PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "none"}},
		}}),
		s.rome.Create(t.Context(), deploymentOf(ns, "web", 2, "300m", nil)),
	))
	if _, away := s.allReady(ns, "web", 2); len(away) != 2 {
		t.Fatalf("%d pods overflowed, want 2", len(away))
	}
	s.eventually("paris keeps places for the unused hold", func() error {
		if kept, err := s.placeholdersOn(drained); err != nil || kept > 0 {
			return err
		}
		return errors.New("none")
	})

	// While there is no room elsewhere, the guests stay for now.
	for _, node := range drained {
		s.cordon("paris", node, true)
	}
	s.saysWhatIsLost()
	s.eventually("no place is kept on the cordoned nodes", func() error {
		kept, err := s.placeholdersOn(drained)
		if err == nil && kept > 0 {
			err = fmt.Errorf("%d are", kept)
		}
		return err
	})
	s.eventually("both pods in rome have condition "+string(broker.PodMustLeave), func() error {
		pods, err := s.podsOf(ns, "web")
		if err == nil && len(slices.DeleteFunc(slices.Clone(pods), func(p corev1.Pod) bool { return !has(p, broker.PodMustLeave) })) != 2 {
			err = describe(pods)
		}
		return err
	})

	emptyBerlin()
	s.evictGuests(ns)
	began := time.Now()
	// A pod that was bound in the meantime is evicted when it has not started in time. Those
	// whose guests were evicted have failed.
	s.eventually("both pods are ready in berlin", func() error {
		pods, err := s.podsOf(ns, "web")
		elsewhere := slices.DeleteFunc(slices.Clone(pods), func(p corev1.Pod) bool {
			return !has(p, corev1.PodReady) || p.Spec.NodeName != broker.VirtualNodeName("berlin")
		})
		if err == nil && len(elsewhere) != 2 {
			err = describe(pods)
		}
		return err
	})
	t.Logf("timing: the provider is drained, all pods are ready elsewhere %6.1fs", time.Since(began).Seconds())
}

// saysWhatIsLost expects one line for the lost hold with guests: reason, and by when they must
// leave. It stays once the broker has lowered its promise.
func (s *playgroundTest) saysWhatIsLost() {
	s.t.Helper()
	s.eventually("the broker has lowered its promise, and a line says CapacityLost", func() error {
		var list broker.ProviderInstructionList
		if err := s.paris.List(s.t.Context(), &list, client.InNamespace(environment.Namespace)); err != nil {
			return err
		}
		var lines []string
		for _, in := range list.Items {
			line, err := s.line("paris", false, "providerinstructions", in.Namespace, in.Name)
			if lines = append(lines, line); err != nil {
				continue
			}
			if by := in.Status.LeaveBy; by != nil && in.Spec.Releasing && strings.Contains(line, "=CapacityLost,") && strings.Contains(line, by.UTC().Format(time.RFC3339)) {
				s.t.Logf("kubectl get providerinstructions: %s", line)
				return nil
			}
		}
		return errors.New(strings.Join(lines, "; "))
	})
}

// placeholdersOn counts the placeholders that keep places on some nodes of paris.
func (s *playgroundTest) placeholdersOn(nodes []string) (int, error) {
	var list corev1.PodList
	err := s.paris.List(s.t.Context(), &list, client.InNamespace("spillway-holds"))
	return len(slices.DeleteFunc(list.Items, func(p corev1.Pod) bool {
		return p.DeletionTimestamp != nil || !slices.Contains(nodes, p.Spec.NodeName)
	})), err
}

// evictGuests evicts all guests of rome in paris, as kubectl drain does, and waits until they
// are gone. They have the label by which paris attributes them to a hold.
func (s *playgroundTest) evictGuests(ns string) {
	s.t.Helper()
	ctx := context.Background()
	guests := s.guestsOf("paris", "web")
	if len(guests) != 2 {
		s.t.Fatalf("%d guests are in paris, want 2", len(guests))
	}
	for _, guest := range guests {
		if guest.Labels[broker.LabelHold] == "" || guest.Labels["broker.fluidos.eu/origin-uid"] == "" {
			s.t.Errorf("guest %s has the labels %v", guest.Name, guest.Labels)
		}
		eviction := &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Namespace: guest.Namespace, Name: guest.Name}}
		// It may have left meanwhile.
		if err := s.p.Cluster("paris").Set.PolicyV1().Evictions(guest.Namespace).Evict(ctx, eviction); !apierrors.IsNotFound(err) {
			expect.NoError(s.t, err)
		}
	}
	for _, guest := range guests {
		s.eventually("guest "+guest.Name+" is gone", func() error {
			var now corev1.Pod
			if err := s.paris.Get(ctx, client.ObjectKeyFromObject(&guest), &now); err != nil {
				return client.IgnoreNotFound(err)
			}
			if now.UID != guest.UID {
				return nil
			}
			return describe([]corev1.Pod{now})
		})
	}
}
