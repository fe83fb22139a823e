package steering_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-logr/logr/funcr"
	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
	clocktesting "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/e2e/playground/cluster"
	"github.com/spillway-dev/spillway/scheduler-plugin/demand"
	"github.com/spillway-dev/spillway/scheduler-plugin/steering"
)

func review(t *testing.T, pod any, change ...func(*admissionv1.AdmissionRequest)) []byte {
	t.Helper()
	raw, err := json.Marshal(pod)
	expect.NoError(t, err)
	request := &admissionv1.AdmissionRequest{
		UID:       "review-1",
		Operation: admissionv1.Create,
		Resource:  metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
	}
	request.Object.Raw = raw
	for _, c := range change {
		c(request)
	}
	body, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request:  request,
	})
	expect.NoError(t, err)
	return body
}

// serve sends a request to the handler and decodes the answer.
func serve(t *testing.T, method, contentType string, body []byte) admissionv1.AdmissionReview {
	t.Helper()
	return serveBy(t, steering.Handler(steering.Options{}), method, contentType, body)
}

func serveBy(t *testing.T, handler http.Handler, method, contentType string, body []byte) admissionv1.AdmissionReview {
	t.Helper()
	r := httptest.NewRequest(method, "/", bytes.NewReader(body))
	r.Header.Set("Content-Type", contentType)
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	var answer admissionv1.AdmissionReview
	expect.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer))
	if answer.Response == nil {
		t.Fatalf("no response in %q", w.Body)
	}
	return answer
}

func TestEligiblePods(t *testing.T) {
	pod := func(change ...func(*corev1.Pod)) *corev1.Pod {
		p := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: corev1.DefaultSchedulerName}}
		for _, c := range change {
			c(p)
		}
		return p
	}
	controlled := func(kind string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Controller: ptr.To(true)}}
		}
	}
	cases := map[string]struct {
		body    []byte
		steered bool
	}{
		"the default scheduler's":   {review(t, pod()), true},
		"no scheduler":              {review(t, pod(func(p *corev1.Pod) { p.Spec.SchedulerName = "" })), true},
		"a ReplicaSet's":            {review(t, pod(controlled("ReplicaSet"))), true},
		"Spillway's by its author":  {review(t, pod(func(p *corev1.Pod) { p.Spec.SchedulerName = broker.SchedulerName })), true},
		"another scheduler's":       {review(t, pod(func(p *corev1.Pod) { p.Spec.SchedulerName = "volcano" })), false},
		"opted out":                 {review(t, pod(func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} })), false},
		"bound":                     {review(t, pod(func(p *corev1.Pod) { p.Spec.NodeName = "home" })), false},
		"a DaemonSet's":             {review(t, pod(controlled("DaemonSet"))), false},
		"an update":                 {review(t, pod(), func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Update }), false},
		"a binding":                 {review(t, pod(), func(r *admissionv1.AdmissionRequest) { r.SubResource = "binding" }), false},
		"something else":            {review(t, pod(), func(r *admissionv1.AdmissionRequest) { r.Resource.Resource = "deployments" }), false},
		"a pod that cannot be read": {review(t, map[string]any{"spec": "none"}), false},
		"a field of a newer API":    {review(t, map[string]any{"spec": map[string]any{"novelty": true}}), true},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			answer := serve(t, http.MethodPost, "application/json", tc.body)
			if answer.Kind != "AdmissionReview" || answer.Response.UID != "review-1" || !answer.Response.Allowed {
				t.Fatalf("not admitted: %+v", answer.Response)
			}
			const patch = `[{"op":"add","path":"/spec/schedulerName","value":"spillway-scheduler"},` +
				`{"op":"add","path":"/spec/tolerations","value":[{"key":"broker.fluidos.eu/overflow","operator":"Exists","effect":"NoSchedule"}]}]`
			if got := string(answer.Response.Patch); (got == patch) != tc.steered || got != "" && got != patch {
				t.Errorf("patch %q, want steered %t", got, tc.steered)
			}
		})
	}
}

