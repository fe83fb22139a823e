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
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/environment"
)

const (
	gpu = "nvidia.com/gpu"
	// heldPods have places in advance; localsEvery makes 20 pods a second that want them.
	heldPods    = 10
	localsEvery = 50 * time.Millisecond
)

var gpuTaint = corev1.Taint{Key: gpu, Value: "present", Effect: corev1.TaintEffectNoSchedule}

// TestProvidersThatCannotRunPods has pods that some providers cannot run: the nodes have
// another architecture or a taint, or the consumer cannot connect to the provider. Each pod
// runs where it can or gets the reason why not, and nothing takes a place that is held. Rome
// cannot connect to paris before its door is opened. The nodes of berlin are arm64 at first;
// in the end it withdraws a part of what it has granted.
func TestProvidersThatCannotRunPods(t *testing.T) {
	ctx := t.Context()
	arm := map[string]string{corev1.LabelArchStable: "arm64"}
	door := newDoor(t)
	closed := "https://" + door.address
	s := begin(t, nodes{
		"rome":   {group("rome", 1, "cpu", "100m", "memory", "1Gi")},
		"paris":  {group("paris", 1, "cpu", "2500m", "memory", "8Gi")},
		"berlin": {{Prefix: "berlin-arm", Count: 2, Resources: expect.Resources("cpu", "4", "memory", "8Gi"), Labels: arm}},
	})
	s.upgrade("paris", func(ad *broker.ClusterAdvertisement) bool { return ad.Spec.EndpointURL == closed }, "apiServer.endpoint="+closed)
	s.upgrade("berlin", nil, "lend.leaveWithin="+leaveWithin.String())
	s.optedIn("shop")
	s.door = door
	p, began := s.p, time.Now()
	timing := func(what string) { t.Logf("timing: %-50s %6.1fs", what, time.Since(began).Seconds()) }
	s.create("plain", nil)
	s.create("arm", func(spec *corev1.PodSpec) { spec.NodeSelector = arm })
	s.rejected("berlin", "NoMatchingNodes", "the architecture is arm64, and only amd64 pods can overflow")
	s.explained("arm", "OverflowNotPossible", corev1.LabelArchStable+"=arm64")
	timing("an arm64-only provider was not chosen")

	// While rome finds out that it cannot connect to paris:
	s.addGPUs("berlin", group("berlin-gpu", 1, "cpu", "8", "memory", "16Gi", gpu, "2"))
	s.create("gpu", func(spec *corev1.PodSpec) { requestGPU(spec); tolerate(spec) })
	s.create("intolerant", requestGPU)
	s.runs("gpu", "berlin", "berlin-gpu-1")
	s.rejected("berlin", "NoMatchingNodes", "taint nvidia.com/gpu=present:NoSchedule is not tolerated")
	timing("a pod runs on the node with the taint")
	s.reserve()
	timing("places are held")
	s.takePlaces()
	timing("pods have taken the held places")

	s.rejected("paris", "Unreachable", "Cluster rome cannot connect to its API server at "+closed)
	s.explained("plain", "OverflowQueued", "paris: Cluster rome cannot connect to its API server at "+closed, "the architecture is arm64")
	s.explained("intolerant", "OverflowQueued", "taint nvidia.com/gpu=present:NoSchedule is not tolerated")
	timing("rome knows that it cannot connect to paris")
	s.waits("plain", "arm", "intolerant")
	s.openParis()
	expect.NoError(t, p.Cluster("berlin").AddNodes(ctx, "berlin-amd", 1, expect.Resources("cpu", "4", "memory", "8Gi"), nil))
	s.runs("plain", "berlin", "berlin-amd-1")
	timing("a pod runs on the only node that can run it")
	s.waits("arm", "intolerant")

	s.runWeb()
	timing("five pods run on two nodes")
	s.advertised("rome", "that it can connect to all providers", func(ad *broker.ClusterAdvertisement) bool { return len(ad.Spec.Unreachable) == 0 })
	timing("rome knows that it can connect to paris")
	s.withdraw()
	timing("the pods on the cordoned node have left")
}

func requestGPU(spec *corev1.PodSpec) {
	r := &spec.Containers[0].Resources
	r.Requests, r.Limits = expect.Resources("cpu", "200m", "memory", "16Mi", gpu, "1"), expect.Resources(gpu, "1")
}

func tolerate(spec *corev1.PodSpec) {
	spec.Tolerations = []corev1.Toleration{{Key: gpu, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}}
}

// create creates a pod in rome, which has no room for it.
func (s *playgroundTest) create(name string, change func(*corev1.PodSpec)) {
	s.t.Helper()
	s.createIn("shop", name, "200m", change)
}

