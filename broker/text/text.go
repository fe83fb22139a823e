// Package text keeps what is written for people, or comes from another cluster, within the
// limits of where it is shown. It is pure.
package text

import (
	"strings"
	"unicode"
)

// TruncateTo returns the message as valid UTF-8 of at most limit bytes. A shortened
// message ends with "…". limit must be 3 or more, the size of "…".
func TruncateTo(message string, limit int) string {
	message = strings.ToValidUTF8(message, "�")
	if len(message) <= limit {
		return message
	}
	const ellipsis = "…"
	// The cut may be within a character: its first bytes go, too.
	return strings.ToValidUTF8(message[:limit-len(ellipsis)], "") + ellipsis
}

// Line returns what another cluster has written as one line, see TruncateTo: what cannot be
// seen, or changes how other text is shown, is a space.
func Line(text string, limit int) string {
	visible := func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return ' '
	}
	return TruncateTo(strings.TrimSpace(strings.Map(visible, text)), limit)
}

// Quote returns what another cluster has written in quotation marks, for a message of one's
// own. Those within it are single ones: nothing in the text ends the quotation.
func Quote(text string) string {
	return `"` + strings.TrimRight(strings.ReplaceAll(text, `"`, "'"), ". ") + `"`
}

// Cell returns what another cluster has written as the cell of a table that a spreadsheet does not take
// for a formula.
func Cell(text string) string {
	if strings.IndexAny(text, "=+-@\t\r\n") == 0 {
		return "'" + text
	}
	return text
}
