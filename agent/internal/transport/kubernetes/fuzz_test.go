package kubernetes

import (
	"encoding/json"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/broker/protocol/objects"
	"github.com/spillway-dev/spillway/e2e/expect"
)

// FuzzSaid reads arbitrary answers and messages.
func FuzzSaid(f *testing.F) {
	f.Add(`{"id":"1","body":{"known":true}}`)
	f.Add(`{"id":"1","error":{"code":"NotFound"},"retryAfter":1}`)
	f.Add(`{"session":"s","number":1,"message":{"from":"paris","to":"rome","id":"m","sealed":"AAAA"}}`)
	f.Add(`{"id":"1","body":[`)
	f.Fuzz(func(t *testing.T, text string) {
		var response protocol.BeatResponse
		if answered, err := answerTo("1", text, &response); !answered && err != nil {
			t.Fatalf("what is no answer failed: %v", err)
		}
		received := 0
		s := &session{id: "s", handle: func(protocol.Event) { received++ }}
		object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{objects.AnnotationInbox: text}}}
		s.receive(object)
		s.receive(object)
		if received > 1 {
			t.Fatal("a message was received twice")
		}
	})
}

// TestListed: views count once the broker says that all are there, and again when another broker
// says so.
func TestListed(t *testing.T) {
	s := &session{id: "mine", role: protocol.RoleProvider}
	for _, step := range []struct {
		said string
		want bool
	}{{"", false}, {"other broker-1", false}, {"mine broker-1", true}, {"mine broker-1", false}, {"mine broker-2", true}, {"other broker-2", false}} {
		object := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			objects.AnnotationListed(protocol.RoleProvider): step.said, objects.AnnotationListed(protocol.RoleRequester): "mine broker-3",
		}}}
		if got := s.isListed(object); got != step.want {
			t.Errorf("%q: %t", step.said, got)
		}
	}
}

// TestNextBroker: each stream of a broker numbers its messages, and each message counts once.
func TestNextBroker(t *testing.T) {
	received := ""
	s := &session{id: "mine", handle: func(event protocol.Event) { received += event.Relay[0].ID }}
	for _, inbox := range []objects.Inbox{
		{Session: "mine", Stream: "first", Number: 1, Message: protocol.RelayMessage{ID: "a"}}, {Session: "mine", Stream: "first", Number: 2, Message: protocol.RelayMessage{ID: "b"}},
		{Session: "mine", Stream: "first", Number: 2, Message: protocol.RelayMessage{ID: "b"}}, {Session: "other", Stream: "first", Number: 3, Message: protocol.RelayMessage{ID: "x"}},
		{Session: "mine", Stream: "second", Number: 1, Message: protocol.RelayMessage{ID: "c"}}, {Session: "mine", Stream: "second", Number: 1, Message: protocol.RelayMessage{ID: "c"}},
	} {
		text, err := json.Marshal(inbox)
		expect.NoError(t, err)
		s.receive(&metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{objects.AnnotationInbox: string(text)}}})
	}
	if received != "abc" {
		t.Errorf("received %s", received)
	}
}
