package text_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spillway-dev/spillway/broker/text"
)

func TestTruncateTo(t *testing.T) {
	for name, tc := range map[string]struct {
		reason, message, want string
		limit                 int
	}{
		"short":         {reason: "a message within the limit is not changed", message: "grüße", limit: 7, want: "grüße"},
		"long":          {reason: "the ellipsis is within the limit", message: "capacity", limit: 7, want: "capa…"},
		"in a rune":     {reason: "no character is cut in half", message: "ab世界", limit: 6, want: "ab…"},
		"between runes": {reason: "a character that fits stays", message: "ab世界世", limit: 8, want: "ab世…"},
		"invalid":       {reason: "the API accepts valid UTF-8 only", message: "a\xff", limit: 9, want: "a�"},
	} {
		t.Run(name, func(t *testing.T) {
			got := text.TruncateTo(tc.message, tc.limit)
			if got != tc.want || len(got) > tc.limit || !utf8.ValidString(got) {
				t.Errorf("%s: want %q, got %q", tc.reason, tc.want, got)
			}
		})
	}
}

func TestLine(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"plain":             {"2 of 3 pods fit: größer", "2 of 3 pods fit: größer"},
		"control":           {"a\nb\tc\x1b[31md\x00", "a b c [31md"},
		"direction of text": {"a\u202eb\u2066c\u200bd\u2028e", "a b c d e"},
		"invalid":           {"a\xffb", "a�b"},
		"long":              {strings.Repeat("é", 20), strings.Repeat("é", 14) + "…"},
	} {
		t.Run(name, func(t *testing.T) {
			if got := text.Line(tc.text, 32); got != tc.want {
				t.Errorf("got %q, want %q", got, tc.want)
			}
		})
	}
}

func TestQuote(t *testing.T) {
	if got, want := text.Quote(`1 of 2 pods of pod set "web" fit.". Ask oslo.`), `"1 of 2 pods of pod set 'web' fit.'. Ask oslo"`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestCell(t *testing.T) {
	for cell, want := range map[string]string{
		"": "", "web": "web", "a=1": "a=1", "=1+1": "'=1+1", "+1": "'+1", "-1": "'-1", "@sum(a1)": "'@sum(a1)", "\t=1": "'\t=1", "\r=1": "'\r=1", "\n=1": "'\n=1",
	} {
		if got := text.Cell(cell); got != want {
			t.Errorf("%q is %q, want %q", cell, got, want)
		}
	}
}
