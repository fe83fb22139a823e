package relay

import (
	"fmt"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestMessagesExpire(t *testing.T) {
	clock := clocktesting.NewFakeClock(start)
	boxes := NewMailboxes(clock)
	for i := range maxMessagesFrom {
		expect.NoError(t, boxes.Post(protocol.RelayMessage{From: "rome", To: "paris", ID: fmt.Sprint(i), Sealed: []byte("x")}, maxMail))
	}
	if boxes.Post(protocol.RelayMessage{From: "rome", To: "paris", ID: "more"}, maxMail) == nil {
		t.Fatal("a full mailbox accepted a message")
	}
	clock.SetTime(start.Add(messageTTL))
	// No access is needed: the mailbox of a cluster that is offline is emptied too.
	boxes.expire()
	if boxes.all.Len() != 0 || boxes.size != 0 || len(boxes.boxes) != 0 || len(boxes.to) != 0 || len(boxes.from) != 0 {
		t.Fatalf("expired messages are kept: %+v", boxes)
	}
	expect.NoError(t, boxes.Post(protocol.RelayMessage{From: "rome", To: "paris", ID: "later"}, maxMail))
	if got := boxes.Take("paris"); len(got) != 1 || got[0].ID != "later" {
		t.Fatalf("want the message that has not expired, got %v", got)
	}
	if got := boxes.Take("paris"); len(got) > 0 || boxes.size != 0 {
		t.Fatalf("messages were delivered twice: %v", got)
	}
}

// TestMailIsBounded posts as much as the limits allow: for each sender, receiver, and
// for all of them.
func TestMailIsBounded(t *testing.T) {
	large := make([]byte, protocol.MaxSealed)
	const perCluster = 1 << 20
	post := func(boxes *Mailboxes, from, to string) error {
		return boxes.Post(protocol.RelayMessage{From: from, To: to, ID: "id", Sealed: large}, perCluster)
	}
	until := func(boxes *Mailboxes, what string, next func(i int) (from, to string)) {
		for i := range 10_000 {
			from, to := next(i)
			if err := post(boxes, from, to); err != nil {
				if !protocol.HasCode(err, protocol.CodeTooMany) || !strings.Contains(err.Error(), what) {
					t.Fatalf("want %q, got %v", what, err)
				}
				return
			}
		}
		t.Errorf("%d bytes are kept, and no limit refuses more: %s", boxes.size, what)
	}
	boxes := NewMailboxes(clocktesting.NewFakeClock(start))
	until(boxes, "mailbox of cluster paris is full", func(i int) (string, string) { return fmt.Sprint("sender-", i), "paris" })
	if boxes.size > perCluster {
		t.Errorf("the mailbox has %d bytes", boxes.size)
	}
	expect.NoError(t, post(boxes, "rome", "berlin"))
	boxes = NewMailboxes(clocktesting.NewFakeClock(start))
	until(boxes, "too many messages in the mailboxes of others", func(i int) (string, string) { return "rome", fmt.Sprint("receiver-", i) })
	expect.NoError(t, post(boxes, "berlin", "paris"))
	boxes = NewMailboxes(clocktesting.NewFakeClock(start))
	until(boxes, "mailboxes of the broker are full", func(i int) (string, string) { return fmt.Sprint("sender-", i), fmt.Sprint("receiver-", i) })
	if boxes.size > maxMail {
		t.Errorf("the mailboxes have %d bytes", boxes.size)
	}
	boxes.clock.(*clocktesting.FakeClock).SetTime(start.Add(time.Hour))
	expect.NoError(t, post(boxes, "rome", "paris"))
}

// TestRefusalNamesOwnMessages: a sender that is refused does not learn what others have sent.
func TestRefusalNamesOwnMessages(t *testing.T) {
	boxes := NewMailboxes(clocktesting.NewFakeClock(start))
	post := func(from string) error {
		return boxes.Post(protocol.RelayMessage{From: from, To: "paris", ID: "id", Sealed: make([]byte, 10)}, maxMail)
	}
	for range 5 {
		expect.NoError(t, post("oslo"))
	}
	for range maxMessagesFrom {
		expect.NoError(t, post("lima"))
	}
	if err := post("lima"); err == nil || !strings.Contains(err.Error(), "(32 messages and 8576 bytes in it are from lima)") {
		t.Errorf("the refusal is %v", err)
	}
}
