package consumer

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzAddresses leaves arbitrary pods the addresses in the networks of their node's guests.
func FuzzAddresses(f *testing.F) {
	for _, seed := range []string{`{}`, `[`, `{"status":null}`, `{"status":{}}`, `{"status":{"podIP":1}}`, `{"status":{"podIP":"10.1.2.3"}}`,
		`{"status":{"conditions":[{"type":"broker.fluidos.eu/Overflow","reason":"Forged"},{"type":1},null]}}`, `{"status":{"podIP":"10.1.2.3","podIPs":[{"ip":"192.0.2.1"},{"ip":"10.1.2.4"}]}}`, `{"status":{"podIPs":[{"ip":"::ffff:10.1.2.3"}]}}`, `{"Status":{"PODIP":"10.1.2.3"}}`, `{"spec":{"nodeName":1},"status":{}}`, `{"spec":{"nodeName":"n"},"status":{"podIP":"10.2.0.1"}}`} {
		f.Add([]byte(seed))
	}
	network := netip.MustParsePrefix("10.1.0.0/16")
	f.Fuzz(func(t *testing.T, object []byte) {
		before := []byte(`{"status":{"conditions":[{"type":"broker.fluidos.eu/Overflow","status":"True","reason":"Overflowed"}]}}`)
		corrections, err := correct(before, object, func(string) ([]netip.Prefix, bool) { return []netip.Prefix{network}, true })
		var patched map[string]any
		if err != nil || utiljson.Unmarshal(object, &patched) != nil {
			return
		}
		status, _ := patched["status"].(map[string]any)
		if status == nil {
			return // that of a pod from the API server is there
		}
		for _, c := range corrections {
			status[strings.TrimPrefix(c.Path, "/status/")] = c.Value
		}
		changed, err := json.Marshal(patched)
		expect.NoError(t, err)
		var pod corev1.Pod
		if utiljson.Unmarshal(changed, &pod) != nil {
			return // the API server refuses it
		}
		for _, p := range append(pod.Status.PodIPs, corev1.PodIP{IP: pod.Status.PodIP}) {
			if address, err := netip.ParseAddr(p.IP); err == nil && !network.Contains(address) {
				t.Fatalf("%s keeps %s: %s", object, address, changed)
			}
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == broker.PodOverflow && c.Reason != "Overflowed" {
				t.Fatalf("%s says %s in the scheduler's name", object, c.Reason)
			}
		}
	})
}
