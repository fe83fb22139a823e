package hosting_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/virtual-node/internal/guest"
	"github.com/spillway-dev/spillway/virtual-node/internal/hosting"
)

const (
	shop   = "shop"
	guests = "spillway-guests-rome"
	node   = "spillway-paris"
)

// world is home and provider, each a real API server; the test plays scheduler
// and kubelet of both. Between the host and the provider stands a line that can
// be cut.
type world struct {
	*testing.T
	// whole is the test that the subtests belong to.
	whole       *testing.T
	home, paris kubernetes.Interface
	line        *line
	stop        func()
	through     *rest.Config
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, whole: t}
	homeConfig, parisConfig := controlplane.Start(t), controlplane.Start(t)
	w.home, w.paris = kubernetes.NewForConfigOrDie(homeConfig), kubernetes.NewForConfigOrDie(parisConfig)
	for c, ns := range map[kubernetes.Interface]string{w.home: shop, w.paris: guests} {
		w.must(c.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.CreateOptions{}))
		w.must(c.CoreV1().ServiceAccounts(ns).Create(t.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}, metav1.CreateOptions{}))
	}
	u, err := url.Parse(parisConfig.Host)
	if err != nil {
		t.Fatal(err)
	}
	w.line = newLine(t, u.Host)
	w.through = rest.CopyConfig(parisConfig)
	w.through.Host = "https://" + w.line.address()
	w.start()
	return w
}

func (w *world) must(_ any, err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// start runs a host until stop, or the end of the test.
func (w *world) start() {
	w.Helper()
	broadcaster := events.NewBroadcaster(&events.EventSinkImpl{Interface: w.home.EventsV1()})
	ctx, cancel := context.WithCancel(context.Background())
	if err := broadcaster.StartRecordingToSinkWithContext(ctx); err != nil {
		w.Fatal(err)
	}
	h, err := hosting.New(hosting.Options{
		Provider: "paris", Namespace: guests, Remote: kubernetes.NewForConfigOrDie(w.through), Home: w.home,
		Recorder: broadcaster.NewRecorder(scheme.Scheme, "spillway-virtual-node"), Clock: clock.RealClock{}, Log: testr.New(w.whole),
	})
	if err != nil {
		w.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			w.Errorf("the host ended with %v", err)
		}
		broadcaster.Shutdown()
	})
	w.whole.Cleanup(w.stop)
}

func (w *world) eventually(what string, check func() error) {
	w.Helper()
	var last error
	for deadline := time.Now().Add(40 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if last = check(); last == nil {
			return
		}
	}
	w.Fatalf("never so: %s: %v", what, last)
}

func (w *world) pod(name string, change ...func(*corev1.Pod)) *corev1.Pod {
	w.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: shop, Name: name},
		Spec: corev1.PodSpec{NodeName: node, AutomountServiceAccountToken: ptr.To(false), Containers: []corev1.Container{{
			Name: "main", Image: "image", Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m")}},
		}}},
	}
	for _, c := range change {
		c(p)
	}
	made, err := w.home.CoreV1().Pods(shop).Create(w.Context(), p, metav1.CreateOptions{})
	w.must(made, err)
	return made
}

// guest waits for the guest of a pod.
func (w *world) guest(p *corev1.Pod) *corev1.Pod {
	w.Helper()
	var g *corev1.Pod
	w.eventually(p.Name+" has a guest", func() (err error) {
		g, err = w.paris.CoreV1().Pods(guests).Get(w.Context(), guest.Name(p), metav1.GetOptions{})
		return err
	})
	return g
}

// play writes a guest's status, as its kubelet would.
func (w *world) play(g *corev1.Pod, phase corev1.PodPhase, state corev1.ContainerState) {
	w.Helper()
	w.eventually("writing the guest's status", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), g.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		now.Status.Phase, now.Status.StartTime, now.Status.PodIP, now.Status.PodIPs = phase, ptr.To(metav1.Now()), "10.1.2.3", []corev1.PodIP{{IP: "10.1.2.3"}}
		now.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", Image: "image", State: state, Ready: state.Running != nil}}
		ready := corev1.ConditionFalse
		if state.Running != nil {
			ready = corev1.ConditionTrue
		}
		now.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}, {Type: corev1.PodScheduled, Status: corev1.ConditionTrue}}
		_, err = w.paris.CoreV1().Pods(guests).UpdateStatus(w.Context(), now, metav1.UpdateOptions{})
		return err
	})
}

