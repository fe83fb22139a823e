package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/go-logr/logr"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// Fields of the BrokerConfig that are set while the broker runs. The list of all of them is in
// package settings.

// set stores a BrokerConfig with quotas, which apply from now on.
func (m *memory) set(quotas broker.Quotas, version string) {
	m.Observe(&broker.BrokerConfig{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: configName, UID: configName, ResourceVersion: version},
		Spec:       broker.BrokerConfigSpec{Quotas: &quotas},
	}, false)
}

func TestConfigRelayBytes(t *testing.T) {
	m := newMemory(t, logr.Discard())
	post := func(i int) answer {
		message := protocol.RelayMessage{To: "paris", ID: fmt.Sprint(i), Sealed: make([]byte, protocol.MaxSealed)}
		return m.call(http.MethodPost, protocol.PathRelay, encode(t, message), "rome")
	}
	for i := range 4 {
		post(i).expect(t, http.StatusAccepted, "")
	}
	m.set(broker.Quotas{RelayBytesPerCluster: new(int32(128 << 10))}, "1")
	post(4).expect(t, http.StatusTooManyRequests, "")
	m.set(broker.Quotas{}, "2")
	post(5).expect(t, http.StatusAccepted, "")
}

func TestConfigStreams(t *testing.T) {
	m := newMemory(t, logr.Discard())
	var open func() (ended chan struct{})
	open = func() chan struct{} {
		t.Helper()
		reader, writer := io.Pipe()
		ended := make(chan struct{})
		request := m.request(http.MethodGet, protocol.PathReservations+"?watch=true&role="+string(protocol.RoleRequester), "", "rome").WithContext(t.Context())
		go func() {
			defer close(ended)
			m.Handler().ServeHTTP(&pipeWriter{header: http.Header{}, PipeWriter: writer}, request)
			_ = writer.Close()
		}()
		var event protocol.Event
		expect.NoError(t, json.NewDecoder(reader).Decode(&event))
		go func() { _, _ = io.Copy(io.Discard, reader) }()
		if event.Type != protocol.EventRelist {
			return open() // too many first lists are in progress
		}
		return ended
	}
	const many = 6
	var streams []chan struct{}
	for range many {
		streams = append(streams, open())
	}
	m.set(broker.Quotas{StreamsPerCluster: new(int32(4))}, "1")
	streams = append(streams, open())
	for i, ended := range streams[:many-3] {
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			t.Fatalf("stream %d of %d is open, and the quota is 4", i, len(streams))
		}
	}
	for i, ended := range streams[many-3:] {
		select {
		case <-ended:
			t.Errorf("stream %d of %d has ended", many-3+i, len(streams))
		default:
		}
	}
}
