package main

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// TestCommandsInTexts: the commands that documentation, the demo and messages name have such verbs
// and flags, after the plugin's name.
func TestCommandsInTexts(t *testing.T) {
	commands := regexp.MustCompile(`kubectl( -n [^ ]+)? spillway ([a-z-]+)((?: [^\n#|` + "`" + `"&;:)]+)?)`)
	n := 0
	for _, pattern := range []string{"*.go", "../../*/README.md", "../../README.md", "../../e2e/playground/demo/*.go", "../internal/*/*.go"} {
		files, err := filepath.Glob(pattern)
		expect.NoError(t, err)
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			content, err := os.ReadFile(file)
			expect.NoError(t, err)
			for _, found := range commands.FindAllStringSubmatch(string(content), -1) {
				n++
				root := newCommand(genericclioptions.IOStreams{Out: io.Discard, ErrOut: io.Discard})
				verb, _, err := root.Find([]string{found[2]})
				if err != nil || verb == root || found[1] != "" {
					t.Errorf("%s: %q is no command", file, found[0])
					continue
				}
				words := strings.FieldsFunc(found[3], func(r rune) bool { return r == ' ' || r == ',' })
				for _, word := range words {
					flag, _, _ := strings.Cut(strings.TrimLeft(word, "-"), "=")
					known := verb.Flags().Lookup(flag) != nil || verb.InheritedFlags().Lookup(flag) != nil || len(flag) == 1 && (verb.Flags().ShorthandLookup(flag) != nil || verb.InheritedFlags().ShorthandLookup(flag) != nil)
					if strings.HasPrefix(word, "-") && flag != "" && !known {
						t.Errorf("%s: %q has no flag %s", file, found[0], word)
					}
				}
			}
		}
	}
	if n < 20 {
		t.Errorf("%d commands were found", n)
	}
}

// TestBadInput: what cannot be meant is refused in a line that says what to write.
func TestBadInput(t *testing.T) {
	for arguments, want := range map[string]string{
		"explian":                  `unknown command "explian"; did you mean explain? see kubectl spillway --help`,
		"wombat":                   `unknown command "wombat"; see kubectl spillway --help`,
		"explain":                  `0 arguments are given: write kubectl spillway explain (POD | TYPE/NAME | TYPE NAME), or see its --help`,
		"reserve warm batch":       `2 arguments are given: write kubectl spillway reserve NAME, or see its --help`,
		"status now":               `1 argument is given: write kubectl spillway status, or see its --help`,
		"status --foo":             `unknown flag: --foo; see kubectl spillway status --help`,
		"status -x":                `unknown shorthand flag: 'x' in -x; see kubectl spillway status --help`,
		"reserve warm --cpu":       `flag needs an argument: --cpu; see kubectl spillway reserve --help`,
		"reserve warm --pods=x":    `--pods="x" is not a whole number`,
		"reserve warm --wait=soon": `--wait="soon" is not a duration, such as 5m or 24h`,
		"top --once=maybe":         `--once="maybe" is not true or false`,
		"what-if":                  `name a manifest by -f FILE, or standard input by -f -`,
		"status -o xml":            `-o "xml" is none of wide, json and yaml`,
		"drain paris --timeout=0s": `--timeout=0s must be above 0, such as 5m`,
	} {
		var out, errors bytes.Buffer
		code := run(t.Context(), strings.Fields(arguments), genericclioptions.IOStreams{Out: &out, ErrOut: &errors})
		if got := errors.String(); code != exitNoAnswer || got != "error: "+want+"\n" || out.Len() > 0 {
			t.Errorf("%s exits with %d and says %q, want %q", arguments, code, got, want)
		}
	}
}

// TestHelp: the flags of kubectl do not hide those of a verb, and are taken.
func TestHelp(t *testing.T) {
	var out, errors bytes.Buffer
	code := run(t.Context(), []string{"usage", "--help", "--token=x"}, genericclioptions.IOStreams{Out: &out, ErrOut: &errors})
	if help := out.String(); code != 0 || strings.Contains(help, "--token") || !strings.Contains(help, "--by string") || !strings.Contains(help, "--context") {
		t.Errorf("usage --help exits with %d and prints\n%s%s", code, help, errors.String())
	}
}

// TestLocale: other terminals get ASCII.
func TestLocale(t *testing.T) {
	for locale, want := range map[string]bool{"en_US.UTF-8": true, "C.utf8": true, "C": false, "de_DE.ISO-8859-1": false, "": true} {
		if got := utf8Locale(func(name string) string { return map[string]string{"LANG": locale}[name] }); got != want {
			t.Errorf("locale %q is UTF-8: %t", locale, got)
		}
	}
	if utf8Locale(func(name string) string { return map[string]string{"LANG": "en_US.UTF-8", "LC_ALL": "C"}[name] }) {
		t.Error("LC_ALL does not come first")
	}
}
