package pods

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

var (
	terminated = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}
	waiting    = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}
	started    = corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Unix(1000, 0)}}
)

func withContainers(phase corev1.PodPhase, states ...corev1.ContainerState) corev1.PodStatus {
	status := corev1.PodStatus{Phase: phase}
	for _, state := range states {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{Name: "main", State: state})
	}
	return status
}

func fullPod() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "shop", Name: "web", UID: "1", ResourceVersion: "7", Labels: map[string]string{"app": "web"},
			Annotations: map[string]string{translate.AnnotationNamespace: "shop", translate.AnnotationName: "web"},
		},
		Spec: corev1.PodSpec{
			Containers: []corev1.Container{{
				Name: "main", Image: "image:1", Args: []string{"serve"}, Env: []corev1.EnvVar{{Name: "A", Value: "b"}},
				Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "100m", "memory", "1Gi")},
			}, {Name: "side", Image: "side:1"}},
			Volumes:         []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}},
			SchedulingGates: []corev1.PodSchedulingGate{{Name: broker.GateHandOver}},
		},
		Status: withContainers(corev1.PodRunning, started),
	}
}

// TestEncodePod: the cache of the pods has all of a pod but its managed fields.
func TestEncodePod(t *testing.T) {
	pod := fullPod()
	pod.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
	encoded, err := encodePod(pod)
	expect.NoError(t, err)
	if got := encoded.(*encodedPod).decode(); !equality.Semantic.DeepEqual(got, fullPod()) {
		t.Errorf("decoded %+v, want %+v", got, fullPod())
	}
	// Informers transform some objects twice.
	if again, err := encodePod(encoded); err != nil || again != encoded {
		t.Errorf("encoded again: %v, %v", again, err)
	}
}

// TestEnded: a pod that is being deleted has ended when none of its containers runs.
func TestEnded(t *testing.T) {
	for _, tc := range []struct {
		name   string
		grace  *int64
		status corev1.PodStatus
		ended  bool
	}{
		{"it is not being deleted", nil, withContainers(corev1.PodPending), false},
		{"it never started", ptr.To[int64](30), withContainers(corev1.PodPending), true},
		{"its container waits", ptr.To[int64](30), withContainers(corev1.PodPending, waiting), true},
		{"a container still runs", ptr.To[int64](30), withContainers(corev1.PodRunning, terminated, started), false},
		{"the state of a container is not known", ptr.To[int64](30), withContainers(corev1.PodRunning, corev1.ContainerState{}), false},
		{"all containers are terminated", ptr.To[int64](30), withContainers(corev1.PodRunning, terminated, terminated), true},
		{"only its finalizers are left", ptr.To[int64](0), withContainers(corev1.PodRunning, terminated), false},
	} {
		pod := fullPod()
		pod.Status = tc.status
		if tc.grace != nil {
			pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = ptr.To(metav1.Unix(1000, 0)), tc.grace
		}
		encoded, err := encodePod(pod)
		expect.NoError(t, err)
		if got := encoded.(*encodedPod).ended; got != tc.ended {
			t.Errorf("%s: ended is %t", tc.name, got)
		}
	}
}

// TestPatchOfEncodedGuest: the patch of a guest is the same as if the cache had all of it.
func TestPatchOfEncodedGuest(t *testing.T) {
	full := fullPod()
	full.Labels[translate.LabelUID] = "1"
	full.Name = translate.GuestName(full)
	desired := full.DeepCopy()
	desired.Labels, desired.Annotations = map[string]string{"version": "2", translate.LabelUID: "1"}, map[string]string{"note": "changed"}
	desired.Spec.Containers[1].Image, desired.Spec.ActiveDeadlineSeconds = "side:2", ptr.To[int64](60)
	encoded, err := encodeGuest(full.DeepCopy())
	expect.NoError(t, err)
	cached := encoded.(*encodedPod)
	if cached.origin != "shop/web" || cached.originUID != "1" {
		t.Errorf("the guest is of pod %s (%s)", cached.origin, cached.originUID)
	}
	patch := func(guest *corev1.Pod) (out map[string]any) {
		changed := withChanges(guest, desired)
		changed.Spec.SchedulingGates = nil
		data, err := client.StrategicMergeFrom(guest).Data(changed)
		expect.NoError(t, err)
		expect.NoError(t, json.Unmarshal(data, &out))
		return out
	}
	if got, want := patch(cached.decode()), patch(full); !equality.Semantic.DeepEqual(got, want) {
		t.Errorf("patch %v, want %v", got, want)
	}
	pod := fullPod()
	if got, want := translate.Status(pod, cached.decode()), translate.Status(pod, full); !equality.Semantic.DeepEqual(got, want) {
		t.Errorf("status %+v, want %+v", got, want)
	}
}

// TestWriteStatus: a status is written when it differs, and once; again when another client
// has changed it.
func TestWriteStatus(t *testing.T) {
	writes := 0
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writes++
		io.Copy(io.Discard, r.Body)
	}))
	defer server.Close()
	set, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	expect.NoError(t, err)
	h := &Handler{Options: Options{ConsumerClient: set, Clock: testclock.NewFakeClock(time.Unix(1000, 0))}, states: map[types.UID]*podState{}}
	pending, running := withContainers(corev1.PodPending, waiting), withContainers(corev1.PodRunning, started)
	for _, tc := range []struct {
		name            string
		resourceVersion string
		current, status corev1.PodStatus
		writes          int
	}{
		{"the pod has the status", "1", pending, pending, 0},
		{"it has another one", "1", pending, running, 1},
		{"the cache does not show the write yet", "1", pending, running, 0},
		{"it does", "2", running, running, 0},
		{"another client has changed it", "3", pending, running, 1},
		{"the guest has changed before the cache shows that", "3", pending, withContainers(corev1.PodFailed, terminated), 1},
	} {
		pod := fullPod()
		pod.ResourceVersion, pod.Status = tc.resourceVersion, tc.current
		writes = 0
		after, err := h.writeStatus(t.Context(), pod, tc.status)
		expect.NoError(t, err)
		if after != 0 {
			t.Errorf("%s: it is to be computed again after %s", tc.name, after)
		}
		if writes != tc.writes {
			t.Errorf("%s: %d writes, want %d", tc.name, writes, tc.writes)
		}
	}
}
