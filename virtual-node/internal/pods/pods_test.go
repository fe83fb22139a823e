package pods_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/connrotation"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/internal/pods"
	"github.com/spillway-dev/spillway/virtual-node/internal/translate"
)

func TestMain(m *testing.M) { controlplane.Main(m) }

const (
	namespace      = "shop"
	guestNamespace = "spillway-guests-rome"
	nodeName       = "spillway-paris"
)

// environment is a handler between two real API servers. The test acts as the
// scheduler and kubelets of both.
type environment struct {
	suite              *testing.T
	consumer, provider kubernetes.Interface
	// ofHandler is the handler's client of the consumer, whose writes and conflicts are counted.
	ofHandler         kubernetes.Interface
	writes, conflicts atomic.Int64
	// asked are the paths that the handler has read of the consumer.
	asked sync.Map
	// answer answers a request to the provider in its place, where it does not return nil.
	answer            atomic.Pointer[func(*http.Request) *http.Response]
	guestNamespaceUID types.UID
	// providerConfig is the handler's: its connections can be cut.
	providerConfig *rest.Config
	connections    *connrotation.Dialer
	cut            atomic.Bool
	handler        *pods.Handler
	stop           func()
}

func newEnvironment(t *testing.T) *environment {
	t.Helper()
	consumerConfig, providerConfig := controlplane.Start(t), controlplane.Start(t)
	e := &environment{
		suite: t, consumer: kubernetes.NewForConfigOrDie(consumerConfig), provider: kubernetes.NewForConfigOrDie(providerConfig),
		providerConfig: rest.CopyConfig(providerConfig),
	}
	counted := rest.CopyConfig(consumerConfig)
	counted.ContentType, counted.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf+","+runtime.ContentTypeJSON
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			e.asked.Store(r.URL.Path, true)
			response, err := next.RoundTrip(r)
			if r.Method == http.MethodPut && err == nil {
				e.writes.Add(1)
				if response.StatusCode == http.StatusConflict {
					e.conflicts.Add(1)
				}
			}
			return response, err
		})
	})
	e.ofHandler = kubernetes.NewForConfigOrDie(counted)
	for name, client := range map[string]kubernetes.Interface{namespace: e.consumer, guestNamespace: e.provider} {
		created, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		expect.NoError(t, err)
		if name == guestNamespace {
			e.guestNamespaceUID = created.UID
		}
		_, err = client.CoreV1().ServiceAccounts(name).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{})
		expect.NoError(t, err)
	}
	_, err := e.provider.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{
		ObjectMeta: metav1.ObjectMeta{Name: "spillway-guest"}, PreemptionPolicy: ptr.To(corev1.PreemptNever),
	}, metav1.CreateOptions{})
	expect.NoError(t, err)
	e.connections = connrotation.NewDialer(func(ctx context.Context, network, address string) (net.Conn, error) {
		if e.cut.Load() {
			return nil, errors.New("connection refused by the test")
		}
		var dialer net.Dialer
		return dialer.DialContext(ctx, network, address)
	})
	e.providerConfig.Dial = e.connections.DialContext
	e.providerConfig.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return roundTrip(func(r *http.Request) (*http.Response, error) {
			if answer := e.answer.Load(); answer != nil {
				if response := (*answer)(r); response != nil {
					return response, nil
				}
			}
			return next.RoundTrip(r)
		})
	})
	e.start()
	return e
}

// roundTrip is an http.RoundTripper.
type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (e *environment) pods() typedcorev1.PodInterface { return e.consumer.CoreV1().Pods(namespace) }

func (e *environment) guests() typedcorev1.PodInterface {
	return e.provider.CoreV1().Pods(guestNamespace)
}

