package overflow

import (
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/spillway-dev/spillway/broker/undecoded"
)

// undecodable is the metric of the objects that the plugin cannot decode.
var undecodable = undecoded.NewGauge("overflow")

func init() { legacyregistry.RawMustRegister(undecodable) }
