// Package architecture checks that the rooms of the project stay apart: who may import
// whom, and which packages must not look at a clock.
package architecture_test

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/lab/binaries"
)

const module = "github.com/spillway-dev/spillway/"

type pkg struct {
	ImportPath, Dir  string
	Imports, GoFiles []string
}

func packages(t *testing.T) (root string, all []pkg) {
	t.Helper()
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Dir,Imports,GoFiles", "./...")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	decoder := json.NewDecoder(strings.NewReader(string(out)))
	for {
		var p pkg
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		p.ImportPath = strings.TrimPrefix(p.ImportPath, module)
		all = append(all, p)
	}
	if len(all) < 10 {
		t.Fatalf("only %d packages found", len(all))
	}
	return root, all
}

// pure packages decide and account; they must be provable, so they see neither
// the network nor the time.
var pure = []string{"broker/internal/decide", "broker/internal/ledger", "scheduler-plugin/demand"}

func TestPurePackages(t *testing.T) {
	root, all := packages(t)
	for _, name := range pure {
		i := slices.IndexFunc(all, func(p pkg) bool { return p.ImportPath == name })
		if i < 0 {
			t.Errorf("%s is not there any more: mend this test's list", name)
			continue
		}
		for _, dep := range all[i].Imports {
			if dep == "net/http" || dep == "os" || strings.HasPrefix(dep, "k8s.io/client-go") || strings.Contains(dep, "controller-runtime") ||
				(strings.HasPrefix(dep, module) && !strings.HasPrefix(dep, module+"broker/api/") && !slices.Contains(pure, strings.TrimPrefix(dep, module))) {
				t.Errorf("%s imports %s: it must stay free of I/O", name, dep)
			}
		}
		for _, file := range all[i].GoFiles {
			for _, use := range clockUses(t, filepath.Join(root, name, file)) {
				t.Errorf("%s/%s uses %s: take a clock or a time as an argument", name, file, use)
			}
		}
	}
}

func TestWallsBetweenRooms(t *testing.T) {
	_, all := packages(t)
	const driver = module + "agent/internal/peering/"
	for _, p := range all {
		for _, dep := range p.Imports {
			switch {
			case strings.HasPrefix(dep, "k8s.io/kubernetes") && !strings.HasPrefix(p.ImportPath, "scheduler-plugin"):
				t.Errorf("%s imports %s: only the scheduler plugin builds on Kubernetes itself", p.ImportPath, dep)
			case strings.HasPrefix(dep, driver) && dep != driver+"sealing" && dep != driver+"session" && dep != driver+"fake" &&
				p.ImportPath != "agent" && !strings.HasPrefix(module+p.ImportPath, dep):
				t.Errorf("%s imports %s: drivers are reached through the port only", p.ImportPath, dep)
			case strings.HasPrefix(dep, "github.com/liqotech/liqo") && !strings.HasPrefix(p.ImportPath, "agent/internal/peering/liqo") && !strings.HasPrefix(p.ImportPath, "e2e"):
				t.Errorf("%s imports %s: Liqo is one driver's business", p.ImportPath, dep)
			}
		}
		for _, word := range []string{"util", "utils", "common", "helpers", "misc"} {
			if filepath.Base(p.ImportPath) == word {
				t.Errorf("package %s: name it after what it does", p.ImportPath)
			}
		}
	}
}

// TestTopLevel holds the visible top level of the project.
func TestTopLevel(t *testing.T) {
	root, err := binaries.Root()
	if err != nil {
		t.Fatal(err)
	}
	allowed := []string{"scheduler-plugin", "virtual-node", "broker", "agent", "charts", "e2e"}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		if name := d.Name(); d.IsDir() {
			if !strings.HasPrefix(name, ".") && !slices.Contains(allowed, name) {
				t.Errorf("folder %s does not belong at the top level", name)
			}
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// clockUses lists the calls of a file that read the wall clock or wait on it.
func clockUses(t *testing.T, path string) []string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	var uses []string
	ast.Inspect(file, func(n ast.Node) bool {
		selector, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := selector.X.(*ast.Ident); ok && x.Name == "time" &&
			slices.Contains([]string{"Now", "Since", "Until", "After", "AfterFunc", "Sleep", "Tick", "NewTimer", "NewTicker"}, selector.Sel.Name) {
			uses = append(uses, "time."+selector.Sel.Name)
		}
		return true
	})
	return uses
}