// TestMalformedReviews: an answer without the UID of a request is a failed call
// for the API server, to which it applies failurePolicy Ignore.
func TestMalformedReviews(t *testing.T) {
	for name, tc := range map[string]struct{ method, contentType, body string }{
		"not JSON":        {http.MethodPost, "application/json", "nonsense"},
		"empty":           {http.MethodPost, "application/json", ""},
		"no request":      {http.MethodPost, "application/json", `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`},
		"another kind":    {http.MethodPost, "application/json", `{"apiVersion":"v1","kind":"Pod"}`},
		"too large":       {http.MethodPost, "application/json", `{"x":"` + strings.Repeat("x", 8<<20) + `"}`},
		"GET":             {http.MethodGet, "application/json", ""},
		"no content type": {http.MethodPost, "", string(review(t, &corev1.Pod{}))},
	} {
		t.Run(name, func(t *testing.T) {
			if got := serve(t, tc.method, tc.contentType, []byte(tc.body)).Response; got.UID != "" || got.Patch != nil {
				t.Errorf("got a verdict: %+v", got)
			}
		})
	}
}

// TestCertificateReload: Serve waits for the certificate, and takes another as
// soon as the files change.
func TestCertificateReload(t *testing.T) {
	dir := t.TempDir()
	port, err := cluster.FreePort() // Serve listens on it later
	expect.NoError(t, err)
	address := cluster.Address(port)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- steering.Serve(ctx, address, dir, steering.Options{}) }()

	serial := func() int64 {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			return 0
		}
		defer conn.Close()
		return conn.ConnectionState().PeerCertificates[0].SerialNumber.Int64()
	}
	expectSerial := func(want int64) {
		t.Helper()
		expect.Eventually(t, fmt.Sprint("certificate ", want), func() (bool, string) {
			select {
			case err := <-ended:
				t.Fatalf("Serve ended: %v", err)
			default:
			}
			got := serial()
			return got == want, fmt.Sprint("served ", got)
		})
	}
	if got := serial(); got != 0 {
		t.Fatalf("served certificate %d before there was one", got)
	}
	writeCertificate(t, dir, 1)
	expectSerial(1)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	response, err := client.Get("https://" + address + "/healthz")
	expect.NoError(t, err)
	expect.NoError(t, response.Body.Close())
	if response.StatusCode != http.StatusOK {
		t.Errorf("/healthz: %s", response.Status)
	}
	client.CloseIdleConnections()
	writeCertificate(t, dir, 2)
	expectSerial(2)
	expect.NoError(t, os.Remove(filepath.Join(dir, corev1.TLSPrivateKeyKey)))
	if got := serial(); got != 2 {
		t.Errorf("served certificate %d while the files change, want the previous one", got)
	}
	cancel()
	expect.NoError(t, <-ended)
}

func writeCertificate(t *testing.T, dir string, serial int64) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	expect.NoError(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	expect.NoError(t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	expect.NoError(t, err)
	for name, block := range map[string]*pem.Block{
		corev1.TLSCertKey:       {Type: "CERTIFICATE", Bytes: cert},
		corev1.TLSPrivateKeyKey: {Type: "PRIVATE KEY", Bytes: keyDER},
	} {
		expect.NoError(t, os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(block), 0o600))
	}
}

// patched returns a pod as the API server gets it from a handler.
func patched(t *testing.T, handler http.Handler, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	r := httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(review(t, pod)))
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, r)
	var answer admissionv1.AdmissionReview
	expect.NoError(t, json.Unmarshal(w.Body.Bytes(), &answer))
	if answer.Response.Patch == nil {
		return pod
	}
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(pod)
	expect.NoError(t, err)
	return apply(t, answer.Response.Patch, object)
}