// start runs a handler until stop is called or the suite ends.
func (e *environment) start() {
	e.suite.Helper()
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: e.consumer.EventsV1()})
	ctx, cancel := context.WithCancel(context.Background())
	expect.NoError(e.suite, broadcaster.StartRecordingToSinkWithContext(ctx))
	h, err := pods.New(pods.Options{
		Provider: "paris", GuestNamespace: guestNamespace, ProviderClient: kubernetes.NewForConfigOrDie(e.providerConfig), ConsumerClient: e.ofHandler,
		Recorder: broadcaster.NewRecorder(scheme.Scheme, "spillway-virtual-node"), Clock: clock.RealClock{}, Log: testr.New(e.suite),
		Networks: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("127.0.0.0/8")},
	})
	expect.NoError(e.suite, err)
	e.handler = h
	var running sync.WaitGroup
	running.Go(func() { h.Run(ctx) })
	e.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait()
		broadcaster.Shutdown()
	})
	e.suite.Cleanup(e.stop)
}

// disconnect cuts the handler's connections to the provider.
func (e *environment) disconnect() {
	e.cut.Store(true)
	e.connections.CloseAll()
}

func (e *environment) createPod(t *testing.T, name string, change ...func(*corev1.Pod)) *corev1.Pod {
	t.Helper()
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Spec: corev1.PodSpec{NodeName: nodeName, AutomountServiceAccountToken: ptr.To(false), Containers: []corev1.Container{{
			Name: "main", Image: "image", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "100m")},
		}}},
	}
	for _, c := range change {
		c(pod)
	}
	created, err := e.pods().Create(t.Context(), pod, metav1.CreateOptions{})
	expect.NoError(t, err)
	return created
}

// awaitGuest waits for the guest of a pod.
func (e *environment) awaitGuest(t *testing.T, pod *corev1.Pod) (guest *corev1.Pod) {
	t.Helper()
	expect.Eventually(t, "the guest of "+pod.Name, func() (bool, string) {
		var err error
		guest, err = e.guests().Get(t.Context(), translate.GuestName(pod), metav1.GetOptions{})
		return err == nil, fmt.Sprint(err)
	})
	// kubectl drain refuses a pod without a controller.
	if owner := metav1.GetControllerOf(guest); owner == nil || owner.Kind != "Namespace" || owner.Name != guestNamespace || owner.UID != e.guestNamespaceUID {
		t.Errorf("the controller of guest %s is %+v, want its namespace", guest.Name, owner)
	}
	if never := guest.Spec.PreemptionPolicy; never == nil || *never != corev1.PreemptNever {
		t.Errorf("guest %s may preempt pods of the provider", guest.Name)
	}
	return guest
}

// bind gives a guest a node, if it has none: it would be deleted without a grace period.
func (e *environment) bind(t *testing.T, guest *corev1.Pod) {
	t.Helper()
	err := e.guests().Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: guest.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: "worker"}}, metav1.CreateOptions{})
	if !apierrors.IsConflict(err) {
		expect.NoError(t, err)
	}
}

// setGuestStatus writes a guest's status, as its kubelet would.
func (e *environment) setGuestStatus(t *testing.T, guest *corev1.Pod, phase corev1.PodPhase, state corev1.ContainerState) {
	t.Helper()
	e.bind(t, guest)
	expect.Eventually(t, "an update of the guest's status", func() (bool, string) {
		current, err := e.guests().Get(t.Context(), guest.Name, metav1.GetOptions{})
		if err != nil {
			return false, err.Error()
		}
		ready := corev1.ConditionFalse
		if state.Running != nil {
			ready = corev1.ConditionTrue
		}
		s := &current.Status
		s.Phase, s.StartTime, s.PodIP, s.PodIPs = phase, ptr.To(metav1.Now()), "10.1.2.3", []corev1.PodIP{{IP: "10.1.2.3"}}
		s.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Image: "image", State: state, Ready: state.Running != nil}}
		s.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}, {Type: corev1.PodScheduled, Status: corev1.ConditionTrue}}
		_, err = e.guests().UpdateStatus(t.Context(), current, metav1.UpdateOptions{})
		return err == nil, fmt.Sprint(err)
	})
}

func running(startedAt metav1.Time) corev1.ContainerState {
	return corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: startedAt}}
}

