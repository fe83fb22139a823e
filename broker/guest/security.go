package guest

import (
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	broker "github.com/spillway-dev/spillway/broker/api/v1alpha1"
)

// maxGracePeriod is the longest termination grace period of a guest in seconds.
const maxGracePeriod = 3600

// allowedCapabilities, safeSysctls and containerTypes (of SELinux) are those of the Pod
// Security Standard baseline.
var (
	allowedCapabilities = []corev1.Capability{
		"AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT",
	}
	safeSysctls = []string{
		"kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range",
		"net.ipv4.ip_local_reserved_ports", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes",
		"net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem",
	}
	containerTypes = []string{"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
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
	if reason := beyondMemory(spec); reason != "" {
		return reason
	}
	if context := spec.SecurityContext; context != nil {
		for _, sysctl := range context.Sysctls {
			if !slices.Contains(safeSysctls, sysctl.Name) {
				return fmt.Sprintf("it sets sysctl %s, which providers do not allow", sysctl.Name)
			}
		}
		if option := relaxed(context.SeccompProfile, context.AppArmorProfile, context.SELinuxOptions); option != "" {
			return fmt.Sprintf("its %s, which providers do not allow", option)
		}
	}
	for _, c := range slices.Concat(spec.InitContainers, spec.Containers) {
		if field := connecting(&c); field != "" {
			return fmt.Sprintf("container %q has a host in its %s, which providers do not allow: without one, the kubelet connects to the pod", c.Name, field)
		}
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
		if option := relaxed(context.SeccompProfile, context.AppArmorProfile, context.SELinuxOptions); option != "" {
			return fmt.Sprintf("in container %q, the %s, which providers do not allow", c.Name, option)
		}
	}
	return ""
}

// connecting returns the first probe or lifecycle hook of a container in which the kubelet
// connects to a host that the pod names, instead of the pod; empty if there is none.
func connecting(c *corev1.Container) (field string) {
	names := func(get *corev1.HTTPGetAction, connect *corev1.TCPSocketAction) bool {
		return get != nil && get.Host != "" || connect != nil && connect.Host != ""
	}
	for _, p := range []struct {
		field string
		probe *corev1.Probe
	}{{"livenessProbe", c.LivenessProbe}, {"readinessProbe", c.ReadinessProbe}, {"startupProbe", c.StartupProbe}} {
		if p.probe != nil && names(p.probe.HTTPGet, p.probe.TCPSocket) {
			return p.field
		}
	}
	if c.Lifecycle == nil {
		return ""
	}
	for _, h := range []struct {
		field string
		hook  *corev1.LifecycleHandler
	}{{"lifecycle.postStart", c.Lifecycle.PostStart}, {"lifecycle.preStop", c.Lifecycle.PreStop}} {
		if h.hook != nil && names(h.hook.HTTPGet, h.hook.TCPSocket) {
			return h.field
		}
	}
	return ""
}

// PodSecurity returns the strictest Pod Security Standard that a pod complies with:
// restricted or baseline. The pod is one that may overflow, so that it complies with
// baseline and has no other volumes than restricted allows.
func PodSecurity(spec *corev1.PodSpec) string {
	pod := spec.SecurityContext
	if pod == nil {
		pod = &corev1.PodSecurityContext{}
	}
	if pod.RunAsNonRoot != nil && !*pod.RunAsNonRoot || isRoot(pod.RunAsUser) {
		return broker.PodSecurityBaseline
	}
	for _, containers := range [][]corev1.Container{spec.InitContainers, spec.Containers} {
		for i := range containers {
			if !restricted(pod, containers[i].SecurityContext) {
				return broker.PodSecurityBaseline
			}
		}
	}
	return broker.PodSecurityRestricted
}

// restricted reports whether a container complies with the Pod Security Standard restricted.
func restricted(pod *corev1.PodSecurityContext, container *corev1.SecurityContext) bool {
	if container == nil || container.AllowPrivilegeEscalation == nil || *container.AllowPrivilegeEscalation || isRoot(container.RunAsUser) {
		return false
	}
	nonRoot := container.RunAsNonRoot
	if nonRoot == nil {
		nonRoot = pod.RunAsNonRoot
	}
	capabilities := container.Capabilities
	return nonRoot != nil && *nonRoot && (container.SeccompProfile != nil || pod.SeccompProfile != nil) &&
		capabilities != nil && slices.Contains(capabilities.Drop, "ALL") &&
		!slices.ContainsFunc(capabilities.Add, func(c corev1.Capability) bool { return c != "NET_BIND_SERVICE" })
}

func isRoot(user *int64) bool { return user != nil && *user == 0 }

// relaxed describes which of the options that a pod and a container can both set violates
// the Pod Security Standard baseline; empty if none does.
func relaxed(seccomp *corev1.SeccompProfile, appArmor *corev1.AppArmorProfile, seLinux *corev1.SELinuxOptions) string {
	switch {
	case seccomp != nil && seccomp.Type == corev1.SeccompProfileTypeUnconfined:
		return "seccompProfile is Unconfined"
	case appArmor != nil && appArmor.Type == corev1.AppArmorProfileTypeUnconfined:
		return "appArmorProfile is Unconfined"
	case seLinux != nil && (seLinux.User != "" || seLinux.Role != "" || !slices.Contains(containerTypes, seLinux.Type)):
		return "seLinuxOptions are not those of containers"
	}
	return ""
}
