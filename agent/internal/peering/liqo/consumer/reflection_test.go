package consumer

import (
	"context"
	"maps"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	offloadingv1beta1 "github.com/liqotech/liqo/apis/offloading/v1beta1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
	testclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/inventory"
	"github.com/spillway-dev/spillway/agent/internal/peering"
	"github.com/spillway-dev/spillway/agent/internal/peering/contract"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/agent/internal/peering/liqo/liqotest"
	"github.com/spillway-dev/spillway/agent/internal/peering/session"
	"github.com/spillway-dev/spillway/e2e/controlplane"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// referring is the spec of a pod that refers to ConfigMaps and Secrets in every way.
func referring() corev1.PodSpec {
	configMap := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	return corev1.PodSpec{
		ImagePullSecrets: []corev1.LocalObjectReference{configMap("pull")},
		Volumes: []corev1.Volume{
			{VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: configMap("words")}}},
			{VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "key"}}},
			{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: configMap("kube-root-ca.crt")}},
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: configMap("projected")}},
				{Secret: &corev1.SecretProjection{LocalObjectReference: configMap("projected")}},
			}}}},
		},
		InitContainers: []corev1.Container{{
			EnvFrom: []corev1.EnvFromSource{
				{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: configMap("all")}},
				{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: configMap("all"), Optional: ptr.To(true)}},
			},
		}},
		Containers: []corev1.Container{{
			Env: []corev1.EnvVar{
				{Value: "x"},
				{ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: configMap("one"), Optional: ptr.To(true)}}},
				{ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: configMap("one")}}},
				{ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: configMap("one"), Optional: ptr.To(true)}}},
			},
		}},
	}
}

func TestSources(t *testing.T) {
	spec := referring()
	want := map[source]bool{
		{"ConfigMap", "words"}: false, {"Secret", "key"}: false, {"ConfigMap", "projected"}: false, {"Secret", "projected"}: false,
		{"ConfigMap", "all"}: false, {"Secret", "all"}: true, {"ConfigMap", "one"}: true, {"Secret", "one"}: false, {"Secret", "pull"}: true,
	}
	if got := sources(&spec); !maps.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

func TestRestrict(t *testing.T) {
	defaults := offloadingv1beta1.VkOptionsTemplateSpec{
		ExtraArgs:        []string{"--enable-apiserver-support=true", "--other"},
		ReflectorsConfig: map[string]offloadingv1beta1.ReflectorConfig{"secret": {NumWorkers: 3, Type: offloadingv1beta1.DenyList}},
	}
	for _, test := range []struct {
		all, tokens, unconnected bool
		wantSecrets              offloadingv1beta1.ReflectionType
		wantArgs                 []string
	}{
		{false, false, false, offloadingv1beta1.AllowList, []string{"--other", "--enable-apiserver-support=false"}},
		{true, false, false, offloadingv1beta1.DenyList, []string{"--other", "--enable-apiserver-support=false"}},
		{false, true, false, offloadingv1beta1.AllowList, []string{"--enable-apiserver-support=true", "--other"}},
		{false, true, true, offloadingv1beta1.AllowList, []string{"--enable-apiserver-support=true", "--other", "--disable-ip-reflection=true"}},
	} {
		d := &Driver{Options: Options{ReflectAll: test.all, ServiceAccountTokens: test.tokens}}
		got := d.restrict(defaults, test.unconnected)
		if got.ReflectorsConfig["secret"] != (offloadingv1beta1.ReflectorConfig{NumWorkers: 3, Type: test.wantSecrets}) || !slices.Equal(got.ExtraArgs, test.wantArgs) {
			t.Errorf("%+v: got %+v", test, got)
		}
		if want := map[bool]offloadingv1beta1.ReflectionType{false: offloadingv1beta1.AllowList}[test.all]; got.ReflectorsConfig["configmap"].Type != want {
			t.Errorf("%+v: ConfigMaps are reflected by %q", test, got.ReflectorsConfig["configmap"].Type)
		}
	}
	if defaults.ReflectorsConfig["secret"].Type != offloadingv1beta1.DenyList || defaults.ExtraArgs[0] != "--enable-apiserver-support=true" {
		t.Error("the defaults have changed")
	}
}

// TestSetAddresses: the virtual kubelet of a node that exists is changed when networks are connected
// with its provider, and when they are no more.
func TestSetAddresses(t *testing.T) {
	node := &offloadingv1beta1.VirtualNode{}
	if setAddresses(node, true) {
		t.Error("changed before Liqo has made its template")
	}
	node.Spec.Template = &offloadingv1beta1.DeploymentTemplate{}
	node.Spec.Template.Spec.Template.Spec.Containers = []corev1.Container{{Args: []string{"--other"}}}
	for n, step := range []struct {
		without, changed bool
		want             []string
	}{
		{false, false, []string{"--other"}},
		{true, true, []string{"--other", "--disable-ip-reflection=true"}},
		{true, false, []string{"--other", "--disable-ip-reflection=true"}},
		{false, true, []string{"--other", "--disable-ip-reflection=false"}},
		{false, false, []string{"--other", "--disable-ip-reflection=false"}},
	} {
		changed := setAddresses(node, step.without)
		if got := node.Spec.Template.Spec.Template.Spec.Containers[0].Args; changed != step.changed || !slices.Equal(got, step.want) {
			t.Errorf("step %d: changed %t, arguments %v, want %v", n, changed, got, step.want)
		}
	}
}

// What a pod refers to is marked for Liqo as long as its namespace is used; what else is
// in the namespace, and what its owner has decided about, is left as it is.
func TestReflection(t *testing.T) {
	rome := liqotest.NewClient(t, controlplane.Start(t))
	expect.NoError(t, rome.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}}))
	start := func(c client.Client, clock clock.PassiveClock) *Driver {
		t.Helper()
		driver, err := New(Options{NamespaceRole: "spillway-agent-namespace", Options: liqo.Options{Options: session.Options{
			Client: c, ClusterID: "rome", Messenger: &contract.Relay[*Driver, peering.Provider]{}, Clock: clock, Log: testr.New(t),
			ServiceAccount: types.NamespacedName{Namespace: "spillway-system", Name: "spillway-agent"},
		}}})
		expect.NoError(t, err)
		return driver
	}
	driver := start(rome, nil)
	ctx := t.Context()
	secret := func(name string, annotations map[string]string) {
		expect.NoError(t, rome.Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, Annotations: annotations}}))
	}
	secret("key", nil)
	secret("other", nil)
	secret("projected", map[string]string{"liqo.io/allow-reflection": "false"})
	for _, name := range []string{"words", "projected", "all"} {
		expect.NoError(t, rome.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}}))
	}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "p"}, Spec: referring()}
	carry := func() (peering.Progress, error) { return driver.Carry(ctx, pod) }
	contract.Until(t, peering.ReasonSourceMissing, carry)
	secret("one", nil)
	contract.Until(t, "Carried", carry)
	expectMarks := func(want map[string]string) {
		t.Helper()
		for name, mark := range want {
			s := liqotest.Read(t, rome, "shop", name, &corev1.Secret{})
			_, labelled := s.Labels[labelReflected]
			if s.Annotations["liqo.io/allow-reflection"] != mark || labelled != (mark == "true") {
				t.Errorf("Secret %s has annotations %v and labels %v, want %q", name, s.Annotations, s.Labels, mark)
			}
		}
	}
	expectMarks(map[string]string{"key": "true", "one": "true", "other": "", "projected": "false"})
	if words := liqotest.Read(t, rome, "shop", "words", &corev1.ConfigMap{}); words.Annotations["liqo.io/allow-reflection"] != "true" {
		t.Errorf("ConfigMap words has annotations %v", words.Annotations)
	}

	expectMarkedAgain(t, rome, start, pod)
	expectMarks(map[string]string{"key": "true"})

	unmark := func(used bool) {
		t.Helper()
		expect.NoError(t, start(rome, nil).unmark(ctx, func(string) bool { return used }))
	}
	unmark(true)
	expectMarks(map[string]string{"key": "true"})
	unmark(false)
	expectMarks(map[string]string{"key": "", "one": "", "other": "", "projected": "false"})
	binding, err := session.Find(ctx, rome, "shop", reflectionBinding, &rbacv1.RoleBinding{})
	if err != nil || binding != nil {
		t.Errorf("the permission is left: %v, %v", binding, err)
	}
}

