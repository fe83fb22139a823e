package liqo_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/spillway-dev/spillway/agent/internal/peering/liqo"
	"github.com/spillway-dev/spillway/e2e/expect"
)

func TestAnswers(t *testing.T) {
	if diff := cmp.Diff(expect.Resources("cpu", "1", "memory", "0"), liqo.AtMost(expect.Resources("cpu", "2", "memory", "1Gi"), expect.Resources("cpu", "1", "pods", "9"))); diff != "" {
		t.Errorf("atMost (-want +got):\n%s", diff)
	}
	if liqo.AnswerPrefix(expect.Resources("cpu", "1", "nvidia.com/gpu", "0")) != liqo.AnswerPrefix(expect.Resources("cpu", "1000m")) {
		t.Error("equal requests have different prefixes")
	}
	if liqo.AnswerPrefix(expect.Resources("cpu", "1")) == liqo.AnswerPrefix(expect.Resources("cpu", "2")) {
		t.Error("different requests have the same prefix")
	}
}
