{{/*
Validations of the pod of a guest, whatever the driver. The policy defines the variables
pod (its spec), containers (with init containers) and memory (what its containers may
use, in bytes). The argument is the driver.
*/}}
{{- define "spillway-agent.guestRules" -}}
- expression: "!has(variables.pod.nodeName) || variables.pod.nodeName == ''"
  message: "a guest may not choose its node: leave spec.nodeName empty"
  reason: Forbidden
- expression: "!has(variables.pod.schedulerName) || variables.pod.schedulerName in ['', 'default-scheduler']"
  message: "a guest may not choose its scheduler: leave spec.schedulerName empty"
  reason: Forbidden
# A term without namespaces concerns the guests of one consumer only. Required
# anti-affinity to all pods would keep every other pod from the whole topology.
- expression: >-
    !has(variables.pod.affinity) || (
    (!has(variables.pod.affinity.podAffinity) || variables.podTerms.all(t, t.topologyKey == 'kubernetes.io/hostname' && !has(t.namespaceSelector) && (!has(t.namespaces) || size(t.namespaces) == 0))) &&
    (!has(variables.pod.affinity.podAntiAffinity) || variables.podAntiTerms.all(t, t.topologyKey == 'kubernetes.io/hostname' && !has(t.namespaceSelector) && (!has(t.namespaces) || size(t.namespaces) == 0))))
  message: "the pod affinity and anti-affinity of a guest may only concern pods of its own namespace and topology key kubernetes.io/hostname: remove the other terms"
  reason: Forbidden
- expression: >-
    !has(variables.pod.volumes) || variables.pod.volumes.all(v, has(v.configMap) || has(v.secret) || has(v.emptyDir) || has(v.downwardAPI) || has(v.image) || has(v.hostPath) ||
    (has(v.projected) && (!has(v.projected.sources) || v.projected.sources.all(s, !has(s.serviceAccountToken) && !has(s.clusterTrustBundle) && !has(s.podCertificate)))))
  message: "a guest may only use volumes of type configMap, secret, downwardAPI, emptyDir and image, and projected volumes of these: remove the others"
  reason: Forbidden
- expression: >-
    !has(variables.pod.volumes) || variables.pod.volumes.all(v, !has(v.emptyDir) || !has(v.emptyDir.medium) || v.emptyDir.medium == '' ||
    (has(v.emptyDir.sizeLimit) && quantity(string(v.emptyDir.sizeLimit)).compareTo(quantity(string(variables.memory))) <= 0))
  message: "an emptyDir in memory must be bounded: set its sizeLimit to at most the memory that the guest's containers request or are limited to"
  reason: Forbidden
- expression: "!has(variables.pod.resourceClaims) || size(variables.pod.resourceClaims) == 0"
  message: "a guest may not use resource claims: remove spec.resourceClaims"
  reason: Forbidden
- expression: "!has(variables.pod.runtimeClassName) || variables.pod.runtimeClassName == ''"
  message: "a guest may not choose a runtime class of this cluster: remove spec.runtimeClassName"
  reason: Forbidden
- expression: "!has(variables.pod.ephemeralContainers) || size(variables.pod.ephemeralContainers) == 0"
  message: "a guest may not be created with ephemeral containers: remove spec.ephemeralContainers"
  reason: Forbidden
- expression: "!has(variables.pod.terminationGracePeriodSeconds) || variables.pod.terminationGracePeriodSeconds <= 3600"
  message: "a guest must terminate within an hour: set spec.terminationGracePeriodSeconds to 3600 or less"
  reason: Forbidden
# The ServiceAccount admission plugin sets "default" if the field is empty.
- expression: "variables.pod.?serviceAccountName.orValue('') in ['', 'default'] && variables.pod.?serviceAccount.orValue('') in ['', 'default']"
  message: "a guest may not use a ServiceAccount of this cluster: leave spec.serviceAccountName empty"
  reason: Forbidden
- expression: "has(variables.pod.automountServiceAccountToken) && !variables.pod.automountServiceAccountToken"
  message: "a guest may not have a token of this cluster: set spec.automountServiceAccountToken to false"
  reason: Forbidden
{{ include "spillway-agent.guestTolerations" . }}
{{- end }}

{{/* Variables of guestRules, which follow the variable pod. */}}
{{- define "spillway-agent.guestVariables" -}}
- name: containers
  expression: "(has(variables.pod.containers) ? variables.pod.containers : []) + (has(variables.pod.initContainers) ? variables.pod.initContainers : [])"
- name: memory
  expression: >-
    variables.containers.map(c, !has(c.resources) ? 0 :
    has(c.resources.limits) && 'memory' in c.resources.limits ? quantity(string(c.resources.limits.memory)).asInteger() :
    has(c.resources.requests) && 'memory' in c.resources.requests ? quantity(string(c.resources.requests.memory)).asInteger() : 0).sum()
{{- range $name, $field := dict "podTerms" "podAffinity" "podAntiTerms" "podAntiAffinity" }}
- name: {{ $name }}
  expression: >-
    has(variables.pod.affinity) && has(variables.pod.affinity.{{ $field }})
    ? (has(variables.pod.affinity.{{ $field }}.requiredDuringSchedulingIgnoredDuringExecution) ? variables.pod.affinity.{{ $field }}.requiredDuringSchedulingIgnoredDuringExecution : []) +
    (has(variables.pod.affinity.{{ $field }}.preferredDuringSchedulingIgnoredDuringExecution) ? variables.pod.affinity.{{ $field }}.preferredDuringSchedulingIgnoredDuringExecution.map(p, p.podAffinityTerm) : []) : []
{{- end }}
{{- end }}