func (w *world) run(p *corev1.Pod) *corev1.Pod {
	w.Helper()
	g := w.guest(p)
	w.play(g, corev1.PodRunning, corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.Now()}})
	w.expect(p, "it runs", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodRunning && s.PodIP == "10.1.2.3" && len(s.ContainerStatuses) == 1 && s.ContainerStatuses[0].Ready
	})
	return g
}

func (w *world) expect(p *corev1.Pod, what string, ok func(*corev1.PodStatus) bool) {
	w.Helper()
	w.eventually(p.Name+": "+what, func() error {
		now, err := w.home.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
		if err == nil && !ok(&now.Status) {
			err = fmt.Errorf("its status is %+v", now.Status)
		}
		return err
	})
}

func (w *world) gone(c kubernetes.Interface, namespace, name string) {
	w.Helper()
	w.eventually(name+" is gone", func() error {
		_, err := c.CoreV1().Pods(namespace).Get(w.Context(), name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("still there (%v)", err)
	})
}

func (w *world) told(reason, part string) {
	w.Helper()
	w.eventually("people are told of "+reason, func() error {
		list, err := w.home.EventsV1().Events(shop).List(w.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, e := range list.Items {
			if e.Reason == reason && strings.Contains(e.Note, part) {
				return nil
			}
		}
		return fmt.Errorf("among %d events is none: %v", len(list.Items), notes(list.Items))
	})
}

func notes(list []eventsv1.Event) (out []string) {
	for _, e := range list {
		out = append(out, e.Reason+": "+e.Note)
	}
	return out
}

func refersTo(p *corev1.Pod) {
	p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "key"}}}}
	p.Spec.Volumes = []corev1.Volume{{Name: "words", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "words"}}}}}
	p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "words", MountPath: "/words"}}
}

func TestHosting(t *testing.T) {
	w := newWorld(t)
	sub := func(name string, f func(*world)) {
		t.Run(name, func(t *testing.T) {
			inner := *w
			inner.T = t
			f(&inner)
			w.stop = inner.stop
		})
	}
	sub("a pod with what it refers to", copies)
	sub("a token of this cluster does not leave it", token)
	sub("completion and exit codes", completion)
	sub("a guest that vanishes", vanished)
	sub("a label written meanwhile stays", labelled)
	sub("a provider out of reach", outOfReach)
	sub("a restart", restart)
	sub("a provider that refuses", refuses)
}

func copies(w *world) {
	p := w.pod("refers", refersTo)
	w.expect(p, "it waits for its Secret", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodPending && s.StartTime == nil && len(s.ContainerStatuses) == 1 && s.ContainerStatuses[0].State.Waiting != nil &&
			s.ContainerStatuses[0].State.Waiting.Reason == "CreateContainerConfigError"
	})
	w.told("WaitingForConfiguration", "not found")
	w.must(w.home.CoreV1().ConfigMaps(shop).Create(w.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "words"}, Data: map[string]string{"text": "one"}}, metav1.CreateOptions{}))
	w.must(w.home.CoreV1().Secrets(shop).Create(w.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "key"}, StringData: map[string]string{"KEY": "k"}}, metav1.CreateOptions{}))
	w.must(w.home.CoreV1().Secrets(shop).Create(w.Context(), &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "other"}, StringData: map[string]string{"KEY": "o"}}, metav1.CreateOptions{}))
	g := w.run(p)
	if name := g.Spec.Containers[0].EnvFrom[0].SecretRef.Name; name != guest.CopyName(shop, "key") {
		w.Errorf("the guest refers to Secret %s", name)
	}
	w.must(w.home.CoreV1().ConfigMaps(shop).Patch(w.Context(), "words", types.MergePatchType, []byte(`{"data":{"text":"two"}}`), metav1.PatchOptions{}))
	w.eventually("the copy follows", func() error {
		c, err := w.paris.CoreV1().ConfigMaps(guests).Get(w.Context(), guest.CopyName(shop, "words"), metav1.GetOptions{})
		if err == nil && c.Data["text"] != "two" {
			err = fmt.Errorf("it says %q", c.Data["text"])
		}
		return err
	})
	if list, err := w.paris.CoreV1().Secrets(guests).List(w.Context(), metav1.ListOptions{}); err != nil || len(list.Items) != 1 {
		w.Errorf("%d Secrets were copied (%v), want the one that is referred to", len(list.Items), err)
	}
	w.end(p, g)
	w.noCopies()
}

