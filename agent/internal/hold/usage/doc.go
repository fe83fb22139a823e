// Package usage answers which of its promises each guest of a consumer uses, and what of them is
// left. Verdicts, hand-overs and marks of guests all count with it; it reads and writes nothing.
package usage