{{/*
Tolerations of a guest: none for virtual nodes, so that it is not lent to a third
cluster. Liqo copies the toleration of Spillway's virtual nodes, but not the one of its
own, whose taint all virtual nodes have with driver liqo.
*/}}
{{- define "spillway-agent.guestTolerations" -}}
- expression: >-
    !has(variables.pod.tolerations) || variables.pod.tolerations.all(t, has(t.key) && t.key != '' &&
    {{- if ne . "liqo" }}
    t.key != 'broker.fluidos.eu/overflow' &&
    {{- end }}
    !(t.key in ['virtual-node.liqo.io/not-allowed', 'virtual-kubelet.io/provider',
    'node-role.kubernetes.io/control-plane', 'node-role.kubernetes.io/master', 'node.kubernetes.io/unschedulable']))
  message: "a guest may not tolerate all taints, nor those of control planes, cordoned nodes and virtual nodes: remove the toleration"
  reason: Forbidden
{{- end }}

{{/*
What is required of a new guest so that it does not overflow again. The argument is what the
message ends with. A term without requirements matches no node.
*/}}
{{- define "spillway-agent.newGuestRules" -}}
- expression: >-
    oldObject != null || [variables.pod.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms.orValue([])].all(terms,
    size(terms) > 0 && terms.all(t, (!has(t.matchExpressions) && !has(t.matchFields)) ||
    t.?matchExpressions.orValue([]).exists(e, e.key == 'type' && e.operator == 'NotIn' && 'virtual-kubelet' in e.?values.orValue([]))))
  message: "a guest may not run on virtual nodes: each term of its required node affinity excludes label type=virtual-kubelet{{ . }}"
  reason: Forbidden
{{- end }}

{{/*
The Pod Security Standards as validations, for objects that Pod Security admission does
not see. The argument is the level.
*/}}
{{- define "spillway-agent.podSecurityRules" -}}
- expression: >-
    !(has(variables.pod.hostNetwork) && variables.pod.hostNetwork) &&
    !(has(variables.pod.hostPID) && variables.pod.hostPID) &&
    !(has(variables.pod.hostIPC) && variables.pod.hostIPC)
  message: "a guest may not use its node's namespaces: remove hostNetwork, hostPID and hostIPC"
  reason: Forbidden
- expression: "!has(variables.pod.volumes) || variables.pod.volumes.all(v, !has(v.hostPath))"
  message: "a guest may not mount directories of its node: remove the hostPath volume"
  reason: Forbidden
- expression: "variables.containers.all(c, !has(c.ports) || c.ports.all(p, !has(p.hostPort) || p.hostPort == 0))"
  message: "a guest may not use ports of its node: remove hostPort"
  reason: Forbidden
# The kubelet is outside the NetworkPolicies for guests.
- expression: >-
    variables.containers.all(c,
    [c.?livenessProbe, c.?readinessProbe, c.?startupProbe].all(p, p.?httpGet.?host.orValue('') == '' && p.?tcpSocket.?host.orValue('') == '') &&
    [c.?lifecycle.?postStart, c.?lifecycle.?preStop].all(h, h.?httpGet.?host.orValue('') == '' && h.?tcpSocket.?host.orValue('') == ''))
  message: "a guest may not make its node connect to other hosts than the guest: remove host from its probes and lifecycle hooks"
  reason: Forbidden
- expression: "variables.contexts.all(s, !(has(s.privileged) && s.privileged))"
  message: "a guest may not be privileged: remove securityContext.privileged"
  reason: Forbidden
- expression: "variables.allContexts.all(s, !has(s.windowsOptions) || !has(s.windowsOptions.hostProcess) || !s.windowsOptions.hostProcess)"
  message: "a guest may not be a process of its node: remove windowsOptions.hostProcess"
  reason: Forbidden
- expression: >-
    variables.contexts.all(s, !has(s.capabilities) || !has(s.capabilities.add) || s.capabilities.add.all(name, name in
    {{- if eq . "restricted" }} ['NET_BIND_SERVICE']
    {{- else }} ['AUDIT_WRITE', 'CHOWN', 'DAC_OVERRIDE', 'FOWNER', 'FSETID', 'KILL', 'MKNOD', 'NET_BIND_SERVICE', 'SETFCAP', 'SETGID', 'SETPCAP', 'SETUID', 'SYS_CHROOT']
    {{- end }}))
  message: "a guest may not add capabilities beyond the Pod Security Standard {{ . }}: remove them from securityContext.capabilities.add"
  reason: Forbidden