func (w *world) noCopies() {
	w.Helper()
	w.eventually("the copies are gone", func() error {
		secrets, err := w.paris.CoreV1().Secrets(guests).List(w.Context(), metav1.ListOptions{})
		if err != nil {
			return err
		}
		maps, err := w.paris.CoreV1().ConfigMaps(guests).List(w.Context(), metav1.ListOptions{})
		if err == nil && len(secrets.Items)+len(maps.Items) > 0 {
			err = fmt.Errorf("left are %d Secrets, %d ConfigMaps", len(secrets.Items), len(maps.Items))
		}
		return err
	})
}

// end deletes a pod at home, plays its guest's end, and sees both go.
func (w *world) end(p, g *corev1.Pod) {
	w.Helper()
	w.must(nil, w.home.CoreV1().Pods(shop).Delete(w.Context(), p.Name, metav1.DeleteOptions{}))
	w.eventually("the guest is told to end", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), g.Name, metav1.GetOptions{})
		if err == nil && now.DeletionTimestamp == nil {
			err = fmt.Errorf("it is not")
		}
		return client404(err)
	})
	if _, err := w.home.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{}); err != nil {
		w.Errorf("the pod went before its guest: %v", err)
	}
	if err := w.paris.CoreV1().Pods(guests).Delete(w.Context(), g.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); client404(err) != nil {
		w.Fatal(err)
	}
	w.gone(w.home, shop, p.Name)
	w.gone(w.paris, guests, g.Name)
}

func client404(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func token(w *world) {
	w.must(w.home.CoreV1().Secrets(shop).Create(w.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "token", Annotations: map[string]string{corev1.ServiceAccountNameKey: "default"}},
		Type:       corev1.SecretTypeServiceAccountToken, StringData: map[string]string{"token": "secret"},
	}, metav1.CreateOptions{}))
	p := w.pod("with-token", func(p *corev1.Pod) {
		p.Spec.Containers[0].EnvFrom = []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "token"}}}}
	})
	w.told("WaitingForConfiguration", "given to no other cluster")
	if list, err := w.paris.CoreV1().Secrets(guests).List(w.Context(), metav1.ListOptions{}); err != nil || len(list.Items) != 0 {
		w.Errorf("%d Secrets were copied (%v)", len(list.Items), err)
	}
	w.must(nil, w.home.CoreV1().Pods(shop).Delete(w.Context(), p.Name, metav1.DeleteOptions{}))
	w.gone(w.home, shop, p.Name)
}

func completion(w *world) {
	p := w.pod("failing", refersTo, func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever })
	g := w.run(p)
	w.play(g, corev1.PodFailed, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error"}})
	w.expect(p, "its exit code is known", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodFailed && s.ContainerStatuses[0].State.Terminated != nil && s.ContainerStatuses[0].State.Terminated.ExitCode == 3
	})
	// It stays, with what can be read of it, but needs nothing any more.
	w.noCopies()
	w.must(nil, w.home.CoreV1().Pods(shop).Delete(w.Context(), p.Name, metav1.DeleteOptions{}))
	w.gone(w.home, shop, p.Name)
	w.eventually("its guest is deleted", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), g.Name, metav1.GetOptions{})
		if err == nil && now.DeletionTimestamp == nil {
			err = fmt.Errorf("it is not")
		}
		return client404(err)
	})
}

