// Package figures prints the figures of benchmarks, a line each: "bench <name> <value>
// <unit> (aim <aim>)". A figure that is counted fails its benchmark if it is above its aim, or
// if nothing was counted; a timing never does.
package figures

import (
	"errors"
	"fmt"
	"io"
	"strconv"
)

// Printer prints figures. It is not safe for concurrent use.
type Printer struct {
	out    io.Writer
	missed []error
}

// New returns a Printer that prints to out.
func New(out io.Writer) *Printer { return &Printer{out: out} }

// Time prints a figure that depends on the machine and on what else runs there, such as a
// duration, a rate, a ratio of them, or the use of memory.
func (p *Printer) Time(name string, value float64, unit, aim string) {
	fmt.Fprintf(p.out, "bench %s %s %s (aim %s)\n", name, format(value), unit, aim)
}

// Count prints a figure that is counted, such as writes or bytes, and that does not depend on
// the machine. Err returns an error if it is above atMost, or not above 0: what counts is then
// missing.
func (p *Printer) Count(name string, value float64, unit string, atMost float64) {
	p.count(name, value, unit, value > 0, atMost)
}

// CountEach is Count for a mean over things of which each counts as 1 at least.
func (p *Printer) CountEach(name string, value float64, unit string, atMost float64) {
	p.count(name, value, unit, value >= 1, atMost)
}

func (p *Printer) count(name string, value float64, unit string, complete bool, atMost float64) {
	p.Time(name, value, unit, "<= "+format(atMost))
	switch {
	case !complete: // also NaN, of nothing counted
		p.missed = append(p.missed, fmt.Errorf("%s is %s %s: not all was counted", name, format(value), unit))
	case value > atMost:
		p.missed = append(p.missed, fmt.Errorf("%s is %s %s, above its aim of %s", name, format(value), unit, format(atMost)))
	}
}

// Err returns an error for each counted figure above its aim, and for each of which too little
// was counted.
func (p *Printer) Err() error { return errors.Join(p.missed...) }

// format has four significant digits, and no exponent in large figures.
func format(value float64) string {
	if value >= 1000 {
		return strconv.FormatFloat(value, 'f', 0, 64)
	}
	return strconv.FormatFloat(value, 'g', 4, 64)
}
