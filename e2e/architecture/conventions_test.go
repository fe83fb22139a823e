package architecture_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const (
	maxProductFunction = 100
	maxTestFunction    = 120
)

// eachFile calls visit with every file of the project that is not generated, by
// its path below the root.
func eachFile(t *testing.T, visit func(path string, content []byte)) {
	t.Helper()
	root := projectRoot(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); path != root && strings.HasPrefix(name, ".") && name != ".ci" || path == filepath.Join(root, "bin") {
				return fs.SkipDir
			}
			return nil
		}
		if strings.HasPrefix(d.Name(), "zz_generated") {
			return nil
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		visit(filepath.ToSlash(relative), content)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func eachGoFile(t *testing.T, visit func(path string, content []byte)) {
	t.Helper()
	eachFile(t, func(path string, content []byte) {
		if strings.HasSuffix(path, ".go") {
			visit(path, content)
		}
	})
}

func TestFunctionLength(t *testing.T) {
	eachGoFile(t, func(path string, content []byte) {
		files := token.NewFileSet()
		file, err := parser.ParseFile(files, path, content, 0)
		if err != nil {
			t.Fatal(err)
		}
		limit := maxProductFunction
		if strings.HasSuffix(path, "_test.go") {
			limit = maxTestFunction
		}
		for _, declaration := range file.Decls {
			f, ok := declaration.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if lines := files.Position(f.End()).Line - files.Position(f.Pos()).Line + 1; lines > limit {
				t.Errorf("%s: function %s has %d lines, at most %d are allowed", path, f.Name.Name, lines, limit)
			}
		}
	})
}

// TestNoSleepInTests: tests wait for conditions with a deadline, which
// e2e/expect does for all of them.
func TestNoSleepInTests(t *testing.T) {
	root := projectRoot(t)
	eachGoFile(t, func(path string, _ []byte) {
		if !strings.HasSuffix(path, "_test.go") {
			return
		}
		for _, use := range timeCalls(t, filepath.Join(root, path), sleep) {
			t.Errorf("%s:%d calls %s: wait for a condition with e2e/expect", path, use.position.Line, use.name)
		}
	})
}

// vocabulary maps words that the project does not use to the ones it does.
var vocabulary = map[string]string{
	`nobody`:                 "no cluster, no one, or say which",
	`anybody`:                "any cluster, every user",
	`whoever`:                "say which",
	`anew`:                   "again",
	`in vain`:                "without effect",
	`(?:un)?told`:            "reported, recorded, sent",
	`lenders?`:               "provider",
	`borrow(?:er|ers|s|ed)?`: "consumer",
	`scuttl(?:e|es|ed|ing)`:  "delete",
	`story|stories`:          "scenario, chapter",
}

// TestVocabulary keeps one word for each concept: see the glossary in
// ARCHITECTURE.md.
func TestVocabulary(t *testing.T) {
	expressions := map[*regexp.Regexp]string{}
	for word, instead := range vocabulary {
		expressions[regexp.MustCompile(`(?i)\b(?:`+word+`)\b`)] = instead
	}
	eachFile(t, func(path string, content []byte) {
		if path == "LICENSE" || path == "ARCHITECTURE.md" || path == "e2e/architecture/conventions_test.go" || strings.HasSuffix(path, "go.sum") {
			return
		}
		for number, line := range strings.Split(string(content), "\n") {
			for expression, instead := range expressions {
				if found := expression.FindString(line); found != "" {
					t.Errorf("%s:%d says %q; use: %s\n\t%s", path, number+1, found, instead, strings.TrimSpace(line))
				}
			}
		}
	})
}