// addGPUs adds a node with GPUs and their taint to a provider, and waits until the broker
// knows it. Its architecture is amd64.
func (s *playgroundTest) addGPUs(provider string, nodes environment.NodeGroup) {
	s.t.Helper()
	ctx, c := s.t.Context(), s.p.Cluster(provider)
	expect.NoError(s.t, c.AddNodes(ctx, nodes.Prefix, nodes.Count, nodes.Resources, nodes.Labels))
	node := &corev1.Node{}
	s.eventually("the node has its taint", func() error {
		if err := c.Client.Get(ctx, client.ObjectKey{Name: nodes.Prefix + "-1"}, node); err != nil {
			return err
		}
		node.Spec.Taints = append(node.Spec.Taints, gpuTaint)
		return c.Client.Update(ctx, node)
	})
	s.advertised(provider, "the node with its taint", func(ad *broker.ClusterAdvertisement) bool {
		return slices.ContainsFunc(ad.Spec.NodeClasses, func(class broker.NodeClass) bool { return len(class.Taints) == 1 && class.Taints[0].Key == gpu })
	})
}

// rejected waits until a Reservation of the namespace says why a cluster was not chosen.
func (s *playgroundTest) rejected(cluster, reason, message string) {
	s.t.Helper()
	s.eventually(cluster+" is rejected: "+reason, func() error {
		var list broker.ReservationList
		if err := s.rome.List(s.t.Context(), &list, client.InNamespace("shop")); err != nil {
			return err
		}
		var seen []string
		for _, r := range list.Items {
			if r.Status.Decision == nil {
				continue
			}
			for _, rejection := range r.Status.Decision.Rejections {
				if rejection.Cluster == cluster && rejection.Reason == reason && strings.Contains(rejection.Message, message) {
					return nil
				}
				seen = append(seen, fmt.Sprintf("%+v", rejection))
			}
		}
		return fmt.Errorf("rejections in %d Reservations: %q", len(list.Items), seen)
	})
}

// explained waits until an event of a pod in rome has all words.
func (s *playgroundTest) explained(pod, reason string, words ...string) {
	s.t.Helper()
	s.eventually("the events of pod "+pod+" say why it does not run", func() error {
		var list corev1.EventList
		if err := s.rome.List(s.t.Context(), &list, client.InNamespace("shop")); err != nil {
			return err
		}
		var seen []string
		for _, e := range list.Items {
			if e.InvolvedObject.Name != pod {
				continue
			}
			seen = append(seen, e.Reason+": "+e.Message)
			if e.Reason == reason && !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(e.Message, word) }) {
				return nil
			}
		}
		return fmt.Errorf("events: %q", seen)
	})
}

// runs waits until a pod runs on a node of a provider.
func (s *playgroundTest) runs(name, provider, node string) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("pod %s runs in %s", name, provider), func() error {
		pod := &corev1.Pod{}
		if err := s.rome.Get(s.t.Context(), client.ObjectKey{Namespace: "shop", Name: name}, pod); err != nil {
			return err
		}
		if pod.Status.Phase != corev1.PodRunning || pod.Spec.NodeName != broker.VirtualNodeName(provider) {
			return fmt.Errorf("it is %s on %q", pod.Status.Phase, pod.Spec.NodeName)
		}
		return nil
	})
	var guests corev1.PodList
	expect.NoError(s.t, s.p.Cluster(provider).Client.List(s.t.Context(), &guests, client.InNamespace(broker.GuestNamespace("rome"))))
	for _, guest := range guests.Items {
		if guest.Annotations[broker.Group+"/origin-name"] == name {
			if guest.Spec.NodeName != node {
				s.t.Errorf("the guest of pod %s runs on %s, want %s", name, guest.Spec.NodeName, node)
			}
			return
		}
	}
	s.t.Errorf("pod %s has no guest among %d", name, len(guests.Items))
}

// waits expects that pods have no node.
func (s *playgroundTest) waits(names ...string) {
	s.t.Helper()
	for _, name := range names {
		pod := &corev1.Pod{}
		expect.NoError(s.t, s.rome.Get(s.t.Context(), client.ObjectKey{Namespace: "shop", Name: name}, pod))
		if pod.Spec.NodeName != "" {
			s.t.Errorf("pod %s is bound to %s", name, pod.Spec.NodeName)
		}
	}
}

