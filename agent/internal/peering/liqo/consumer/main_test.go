package consumer

import (
	"testing"

	"github.com/spillway-dev/spillway/e2e/controlplane"
)

func TestMain(m *testing.M) { controlplane.Main(m) }
