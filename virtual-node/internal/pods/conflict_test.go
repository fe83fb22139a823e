package pods

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestStatusOfStalePod: a status that was computed from an older pod reverts nothing that
// others have written since; it is to be computed again from the newer one.
func TestStatusOfStalePod(t *testing.T) {
	config := controlplane.Start(t)
	config.ContentType, config.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	set := kubernetes.NewForConfigOrDie(config)
	_, err := set.CoreV1().ServiceAccounts(metav1.NamespaceDefault).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	pods := set.CoreV1().Pods(metav1.NamespaceDefault)
	h := &Handler{Options: Options{ConsumerClient: set, Clock: testclock.NewFakeClock(time.Unix(1000, 0))}, states: map[types.UID]*podState{}}
	// cached returns the pod as the cache has it once it shows what the API server has now.
	cached := func() *corev1.Pod {
		live, err := pods.Get(t.Context(), "web", metav1.GetOptions{})
		expect.NoError(t, err)
		encoded, err := encodePod(live)
		expect.NoError(t, err)
		return encoded.(*encodedPod).decode()
	}
	running := func(pod *corev1.Pod) corev1.PodStatus {
		status := *pod.Status.DeepCopy()
		status.Phase, status.ContainerStatuses = corev1.PodRunning, withContainers(corev1.PodRunning, started).ContainerStatuses
		return status
	}
	create := func() {
		_, err := pods.Create(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.PodSpec{
			NodeName: "spillway-paris", AutomountServiceAccountToken: ptr.To(false), Containers: []corev1.Container{{Name: "main", Image: "image"}}}}, metav1.CreateOptions{})
		expect.NoError(t, err)
	}
	create()
	stale := cached()
	for kind, patch := range map[string]string{
		"status": `{"status":{"conditions":[{"type":"example.com/gate","status":"True"}]}}`, "": `{"metadata":{"labels":{"app":"web"}}}`,
	} {
		var subresources []string
		if kind != "" {
			subresources = append(subresources, kind)
		}
		_, err := pods.Patch(t.Context(), "web", types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, subresources...)
		expect.NoError(t, err)
	}
	after, err := h.writeStatus(t.Context(), stale, running(stale))
	expect.NoError(t, err)
	if after == 0 {
		t.Error("the status is not computed again")
	}
	intact := func(phase corev1.PodPhase) {
		t.Helper()
		pod := cached()
		_, gate := conditionOf(pod, "example.com/gate")
		if pod.Status.Phase != phase || !gate || pod.Labels["app"] != "web" {
			t.Errorf("phase %s, conditions %v, labels %v; want phase %s with the condition and label that others wrote", pod.Status.Phase, pod.Status.Conditions, pod.Labels, phase)
		}
	}
	intact(corev1.PodPending)
	newer := cached()
	after, err = h.writeStatus(t.Context(), newer, running(newer))
	expect.NoError(t, err)
	if after != 0 {
		t.Error("the status of the newer pod is computed again")
	}
	intact(corev1.PodRunning)

	// Another pod of the same name has another status.
	expect.NoError(t, pods.Delete(t.Context(), "web", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	create()
	newer.Status = corev1.PodStatus{}
	_, err = h.writeStatus(t.Context(), newer, running(newer))
	expect.NoError(t, err)
	if pod := cached(); pod.Status.Phase != corev1.PodPending {
		t.Errorf("a new pod is %s by the status of its predecessor", pod.Status.Phase)
	}
}

func conditionOf(pod *corev1.Pod, kind corev1.PodConditionType) (condition corev1.PodCondition, ok bool) {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c, true
		}
	}
	return condition, false
}
