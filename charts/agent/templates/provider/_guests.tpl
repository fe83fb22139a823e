{{/*
Validations of the pod of a guest, whatever the driver, beside Pod Security. The policy defines the
variable pod, its spec. The argument is the root context.
*/}}
{{- define "spillway-agent.guestRules" -}}
{{- $liqo := eq .Values.driver "liqo" }}
{{- $webhook := $liqo | ternary ": the webhook of spillway-agent sets that; Liqo tries again" "" -}}
- expression: >-
    {{ if not $liqo }}oldObject != null || {{ end }}variables.pod.?nodeName.orValue('') == ''
  message: "a guest may not choose its node: leave spec.nodeName empty"
  reason: Forbidden
- expression: variables.pod.?schedulerName.orValue('') in ['', 'default-scheduler'] && variables.pod.?runtimeClassName.orValue('') == ''
  message: "a guest may not choose a scheduler or runtime class of this cluster: leave spec.schedulerName and spec.runtimeClassName empty"
  reason: Forbidden
- expression: >-
    variables.pod.?priorityClassName.orValue('') == '{{ include "spillway-agent.guestPriorityClass" . }}'
    {{- if $liqo }} && variables.pod.?priority.orValue(0) <= {{ int64 .Values.lend.priority }}{{ end }}
  message: "a guest may have no priority but that of PriorityClass {{ include "spillway-agent.guestPriorityClass" . }}{{ $liqo | ternary $webhook ": set spec.priorityClassName to that" }}"
  reason: Forbidden
# A term without namespaces concerns the guests of one consumer only. Required
# anti-affinity to all pods would keep every other pod from the whole topology.
- expression: >-
    [variables.pod.?affinity.?podAffinity, variables.pod.?affinity.?podAntiAffinity].all(a, (a.?requiredDuringSchedulingIgnoredDuringExecution.orValue([]) +
    a.?preferredDuringSchedulingIgnoredDuringExecution.orValue([]).map(p, p.podAffinityTerm)).all(t,
    t.topologyKey == 'kubernetes.io/hostname' && !has(t.namespaceSelector) && size(t.?namespaces.orValue([])) == 0))
  message: "the pod affinity and anti-affinity of a guest may only concern pods of its own namespace and topology key kubernetes.io/hostname: remove the other terms"
  reason: Forbidden
# hostPath is up to Pod Security.
- expression: >-
    variables.pod.?volumes.orValue([]).all(v, has(v.configMap) || has(v.secret) || has(v.emptyDir) || has(v.downwardAPI) || has(v.image) || has(v.hostPath) ||
    (has(v.projected) && v.projected.?sources.orValue([]).all(s, !has(s.serviceAccountToken) && !has(s.clusterTrustBundle) && !has(s.podCertificate))))
  message: "a guest may only use volumes of type configMap, secret, downwardAPI, emptyDir and image, and projected volumes of these: remove the others"
  reason: Forbidden
- expression: "size(variables.pod.?resourceClaims.orValue([])) == 0"
  message: "a guest may not use resource claims: remove spec.resourceClaims"
  reason: Forbidden
- expression: "variables.pod.?terminationGracePeriodSeconds.orValue(0) <= 3600"
  message: "a guest must terminate within an hour: set spec.terminationGracePeriodSeconds to 3600 or less"
  reason: Forbidden
# The ServiceAccount admission plugin sets "default" if the field is empty.
- expression: >-
    [variables.pod.?serviceAccountName, variables.pod.?serviceAccount].all(a, a.orValue('') in ['', 'default']) && !variables.pod.?automountServiceAccountToken.orValue(true)
  message: "a guest may neither use a ServiceAccount of this cluster nor have a token: leave spec.serviceAccountName empty, and set spec.automountServiceAccountToken to false"
  reason: Forbidden
# None for virtual nodes, so that it is not lent to a third cluster. Liqo copies the toleration of
# Spillway's virtual nodes, but not the one of its own, whose taint all virtual nodes have with it.
- expression: >-
    variables.pod.?tolerations.orValue([]).all(t, !(t.?key.orValue('') in ['', 'virtual-node.liqo.io/not-allowed', 'virtual-kubelet.io/provider',
    {{ if not $liqo }}'broker.fluidos.eu/overflow', {{ end }}'node-role.kubernetes.io/control-plane', 'node-role.kubernetes.io/master', 'node.kubernetes.io/unschedulable']))
  message: "a guest may not tolerate all taints, nor those of control planes, cordoned nodes and virtual nodes: remove the toleration"
  reason: Forbidden
# So that it does not overflow again. A term without requirements matches no node.
- expression: >-
    [variables.pod.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms.orValue([])].all(terms, size(terms) > 0 &&
    terms.all(t, (!has(t.matchExpressions) && !has(t.matchFields)) ||
    t.?matchExpressions.orValue([]).exists(e, e.key == 'type' && e.operator == 'NotIn' && 'virtual-kubelet' in e.?values.orValue([]))))
  message: "a guest may not run on virtual nodes: each term of its required node affinity excludes label type=virtual-kubelet{{ $webhook }}"
  reason: Forbidden
- expression: "object.metadata.?annotations[?'cluster-autoscaler.kubernetes.io/safe-to-evict'].orValue('true') == 'true'"
  message: "a guest may not keep its node from being removed: remove annotation cluster-autoscaler.kubernetes.io/safe-to-evict"
  reason: Forbidden
{{- end }}
