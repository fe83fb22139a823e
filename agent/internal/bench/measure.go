package main

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

const (
	nodes   = 1000
	pods    = 30000
	changes = 200
)

// recognizer knows guests by the label of their namespace.
var recognizer = inventory.Recognizer{Guest: func(pod *corev1.Pod, labels func(string) map[string]string) (string, bool) {
	consumer := labels(pod.Namespace)[broker.LabelGuestsOf]
	return consumer, consumer != ""
}}

// measure measures the cost of one change of a large cluster: a pod starts or ends on a
// node, and the advertisement is computed.
func measure() {
	tracker, start := inventory.NewTracker(recognizer), time.Now()
	for i := range nodes {
		tracker.Set(node(i))
	}
	for i := range pods {
		tracker.Set(pod(i))
	}
	fmt.Printf("counting all objects: %.1f ms\n", milliseconds(time.Since(start)))

	var counting, measuring time.Duration
	for i := range changes {
		start := time.Now()
		if p := pod(pods + i/2); i%2 == 0 {
			tracker.Set(p)
		} else {
			tracker.Delete(p)
		}
		counted := time.Now()
		tracker.Measure(inventory.Terms{}, start, int64(i))
		counting += counted.Sub(start)
		measuring += time.Since(counted)
	}
	fmt.Printf("counting one change: %.4f ms; computing the advertisement: %.2f ms\n",
		milliseconds(counting)/changes, milliseconds(measuring)/changes)
	lines.Time("measure_1000_nodes", milliseconds(counting+measuring)/changes, "ms", "<= 20")
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

func node(i int) *corev1.Node {
	name := fmt.Sprintf("node-%04d", i)
	allocatable := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("32"), corev1.ResourceMemory: resource.MustParse("128Gi"), corev1.ResourcePods: resource.MustParse("110"),
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{
			corev1.LabelHostname: name, corev1.LabelArchStable: "amd64", corev1.LabelOSStable: "linux",
			corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3), corev1.LabelInstanceTypeStable: fmt.Sprintf("type-%d", i%5),
		}},
		Status: corev1.NodeStatus{
			Capacity: allocatable, Allocatable: allocatable,
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
		},
	}
}

func pod(i int) *corev1.Pod {
	requests := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(int64(100+i%7*50), resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(int64(128+i%11*64)<<20, resource.BinarySI),
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: fmt.Sprintf("ns-%d", i%100), Name: fmt.Sprintf("pod-%d", i)},
		Spec: corev1.PodSpec{
			NodeName:   fmt.Sprintf("node-%04d", i%nodes),
			Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{Requests: requests}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
}
