package translate

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	podresource "k8s.io/component-helpers/resource"
)

// fill sets every field to what a hostile provider may send: long texts, many elements, a time
// that JSON cannot express, and amounts without measure.
func fill(v reflect.Value) {
	const elements = 10
	text := strings.Repeat("x", 16<<10)
	switch v.Interface().(type) {
	case metav1.Time:
		v.Set(reflect.ValueOf(metav1.Unix(1<<50, 0)))
		return
	case resource.Quantity:
		v.Set(reflect.ValueOf(resource.MustParse("1E")))
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString(text)
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(-1 << 31)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), elements, elements))
		for i := range elements {
			fill(v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		for i := range elements {
			value := reflect.New(v.Type().Elem()).Elem()
			fill(value)
			v.SetMapIndex(reflect.ValueOf(fmt.Sprintf("%d%s", i, text)).Convert(v.Type().Key()), value)
		}
	default:
		panic(fmt.Sprintf("a field of kind %s", v.Kind()))
	}
}

// hostileGuest has every field of its status filled, with containers and conditions that are
// taken over.
func hostileGuest() *corev1.Pod {
	guest := &corev1.Pod{}
	fill(reflect.ValueOf(&guest.Status).Elem())
	for i := range guest.Status.ContainerStatuses {
		guest.Status.ContainerStatuses[i].Name = "main"
		guest.Status.InitContainerStatuses[i].Name = "prepare"
		wild := corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1k")}
		guest.Status.ContainerStatuses[i].Resources.Requests, guest.Status.ContainerStatuses[i].AllocatedResources = wild, wild
		guest.Status.Resources.Requests, guest.Status.AllocatedResources = wild, wild
	}
	one := guest.Status.Conditions[0]
	guest.Status.Conditions = nil
	for range 3 {
		for _, kind := range mirroredConditions {
			one.Type = kind
			guest.Status.Conditions = append(guest.Status.Conditions, one)
		}
	}
	return guest
}

// TestEveryFieldOfAStatusIsBounded: whatever a provider reports, the pod's status stays small,
// every client can read it, and the pod uses no more of this cluster than its spec says.
func TestEveryFieldOfAStatusIsBounded(t *testing.T) {
	pod := overflowed()
	pod.CreationTimestamp = early
	pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}
	pod.Status = Status(pod, hostileGuest())
	status := pod.Status
	// Of two containers and the conditions, 4 KiB each text.
	if size, limit := status.Size(), 256<<10; size > limit {
		t.Errorf("the status has %d bytes, more than %d", size, limit)
	}
	if len(status.Conditions) > len(mirroredConditions)+1 {
		t.Errorf("%d conditions, of %d types", len(status.Conditions), len(mirroredConditions)+1)
	}
	data, err := json.Marshal(status)
	if err == nil {
		err = json.Unmarshal(data, &corev1.PodStatus{})
	}
	if err != nil {
		t.Errorf("the status cannot be read as JSON: %v", err)
	}
	if requests := podresource.PodRequests(pod, podresource.PodResourcesOptions{UseStatusResources: true, InPlacePodLevelResourcesVerticalScalingEnabled: true}); requests.Cpu().String() != "100m" {
		t.Errorf("the pod counts as %s CPUs, it requests 100m", requests.Cpu())
	}
	if !slices.Contains([]corev1.PodPhase{corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed, corev1.PodUnknown}, status.Phase) {
		t.Errorf("the phase is %.20q", status.Phase)
	}
	// It has started: if it is gone, it was lost.
	if status.StartTime == nil || !status.StartTime.Equal(&early) {
		t.Errorf("the start time is %v", status.StartTime)
	}
}

// TestTimesOfTheGuest: those that can be expressed are not changed, whatever the provider's clock.
func TestTimesOfTheGuest(t *testing.T) {
	before := metav1.NewTime(early.Add(-48 * time.Hour))
	guest := &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning, StartTime: &before, ContainerStatuses: []corev1.ContainerStatus{{
		Name: "main", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: late}},
	}}}}
	pod := overflowed()
	pod.CreationTimestamp = early
	status := Status(pod, guest)
	if !status.StartTime.Equal(&before) || !status.ContainerStatuses[0].State.Running.StartedAt.Equal(&late) {
		t.Errorf("start times %s and %s", status.StartTime, status.ContainerStatuses[0].State.Running.StartedAt)
	}
}
