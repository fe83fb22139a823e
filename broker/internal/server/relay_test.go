package server

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/spillway-dev/spillway/broker/protocol"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestMessagesExpire(t *testing.T) {
	clock := clocktesting.NewFakePassiveClock(start)
	boxes := newMailboxes(clock)
	for i := range maxMessagesFrom {
		expect.NoError(t, boxes.post(protocol.RelayMessage{From: "rome", To: "paris", ID: fmt.Sprint(i), Sealed: []byte("x")}, maxMail))
	}
	if boxes.post(protocol.RelayMessage{From: "rome", To: "paris", ID: "more"}, maxMail) == nil {
		t.Fatal("a full mailbox accepted a message")
	}
	clock.SetTime(start.Add(messageTTL))
	// No access is needed: the mailbox of a cluster that is offline is emptied too.
	boxes.expire()
	if boxes.all.Len() != 0 || boxes.size != 0 || len(boxes.boxes) != 0 || len(boxes.sent) != 0 || len(boxes.to) != 0 || len(boxes.from) != 0 {
		t.Fatalf("expired messages are kept: %+v", boxes)
	}
	expect.NoError(t, boxes.post(protocol.RelayMessage{From: "rome", To: "paris", ID: "later"}, maxMail))
	if got := boxes.take("paris"); len(got) != 1 || got[0].ID != "later" {
		t.Fatalf("want the message that has not expired, got %v", got)
	}
	if got := boxes.take("paris"); got != nil || boxes.size != 0 {
		t.Fatalf("messages were delivered twice: %v", got)
	}
}

