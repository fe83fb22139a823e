package session

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// testMessage has two fields of its own, in a Grant.
type testMessage struct {
	Header
	Token string `json:"token,omitempty"`
	CA    []byte `json:"ca,omitempty"`
}

func (m *testMessage) InvalidField() string {
	if m.Kind == Grant && !strings.HasPrefix(m.Token, "t") {
		return "token"
	}
	return ""
}

func testCodec(named bool) *Codec[*testMessage] {
	return &Codec[*testMessage]{
		Driver: "test", Named: named, MaxSize: 1024, New: func() *testMessage { return &testMessage{} },
		Fields: map[Kind][]string{Hello: {"requestID"}, Teardown: nil, Gone: nil, Grant: {"requestID", "token", "ca"}, Refusal: {"requestID"}},
	}
}

func TestCodec(t *testing.T) {
	kinds := []Kind{Hello, Teardown, Gone, Grant, Refusal, Offer}
	session := func(n int64) string { return fmt.Sprintf(`{"kind":"Gone","session":%d}`, n) }
	cases := map[string]struct {
		reason string
		raw    string
		named  bool
		want   *testMessage
	}{
		"minimal":           {raw: `{"kind":"Gone","session":7}`, want: &testMessage{Header: Header{Kind: Gone, Session: 7}}},
		"empty field":       {reason: "empty is the same as absent", raw: `{"kind":"Gone","session":7,"token":"","ca":""}`, want: &testMessage{Header: Header{Kind: Gone, Session: 7}}},
		"driver's field":    {raw: `{"kind":"Grant","session":7,"requestID":3,"token":"t"}`, want: &testMessage{Header: Header{Kind: Grant, Session: 7, RequestID: 3}, Token: "t"}},
		"refusal":           {raw: `{"kind":"Refusal","session":7,"requestID":3,"reason":"No","text":"no","current":9}`, want: &testMessage{Header: Header{Kind: Refusal, Session: 7, RequestID: 3, Reason: "No", Text: "no", Current: 9}}},
		"named":             {raw: `{"driver":"test","kind":"Gone","session":7}`, named: true, want: &testMessage{Header: Header{Driver: "test", Kind: Gone, Session: 7}}},
		"last session":      {raw: session(maxNumber), want: &testMessage{Header: Header{Kind: Gone, Session: maxNumber}}},
		"nothing":           {},
		"not JSON":          {raw: `hello`},
		"null":              {raw: `null`},
		"two values":        {raw: session(7) + `{}`},
		"unknown field":     {raw: `{"kind":"Gone","session":7,"extra":1}`},
		"unknown kind":      {raw: `{"kind":"Hallo","session":7}`},
		"unused kind":       {reason: "the driver has no Offer", raw: `{"kind":"Offer","session":7}`},
		"no session":        {raw: `{"kind":"Gone"}`},
		"negative session":  {raw: session(-1)},
		"session overflow":  {reason: "Next must not overflow", raw: session(math.MaxInt64)},
		"current overflow":  {reason: "Next must not overflow", raw: fmt.Sprintf(`{"kind":"Refusal","session":7,"requestID":3,"reason":"StaleSession","current":%d}`, int64(math.MaxInt64))},
		"no request ID":     {raw: `{"kind":"Hello","session":7}`},
		"request ID":        {reason: "Gone answers no request", raw: `{"kind":"Gone","session":7,"requestID":3}`},
		"other kind's":      {reason: "only a Grant has a token", raw: `{"kind":"Hello","session":7,"requestID":3,"token":"t"}`},
		"reason in a Gone":  {raw: `{"kind":"Gone","session":7,"reason":"No"}`},
		"invalid field":     {raw: `{"kind":"Grant","session":7,"requestID":3,"token":"x"}`},
		"unnamed":           {raw: `{"kind":"Gone","session":7}`, named: true},
		"named otherwise":   {raw: `{"driver":"other","kind":"Gone","session":7}`, named: true},
		"name not expected": {raw: `{"driver":"test","kind":"Gone","session":7}`},
		"no reason":         {raw: `{"kind":"Refusal","session":7,"requestID":3}`},
		"reason in words":   {raw: `{"kind":"Refusal","session":7,"requestID":3,"reason":"no way"}`},
		"long text":         {raw: `{"kind":"Refusal","session":7,"requestID":3,"reason":"No","text":"` + strings.Repeat("x", maxText+1) + `"}`},
		"too large":         {raw: session(7) + strings.Repeat(" ", 1024)},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			codec := testCodec(tc.named)
			got, err := codec.Decode([]byte(tc.raw), kinds...)
			if tc.want == nil {
				if !errors.Is(err, ErrMalformed) {
					t.Fatalf("%s: decoded as %+v, %v", tc.reason, got, err)
				}
				return
			}
			if diff := cmp.Diff(tc.want, got); err != nil || diff != "" {
				t.Fatalf("%s: %v (-want +got):\n%s", tc.reason, err, diff)
			}
			raw, err := codec.Encode(got)
			if err != nil {
				t.Fatal(err)
			}
			again, err := codec.Decode(raw, got.Kind)
			if diff := cmp.Diff(got, again); err != nil || diff != "" {
				t.Errorf("changed by encoding: %v\n%s", err, diff)
			}
			if _, err := codec.Decode(raw, Request); !errors.Is(err, ErrMalformed) {
				t.Errorf("accepted as another kind: %v", err)
			}
		})
	}
}

func TestRefuseTruncatesBetweenCharacters(t *testing.T) {
	m := &testMessage{Header: Refuse("No", strings.Repeat("ä", maxText))}
	m.Session, m.RequestID = 7, 3
	if _, err := testCodec(false).Encode(m); err != nil {
		t.Error(err)
	}
}

func TestValidateClusterID(t *testing.T) {
	for id, valid := range map[string]bool{
		"rome": true, "rome-2": true, "1": true, "": false, "Rome": false, "rome.example": false, "-rome": false, "rome\n": false,
		"system:masters": false, "../kube-system": false, strings.Repeat("a", 40): true, strings.Repeat("a", 41): false,
	} {
		if err := ValidateClusterID(id); (err == nil) != valid {
			t.Errorf("%q: %v", id, err)
		}
	}
}
