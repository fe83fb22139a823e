package controller

import (
	"bytes"
	"io"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzDecodedJSON counts what a provider sends in JSON. The pods that are decoded from it
// take no more than was counted.
func FuzzDecodedJSON(f *testing.F) {
	for _, seed := range []string{
		`{"kind":"PodList","apiVersion":"v1","items":[{},{"metadata":{"name":"web"}}]}`,
		`{"items":[null,null , null]}`, `{"items":[0,"",[],{}]}`, `{"items":[{"spec":{"containers":[0],"volumes":[ ]}}]}`,
		`{"limits":{"cpu":1e-5000}}`, `{"limits":{"cpu":"1e2147483648"}}`, `{"a":"\\\"e-5000"}`, `{"a":"\`, `]]]]{{{{`, `[`, ``, "\x00",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		left := memory(maxDecoded)
		if left.json(data) != nil {
			return
		}
		var pods corev1.PodList
		_ = utiljson.Unmarshal(data, &pods) // what is malformed is decoded up to there
		expectCounted(t, left, len(pods.Items))
	})
}

// FuzzDecodedProtobuf does the same for an object in protobuf, and for a stream of events.
func FuzzDecodedProtobuf(f *testing.F) {
	pod, err := ordinaryGuest().Marshal()
	expect.NoError(f, err)
	honest := enveloped("Pod", pod)
	for _, seed := range [][]byte{
		honest, enveloped("PodList", empties(2, 10)), enveloped("PodList", appendField(nil, 2, pod)), enveloped("Unheard", nil),
		enveloped("List", appendField(nil, 2, appendField(nil, 1, enveloped("List", appendField(nil, 2, appendField(nil, 1, honest)))))),
		enveloped("PodList", []byte{2<<3 | 2, 9}), watchEvent(honest), append(watchEvent(honest), watchEvent(enveloped("PodList", empties(2, 3)))...),
		{0xff, 0xff, 0xff, 0xff, 0}, {0, 0, 0, 9, 1}, []byte("k8s\x00"), nil,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		// The events that are returned are those that were sent.
		events, _ := io.ReadAll(&checkedEvents{ReadCloser: io.NopCloser(bytes.NewReader(data))})
		if !bytes.HasPrefix(data, events) {
			t.Errorf("%d bytes of events are not what was sent", len(events))
		}
		left := memory(maxDecoded)
		if left.object(data) != nil {
			return
		}
		object, _, err := scheme.Codecs.UniversalDeserializer().Decode(data, nil, nil)
		if pods, ok := object.(*corev1.PodList); ok && err == nil {
			expectCounted(t, left, len(pods.Items))
		}
	})
}

// expectCounted expects that so many pods were counted.
func expectCounted(t *testing.T, left memory, pods int) {
	t.Helper()
	if counted, least := maxDecoded-int64(left), int64(pods)*int64(reflect.TypeFor[corev1.Pod]().Size()); counted < least {
		t.Errorf("%d pods take at least %d bytes, and count as %d", pods, least, counted)
	}
}
