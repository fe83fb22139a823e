package guest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestPure keeps the package without clients and clock: what a guest is like
// follows from its pod alone, and is computed again and again.
func TestPure(t *testing.T) {
	files := token.NewFileSet()
	names, err := filepath.Glob("*.go")
	if err != nil || len(names) == 0 {
		t.Fatalf("found no source: %v", err)
	}
	banned := []string{"net", "os", "time", "math/rand", "k8s.io/client-go", "sigs.k8s.io/controller-runtime", "k8s.io/kubernetes", "k8s.io/utils/clock"}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(files, name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, imp := range file.Imports {
			path := strings.Trim(imp.Path.Value, `"`)
			for _, b := range banned {
				if path == b || strings.HasPrefix(path, b+"/") {
					t.Errorf("%s: imports %s", files.Position(imp.Pos()), path)
				}
			}
		}
		// metav1 can read the clock as well.
		ast.Inspect(file, func(n ast.Node) bool {
			if sel, ok := n.(*ast.SelectorExpr); ok && sel.Sel.Name == "Now" {
				t.Errorf("%s: reads the clock", files.Position(sel.Pos()))
			}
			return true
		})
	}
}
