package contract

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/agent/internal/peering/session"
)

// Messages checks that a driver's codec decodes what it encodes, each sample as its
// own kind only, and none of the malformed messages.
func Messages[M session.Message](t *testing.T, codec *session.Codec[M], samples map[session.Kind]M, malformed map[string]string) {
	var kinds []session.Kind
	for kind, m := range samples {
		kinds = append(kinds, kind)
		raw, err := codec.Encode(m)
		if err != nil {
			t.Fatalf("%s: %v", kind, err)
		}
		for other := range codec.Fields {
			got, err := codec.Decode(raw, other)
			if other != kind && !errors.Is(err, session.ErrMalformed) {
				t.Errorf("%s was decoded as %s: %v", kind, other, err)
			}
			if diff := cmp.Diff(m, got); other == kind && (err != nil || diff != "") {
				t.Errorf("%s changed (-sent +received): %v\n%s", kind, err, diff)
			}
		}
	}
	if len(kinds) != len(codec.Fields) {
		t.Errorf("samples of %v, kinds of the codec: %v", kinds, codec.Fields)
	}
	for name, raw := range malformed {
		if m, err := codec.Decode([]byte(raw), kinds...); !errors.Is(err, session.ErrMalformed) {
			t.Errorf("%s: decoded as %+v, %v", name, m, err)
		}
	}
}

// FuzzMessages checks that whatever a codec decodes is valid: it can be encoded and
// decoded again without a change, and is not the reply that all drivers share.
func FuzzMessages[M session.Message](f *testing.F, codec *session.Codec[M], samples map[session.Kind]M) {
	var kinds []session.Kind
	for kind, m := range samples {
		raw, err := codec.Encode(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(raw)
		kinds = append(kinds, kind)
	}
	f.Add([]byte(`{"kind":"Hello","session":1e3}`))
	f.Add(session.Unreadable("other"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		m, err := codec.Decode(raw, kinds...)
		if err != nil {
			if !errors.Is(err, session.ErrMalformed) {
				t.Fatalf("unexpected kind of error: %v", err)
			}
			return
		}
		if other, ok := session.ReadsOnly(raw); ok {
			t.Fatalf("%+v is also the shared reply of driver %s", m, other)
		}
		again, err := codec.Encode(m)
		if err != nil {
			t.Fatalf("%+v cannot be encoded: %v", m, err)
		}
		got, err := codec.Decode(again, m.Head().Kind)
		if err != nil {
			t.Fatalf("%s cannot be decoded again: %v", again, err)
		}
		if diff := cmp.Diff(m, got); diff != "" {
			t.Fatalf("changed:\n%s", diff)
		}
	})
}