// apply returns the pod that an object is after a patch of the webhook.
func apply(t *testing.T, patch []byte, object map[string]any) *corev1.Pod {
	t.Helper()
	var operations []struct {
		Op, Path string
		Value    any
	}
	if len(patch) > 0 {
		expect.NoError(t, json.Unmarshal(patch, &operations))
	}
	for _, o := range operations {
		if o.Op != "add" {
			t.Fatalf("operation %q", o.Op)
		}
		expect.NoError(t, unstructured.SetNestedField(object, o.Value, strings.Split(o.Path, "/")[1:]...))
	}
	after, err := json.Marshal(object)
	expect.NoError(t, err)
	result := &corev1.Pod{}
	expect.NoError(t, json.Unmarshal(after, result))
	return result
}

// A steered pod keeps its shape, tolerates virtual nodes and what the driver needs,
// and is not changed by a second call.
func TestTolerations(t *testing.T) {
	gpu := corev1.Toleration{Key: "gpu", Operator: corev1.TolerationOpExists}
	driver := corev1.Toleration{Key: "driver.example.com/no", Operator: corev1.TolerationOpEqual, Value: "true", Effect: corev1.TaintEffectNoExecute}
	pod := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: []corev1.Toleration{gpu}}}
	handler := steering.Handler(steering.Options{Tolerations: []corev1.Toleration{driver}})
	once := patched(t, handler, pod)
	want := []corev1.Toleration{gpu, {Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}, driver}
	if diff := cmp.Diff(want, once.Spec.Tolerations); diff != "" {
		t.Errorf("tolerations (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(once, patched(t, handler, once)); diff != "" {
		t.Errorf("a second call (-first +second):\n%s", diff)
	}
	before, _ := demand.ShapeOf(pod)
	if after, _ := demand.ShapeOf(once); after != before {
		t.Errorf("shape %s, want that of the author's pod %s", after, before)
	}
}

// TestWorkloadRef: the field of Kubernetes 1.35, which the types of later versions lack, is kept
// where the scheduler and the agent read the gang of a pod, of any scheduler.
func TestWorkloadRef(t *testing.T) {
	for name, tc := range map[string]struct {
		meta, spec map[string]any
		want       demand.Gang
	}{
		"of a Workload":        {spec: map[string]any{"workloadRef": map[string]any{"name": "train", "podGroup": "workers"}}, want: demand.Gang{API: demand.KubernetesGangs, Workload: "train", PodGroup: "workers"}},
		"of a replica":         {spec: map[string]any{"workloadRef": map[string]any{"name": "train", "podGroup": "workers", "podGroupReplicaKey": "1"}}, want: demand.Gang{API: demand.KubernetesGangs, Workload: "train", PodGroup: "workers", Replica: "1"}},
		"with annotations":     {meta: map[string]any{"annotations": map[string]any{"team": "a"}}, spec: map[string]any{"workloadRef": map[string]any{"name": "train", "podGroup": "workers"}}, want: demand.Gang{API: demand.KubernetesGangs, Workload: "train", PodGroup: "workers"}},
		"of another scheduler": {spec: map[string]any{"schedulerName": "volcano", "workloadRef": map[string]any{"name": "train", "podGroup": "workers"}}, want: demand.Gang{API: demand.KubernetesGangs, Workload: "train", PodGroup: "workers"}},
		"of no group":          {meta: map[string]any{"annotations": map[string]any{"team": "a"}}, spec: map[string]any{}},
	} {
		t.Run(name, func(t *testing.T) {
			object := map[string]any{"spec": tc.spec}
			if tc.meta != nil {
				object["metadata"] = tc.meta
			}
			answer := serveBy(t, steering.GangHandler(), http.MethodPost, "application/json", review(t, object))
			pod := apply(t, answer.Response.Patch, object)
			if got, _ := demand.GangOf(pod); got.Workload != tc.want.Workload || tc.want.Workload != "" && got != tc.want {
				t.Errorf("gang %+v, want %+v", got, tc.want)
			}
			if tc.meta != nil && pod.Annotations["team"] != "a" {
				t.Errorf("annotations %v: the author's are gone", pod.Annotations)
			}
			if bytes.Contains(answer.Response.Patch, []byte("workloadRef")) {
				t.Errorf("%s: the patch changes workloadRef", answer.Response.Patch)
			}
		})
	}
}