func vanished(w *world) {
	p := w.pod("vanishing")
	g := w.run(p)
	w.must(nil, w.paris.CoreV1().Pods(guests).Delete(w.Context(), g.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	w.expect(p, "it has failed", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodFailed && s.Reason == "GuestLost" })
	w.told("GuestLost", "paris")
}

// The library writes pods as it knew them.
func labelled(w *world) {
	p := w.pod("labelled")
	g := w.guest(p)
	for i := range 20 {
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"count":"%d"}}}`, i)
		w.must(w.home.CoreV1().Pods(shop).Patch(w.Context(), p.Name, types.MergePatchType, patch, metav1.PatchOptions{}))
		w.play(g, corev1.PodRunning, corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: metav1.NewTime(time.Unix(int64(i), 0))}})
		now, err := w.home.CoreV1().Pods(shop).Get(w.Context(), p.Name, metav1.GetOptions{})
		if err != nil || now.Annotations["count"] != fmt.Sprint(i) {
			w.Fatalf("the annotation is %q (%v), want %d", now.Annotations["count"], err, i)
		}
	}
	w.eventually("the guest has the annotation", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), g.Name, metav1.GetOptions{})
		if err == nil && now.Annotations["count"] != "19" {
			err = fmt.Errorf("it has %v", now.Annotations)
		}
		return err
	})
	w.end(p, g)
}

func outOfReach(w *world) {
	staying, going := w.pod("staying"), w.pod("going")
	stays, goes := w.run(staying), w.run(going)
	w.line.cut()
	never := w.pod("never", func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever })
	w.must(nil, w.home.CoreV1().Pods(shop).Delete(w.Context(), going.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](1)}))
	// What the library would do when the grace is over, and to a pod that cannot be
	// begun, it would have done by then.
	<-time.After(4 * time.Second)
	w.expect(staying, "it is as it was", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodRunning })
	w.expect(going, "it waits", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodRunning })
	w.expect(never, "it waits", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodPending })
	w.line.mend()
	g := w.run(never)
	w.eventually("the guest is told to end", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), goes.Name, metav1.GetOptions{})
		if err == nil && now.DeletionTimestamp == nil {
			err = fmt.Errorf("it is not")
		}
		return client404(err)
	})
	if err := w.paris.CoreV1().Pods(guests).Delete(w.Context(), goes.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); client404(err) != nil {
		w.Fatal(err)
	}
	w.gone(w.home, shop, going.Name)
	w.expect(staying, "it is as it was", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodRunning })
	w.end(staying, stays)
	w.end(never, g)
}

func restart(w *world) {
	kept, deleted := w.pod("kept"), w.pod("deleted")
	k, d := w.run(kept), w.run(deleted)
	w.stop()
	w.must(nil, w.home.CoreV1().Pods(shop).Delete(w.Context(), deleted.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
	w.gone(w.home, shop, deleted.Name)
	w.start()
	w.eventually("the guest whose pod is gone is deleted", func() error {
		now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), d.Name, metav1.GetOptions{})
		if err == nil && now.DeletionTimestamp == nil {
			err = fmt.Errorf("it is not")
		}
		return client404(err)
	})
	now, err := w.paris.CoreV1().Pods(guests).Get(w.Context(), k.Name, metav1.GetOptions{})
	if err != nil || now.UID != k.UID || now.DeletionTimestamp != nil {
		w.Errorf("the other guest is %v (%v)", now, err)
	}
	w.expect(kept, "it runs on", func(s *corev1.PodStatus) bool { return s.Phase == corev1.PodRunning })
	w.end(kept, k)
}

func refuses(w *world) {
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "none"}, Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"requests.cpu": resource.MustParse("0")}}}
	q, err := w.paris.CoreV1().ResourceQuotas(guests).Create(w.Context(), quota, metav1.CreateOptions{})
	w.must(q, err)
	// No controller runs here that would fill it in.
	q.Status.Hard, q.Status.Used = q.Spec.Hard, corev1.ResourceList{"requests.cpu": resource.MustParse("0")}
	w.must(w.paris.CoreV1().ResourceQuotas(guests).UpdateStatus(w.Context(), q, metav1.UpdateOptions{}))
	p := w.pod("refused", func(p *corev1.Pod) { p.Spec.RestartPolicy = corev1.RestartPolicyNever })
	w.expect(p, "it says why it waits", func(s *corev1.PodStatus) bool {
		return s.Phase == corev1.PodPending && s.Reason == "ProviderRefused" && strings.Contains(s.Message, "exceeded quota") && s.StartTime == nil
	})
	w.told("ProviderRefused", "exceeded quota")
	w.must(nil, w.paris.CoreV1().ResourceQuotas(guests).Delete(w.Context(), "none", metav1.DeleteOptions{}))
	g := w.run(p)
	w.end(p, g)
}

// line is a TCP connection to a server that can be cut.
type line struct {
	listener net.Listener
	target   string

	mu    sync.Mutex
	down  bool
	conns map[net.Conn]bool
}

func newLine(t *testing.T, target string) *line {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &line{listener: listener, target: target, conns: map[net.Conn]bool{}}
	t.Cleanup(func() {
		listener.Close()
		l.cut()
	})
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go l.carry(c)
		}
	}()
	return l
}

func (l *line) address() string { return l.listener.Addr().String() }

func (l *line) carry(c net.Conn) {
	defer c.Close()
	there, err := net.Dial("tcp", l.target)
	if err != nil {
		return
	}
	defer there.Close()
	l.mu.Lock()
	if l.down {
		l.mu.Unlock()
		return
	}
	l.conns[c], l.conns[there] = true, true
	l.mu.Unlock()
	go func() {
		io.Copy(there, c)
		there.Close()
	}()
	io.Copy(c, there)
	l.mu.Lock()
	delete(l.conns, c)
	delete(l.conns, there)
	l.mu.Unlock()
}

func (l *line) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for c := range l.conns {
		c.Close()
	}
}

func (l *line) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = false
}