// run makes the guest of a pod run, and returns it.
func (e *environment) run(t *testing.T, pod *corev1.Pod) (guest *corev1.Pod) {
	t.Helper()
	guest = e.awaitGuest(t, pod)
	e.setGuestStatus(t, guest, corev1.PodRunning, running(metav1.Now()))
	e.expectStatus(t, pod, "that of the running guest", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodRunning && s.PodIP == "10.1.2.3" && len(s.ContainerStatuses) == 1 && s.ContainerStatuses[0].Ready
	})
	return guest
}

func (e *environment) expectStatus(t *testing.T, pod *corev1.Pod, what string, check func(*corev1.PodStatus) bool) {
	t.Helper()
	expect.Eventually(t, fmt.Sprintf("status of %s: %s", pod.Name, what), func() (bool, string) {
		current, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
		return err == nil && check(&current.Status), fmt.Sprintf("%+v, %v", current.Status, err)
	})
}

func inPhase(phase corev1.PodPhase) func(*corev1.PodStatus) bool {
	return func(s *corev1.PodStatus) bool { return s.Phase == phase }
}

func expectDeleted(t *testing.T, client typedcorev1.PodInterface, name string) {
	t.Helper()
	expect.Eventually(t, "the deletion of "+name, func() (bool, string) {
		_, err := client.Get(t.Context(), name, metav1.GetOptions{})
		return apierrors.IsNotFound(err), fmt.Sprint(err)
	})
}

// expectTerminating waits until the guest is deleted or being deleted.
func (e *environment) expectTerminating(t *testing.T, guest *corev1.Pod) {
	t.Helper()
	expect.Eventually(t, "the deletion of guest "+guest.Name, func() (bool, string) {
		current, err := e.guests().Get(t.Context(), guest.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err) || err == nil && current.DeletionTimestamp != nil, fmt.Sprintf("deletion timestamp %v, %v", current.DeletionTimestamp, err)
	})
}

func (e *environment) expectEvent(t *testing.T, reason, text string) {
	t.Helper()
	expect.Eventually(t, "an Event "+reason, func() (bool, string) {
		list, err := e.consumer.EventsV1().Events(namespace).List(t.Context(), metav1.ListOptions{})
		expect.NoError(t, err)
		var notes []string
		for _, event := range list.Items {
			notes = append(notes, event.Reason+": "+event.Note)
		}
		return slices.ContainsFunc(list.Items, func(event eventsv1.Event) bool {
			return event.Reason == reason && strings.Contains(event.Note, text)
		}), fmt.Sprint(notes)
	})
}

// deletePod deletes a pod and ends its guest, and waits for both.
func (e *environment) deletePod(t *testing.T, pod, guest *corev1.Pod) {
	t.Helper()
	expect.NoError(t, e.pods().Delete(t.Context(), pod.Name, metav1.DeleteOptions{}))
	e.expectTerminating(t, guest)
	if _, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil {
		t.Errorf("the pod was deleted before its guest: %v", err)
	}
	e.endGuest(t, guest)
	expectDeleted(t, e.pods(), pod.Name)
	expectDeleted(t, e.guests(), guest.Name)
}

// endGuest deletes a terminating guest, as its kubelet would.
func (e *environment) endGuest(t *testing.T, guest *corev1.Pod) {
	t.Helper()
	if err := e.guests().Delete(t.Context(), guest.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); !apierrors.IsNotFound(err) {
		expect.NoError(t, err)
	}
}

func (e *environment) createSecret(t *testing.T, secret *corev1.Secret) {
	t.Helper()
	_, err := e.consumer.CoreV1().Secrets(namespace).Create(t.Context(), secret, metav1.CreateOptions{})
	expect.NoError(t, err)
}

func (e *environment) expectCopiedSecrets(t *testing.T, want int) {
	t.Helper()
	if list, err := e.provider.CoreV1().Secrets(guestNamespace).List(t.Context(), metav1.ListOptions{}); err != nil || len(list.Items) != want {
		t.Errorf("got %d copied Secrets (%v), want %d", len(list.Items), err, want)
	}
}

