{{/* Validations of policies that use spillway-agent.rules. */}}

{{/* Guests with driver direct: direct/consumers.yaml. */}}
{{- define "spillway-agent.directGuestVariables" -}}
{{ include "spillway-agent.podVariable" . }}
{{ include "spillway-agent.guestVariables" . }}
- name: lent
  expression: "has(params.spec.hard) ? params.spec.hard.map(name, name) : []"
{{- end }}
{{- define "spillway-agent.directGuestRules" -}}
# A quota does not limit resources that it does not list.
- expression: >-
    variables.containers.all(c, !has(c.resources) || !has(c.resources.requests) ||
    c.resources.requests.all(name, ('requests.' + name) in variables.lent))
  message: "a guest may only request resources that are granted to its cluster: remove the others from its requests"
  reason: Forbidden
- expression: "!has(object.spec.resources) || !has(object.spec.resources.requests) || object.spec.resources.requests.all(name, ('requests.' + name) in variables.lent)"
  message: "a guest may only request resources that are granted to its cluster: remove the others from its requests"
  reason: Forbidden
- expression: "has(object.spec.priorityClassName) && object.spec.priorityClassName == '{{ include "spillway-agent.guestPriorityClass" . }}'"
  message: "a guest may not have another priority than guests of this cluster: set spec.priorityClassName to {{ include "spillway-agent.guestPriorityClass" . }}"
  reason: Forbidden
{{ include "spillway-agent.guestRules" "direct" }}
{{ include "spillway-agent.newGuestRules" "" }}
{{- end }}

{{- define "spillway-agent.podVariable" -}}
- name: pod
  expression: "object.spec"
{{- end }}

{{/* What a consumer writes with driver direct. */}}
{{- define "spillway-agent.consumerObjectRules" -}}
- expression: "request.resource.resource != 'secrets' || !has(object.type) || object.type != 'kubernetes.io/service-account-token'"
  message: "a consumer may not create a Secret of type kubernetes.io/service-account-token"
  reason: Forbidden
- expression: >-
    !has(object.metadata.finalizers) || object.metadata.finalizers.all(f,
    oldObject != null && has(oldObject.metadata.finalizers) && f in oldObject.metadata.finalizers)
  message: "a consumer may not add finalizers: remove metadata.finalizers"
  reason: Forbidden
# Without a controller kubectl drain refuses a pod, and an owner of another kind, such
# as a DaemonSet, would make it an exception there.
- expression: >-
    request.resource.resource != 'pods' || (has(object.metadata.ownerReferences) && size(object.metadata.ownerReferences) == 1 &&
    object.metadata.ownerReferences.all(o, o.apiVersion == 'v1' && o.kind == 'Namespace' && o.name == object.metadata.namespace && has(o.controller) && o.controller))
  message: "a guest must be controlled by its namespace, so that its node can be drained: set metadata.ownerReferences to the Namespace"
  reason: Forbidden
- expression: >-
    request.resource.resource != 'pods' || !has(object.metadata.annotations) ||
    !('cluster-autoscaler.kubernetes.io/safe-to-evict' in object.metadata.annotations) || object.metadata.annotations['cluster-autoscaler.kubernetes.io/safe-to-evict'] == 'true'
  message: "a guest may not keep its node from being removed: set annotation cluster-autoscaler.kubernetes.io/safe-to-evict to true"
  reason: Forbidden
{{- end }}
