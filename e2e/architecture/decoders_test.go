package architecture_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// decoding are the functions that parse what comes from outside.
var decoding = []string{
	"json.Unmarshal", "utiljson.Unmarshal", "json.NewDecoder", "decode", "decodeJSON", "decodeStrict", "yaml.Unmarshal", "yaml.UnmarshalStrict", "clientcmd.Load",
	"pem.Decode", "x509.ParseCertificate", "x509.ParseCertificateRequest", "x509.ParsePKIXPublicKey", "x509.ParsePKCS8PrivateKey",
	"keyutil.ParsePrivateKeyPEM", "cert.ParseCertsPEM", "tls.X509KeyPair",
	"binary.Uvarint", "binary.BigEndian.Uint32",
}

// decodingRooms are the folders of the programs. Of their packages, those for tests and
// benches decode nothing that comes from outside.
var decodingRooms = []string{"agent", "broker", "scheduler-plugin", "virtual-node"}

// decoders are the functions that call one, and the fuzz target that covers each.
var decoders = map[string]string{
	"broker/protocol.once":                     "broker/protocol.FuzzResponses",
	"broker/protocol.readError":                "broker/protocol.FuzzResponses",
	"broker/protocol.stream":                   "broker/protocol.FuzzResponses",
	"broker/protocol.read":                     "broker/protocol.FuzzResponses",
	"broker/protocol.add":                      "broker/protocol.FuzzResponses",
	"broker/protocol/objects.Unpack":           "broker/protocol/objects.FuzzUnpack",
	"broker/internal/mailbox.pending":          "broker/internal/mailbox.FuzzRequests",
	"broker/internal/mailbox.bodyOf":           "broker/internal/mailbox.FuzzRequests",
	"broker/protocol.Join":                     "broker/protocol.FuzzJoin",
	"broker/protocol.verifyIssued":             "broker/protocol.FuzzJoin",
	"broker/internal/identity.parseCSR":        "broker/internal/identity.FuzzCertificates",
	"broker/internal/identity.sign":            "broker/internal/identity.FuzzCertificates",
	"broker/internal/server.decode":            fuzzBodies,
	"broker/internal/server.decodeJSON":        fuzzBodies,
	"broker/internal/server.validateExponents": fuzzBodies,
	"broker/internal/server.postAdvertisement": fuzzBodies,
	"broker/internal/server.postBeat":          fuzzBodies,
	"broker/internal/server.postReservation":   fuzzBodies,
	"broker/internal/server.postRelay":         fuzzBodies,
	"broker/internal/server.ack":               fuzzBodies,
	"broker/internal/server.renew":             fuzzBodies,
	"broker/internal/server.join":              fuzzBodies,

	"agent/internal/usage.Decode":                  "agent/internal/usage.FuzzDecode",
	"agent/internal/health.expiry":                 "agent/internal/health.FuzzExpiry",
	"agent/internal/probe.Lacks":                   "agent/internal/probe.FuzzLacks",
	"agent/internal/identity.parse":                "agent/internal/identity.FuzzCredentials",
	"agent/internal/identity.stored":               "agent/internal/identity.FuzzCredentials",
	"agent/internal/identity.certificateRequest":   "agent/internal/identity.FuzzCredentials",
	"agent/internal/instruction.Held":              "agent/internal/instruction.FuzzHeld",
	"agent/internal/transport/kubernetes.answerTo": "agent/internal/transport/kubernetes.FuzzSaid",
	"agent/internal/transport/kubernetes.receive":  "agent/internal/transport/kubernetes.FuzzSaid",
	"agent/internal/peering/liqo.CheckProof":       "agent/internal/peering/liqo.FuzzProof",
	"agent/internal/peering/liqo.onePEM":           "agent/internal/peering/liqo.FuzzProof",
	"agent/internal/peering/liqo/provider.changes": "agent/internal/peering/liqo/provider.FuzzGuests",
	"agent/internal/peering/liqo/consumer.correct": "agent/internal/peering/liqo/consumer.FuzzAddresses",
	"agent/internal/peering/sealing.Fingerprint":   "agent/internal/peering/sealing.FuzzPeerKeys",
	"agent/internal/peering/sealing.Seal":          "agent/internal/peering/sealing.FuzzPeerKeys",
	"agent/internal/peering/sealing.Open":          "agent/internal/peering/sealing.FuzzOpen",
	"agent/internal/peering/session.Decode":        "agent/internal/peering/direct.FuzzDecode",
	"agent/internal/peering/session.canonical":     "agent/internal/peering/liqo.FuzzDecode",
	"agent/internal/peering/session.marshal":       "agent/internal/peering/liqo.FuzzDecode",
	"agent/internal/peering/session.decodeStrict":  "agent/internal/peering/liqo.FuzzDecode",
	"agent/internal/peering/session.ReadsOnly":     "agent/internal/peering/liqo.FuzzDecode",

	"scheduler-plugin/steering.annotateWorkload": "scheduler-plugin/steering.FuzzPods",
	"scheduler-plugin/steering.handle":           "scheduler-plugin/steering.FuzzPods",
	"virtual-node/nodeconfig.FromSecret":         "virtual-node/nodeconfig.FuzzFromSecret",
}

