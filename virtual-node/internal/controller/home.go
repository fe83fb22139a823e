package controller

import (
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/rest"
)

// protobuf is the encoding of what this program sends and receives: JSON takes several times
// the CPU time. API servers answer with JSON what has no other encoding.
var protobuf = rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf, AcceptContentTypes: runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON}

// HomeConfig returns a copy of config for the clients of this cluster's API server: with the
// encoding and the rate limit that thousands of pods on a virtual node need.
func HomeConfig(config *rest.Config) *rest.Config {
	home := rest.CopyConfig(config)
	home.QPS, home.Burst = 200, 400
	home.ContentType, home.AcceptContentTypes = protobuf.ContentType, protobuf.AcceptContentTypes
	return home
}