// TestReady: the readiness probe says why the program is not ready.
func TestReady(t *testing.T) {
	for reason, want := range map[string]int{"": http.StatusOK, "Kubernetes 1.34": http.StatusServiceUnavailable} {
		w := httptest.NewRecorder()
		steering.ReadyHandler(steering.Options{NotReady: func() string { return reason }}).ServeHTTP(w, httptest.NewRequest(http.MethodGet, steering.ReadyPath, nil))
		if w.Code != want || strings.TrimSpace(w.Body.String()) != reason {
			t.Errorf("%q: status %d %q", reason, w.Code, w.Body)
		}
	}
}

// While no replica of the scheduler leads, pods stay with the cluster's scheduler.
func TestNoLeader(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	leader := steering.NewLeader(now)
	pod := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: corev1.DefaultSchedulerName}}
	lease := func(version string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: version},
			Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("scheduler-1_x"), LeaseDurationSeconds: ptr.To[int32](10), RenewTime: &metav1.MicroTime{Time: time.Unix(9e9, 0)}}}
	}
	released := func(version string) *coordinationv1.Lease {
		l := lease(version)
		l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds = ptr.To(""), ptr.To[int32](1)
		return l
	}
	for _, step := range []struct {
		reason  string
		after   time.Duration
		lease   *coordinationv1.Lease
		steered bool
	}{
		{"at start a leader is being elected", 0, nil, true},
		{"none was elected", 16 * time.Second, nil, false},
		{"one is elected", time.Second, lease("1"), true},
		{"it renews its lease", 9 * time.Second, lease("2"), true},
		{"another may acquire the lease", 9 * time.Second, lease("2"), true},
		{"the lease has expired, whatever its times say", 2 * time.Second, lease("2"), false},
		{"the Lease was deleted", time.Second, nil, false},
		{"another one leads", time.Second, lease("3"), true},
		{"it releases the Lease: client-go states a duration of one second", time.Second, released("4"), true},
		{"another one acquires it within its duration", 4 * time.Second, released("4"), true},
		{"none has", 11 * time.Second, released("4"), false},
	} {
		now.SetTime(now.Now().Add(step.after))
		leader.Observe(step.lease)
		got := patched(t, steering.Handler(steering.Options{Leads: leader.Leads}), pod).Spec.SchedulerName == broker.SchedulerName
		if got != step.steered {
			t.Errorf("%s: steered %t, want %t", step.reason, got, step.steered)
		}
	}
}

// TestUnreadableLease: while the API server does not allow to read the Lease, no replica is known to
// lead, and the log says why, not each time.
func TestUnreadableLease(t *testing.T) {
	var reads atomic.Int64
	var allowed atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		reads.Add(1)
		w.Header().Set("Content-Type", "application/json")
		if !allowed.Load() {
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Forbidden", "code": 403, "message": "not allowed"}`)
			return
		}
		fmt.Fprint(w, `{"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"resourceVersion": "7"}}`)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	expect.NoError(t, err)
	now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	leader := steering.NewLeader(now)
	var logged atomic.Int64
	ctx := klog.NewContext(t.Context(), funcr.New(func(_, line string) {
		if strings.Contains(line, "Failed to read the Lease") && strings.Contains(line, "not allowed") {
			logged.Add(1)
		}
	}, funcr.Options{}))
	go leader.Watch(ctx, client, "kube-system", "spillway-scheduler")
	expect.Eventually(t, "the Lease to be read again", func() (bool, string) { return reads.Load() >= 3, fmt.Sprint(reads.Load(), " reads") })
	if n := logged.Load(); n != 1 {
		t.Errorf("logged %d times, want once", n)
	}
	now.SetTime(now.Now().Add(time.Minute))
	if leader.Leads() {
		t.Error("a replica is taken to lead whose Lease cannot be read")
	}
	allowed.Store(true)
	expect.Eventually(t, "the Lease to count", func() (bool, string) { return leader.Leads(), "no replica leads" })
}

