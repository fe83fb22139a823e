package protocol

import _ "embed"

// OpenAPI is the OpenAPI 3 document of the REST interface. TestOpenAPI generates it
// from the wire types, and fails if it is outdated.
//
//go:generate go test . -run TestOpenAPI -update
//go:embed openapi.json
var OpenAPI []byte