// reserve holds places for pods of rome on the node with GPUs: no other node of berlin can
// run them.
func (s *playgroundTest) reserve() {
	s.t.Helper()
	ctx := s.t.Context()
	tolerating := specOf("300m", tolerate)
	reservation := &broker.Reservation{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "advance"},
		Spec: broker.ReservationSpec{TargetClusterID: "berlin", PodSets: []broker.PodSet{{
			Name: "held", Count: heldPods, Requests: broker.FromList(tolerating.Containers[0].Resources.Requests), Tolerations: tolerating.Tolerations,
		}}},
	}
	expect.NoError(s.t, s.rome.Create(ctx, reservation))
	s.eventually("the places are held", func() error {
		if err := s.rome.Get(ctx, client.ObjectKeyFromObject(reservation), reservation); err != nil {
			return err
		}
		if reservation.Status.Phase != broker.ReservationActive || !meta.IsStatusConditionTrue(reservation.Status.Conditions, broker.ConditionReady) {
			return fmt.Errorf("phase %s, conditions %+v", reservation.Status.Phase, reservation.Status.Conditions)
		}
		return nil
	})
	var placeholders corev1.PodList
	expect.NoError(s.t, s.berlin.List(ctx, &placeholders, client.InNamespace("spillway-holds")))
	held := 0
	for _, pod := range placeholders.Items {
		if pod.Spec.NodeName == "berlin-gpu-1" && pod.Spec.Containers[0].Resources.Requests.Cpu().String() == "300m" {
			held++
		}
	}
	if held != heldPods {
		s.t.Errorf("%d placeholders are bound, want %d", held, heldPods)
	}
}

// takePlaces has pods of rome take the places while pods of berlin want them, 20 a second,
// and notes how long each took from its creation until it ran.
func (s *playgroundTest) takePlaces() {
	s.t.Helper()
	ctx := s.t.Context()
	s.namespaceIn(s.berlin, "local", nil)
	stop := s.compete(s.berlin, []string{"300m", "150m"}, func(spec *corev1.PodSpec) {
		tolerate(spec)
		spec.NodeSelector = map[string]string{corev1.LabelHostname: "berlin-gpu-1"}
	})
	s.eventually("pods of berlin wait for room", func() error {
		waiting, err := s.unschedulable()
		if err == nil && waiting == 0 {
			err = errors.New("none waits")
		}
		return err
	})
	expect.NoError(s.t, s.rome.Create(ctx, deploymentOf("shop", "held", heldPods, "300m", tolerate)))
	began, took := time.Now(), map[string]time.Duration{}
	s.eventually("all pods with a place run", func() error {
		var pods corev1.PodList
		if err := s.rome.List(ctx, &pods, client.InNamespace("shop"), client.MatchingLabels{"app": "held"}); err != nil {
			return err
		}
		var states []string
		for _, pod := range pods.Items {
			if _, known := took[pod.Name]; !known && pod.Status.Phase == corev1.PodRunning && pod.Spec.NodeName == broker.VirtualNodeName("berlin") {
				took[pod.Name] = time.Since(began)
			}
			states = append(states, fmt.Sprintf("%s on %q", pod.Status.Phase, pod.Spec.NodeName))
		}
		if len(took) < heldPods {
			return fmt.Errorf("%d of %d: %q", len(took), heldPods, states)
		}
		return nil
	})
	waiting, err := s.unschedulable()
	expect.NoError(s.t, err)
	locals := stop()
	expect.NoError(s.t, s.berlin.DeleteAllOf(ctx, &corev1.Pod{}, client.InNamespace("local"), client.GracePeriodSeconds(0)))
	if waiting == 0 {
		s.t.Error("no pod of berlin waits any more: the places were not wanted")
	}
	slowest, late := time.Duration(0), 0
	for _, d := range took {
		slowest = max(slowest, d)
		if d > 30*time.Second {
			late++
		}
	}
	s.t.Logf("timing: %d pods with held places run, the slowest after %.1fs, %d after more than 30s; %d pods of berlin wanted room, and %d had none",
		len(took), slowest.Seconds(), late, locals, waiting)
}

// unschedulable is how many pods of berlin its scheduler has found no node for.
func (s *playgroundTest) unschedulable() (n int, _ error) {
	var pods corev1.PodList
	err := s.berlin.List(s.t.Context(), &pods, client.InNamespace("local"))
	for _, pod := range pods.Items {
		if slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable
		}) {
			n++
		}
	}
	return n, err
}

// compete creates pods in namespace local of a provider, of two sizes, until it is stopped, and
// returns how many.
func (s *playgroundTest) compete(provider client.Client, cpu []string, change func(*corev1.PodSpec)) (stop func() int) {
	s.t.Helper()
	ctx, cancel := context.WithCancel(s.t.Context())
	s.t.Cleanup(cancel)
	done := make(chan int, 1)
	go func() {
		created := 0
		ticker := time.NewTicker(localsEvery)
		defer ticker.Stop()
		for i := 0; ; i++ {
			select {
			case <-ctx.Done():
				done <- created
				return
			case <-ticker.C:
			}
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "local", Name: fmt.Sprintf("local-%d", i)}, Spec: specOf(cpu[i%2], change)}
			if provider.Create(ctx, pod) == nil {
				created++
			}
		}
	}()
	return func() int {
		cancel()
		return <-done
	}
}
