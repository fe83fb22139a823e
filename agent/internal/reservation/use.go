package reservation

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
	"github.com/spillway-dev/spillway/broker/events"
)

// maxSummary is the maximum size of a summary in bytes: the broker refuses more than 512.
const maxSummary = 512

// used sums up what pods use of a Reservation that was made by hand; nil for others, and
// before the first virtual node.
func used(spec *broker.ReservationSpec, instructions []broker.ReservationInstruction) *broker.Use {
	var sum *broker.Use
	for i := range instructions {
		at := instructions[i].Status.Used
		if at == nil {
			continue
		}
		if sum == nil {
			sum = &broker.Use{}
		}
		sum.Count += at.Count
		sum.Resources = broker.FromList(broker.AddTo(sum.Resources.List(), at.Resources.List()))
		sum.Pods = append(sum.Pods, at.Pods...)
	}
	if sum == nil {
		return nil
	}
	slices.Sort(sum.Pods)
	sum.Pods = sum.Pods[:min(len(sum.Pods), broker.MaxUsePods)]
	sum.Summary = usedSummary(spec, sum)
	return sum
}

// usedSummary is a Use in one line: "2 of 5 pods", or for a divisible total "2 pods, cpu
// 1500m of 4, memory 1Gi of 8Gi".
func usedSummary(spec *broker.ReservationSpec, use *broker.Use) string {
	if spec.RequestedResources == nil {
		return fmt.Sprintf("%d of %d pods", use.Count, broker.HeldCapacity{PodSets: spec.PodSets}.Pods())
	}
	parts := []string{fmt.Sprintf("%d pods", use.Count)}
	if use.Count == 1 {
		parts[0] = "1 pod"
	}
	total, part := spec.RequestedResources.List(), use.Resources.List()
	for _, name := range slices.Sorted(maps.Keys(total)) {
		of, amount := total[name], part[name]
		parts = append(parts, fmt.Sprintf("%s %s of %s", name, amount.String(), of.String()))
	}
	return events.TruncateTo(strings.Join(parts, ", "), maxSummary)
}