- expression: "variables.contexts.all(s, !has(s.procMount) || s.procMount in ['', 'Default'])"
  message: "a guest may not unmask /proc: remove securityContext.procMount"
  reason: Forbidden
- expression: >-
    variables.allContexts.all(s, !has(s.seLinuxOptions) || (
    (!has(s.seLinuxOptions.type) || s.seLinuxOptions.type in ['', 'container_t', 'container_init_t', 'container_kvm_t', 'container_engine_t']) &&
    (!has(s.seLinuxOptions.user) || s.seLinuxOptions.user == '') && (!has(s.seLinuxOptions.role) || s.seLinuxOptions.role == '')))
  message: "a guest may not choose its SELinux user, role or other types than those of containers: remove securityContext.seLinuxOptions"
  reason: Forbidden
- expression: "variables.allContexts.all(s, !has(s.appArmorProfile) || s.appArmorProfile.type != 'Unconfined')"
  message: "a guest may not run without AppArmor: remove appArmorProfile type Unconfined"
  reason: Forbidden
- expression: >-
    variables.annotations.all(name, !name.startsWith('container.apparmor.security.beta.kubernetes.io/') ||
    variables.annotations[name] in ['', 'runtime/default'] || variables.annotations[name].startsWith('localhost/'))
  message: "a guest may not run without AppArmor: remove annotations container.apparmor.security.beta.kubernetes.io/…"
  reason: Forbidden
- expression: "variables.allContexts.all(s, !has(s.seccompProfile) || s.seccompProfile.type != 'Unconfined')"
  message: "a guest may not run without seccomp: remove seccompProfile type Unconfined"
  reason: Forbidden
- expression: >-
    !has(variables.pod.securityContext) || !has(variables.pod.securityContext.sysctls) ||
    variables.pod.securityContext.sysctls.all(s, s.name in ['kernel.shm_rmid_forced', 'net.ipv4.ip_local_port_range', 'net.ipv4.ip_unprivileged_port_start',
    'net.ipv4.tcp_syncookies', 'net.ipv4.ping_group_range', 'net.ipv4.ip_local_reserved_ports', 'net.ipv4.tcp_keepalive_time', 'net.ipv4.tcp_fin_timeout',
    'net.ipv4.tcp_keepalive_intvl', 'net.ipv4.tcp_keepalive_probes', 'net.ipv4.tcp_rmem', 'net.ipv4.tcp_wmem'])
  message: "a guest may only set safe sysctls: remove the others from securityContext.sysctls"
  reason: Forbidden
{{- if eq . "restricted" }}
- expression: "variables.containers.all(c, has(c.securityContext) && has(c.securityContext.allowPrivilegeEscalation) && !c.securityContext.allowPrivilegeEscalation)"
  message: "a guest must comply with the Pod Security Standard restricted: set securityContext.allowPrivilegeEscalation to false in each container, or let the provider's administrator set guests.podSecurity to baseline"
  reason: Forbidden
- expression: >-
    variables.containers.all(c, has(c.securityContext) && has(c.securityContext.capabilities) && has(c.securityContext.capabilities.drop) && 'ALL' in c.securityContext.capabilities.drop)
  message: "a guest must comply with the Pod Security Standard restricted: set securityContext.capabilities.drop to [ALL] in each container, or let the provider's administrator set guests.podSecurity to baseline"
  reason: Forbidden
- expression: >-
    variables.allContexts.all(s, !has(s.runAsNonRoot) || s.runAsNonRoot) &&
    ((has(variables.pod.securityContext) && has(variables.pod.securityContext.runAsNonRoot) && variables.pod.securityContext.runAsNonRoot) ||
    variables.containers.all(c, has(c.securityContext) && has(c.securityContext.runAsNonRoot)))
  message: "a guest must comply with the Pod Security Standard restricted: set securityContext.runAsNonRoot to true, or let the provider's administrator set guests.podSecurity to baseline"
  reason: Forbidden
- expression: "variables.allContexts.all(s, !has(s.runAsUser) || s.runAsUser != 0)"
  message: "a guest must comply with the Pod Security Standard restricted: set securityContext.runAsUser to another user than 0, or let the provider's administrator set guests.podSecurity to baseline"
  reason: Forbidden
- expression: >-
    (has(variables.pod.securityContext) && has(variables.pod.securityContext.seccompProfile)) ||
    variables.containers.all(c, has(c.securityContext) && has(c.securityContext.seccompProfile))
  message: "a guest must comply with the Pod Security Standard restricted: set securityContext.seccompProfile.type to RuntimeDefault, or let the provider's administrator set guests.podSecurity to baseline"
  reason: Forbidden
{{- end }}
{{- end }}

{{/* Variables of podSecurityRules: the annotations, which the pod will have, the security contexts of the containers, and these with the pod's. */}}
{{- define "spillway-agent.podSecurityVariables" -}}
- name: annotations
  expression: "has(object.metadata.annotations) ? object.metadata.annotations : {}"
- name: contexts
  expression: "variables.containers.filter(c, has(c.securityContext)).map(c, c.securityContext)"
- name: allContexts
  expression: "variables.contexts + (has(variables.pod.securityContext) ? [variables.pod.securityContext] : [])"
{{- end }}
