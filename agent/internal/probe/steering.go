package probe

import (
	"context"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/spillway-dev/spillway/agent/internal/explain"
	"github.com/spillway-dev/spillway/agent/internal/health"
)

// Steering creates a pod by a dry run in the first of the namespaces that a webhook selects, to see whether
// it is steered; nil if it selects none.
func Steering(ctx context.Context, c client.Client, webhook *admissionv1.MutatingWebhook, namespaces []corev1.Namespace) *health.Trial {
	selector, err := metav1.LabelSelectorAsSelector(webhook.NamespaceSelector)
	if err != nil {
		return nil
	}
	for i := range namespaces {
		if !selector.Matches(labels.Set(namespaces[i].Labels)) {
			continue
		}
		trial := &health.Trial{Namespace: namespaces[i].Name}
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: trial.Namespace, GenerateName: "spillway-check-"}, Spec: corev1.PodSpec{
			SecurityContext: &corev1.PodSecurityContext{RunAsNonRoot: ptr.To(true), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			Containers: []corev1.Container{{Name: "check", Image: "check", SecurityContext: &corev1.SecurityContext{
				AllowPrivilegeEscalation: ptr.To(false), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}}},
		}}
		if err := c.Create(ctx, pod, client.DryRunAll); err != nil {
			trial.Unknown = "was refused: " + err.Error()
		}
		trial.Steered = explain.Steered(pod)
		if name := pod.Spec.SchedulerName; !trial.Steered && name != "" && name != corev1.DefaultSchedulerName {
			trial.Unknown = "was given schedulerName " + name + " by another webhook"
		}
		return trial
	}
	return nil
}