// A replica knows that it leads by the host name in the Lease.
func TestLeadsOn(t *testing.T) {
	now := clocktesting.NewFakePassiveClock(time.Unix(1000, 0))
	leader := steering.NewLeader(now)
	held := func(version, holder string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{ResourceVersion: version},
			Spec: coordinationv1.LeaseSpec{LeaseDurationSeconds: ptr.To[int32](10), HolderIdentity: &holder}}
	}
	for _, step := range []struct {
		reason string
		after  time.Duration
		lease  *coordinationv1.Lease
		want   bool
	}{
		{"none leads yet", 0, nil, false},
		{"another leads, whose name begins alike", time.Second, held("1", "scheduler-12_x"), false},
		{"it leads", time.Second, held("2", "scheduler-1_x"), true},
		{"it renews its lease", 9 * time.Second, held("3", "scheduler-1_x"), true},
		{"it has not renewed it", 11 * time.Second, nil, false},
		{"it has released it", time.Second, held("4", ""), false},
	} {
		now.SetTime(now.Now().Add(step.after))
		leader.Observe(step.lease)
		if got := leader.LeadsOn("scheduler-1"); got != step.want {
			t.Errorf("%s: got %t", step.reason, got)
		}
	}
	restarted := steering.NewLeader(now)
	if restarted.Observe(held("5", "scheduler-1_x")); restarted.LeadsOn("scheduler-1") {
		t.Error("a process leads by the Lease of the one before it")
	}
	if restarted.Observe(held("6", "scheduler-1_y")); !restarted.LeadsOn("scheduler-1") {
		t.Error("a process that has acquired the Lease of the one before it does not lead")
	}
	if leader.Observe(held("5", "_x")); leader.LeadsOn("") {
		t.Error("a host without a name leads")
	}
}

// Pods of other schedulers that tolerate every taint require nodes that are not
// virtual, and keep what they required before.
func TestAvoidVirtualNodes(t *testing.T) {
	all := []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	ssd := corev1.NodeSelectorRequirement{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"ssd"}}
	hdd := corev1.NodeSelectorRequirement{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"hdd"}}
	real := corev1.NodeSelectorRequirement{Key: broker.LabelProvider, Operator: corev1.NodeSelectorOpDoesNotExist}
	requires := func(terms ...[]corev1.NodeSelectorRequirement) *corev1.Affinity {
		selector := &corev1.NodeSelector{}
		for _, t := range terms {
			selector.NodeSelectorTerms = append(selector.NodeSelectorTerms, corev1.NodeSelectorTerm{MatchExpressions: t})
		}
		return &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: selector}}
	}
	type terms = []corev1.NodeSelectorRequirement
	cases := map[string]struct {
		pod  corev1.PodSpec
		kind string
		want *corev1.Affinity
	}{
		"an ordinary pod":         {pod: corev1.PodSpec{}},
		"an operator":             {pod: corev1.PodSpec{Tolerations: all}, want: requires(terms{real})},
		"with requirements":       {pod: corev1.PodSpec{Tolerations: all, Affinity: requires(terms{ssd}, terms{hdd})}, want: requires(terms{ssd, real}, terms{hdd, real})},
		"an empty term":           {pod: corev1.PodSpec{Tolerations: all, Affinity: requires(terms{}, terms{hdd})}, want: requires(terms{hdd, real})},
		"virtual nodes, by key":   {pod: corev1.PodSpec{Tolerations: []corev1.Toleration{{Key: broker.TaintOverflow, Operator: corev1.TolerationOpExists}}}, want: requires(terms{real})},
		"NoExecute only":          {pod: corev1.PodSpec{Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute}}}},
		"bound":                   {pod: corev1.PodSpec{Tolerations: all, NodeName: "home"}},
		"Spillway's":              {pod: corev1.PodSpec{Tolerations: all, SchedulerName: broker.SchedulerName}},
		"a DaemonSet's":           {pod: corev1.PodSpec{Tolerations: all}, kind: "DaemonSet"},
		"it avoids them already":  {pod: corev1.PodSpec{Tolerations: all, Affinity: requires(terms{real})}, want: requires(terms{real})},
		"of a custom controller":  {pod: corev1.PodSpec{Tolerations: all}, kind: "Database", want: requires(terms{real})},
		"another scheduler's pod": {pod: corev1.PodSpec{Tolerations: all, SchedulerName: "volcano"}, want: requires(terms{real})},
	}
	for name, tc := range cases {
		pod := &corev1.Pod{Spec: tc.pod}
		if tc.kind != "" {
			pod.OwnerReferences = []metav1.OwnerReference{{Kind: tc.kind, Controller: ptr.To(true)}}
		}
		if diff := cmp.Diff(tc.want, patched(t, steering.AvoidHandler(steering.Options{}), pod).Spec.Affinity); diff != "" {
			t.Errorf("%s: affinity (-want +got):\n%s", name, diff)
		}
	}
}

