package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"golang.org/x/term"
	"sigs.k8s.io/yaml"

	"github.com/spillway-dev/spillway/agent/internal/explain"
)

// Formats beside text.
const (
	outputWide = "wide"
	outputJSON = "json"
	outputYAML = "yaml"
)

// print writes a value in the format that is asked for; text is it for people.
func (o *options) print(value any, text func(explain.Style) string) error {
	var out []byte
	var err error
	switch o.output {
	case outputJSON:
		out, err = json.MarshalIndent(value, "", "  ")
		out = append(out, '\n')
	case outputYAML:
		out, err = yaml.Marshal(value)
	default:
		out = []byte(text(o.style()))
	}
	if err != nil {
		return fmt.Errorf("printing as %s: %w", o.output, err)
	}
	_, err = o.Out.Write(out)
	return err
}

// style is how text is written to standard output: for a terminal, within its width.
func (o *options) style() explain.Style {
	style := explain.Style{ASCII: o.ascii || !utf8Locale(os.Getenv), Wide: o.output == outputWide}
	if file, ok := o.Out.(*os.File); ok && term.IsTerminal(int(file.Fd())) {
		if width, _, err := term.GetSize(int(file.Fd())); err == nil {
			style.Width = width
		}
	}
	return style
}

// utf8Locale reports whether the locale is UTF-8, or unknown.
func utf8Locale(environment func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if value := environment(name); value != "" {
			value = strings.ToLower(strings.ReplaceAll(value, "-", ""))
			return strings.Contains(value, "utf8")
		}
	}
	return true
}