// fuzzBodies is the target that decodes all types of bodies.
const fuzzBodies = "broker/internal/server.FuzzBodies"

// ownInput are the functions that decode only what the cluster's own administrator or the
// same program has written: what that is.
var ownInput = map[string]string{
	"agent/internal/advertise.ParseRates":                 "a flag or ConfigMap of the cluster's own administrator",
	"agent.serverOf":                                      "ConfigMap kube-public/cluster-info of the agent's cluster",
	"agent/internal/peering/liqo.Prove":                   "the private key that Liqo has generated in the agent's cluster",
	"agent/internal/peering/sealing.LoadKey":              "the Secret of the agent's key, in its namespace",
	"agent/internal/placeholder.sizeOf":                   "the agent's own annotation of its placeholder",
	"virtual-node/internal/kubelet.SelfSignedCertificate": "the certificate that it has just created",
	"broker/internal/history/database.records":            "what the broker has written to its database",
	"broker/internal/history/database.decodeSum":          "what the broker has written to its database",
	"broker/internal/mailbox.answer":                      "the response of the same process's REST interface",
	"broker/internal/mailbox.Write":                       "a stream of the same process's REST interface",
	"broker/internal/identity.newCA":                      "what this process has signed",
	"broker/internal/identity.parseCAs":                   "the Secret of the authority, in the broker's namespace",
	"agent/internal/whatif.into":                          "the manifest of the one who asks",
	"scheduler-plugin.newDiscovery":                       "the scheduler's configuration file",
	"scheduler-plugin/overflow.parseArgs":                 "the scheduler's configuration file",
	"scheduler-plugin/demand.undecodedSelects":            "an OverflowPolicy of the cluster's own administrator",
}

// TestDecodersAreFuzzed fails for a decoder that is not listed, for one that is not
// there any more, and for a fuzz target that does not exist.
func TestDecodersAreFuzzed(t *testing.T) {
	bodies, err := os.ReadFile(filepath.Join(projectRoot(t), "broker/internal/server/unit_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	found, targets := map[string]bool{}, map[string]bool{}
	eachGoFile(t, func(file string, content []byte) {
		room, _, _ := strings.Cut(file, "/")
		folder := path.Dir(file)
		if !slices.Contains(decodingRooms, room) || strings.HasSuffix(folder, "/bench") || strings.HasSuffix(folder, "test") {
			return
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, content, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, declared := range parsed.Decls {
			function, ok := declared.(*ast.FuncDecl)
			if !ok {
				continue
			}
			name := folder + "." + function.Name.Name
			if strings.HasSuffix(file, "_test.go") {
				targets[name] = true
				continue
			}
			if !calls(function) {
				continue
			}
			found[name] = true
			for _, body := range decodedTypes(function) {
				if decoders[name] == fuzzBodies && !strings.Contains(string(bodies), "&"+body+"{}") {
					t.Errorf("%s decodes a %s, which FuzzBodies does not", name, body)
				}
			}
		}
	})
	for name := range found {
		if decoders[name] == "" && ownInput[name] == "" {
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
	for name := range ownInput {
		if !found[name] {
			t.Errorf("%s is listed, but decodes nothing", name)
		}
	}
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