func (e *environment) expectNoCopies(t *testing.T) {
	t.Helper()
	expect.Eventually(t, "the deletion of the copies", func() (bool, string) {
		secrets, err := e.provider.CoreV1().Secrets(guestNamespace).List(t.Context(), metav1.ListOptions{})
		expect.NoError(t, err)
		configMaps, err := e.provider.CoreV1().ConfigMaps(guestNamespace).List(t.Context(), metav1.ListOptions{})
		expect.NoError(t, err)
		return len(secrets.Items)+len(configMaps.Items) == 0, fmt.Sprintf("%d Secrets, %d ConfigMaps", len(secrets.Items), len(configMaps.Items))
	})
}

func neverRestart(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever }

func withSecret(name string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}}}}
	}
}

func withReferences(p *corev1.Pod) {
	withSecret("key")(p)
	p.Spec.Volumes = []corev1.Volume{{Name: "words", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "words"}}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "words", MountPath: "/words"}}
}

func TestHandler(t *testing.T) {
	e := newEnvironment(t)
	t.Run("references", e.testReferences)
	t.Run("service account token", e.testServiceAccountToken)
	t.Run("exit code", e.testExitCode)
	t.Run("lost guest", e.testLostGuest)
	t.Run("concurrent update", e.testConcurrentUpdate)
	t.Run("concurrent conditions", e.testConcurrentConditions)
	t.Run("many pods", e.testManyPods)
	t.Run("unreachable provider", e.testUnreachableProvider)
	t.Run("restart", e.testRestart)
	t.Run("exceeded quota", e.testExceededQuota)
	t.Run("Pod Security", e.testPodSecurity)
	t.Run("hostile provider", e.testHostileProvider)
	t.Run("hand-over", e.testHandOver)
}

func (e *environment) testReferences(t *testing.T) {
	pod := e.createPod(t, "references", withReferences)
	e.expectStatus(t, pod, "waiting for the Secret", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodPending && s.StartTime == nil && len(s.ContainerStatuses) == 1 && s.ContainerStatuses[0].State.Waiting != nil &&
			s.ContainerStatuses[0].State.Waiting.Reason == "CreateContainerConfigError"
	})
	e.expectEvent(t, "WaitingForConfiguration", "not found")
	configMaps := e.consumer.CoreV1().ConfigMaps(namespace)
	_, err := configMaps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "words"}, Data: map[string]string{"text": "one"}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	for _, name := range []string{"key", "other"} {
		e.createSecret(t, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: name}, StringData: map[string]string{"KEY": name}})
	}
	guest := e.run(t, pod)
	if name := guest.Spec.Containers[0].EnvFrom[0].SecretRef.Name; name != translate.CopyName(namespace, "key") {
		t.Errorf("the guest refers to Secret %s", name)
	}
	_, err = configMaps.Patch(t.Context(), "words", types.MergePatchType, []byte(`{"data":{"text":"two"}}`), metav1.PatchOptions{})
	expect.NoError(t, err)
	expect.Eventually(t, "an update of the copy", func() (bool, string) {
		c, err := e.provider.CoreV1().ConfigMaps(guestNamespace).Get(t.Context(), translate.CopyName(namespace, "words"), metav1.GetOptions{})
		return err == nil && c.Data["text"] == "two", fmt.Sprintf("%v, %v", c.Data, err)
	})
	e.expectCopiedSecrets(t, 1)
	e.deletePod(t, pod, guest)
	e.expectNoCopies(t)
}

func (e *environment) testServiceAccountToken(t *testing.T) {
	pod := e.createPod(t, "token", withSecret("token"))
	e.expectEvent(t, "WaitingForConfiguration", `secret "token" not found`)
	e.createSecret(t, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "token", Annotations: map[string]string{corev1.ServiceAccountNameKey: "default"}},
		Type:       corev1.SecretTypeServiceAccountToken, StringData: map[string]string{"token": "secret"},
	})
	e.expectEvent(t, "SecretNotCopied", "not copied to other clusters")
	e.expectCopiedSecrets(t, 0)
	expect.NoError(t, e.pods().Delete(t.Context(), pod.Name, metav1.DeleteOptions{}))
	expectDeleted(t, e.pods(), pod.Name)
}