// In opted-in namespaces, the pods that are not steered avoid virtual nodes too; those that
// are steered may use them.
func TestPodsThatAreNotSteeredAvoidVirtualNodes(t *testing.T) {
	noLeader := steering.Options{Leads: func() bool { return false }}
	for name, tc := range map[string]struct {
		change  func(*corev1.Pod)
		options steering.Options
		avoids  bool
	}{
		"steered":                {change: func(*corev1.Pod) {}},
		"opted out":              {change: func(p *corev1.Pod) { p.Labels = map[string]string{broker.LabelOverflow: broker.OverflowDisabled} }, avoids: true},
		"another scheduler's":    {change: func(p *corev1.Pod) { p.Spec.SchedulerName = "volcano" }, avoids: true},
		"no scheduler leads":     {change: func(*corev1.Pod) {}, options: noLeader, avoids: true},
		"Spillway's, none leads": {change: func(p *corev1.Pod) { p.Spec.SchedulerName = broker.SchedulerName }, options: noLeader},
		"bound":                  {change: func(p *corev1.Pod) { p.Spec.NodeName = "home" }},
		"a DaemonSet's": {change: func(p *corev1.Pod) {
			p.OwnerReferences = []metav1.OwnerReference{{Kind: "DaemonSet", Controller: ptr.To(true)}}
		}},
		"without the toleration": {change: func(p *corev1.Pod) { p.Spec.Tolerations, p.Spec.SchedulerName = nil, "volcano" }},
	} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}}}}
		tc.change(pod)
		if got := patched(t, steering.Handler(tc.options), pod).Spec.Affinity != nil; got != tc.avoids {
			t.Errorf("%s: the pod avoids virtual nodes: %t, want %t", name, got, tc.avoids)
		}
	}
}

// In mode "only", the cluster's one scheduler has the default name.
func TestOnlyScheduler(t *testing.T) {
	options := steering.Options{SchedulerName: corev1.DefaultSchedulerName}
	everything := func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}} }
	for _, name := range []string{"", corev1.DefaultSchedulerName, broker.SchedulerName} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: name}}
		steered := patched(t, steering.Handler(options), pod)
		if got := steered.Spec.SchedulerName; got != corev1.DefaultSchedulerName || len(steered.Spec.Tolerations) != 1 {
			t.Errorf("scheduler %q: got %q and tolerations %v", name, got, steered.Spec.Tolerations)
		}
	}
	for name, avoids := range map[string]bool{"": false, corev1.DefaultSchedulerName: false, "other": true} {
		pod := &corev1.Pod{Spec: corev1.PodSpec{SchedulerName: name}}
		everything(pod)
		if got := patched(t, steering.AvoidHandler(options), pod).Spec.Affinity != nil; got != avoids {
			t.Errorf("scheduler %q: the pod avoids virtual nodes: %t, want %t", name, got, avoids)
		}
	}
}
