package architecture_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// room is how much one has to know to change a package.
type room struct{ lines, mutexes, maps int }

func (r room) within(most room) bool {
	return r.lines <= most.lines && r.mutexes <= most.mutexes && r.maps <= most.maps
}

// mostOfARoom is what a package may have.
var mostOfARoom = room{lines: 2000, mutexes: 6, maps: 40}

// support packages run in tests and benches only.
var support = regexp.MustCompile(`^e2e/|/bench$|/simulated$|/contract$|/fake$|test$`)

func TestRooms(t *testing.T) {
	_, all := packages(t)
	for _, p := range all {
		if support.MatchString(p.ImportPath) {
			continue
		}
		r := measure(t, p)
		if !r.within(mostOfARoom) {
			t.Errorf("%s has %d lines, %d mutexes and %d fields that are maps, and may have %+v: divide it, or let it forget something", p.ImportPath, r.lines, r.mutexes, r.maps, mostOfARoom)
		}
	}
}

// measure counts what a package has, without generated files.
func measure(t *testing.T, p pkg) (r room) {
	t.Helper()
	for _, name := range p.GoFiles {
		path := filepath.Join(p.Dir, name)
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, content, parser.SkipObjectResolution|parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		if ast.IsGenerated(file) {
			continue
		}
		r.lines += strings.Count(string(content), "\n")
		ast.Inspect(file, func(n ast.Node) bool {
			of, ok := n.(*ast.StructType)
			if !ok {
				return true
			}
			for _, field := range of.Fields.List {
				switch of := field.Type.(type) {
				case *ast.MapType:
					r.maps += max(1, len(field.Names))
				case *ast.SelectorExpr:
					if strings.HasSuffix(of.Sel.Name, "Mutex") {
						r.mutexes++
					}
				}
			}
			return true
		})
	}
	return r
}
