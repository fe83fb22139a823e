package decide_test

import (
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// TestWalls keeps clients, the network and the wall clock out of what decides
// and what gives capacity: they are pure.
func TestWalls(t *testing.T) {
	banned := []string{"k8s.io/client-go", "sigs.k8s.io/controller-runtime", "k8s.io/utils/clock", "net", "os", "time", "math/rand"}
	for _, folder := range []string{".", "../ledger"} {
		files, err := filepath.Glob(filepath.Join(folder, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", folder, err)
		}
		for _, file := range files {
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, spec := range parsed.Imports {
				path := strings.Trim(spec.Path.Value, `"`)
				for _, ban := range banned {
					if path == ban || strings.HasPrefix(path, ban+"/") {
						t.Errorf("%s imports %s", file, path)
					}
				}
			}
		}
	}
}