// countedReads counts the objects that are read.
type countedReads struct {
	client.Client
	reads atomic.Int32
}

func (c *countedReads) Get(ctx context.Context, key client.ObjectKey, object client.Object, options ...client.GetOption) error {
	c.reads.Add(1)
	return c.Client.Get(ctx, key, object, options...)
}

// expectMarkedAgain checks that a Secret which is created again is marked again, within a
// minute, and that the pods which refer to it cost no reads meanwhile.
func expectMarkedAgain(t *testing.T, rome client.Client, start func(client.Client, clock.PassiveClock) *Driver, pod *corev1.Pod) {
	t.Helper()
	ctx := t.Context()
	counted := &countedReads{Client: rome}
	clock := testclock.NewFakePassiveClock(time.Now())
	again := start(counted, clock)
	for range 3 {
		counted.reads.Store(0)
		for range 2 {
			_, err := again.Carry(ctx, pod)
			expect.NoError(t, err)
		}
		if got := counted.reads.Load(); got != 9 {
			t.Errorf("%d reads for two pods, want 9: of each source once", got)
		}
		key := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "key"}}
		expect.NoError(t, rome.Delete(ctx, key.DeepCopy()))
		expect.NoError(t, rome.Create(ctx, key))
		clock.SetTime(clock.Now().Add(lookAgainAfter + 1))
	}
	_, err := again.Carry(ctx, pod)
	expect.NoError(t, err)
}

// TestSourcesInCache: the cache keeps what pods on virtual nodes refer to, and of no others.
func TestSourcesInCache(t *testing.T) {
	for node, keeps := range map[string]bool{"spillway-paris": true, "worker": false, "": false} {
		pod := &corev1.Pod{Spec: referring()}
		pod.Spec.NodeName = node
		want := sources(&pod.Spec)
		if !keeps {
			want = map[source]bool{}
		}
		_, err := inventory.TrimPod(pod)
		expect.NoError(t, err)
		if got := sources(&pod.Spec); !maps.Equal(got, want) {
			t.Errorf("on node %q: %v, want %v", node, got, want)
		}
	}
}
