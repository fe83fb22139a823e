package objects

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/broker/protocol"
)

// TestPack: a view is the same afterwards, and one that repeats itself is small.
func TestPack(t *testing.T) {
	view := protocol.ConsumerView{ID: "one", SourceName: strings.Repeat("web", 100_000)}
	packed, err := Pack(view)
	if err != nil || len(packed) > 4096 {
		t.Fatalf("%d bytes, %v", len(packed), err)
	}
	var unpacked protocol.ConsumerView
	if err := Unpack(packed, &unpacked); err != nil || !reflect.DeepEqual(unpacked, view) {
		t.Errorf("another view: %v", err)
	}
}

// FuzzUnpack reads arbitrary views.
func FuzzUnpack(f *testing.F) {
	packed, err := Pack(protocol.ProviderView{ID: "one"})
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{packed, packed[:len(packed)/2], "", "AAAA", "H4sI"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, packed string) {
		var view protocol.ProviderView
		// Any outcome but a panic.
		_ = Unpack(packed, &view)
	})
}
