package server

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spillway-dev/spillway/e2e/expect"
)

// decoding are the functions that parse what comes from outside.
var decoding = []string{
	"json.Unmarshal", "json.NewDecoder", "decode", "decodeJSON", "yaml.Unmarshal", "pem.Decode",
	"x509.ParseCertificate", "x509.ParseCertificateRequest", "cert.ParseCertsPEM", "protocol.ParseVersions", "ParseVersions",
}

// decoders are the functions of the broker that call one, and the fuzz target that
// covers each.
var decoders = map[string]string{
	"protocol.once":             "FuzzResponses",
	"protocol.readError":        "FuzzResponses",
	"protocol.stream":           "FuzzResponses",
	"protocol.stated":           "FuzzResponses",
	"protocol.Join":             "FuzzJoin",
	"protocol.verifyIssued":     "FuzzJoin",
	"identity.parseCSR":         "FuzzCertificates",
	"identity.sign":             "FuzzCertificates",
	"server.negotiate":          "FuzzVersions",
	"server.decode":             "FuzzBodies",
	"server.decodeJSON":         "FuzzBodies",
	"server.validateExponents":  "FuzzBodies",
	"server.storeAdvertisement": "FuzzBodies",
	"server.parseBeat":          "FuzzBeats",
	"server.postReservation":    "FuzzBodies",
	"server.postRelay":          "FuzzBodies",
	"server.ack":                "FuzzBodies",
	"server.renew":              "FuzzBodies",
	"server.join":               "FuzzBodies",
}

// TestDecodersAreFuzzed fails for a decoder that is not listed, for one that is not
// there any more, and for a fuzz target that does not exist.
func TestDecodersAreFuzzed(t *testing.T) {
	found, targets := map[string]bool{}, map[string]bool{}
	bodies, err := os.ReadFile("unit_test.go")
	expect.NoError(t, err)
	for _, folder := range []string{"../../protocol", "../../internal"} {
		expect.NoError(t, filepath.WalkDir(folder, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() && entry.Name() == "bench" {
				return cmpOr(err, fs.SkipDir)
			}
			if filepath.Ext(path) != ".go" {
				return nil
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			for _, declared := range file.Decls {
				function, ok := declared.(*ast.FuncDecl)
				if !ok {
					continue
				}
				if strings.HasSuffix(path, "_test.go") {
					targets[function.Name.Name] = true
				} else if calls(function) {
					found[file.Name.Name+"."+function.Name.Name] = true
					for _, body := range decodedTypes(function) {
						if !strings.Contains(string(bodies), "&"+body+"{}") {
							t.Errorf("%s decodes a %s, which FuzzBodies does not", function.Name.Name, body)
						}
					}
				}
			}
			return nil
		}))
	}
	for name := range found {
		if decoders[name] == "" {
			t.Errorf("%s decodes what comes from outside: list it with the fuzz target that covers it", name)
		}
	}
	for name, target := range decoders {
		if !found[name] {
			t.Errorf("%s is listed, but decodes nothing", name)
		}
		if !targets[target] {
			t.Errorf("fuzz target %s of %s does not exist", target, name)
		}
	}
}

func cmpOr(err, otherwise error) error {
	if err != nil {
		return err
	}
	return otherwise
}

// calls reports whether a function calls a decoding one.
func calls(function *ast.FuncDecl) bool {
	calling := false
	ast.Inspect(function, func(node ast.Node) bool {
		if call, ok := node.(*ast.CallExpr); ok && slices.Contains(decoding, text(call.Fun)) {
			calling = true
		}
		return true
	})
	return calling
}

// decodedTypes are the types of the variables that a function passes to decode.
func decodedTypes(function *ast.FuncDecl) []string {
	types, passed := map[string][]string{}, []string{}
	ast.Inspect(function, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.ValueSpec:
			for _, name := range n.Names {
				types[name.Name] = append(types[name.Name], text(n.Type))
			}
		case *ast.CallExpr:
			if text(n.Fun) == "decode" {
				if pointer, ok := n.Args[len(n.Args)-1].(*ast.UnaryExpr); ok {
					passed = append(passed, text(pointer.X))
				}
			}
		}
		return true
	})
	var decoded []string
	for _, name := range passed {
		decoded = append(decoded, types[name]...)
	}
	return decoded
}

// text is an expression such as json.Unmarshal.
func text(expression ast.Expr) string {
	switch e := expression.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return text(e.X) + "." + e.Sel.Name
	}
	return ""
}