func (e *environment) testExitCode(t *testing.T) {
	pod := e.createPod(t, "failing", withReferences, neverRestart)
	guest := e.run(t, pod)
	e.setGuestStatus(t, guest, corev1.PodFailed, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error"}})
	e.expectStatus(t, pod, "the exit code", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodFailed && s.ContainerStatuses[0].State.Terminated != nil && s.ContainerStatuses[0].State.Terminated.ExitCode == 3
	})
	e.expectNoCopies(t)
	expect.NoError(t, e.pods().Delete(t.Context(), pod.Name, metav1.DeleteOptions{}))
	expectDeleted(t, e.pods(), pod.Name)
	e.expectTerminating(t, guest)
}

func (e *environment) testLostGuest(t *testing.T) {
	pod := e.createPod(t, "lost")
	e.endGuest(t, e.run(t, pod))
	e.expectStatus(t, pod, "GuestLost", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodFailed && s.Reason == "GuestLost" })
	e.expectEvent(t, "GuestLost", "paris")

	// The provider's node is lost: PodGC there ends the guest, but not its containers.
	pod = e.createPod(t, "lost-node")
	guest := e.run(t, pod)
	expect.NoError(t, e.pods().Delete(t.Context(), pod.Name, metav1.DeleteOptions{}))
	e.expectTerminating(t, guest)
	e.setGuestStatus(t, guest, corev1.PodFailed, running(metav1.Now()))
	e.expectStatus(t, pod, "that of the guest that has failed", inPhase(corev1.PodFailed))
	e.endGuest(t, guest)
	expectDeleted(t, e.pods(), pod.Name)
}

