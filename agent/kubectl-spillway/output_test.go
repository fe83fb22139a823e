package main

import (
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
