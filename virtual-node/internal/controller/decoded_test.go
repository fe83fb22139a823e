package controller

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	metricsv1beta1 "k8s.io/metrics/pkg/apis/metrics/v1beta1"

	"github.com/spillway-dev/spillway/e2e/expect"
	"github.com/spillway-dev/spillway/virtual-node/nodeconfig"
)

// appendField appends a field of a message in protobuf.
func appendField(to []byte, number uint64, value []byte) []byte {
	to = binary.AppendUvarint(to, number<<3|2)
	return append(binary.AppendUvarint(to, uint64(len(value))), value...)
}

// empties are n empty elements of a field.
func empties(number uint64, n int) []byte {
	return bytes.Repeat(appendField(nil, number, nil), n)
}

// enveloped is a message of a kind as Kubernetes encodes it.
func enveloped(kind string, message []byte) []byte {
	meta := appendField(appendField(nil, 1, []byte("v1")), 2, []byte(kind))
	return appendField(appendField([]byte("k8s\x00"), 1, meta), 2, message)
}

// hostileProvider is a client of a provider that answers everything with the same.
func hostileProvider(t *testing.T, status int, contentType string, body []byte) *provider {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}))
	t.Cleanup(server.Close)
	connected, err := newProvider(nodeconfig.Connection{
		Endpoint: server.URL, Namespace: "x", Token: "t",
		CA: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}),
	})
	expect.NoError(t, err)
	return connected
}

// A hostile provider cannot make the program use memory without end by elements that are empty:
// of two bytes each, 64 MiB of them would take 40 GB.
func TestDecodedSizeIsBounded(t *testing.T) {
	const n = 1 << 18
	list, pod := empties(2, n), appendField(nil, 2, empties(2, 3*n))
	json := func(item string) []byte {
		return []byte(`{"kind":"PodList","apiVersion":"v1","items":[` + strings.Repeat(item+",", n-1) + item + `]}`)
	}
	for name, tc := range map[string]struct {
		status      int
		contentType string
		body        []byte
		want        string
	}{
		"pods":                  {http.StatusOK, runtime.ContentTypeProtobuf, enveloped("PodList", list), errTooLarge.Error()},
		"pods of no type":       {http.StatusOK, "", enveloped("PodList", list), errTooLarge.Error()},
		"containers":            {http.StatusOK, runtime.ContentTypeProtobuf, enveloped("PodList", appendField(nil, 2, pod)), errTooLarge.Error()},
		"another kind":          {http.StatusOK, runtime.ContentTypeProtobuf, enveloped("PodTemplateList", list), errTooLarge.Error()},
		"in JSON":               {http.StatusOK, runtime.ContentTypeJSON, json("{}"), errTooLarge.Error()},
		"in JSON, numbers":      {http.StatusOK, runtime.ContentTypeJSON, json("0"), errTooLarge.Error()},
		"in JSON, lists of one": {http.StatusOK, runtime.ContentTypeJSON, json(`{"spec":{"containers":[0],"initContainers":[0],"ephemeralContainers":[0],"volumes":[0]}}`), errTooLarge.Error()},
		"in JSON, null":         {http.StatusOK, runtime.ContentTypeJSON + ";charset=utf-8", json("null"), errTooLarge.Error()},
		"in YAML":               {http.StatusOK, runtime.ContentTypeYAML, json("{}"), "not asked for"},
		"an unknown kind":       {http.StatusOK, runtime.ContentTypeProtobuf, enveloped("Unheard", nil), "unknown kind"},
		"malformed":             {http.StatusOK, runtime.ContentTypeProtobuf, enveloped("PodList", []byte{2<<3 | 2, 9}), errMalformed.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			connected := hostileProvider(t, tc.status, tc.contentType, tc.body)
			pods, err := connected.client.CoreV1().Pods("x").List(t.Context(), metav1.ListOptions{})
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("a list of %d bytes: %v, %d pods; want an error with %q", len(tc.body), err, len(pods.Items), tc.want)
			}
		})
	}
}

