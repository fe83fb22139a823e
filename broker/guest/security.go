package guest

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// maxGracePeriod is the longest termination grace period of a guest in seconds.
const maxGracePeriod = 3600

// allowedCapabilities and safeSysctls are those of the Pod Security Standard baseline.
var (
	allowedCapabilities = []corev1.Capability{
		"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
	}
	safeSysctls = []string{
		"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
		"net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes",
		"net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
	}
)

// Refused returns why every provider refuses a pod as a guest, whatever Pod Security
// Standard it applies, as a clause that completes "the pod cannot overflow: …"; empty if
// a provider may admit it. Host namespaces, hostPath, hostPort and privileged
// containers are the caller's.
func Refused(spec *corev1.PodSpec) string {
	if class := spec.RuntimeClassName; class != nil && *class != "" {
		return fmt.Sprintf("its runtimeClassName %q is one of this cluster; guests run with the provider's default runtime", *class)
	}
	if grace := spec.TerminationGracePeriodSeconds; grace != nil && *grace > maxGracePeriod {
		return fmt.Sprintf("its terminationGracePeriodSeconds is %d, and guests must terminate within %d", *grace, maxGracePeriod)
	}
	if context := spec.SecurityContext; context != nil {
		for _, sysctl := range context.Sysctls {
			if !slices.Contains(safeSysctls, sysctl.Name) {
				return fmt.Sprintf("it sets sysctl %s, which providers do not allow", sysctl.Name)
			}
		}
		if unconfined(context.SeccompProfile) {
			return "its seccompProfile is Unconfined, which providers do not allow"
		}
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		context := c.SecurityContext
		if context == nil {
			continue
		}
		if context.Capabilities != nil {
			for _, capability := range context.Capabilities.Add {
				if !slices.Contains(allowedCapabilities, capability) {
					return fmt.Sprintf("container %q adds capability %s, which providers do not allow", c.Name, capability)
				}
			}
		}
		if context.ProcMount != nil && *context.ProcMount != corev1.DefaultProcMount {
			return fmt.Sprintf("container %q unmasks /proc, which providers do not allow", c.Name)
		}
		if unconfined(context.SeccompProfile) {
			return fmt.Sprintf("the seccompProfile of container %q is Unconfined, which providers do not allow", c.Name)
		}
	}
	return ""
}

func unconfined(profile *corev1.SeccompProfile) bool {
	return profile != nil && profile.Type == corev1.SeccompProfileTypeUnconfined
}