// A write of a status must not revert metadata that changes meanwhile.
func (e *environment) testConcurrentUpdate(t *testing.T) {
	pod := e.createPod(t, "annotated")
	guest := e.awaitGuest(t, pod)
	for i := range 20 {
		_, err := e.pods().Patch(t.Context(), pod.Name, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"count":"%d"}}}`, i), metav1.PatchOptions{})
		expect.NoError(t, err)
		e.setGuestStatus(t, guest, corev1.PodRunning, running(metav1.NewTime(time.Unix(int64(i), 0))))
		current, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
		if err != nil || current.Annotations["count"] != fmt.Sprint(i) {
			t.Fatalf("the annotation is %q (%v), want %d", current.Annotations["count"], err, i)
		}
	}
	expect.Eventually(t, "the annotation of the guest", func() (bool, string) {
		current, err := e.guests().Get(t.Context(), guest.Name, metav1.GetOptions{})
		return err == nil && current.Annotations["count"] == "19", fmt.Sprintf("%v, %v", current.Annotations, err)
	})
	e.deletePod(t, pod, guest)
}

// A write of a status must not revert conditions that others write meanwhile, such as those
// of readiness gates, and is made up for after a conflict.
func (e *environment) testConcurrentConditions(t *testing.T) {
	pod := e.createPod(t, "conditions")
	guest := e.run(t, pod)
	for i := range 20 {
		e.setGuestStatus(t, guest, corev1.PodRunning, running(metav1.NewTime(time.Unix(int64(i), 0))))
		patch := fmt.Appendf(nil, `{"status":{"conditions":[{"type":"example.com/gate-%d","status":"True"}]}}`, i)
		_, err := e.pods().Patch(t.Context(), pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		expect.NoError(t, err)
	}
	e.expectStatus(t, pod, "the last of the guest, with all conditions", func(s *corev1.PodStatus) bool {
		gates := 0
		for _, c := range s.Conditions {
			if strings.HasPrefix(string(c.Type), "example.com/gate-") {
				gates++
			}
		}
		running := s.ContainerStatuses[0].State.Running
		return gates == 20 && running != nil && running.StartedAt.Unix() == 19
	})
	e.deletePod(t, pod, guest)
}

// testManyPods: the handler seldom writes a status from a pod that others have changed, and
// one status for each pod. It keeps pods and guests encoded only.
func (e *environment) testManyPods(t *testing.T) {
	const count = 200
	writes, conflicts := e.writes.Load(), e.conflicts.Load()
	pods, guests := make([]*corev1.Pod, count), make([]*corev1.Pod, count)
	for i := range pods {
		pods[i] = e.createPod(t, fmt.Sprint("many-", i))
	}
	for i, pod := range pods {
		guests[i] = e.awaitGuest(t, pod)
		e.setGuestStatus(t, guests[i], corev1.PodRunning, running(metav1.Now()))
	}
	for _, pod := range pods {
		e.expectStatus(t, pod, "running", inPhase(corev1.PodRunning))
	}
	writes, conflicts = e.writes.Load()-writes, e.conflicts.Load()-conflicts
	t.Logf("%d pods: %d writes, of which %d conflicts", count, writes, conflicts)
	if conflicts >= count/10 {
		t.Errorf("%d of %d writes for %d pods were conflicts", conflicts, writes, count)
	}
	expect.Eventually(t, "all pods and guests in the caches", func() (bool, string) {
		pods, guests, _ := e.handler.Kept()
		return pods >= count && guests >= count, fmt.Sprintf("%d pods, %d guests", pods, guests)
	})
	if _, _, decoded := e.handler.Kept(); len(decoded) > 0 {
		t.Errorf("%d parts of pods are kept that are not encoded, such as %s", len(decoded), decoded[0])
	}
	for i, pod := range pods {
		expect.NoError(t, e.pods().Delete(t.Context(), pod.Name, metav1.DeleteOptions{}))
		e.expectTerminating(t, guests[i])
		e.endGuest(t, guests[i])
	}
	for _, pod := range pods {
		expectDeleted(t, e.pods(), pod.Name)
	}
}

func (e *environment) testUnreachableProvider(t *testing.T) {
	kept, deleted := e.createPod(t, "kept"), e.createPod(t, "deleted")
	keptGuest, deletedGuest := e.run(t, kept), e.run(t, deleted)
	e.disconnect()
	created := e.createPod(t, "created", neverRestart)
	expect.NoError(t, e.pods().Delete(t.Context(), deleted.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}))
	// Longer than the grace period of the pod that is deleted, and than the first retries of the creation.
	expect.Consistently(t, 4*time.Second, "unchanged pods", func() (bool, string) {
		for pod, want := range map[*corev1.Pod]corev1.PodPhase{kept: corev1.PodRunning, deleted: corev1.PodRunning, created: corev1.PodPending} {
			if current, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{}); err != nil || current.Status.Phase != want {
				return false, fmt.Sprintf("%s is %s (%v), want %s", pod.Name, current.Status.Phase, err, want)
			}
		}
		return true, ""
	})
	e.cut.Store(false)
	createdGuest := e.run(t, created)
	e.expectTerminating(t, deletedGuest)
	e.endGuest(t, deletedGuest)
	expectDeleted(t, e.pods(), deleted.Name)
	e.expectStatus(t, kept, "unchanged", inPhase(corev1.PodRunning))
	e.deletePod(t, kept, keptGuest)
	e.deletePod(t, created, createdGuest)
}

func (e *environment) testRestart(t *testing.T) {
	kept, deleted := e.createPod(t, "kept"), e.createPod(t, "deleted")
	keptGuest, orphan := e.run(t, kept), e.run(t, deleted)
	e.stop()
	expect.NoError(t, e.pods().Delete(t.Context(), deleted.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	expectDeleted(t, e.pods(), deleted.Name)
	e.start()
	e.expectTerminating(t, orphan)
	current, err := e.guests().Get(t.Context(), keptGuest.Name, metav1.GetOptions{})
	if err != nil || current.UID != keptGuest.UID || current.DeletionTimestamp != nil {
		t.Errorf("the other guest is %v (%v), want it unchanged", current, err)
	}
	e.expectStatus(t, kept, "unchanged", inPhase(corev1.PodRunning))
	e.deletePod(t, kept, keptGuest)
}

func (e *environment) testExceededQuota(t *testing.T) {
	quotas := e.provider.CoreV1().ResourceQuotas(guestNamespace)
	quota, err := quotas.Create(t.Context(), &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: expect.Resources("requests.cpu", "0")}}, metav1.CreateOptions{})
	expect.NoError(t, err)
	// No controller of quotas is running.
	quota.Status.Hard, quota.Status.Used = quota.Spec.Hard, expect.Resources("requests.cpu", "0")
	_, err = quotas.UpdateStatus(t.Context(), quota, metav1.UpdateOptions{})
	expect.NoError(t, err)
	expect.Eventually(t, "the quota to be in force", func() (bool, string) {
		try := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "try"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i", Resources: corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1")}}}}}
		_, err := e.guests().Create(t.Context(), try, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil && strings.Contains(err.Error(), "exceeded quota"), fmt.Sprint(err)
	})
	pod := e.createPod(t, "refused", neverRestart)
	e.expectStatus(t, pod, "GuestRefused", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodPending && s.Reason == "GuestRefused" && strings.Contains(s.Message, "exceeded quota") && s.StartTime == nil
	})
	e.expectEvent(t, "GuestRefused", "exceeded quota")
	expect.NoError(t, quotas.Delete(t.Context(), "none", metav1.DeleteOptions{}))
	e.deletePod(t, pod, e.run(t, pod))
}

// testPodSecurity: a refusal by the provider's Pod Security names the fields and the value
// that its administrator may change.
func (e *environment) testPodSecurity(t *testing.T) {
	enforce := func(standard string) {
		patch := `{"metadata":{"labels":{"pod-security.kubernetes.io/enforce":` + standard + `}}}`
		_, err := e.provider.CoreV1().Namespaces().Patch(t.Context(), guestNamespace, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		expect.NoError(t, err)
	}
	enforce(`"restricted"`)
	expect.Eventually(t, "the standard to be in effect", func() (bool, string) {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "try"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		_, err := e.guests().Create(t.Context(), pod, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err != nil, fmt.Sprint(err)
	})
	pod := e.createPod(t, "root", neverRestart)
	e.expectStatus(t, pod, "GuestRefused", func(s *corev1.PodStatus) bool {
		return s.Reason == "GuestRefused" && strings.Contains(s.Message, "must set securityContext.runAsNonRoot=true") && strings.Contains(s.Message, "sets guests.podSecurity to baseline")
	})
	e.expectEvent(t, "GuestRefused", "sets guests.podSecurity to baseline")
	enforce("null")
	e.deletePod(t, pod, e.run(t, pod))
}

// testHostileProvider: what a provider says of guests is bounded and leaves this cluster's pods
// as they can be used, and pods of its own that claim to be guests have no effect here. It acts as
// the provider's administrator, and in place of its API server.
func (e *environment) testHostileProvider(t *testing.T) {
	long := strings.Repeat("x", 200<<10)
	refuse := func(r *http.Request) *http.Response {
		if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/pods") {
			return nil
		}
		body, err := json.Marshal(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: long})
		if err != nil {
			t.Error(err)
		}
		return &http.Response{StatusCode: http.StatusForbidden, Header: http.Header{"Content-Type": {runtime.ContentTypeJSON}}, Body: io.NopCloser(bytes.NewReader(body)), Request: r}
	}
	e.answer.Store(&refuse)
	pod := e.createPod(t, "hostile", neverRestart)
	e.expectStatus(t, pod, "a bounded refusal", func(s *corev1.PodStatus) bool {
		return s.Reason == "GuestRefused" && len(s.Message) < 8<<10 && len(s.ContainerStatuses) == 1 && len(s.ContainerStatuses[0].State.Waiting.Message) < 8<<10
	})
	e.answer.Store(nil)
	guest := e.run(t, pod)

	// Its own pods, which say that they are guests of this pod, or of a pod of another namespace.
	imposter := guest.DeepCopy()
	imposter.ObjectMeta = metav1.ObjectMeta{Namespace: guestNamespace, Name: "imposter", Labels: guest.Labels, Annotations: guest.Annotations}
	imposter.Spec.NodeName = ""
	foreign := imposter.DeepCopy()
	foreign.Name, foreign.Labels, foreign.Annotations = "foreign", maps.Clone(guest.Labels), maps.Clone(guest.Annotations)
	foreign.Labels[translate.LabelUID] = "another"
	foreign.Annotations[translate.AnnotationNamespace], foreign.Annotations[translate.AnnotationName] = "kube-system", "secret-of-home"
	for _, own := range []*corev1.Pod{imposter, foreign} {
		created, err := e.guests().Create(t.Context(), own, metav1.CreateOptions{})
		expect.NoError(t, err)
		e.setGuestStatus(t, created, corev1.PodFailed, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}})
	}

	// The status of the guest itself is seen after those.
	current, err := e.guests().Get(t.Context(), guest.Name, metav1.GetOptions{})
	expect.NoError(t, err)
	s := &current.Status
	s.Message, s.PodIP, s.PodIPs = long, "127.0.0.1", []corev1.PodIP{{IP: "127.0.0.1"}}
	s.ContainerStatuses[0].Resources = &corev1.ResourceRequirements{Requests: expect.Resources("cpu", "1000")}
	for i := range 1000 {
		s.ContainerStatuses[0].VolumeMounts = append(s.ContainerStatuses[0].VolumeMounts, corev1.VolumeMountStatus{Name: fmt.Sprint(i), MountPath: long[:100]})
	}
	_, err = e.guests().UpdateStatus(t.Context(), current, metav1.UpdateOptions{})
	expect.NoError(t, err)
	e.expectStatus(t, pod, "bounded and without an address", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodRunning && len(s.Message) > 0 && s.Size() < 16<<10 && s.PodIP == "" && len(s.PodIPs) == 0 && s.ContainerStatuses[0].Resources == nil
	})
	if _, asked := e.asked.Load("/api/v1/namespaces/kube-system/pods/secret-of-home"); asked {
		t.Error("a pod of the provider made the handler read a pod of this cluster")
	}
	_, err = e.pods().Patch(t.Context(), pod.Name, types.MergePatchType, []byte(`{"metadata":{"labels":{"still":"changes"}}}`), metav1.PatchOptions{})
	expect.NoError(t, err)
	e.deletePod(t, pod, guest)
	for _, own := range []*corev1.Pod{imposter, foreign} {
		if left, err := e.guests().Get(t.Context(), own.Name, metav1.GetOptions{}); err != nil || left.DeletionTimestamp != nil {
			t.Errorf("pod %s of the provider was deleted: %v", own.Name, err)
		}
		e.endGuest(t, own)
	}
}

// testHandOver: where the provider hands places over, a guest waits until the provider lets it go;
// that it waits is not reported yet, but what it waits for afterwards is.
func (e *environment) testHandOver(t *testing.T) {
	patch := `{"metadata":{"annotations":{"broker.fluidos.eu/hand-over":"enabled"}}}`
	_, err := e.provider.CoreV1().Namespaces().Patch(t.Context(), guestNamespace, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	expect.NoError(t, err)
	// It has read the namespace before.
	e.stop()
	e.start()
	pod := e.createPod(t, "waits")
	guest := e.awaitGuest(t, pod)
	if gates := guest.Spec.SchedulingGates; len(gates) != 1 || gates[0].Name != broker.GateHandOver {
		t.Fatalf("gates of the guest are %v", gates)
	}
	current, err := e.pods().Get(t.Context(), pod.Name, metav1.GetOptions{})
	expect.NoError(t, err)
	if current.ResourceVersion != pod.ResourceVersion {
		t.Fatalf("while the guest waits for its place, the pod's status was written: %+v", current.Status)
	}
	_, err = e.guests().Patch(t.Context(), guest.Name, types.MergePatchType, []byte(`{"spec":{"schedulingGates":[]}}`), metav1.PatchOptions{})
	expect.NoError(t, err)
	e.expectStatus(t, pod, "waiting for a node", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodPending && strings.Contains(s.Message, "waiting for a node in paris")
	})
}