// The values of a map may have lists too.
func TestDecodedMapsAreBounded(t *testing.T) {
	const n = 5 << 19
	policy := empties(3, n) // validValues
	entry := appendField(appendField(nil, 1, []byte("a")), 2, appendField(nil, 2, policy))
	slice := appendField(nil, 2, appendField(nil, 6, appendField(nil, 3, entry)))
	decoded := &resourcev1.ResourceSlice{}
	expect.NoError(t, decoded.Unmarshal(slice))
	if got := len(decoded.Spec.Devices[0].Capacity["a"].RequestPolicy.ValidValues); got != n {
		t.Fatalf("%d values, want %d", got, n)
	}
	left := memory(maxDecoded)
	if err := left.message(reflect.TypeFor[resourcev1.ResourceSlice](), slice); !errors.Is(err, errTooLarge) {
		t.Errorf("%d bytes: %v, want %v; they count as %d", len(slice), err, errTooLarge, maxDecoded-left)
	}
}

// A quantity of a few bytes takes minutes, and memory, if its exponent is large.
func TestExponentsAreBounded(t *testing.T) {
	for text, refused := range map[string]bool{
		"1e3": false, "500m": false, "1.5Gi": false, "12E4": false, "-1e-9": false, "": false,
		"1e5000": false, "1e-5000": true, " 1E-5000 ": true, "1e2147483648": true, "1111111111111111111e5000": true,
		strings.Repeat("1", 2000): true,
	} {
		amount := appendField(nil, 1, []byte(text))
		entry := appendField(appendField(nil, 1, []byte("cpu")), 2, amount)
		container := appendField(nil, 8, appendField(nil, 1, entry)) // resources.limits
		object := enveloped("PodList", appendField(nil, 2, appendField(nil, 2, appendField(nil, 2, container))))
		inJSON := []byte(`{"items":[{"spec":{"containers":[{"resources":{"limits":{"cpu":"` + text + `"}}}]}}]}`)
		left := memory(maxDecoded)
		if err := left.object(object); errors.Is(err, errTooLarge) != refused {
			t.Errorf("%q: %v", text, err)
		}
		if err := left.json(inJSON); errors.Is(err, errTooLarge) != refused {
			t.Errorf("%q in JSON: %v", text, err)
		}
	}
	left := memory(maxDecoded)
	if err := left.json([]byte(`{"limits":{"cpu":1e-5000}}`)); !errors.Is(err, errTooLarge) {
		t.Errorf("a number in JSON: %v", err)
	}
	expect.NoError(t, left.json([]byte(`{"commit":"123e45678","uid":"550e8400-e29b-41d4-a716-446655440000","escaped":"1\\\"e-5000"}`)))
}

// watchEvent is an event of a watch as the API server sends it.
func watchEvent(object []byte) []byte {
	message := appendField(appendField(nil, 1, []byte("ADDED")), 2, appendField(nil, 1, object))
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(message))), message...)
}

func TestDecodedEventsAreBounded(t *testing.T) {
	const n = 1 << 18
	honest, err := (&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}}).Marshal()
	expect.NoError(t, err)
	first := watchEvent(enveloped("Pod", honest))
	protobuf := runtime.ContentTypeProtobuf + ";stream=watch"
	for name, tc := range map[string]struct {
		contentType string
		body        []byte
		events      int
	}{
		"containers":     {protobuf, append(first, watchEvent(enveloped("Pod", appendField(nil, 2, empties(2, n))))...), 1},
		"a list of pods": {protobuf, append(first, watchEvent(enveloped("PodList", empties(2, n)))...), 1},
		"a large length": {protobuf, append(first, 0xff, 0xff, 0xff, 0xff, 0), 1},
		"honest ones":    {protobuf, append(first, first...), 2},
		"in JSON":        {runtime.ContentTypeJSON, []byte(`{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1"}}`), 0},
		"of no type":     {"", []byte(`{"type":"ADDED","object":{"kind":"Pod","apiVersion":"v1"}}`), 0},
	} {
		t.Run(name, func(t *testing.T) {
			connected := hostileProvider(t, http.StatusOK, tc.contentType, tc.body)
			got := 0
			watching, err := connected.client.CoreV1().Pods("x").Watch(t.Context(), metav1.ListOptions{})
			if err == nil {
				defer watching.Stop()
				for ended := time.After(time.Minute); ; {
					select {
					case e, more := <-watching.ResultChan():
						if !more {
							break
						}
						if e.Type == watch.Added {
							got++
						}
						continue
					case <-ended:
						t.Error("the watch does not end")
					}
					break
				}
			}
			if got != tc.events {
				t.Errorf("%d events, %v; want %d", got, err, tc.events)
			}
		})
	}
}

