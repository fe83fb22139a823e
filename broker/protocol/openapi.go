package protocol

import _ "embed"

// OpenAPI is the OpenAPI 3 document of the broker's interface. A test makes it
// from the wire types, and fails where it is not up to date:
//
//go:generate go test . -run TestOpenAPI -update
//go:embed openapi.json
var OpenAPI []byte