// TestMailIsBounded posts as much as the limits allow: for each sender, receiver, and
// for all of them.
func TestMailIsBounded(t *testing.T) {
	large := make([]byte, protocol.MaxSealed)
	const perCluster = 1 << 20
	post := func(boxes *mailboxes, from, to string) error {
		return boxes.post(protocol.RelayMessage{From: from, To: to, ID: "id", Sealed: large}, perCluster)
	}
	until := func(boxes *mailboxes, what string, next func(i int) (from, to string)) {
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
	boxes := newMailboxes(clocktesting.NewFakePassiveClock(start))
	until(boxes, "mailbox of cluster paris is full", func(i int) (string, string) { return fmt.Sprint("sender-", i), "paris" })
	if boxes.size > perCluster {
		t.Errorf("the mailbox has %d bytes", boxes.size)
	}
	expect.NoError(t, post(boxes, "rome", "berlin"))
	boxes = newMailboxes(clocktesting.NewFakePassiveClock(start))
	until(boxes, "too many messages in the mailboxes of others", func(i int) (string, string) { return "rome", fmt.Sprint("receiver-", i) })
	expect.NoError(t, post(boxes, "berlin", "paris"))
	boxes = newMailboxes(clocktesting.NewFakePassiveClock(start))
	until(boxes, "mailboxes of the broker are full", func(i int) (string, string) { return fmt.Sprint("sender-", i), fmt.Sprint("receiver-", i) })
	if boxes.size > maxMail {
		t.Errorf("the mailboxes have %d bytes", boxes.size)
	}
	boxes.clock.(*clocktesting.FakePassiveClock).SetTime(start.Add(time.Hour))
	expect.NoError(t, post(boxes, "rome", "paris"))
}

// TestFewMessagesAreNotCrowdedOut: however many messages a few clusters have sent, one that has
// sent fewer can send, to a cluster whose mailbox is full, and if the mailboxes of all are.
func TestFewMessagesAreNotCrowdedOut(t *testing.T) {
	const perCluster = 2 << 20
	message := func(from, to, id string, size int) protocol.RelayMessage {
		return protocol.RelayMessage{From: from, To: to, ID: id, Sealed: make([]byte, size)}
	}
	for name, tc := range map[string]struct {
		// senders send messages of a size until they are refused, each to as many receivers.
		senders, receivers, size int
		// most is the most of each sender's messages.
		most int
		// want is whether another cluster can send one of that size then.
		last int
		want bool
	}{
		"all mailboxes are full by a few dozen senders":      {40, 10, protocol.MaxSealed, 1000, protocol.MaxSealed, true},
		"of small messages":                                  {40, 64, 60 << 10, 1000, 1 << 10, true},
		"one mailbox by two senders":                         {2, 1, 10, 1000, protocol.MaxSealed, true},
		"one mailbox by the size of one sender's messages":   {1, 1, protocol.MaxSealed, 1000, protocol.MaxSealed, true},
		"one mailbox by as many messages of as many senders": {maxMessages, 1, 10, 1, 10, false},
		"all mailboxes by as much of as many senders":        {1100, 1100, protocol.MaxSealed, 1, protocol.MaxSealed, false},
	} {
		t.Run(name, func(t *testing.T) {
			boxes := newMailboxes(clocktesting.NewFakePassiveClock(start))
			receiver := func(sender, n int) string {
				if tc.receivers == 1 {
					return "paris"
				}
				return fmt.Sprintf("receiver-%d-%d", sender%tc.receivers, n%tc.receivers)
			}
			for sender := range tc.senders {
				for n := range tc.most {
					if boxes.post(message(fmt.Sprint("sender-", sender), receiver(sender, n), fmt.Sprint(n), tc.size), perCluster) != nil {
						break
					}
				}
			}
			refused := boxes.post(message("rome", "paris", "last", tc.last), perCluster)
			if (refused == nil) != tc.want {
				t.Errorf("the message is refused: %v", refused)
			}
			if tc.want {
				if got := boxes.take("paris"); len(got) == 0 || got[len(got)-1].ID != "last" {
					t.Error("the message is not delivered")
				}
			}
			recount(t, boxes, perCluster)
		})
	}
}

// TestRefusedMessageDropsNothing: a mailbox that is full would have room for another cluster's
// message, but the mailboxes of all would not.
func TestRefusedMessageDropsNothing(t *testing.T) {
	const perCluster = 2 * maxMail
	boxes := newMailboxes(clocktesting.NewFakePassiveClock(start))
	post := func(from, to string, size int) error {
		return boxes.post(protocol.RelayMessage{From: from, To: to, ID: "id", Sealed: make([]byte, size)}, perCluster)
	}
	for range maxMessagesFrom {
		expect.NoError(t, post("oslo", "paris", 10))
		expect.NoError(t, post("bern", "paris", 10))
	}
	for i := 0; boxes.size+protocol.MaxSealed+messageOverhead+2 <= maxMail; i++ {
		expect.NoError(t, post("rome", fmt.Sprint("receiver-", i), protocol.MaxSealed))
	}
	before := boxes.all.Len()
	err := post("rome", "paris", protocol.MaxSealed)
	if !protocol.HasCode(err, protocol.CodeTooMany) || !strings.Contains(err.Error(), "the mailboxes of the broker are full") {
		t.Fatalf("rome, which has sent most of all, is refused: %v", err)
	}
	if after := boxes.all.Len(); after != before {
		t.Errorf("%d messages before and %d after", before, after)
	}
	// One that has sent less there has room.
	expect.NoError(t, post("lima", "paris", 10))
	recount(t, boxes, perCluster)
}

// TestRefusalNamesOwnMessages: a sender that is refused does not learn what others have sent.
func TestRefusalNamesOwnMessages(t *testing.T) {
	boxes := newMailboxes(clocktesting.NewFakePassiveClock(start))
	post := func(from string) error {
		return boxes.post(protocol.RelayMessage{From: from, To: "paris", ID: "id", Sealed: make([]byte, 10)}, maxMail)
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

// recount compares what the mailboxes account for with what is in them.
func recount(t *testing.T, boxes *mailboxes, perCluster int) {
	t.Helper()
	all, to, from := 0, map[string]int{}, map[string]int{}
	for element := boxes.all.Front(); element != nil; element = element.Next() {
		m := element.Value.(*mail)
		all += m.size()
		to[m.message.To] += m.size()
		from[m.message.From] += m.size()
	}
	n := 0
	for receiver, box := range boxes.boxes {
		if n += len(box); len(box) > maxMessages || to[receiver] > perCluster {
			t.Errorf("the mailbox of %s has %d messages of %d bytes", receiver, len(box), to[receiver])
		}
	}
	if all != boxes.size || all > maxMail || n != boxes.all.Len() || !maps.Equal(to, boxes.to) || !maps.Equal(from, boxes.from) {
		t.Errorf("the mailboxes account for %d bytes of %d messages and have %d of %d", boxes.size, n, all, boxes.all.Len())
	}
}