// What honest providers send is far from the bounds.
func TestHonestAnswersAreDecoded(t *testing.T) {
	data, err := ordinaryGuest().Marshal()
	expect.NoError(t, err)
	left := memory(maxDecoded)
	expect.NoError(t, left.object(enveloped("PodList", appendField(nil, 2, data))))
	used := int64(maxDecoded - left)
	t.Logf("a guest of %d bytes takes %d", len(data), used)
	if most := int64(maxDecoded) / used; most < 15_000 {
		t.Errorf("lists of more than %d guests are refused", most)
	}
	usage, err := json.Marshal(metricsv1beta1.PodMetrics{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "x", Labels: map[string]string{"app": "web", "commit": "123e45678"}},
		Containers: []metricsv1beta1.ContainerMetrics{{Name: "c", Usage: expect.Resources("cpu", "12345678n", "memory", "12345Ki")}},
	})
	expect.NoError(t, err)
	left = memory(maxDecoded)
	expect.NoError(t, left.json(usage))
	if most := int64(maxDecoded) / (maxDecoded - int64(left)); most < 10_000 {
		t.Errorf("usages of more than %d pods in JSON are refused", most)
	}
	pods := hostileProvider(t, http.StatusOK, runtime.ContentTypeProtobuf, enveloped("PodList", bytes.Repeat(appendField(nil, 2, data), 500)))
	list, err := pods.client.CoreV1().Pods("x").List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 500 {
		t.Errorf("%d pods, %v", len(list.Items), err)
	}
}

func ordinaryGuest() *corev1.Pod {
	long := strings.Repeat("x", 60)
	labels, env := map[string]string{}, []corev1.EnvVar(nil)
	for i := range 8 {
		labels[fmt.Sprint("example.com/label-", i)] = long[:20]
		env = append(env, corev1.EnvVar{Name: fmt.Sprint("VARIABLE_", i), Value: long})
	}
	resources := corev1.ResourceRequirements{Requests: expect.Resources("cpu", "500m", "memory", "512Mi"), Limits: expect.Resources("memory", "1Gi")}
	now := metav1.Now()
	condition := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: now}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: long, Namespace: "spillway-guests-rome", UID: "5d7f1d9e-2f5e-4f5e-9a53-0d8f3c5f3d11", ResourceVersion: "123456789", CreationTimestamp: now,
			Labels: labels, Annotations: labels, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Namespace", Name: long}},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: long, FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 1500))}, {Manager: long, FieldsV1: metav1.NewFieldsV1(strings.Repeat("f", 800))}},
		},
		Spec: corev1.PodSpec{
			Containers:  []corev1.Container{{Name: "c", Image: long, Args: []string{long, long}, Env: env, Resources: resources, SecurityContext: &corev1.SecurityContext{}}},
			Volumes:     []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{}}}},
			Tolerations: []corev1.Toleration{{Key: long}, {Key: long}},
		},
		Status: corev1.PodStatus{
			Conditions: []corev1.PodCondition{condition, condition, condition, condition, condition}, PodIPs: []corev1.PodIP{{IP: "10.0.0.1"}},
			ContainerStatuses: []corev1.ContainerStatus{{Name: "c", Image: long, ImageID: long, ContainerID: long, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}},
		},
	}
}
