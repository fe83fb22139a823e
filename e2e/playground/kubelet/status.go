package kubelet

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// hostIP is the address of every node.
const hostIP = "127.0.0.1"

func ready(node *corev1.Node) bool {
	for _, c := range node.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// nodeStatus is what a kubelet adds to the capacity that the node was created with.
func nodeStatus(node *corev1.Node) corev1.NodeStatus {
	now := metav1.Now()
	status := corev1.NodeStatus{
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: hostIP}, {Type: corev1.NodeHostName, Address: node.Name}},
		NodeInfo: corev1.NodeSystemInfo{
			KubeletVersion: "v0.0.0-simulated", Architecture: node.Labels[corev1.LabelArchStable], OperatingSystem: node.Labels[corev1.LabelOSStable],
		},
	}
	for _, condition := range []corev1.NodeConditionType{corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure} {
		c := corev1.NodeCondition{Type: condition, Status: corev1.ConditionFalse, Reason: "Simulated", LastHeartbeatTime: now, LastTransitionTime: now}
		if condition == corev1.NodeReady {
			c.Status = corev1.ConditionTrue
		}
		status.Conditions = append(status.Conditions, c)
	}
	return status
}

// workTime returns when a pod ends by itself, after its start.
func workTime(pod *corev1.Pod) (time.Duration, bool) {
	if len(pod.Spec.Containers) == 0 {
		return 0, false
	}
	args := pod.Spec.Containers[0].Args
	if len(args) != 2 || args[0] != "work" {
		return 0, false
	}
	after, err := time.ParseDuration(args[1])
	return after, err == nil
}

// started is the status of a pod whose containers run.
func started(pod *corev1.Pod, address string) corev1.PodStatus {
	now := metav1.Now()
	if pod.Spec.HostNetwork {
		address = hostIP
	}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}
	yes := true
	status := corev1.PodStatus{
		Phase: corev1.PodRunning, StartTime: &now,
		HostIP: hostIP, HostIPs: []corev1.HostIP{{IP: hostIP}}, PodIP: address, PodIPs: []corev1.PodIP{{IP: address}},
	}
	for _, condition := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReadyToStartContainers, corev1.ContainersReady, corev1.PodReady} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: condition, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	for _, c := range pod.Spec.InitContainers {
		s := corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: true, State: terminated(now, now, 0)}
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			s.Started, s.State = &yes, running
		}
		status.InitContainerStatuses = append(status.InitContainerStatuses, s)
	}
	for _, c := range pod.Spec.Containers {
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: true, Started: &yes, State: running})
	}
	return status
}

// ended is the change of status of a running pod whose containers have ended.
func ended(pod *corev1.Pod, phase corev1.PodPhase, exitCode int32) corev1.PodStatus {
	now := metav1.Now()
	status := corev1.PodStatus{Phase: phase}
	reason := "PodCompleted"
	if phase == corev1.PodFailed {
		reason = "PodFailed"
	}
	for _, condition := range []corev1.PodConditionType{corev1.ContainersReady, corev1.PodReady} {
		status.Conditions = append(status.Conditions, corev1.PodCondition{Type: condition, Status: corev1.ConditionFalse, Reason: reason, LastTransitionTime: now})
	}
	for _, c := range pod.Spec.Containers {
		no := false
		status.ContainerStatuses = append(status.ContainerStatuses, corev1.ContainerStatus{
			Name: c.Name, Image: c.Image, Started: &no, State: terminated(*pod.Status.StartTime, now, exitCode),
		})
	}
	return status
}

func terminated(from, to metav1.Time, exitCode int32) corev1.ContainerState {
	reason := "Completed"
	if exitCode != 0 {
		reason = "Error"
	}
	return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: exitCode, Reason: reason, StartedAt: from, FinishedAt: to}}
}
