{{/*
Validations of policies that more requests pass than not, in templates because each policy
has them twice: as they are, and in its match condition.
*/}}

{{/*
The match condition of a policy whose requests seldom violate it: it holds for requests that
meet "when", a CEL expression, if there is one, and violate one of "validations", a list as YAML, which may use
"variables". The API server converts the objects of a request once for match conditions, and
three times for validations. It evaluates all conditions of a policy, whichever holds:
therefore there is one, and what does not concern other requests is not evaluated for them.
Match conditions have neither variables nor namespaceObject.
*/}}
{{- define "spillway-agent.violates" -}}
{{- $rules := list }}
{{- range fromYamlArray .validations }}{{ $rules = append $rules (printf "(%s)" .expression) }}{{ end }}
{{- $rules = join " && " $rules }}
{{- /* A variable may use those before it. */}}
{{- range fromYamlArray (.variables | default "[]") | reverse }}{{ $rules = replace (printf "variables.%s" .name) (printf "(%s)" .expression) $rules }}{{ end }}
{{- $rules = printf "!(%s)" $rules }}
{{- with .when }}{{ $rules = printf "(%s) && %s" . $rules }}{{ end -}}
- name: violates-a-rule
  expression: {{ toRawJson $rules }}
{{- end }}

{{/* The agent's patches of pods. The argument is the list of the cluster's own namespaces. */}}
{{- define "spillway-agent.podChangeVariables" -}}
- name: annotations
  expression: "has(object.metadata.annotations) ? object.metadata.annotations : {}"
- name: oldAnnotations
  expression: "has(oldObject.metadata.annotations) ? oldObject.metadata.annotations : {}"
- name: tolerations
  expression: "has(object.spec.tolerations) ? object.spec.tolerations : []"
- name: oldTolerations
  expression: "has(oldObject.spec.tolerations) ? oldObject.spec.tolerations : []"
{{- end }}
{{- define "spillway-agent.podChangeRules" -}}
- expression: >-
    !(request.namespace in {{ . | toJson | replace "\"" "'" }})
  message: the Spillway agent may not change or evict pods of the cluster's own namespaces
  reason: Forbidden
- expression: >-
    object.metadata.?labels == oldObject.metadata.?labels && object.metadata.?finalizers == oldObject.metadata.?finalizers &&
    object.metadata.?ownerReferences == oldObject.metadata.?ownerReferences && object.spec.containers == oldObject.spec.containers &&
    object.spec.?initContainers == oldObject.spec.?initContainers && object.spec.?activeDeadlineSeconds == oldObject.spec.?activeDeadlineSeconds &&
    object.spec.?schedulingGates.orValue([]) == oldObject.spec.?schedulingGates.orValue([]).filter(g, g.name != 'broker.fluidos.eu/hand-over' || g in object.spec.?schedulingGates.orValue([])) && object.spec.?nodeSelector == oldObject.spec.?nodeSelector && object.spec.?affinity == oldObject.spec.?affinity
  message: the Spillway agent may only add tolerations and annotations to a pod, and remove its own scheduling gate
  reason: Forbidden
- expression: >-
    variables.tolerations.all(t, t in variables.oldTolerations || (has(t.key) && t.key in ['broker.fluidos.eu/overflow', 'virtual-node.liqo.io/not-allowed']))
  message: the Spillway agent may only add tolerations of virtual nodes to a pod
  reason: Forbidden
- expression: >-
    variables.annotations.all(key, key.startsWith('broker.fluidos.eu/') || (key in variables.oldAnnotations && variables.oldAnnotations[key] == variables.annotations[key])) &&
    variables.oldAnnotations.all(key, key.startsWith('broker.fluidos.eu/') || key in variables.annotations)
  message: the Spillway agent may only change its own annotations of a pod (broker.fluidos.eu/*)
  reason: Forbidden
{{- end }}

{{/* What the agent may do with guests. */}}
{{- define "spillway-agent.guestChangeRules" -}}
- expression: request.operation != 'CREATE' || request.?dryRun.orValue(false)
  message: the Spillway agent may only create placeholders, and try whether guests are admitted (dry run)
  reason: Forbidden
- expression: >-
    request.?subResource.orValue('') != 'status' || (object.metadata.?labels == oldObject.metadata.?labels && object.metadata.?annotations == oldObject.metadata.?annotations &&
    object.metadata.?finalizers == oldObject.metadata.?finalizers && object.status.?phase == oldObject.status.?phase &&
    object.status.?podIP == oldObject.status.?podIP && object.status.?podIPs == oldObject.status.?podIPs && object.status.?hostIP == oldObject.status.?hostIP &&
    object.status.?containerStatuses == oldObject.status.?containerStatuses && object.status.?initContainerStatuses == oldObject.status.?initContainerStatuses)
  message: the Spillway agent may only nominate a pod to a node in the pod's status, and mark one that must leave
  reason: Forbidden
- expression: >-
    request.?subResource.orValue('') != 'status' ||
    (object.status.?conditions.orValue([]).filter(c, c.type != 'broker.fluidos.eu/MustLeave').size() == oldObject.status.?conditions.orValue([]).filter(c, c.type != 'broker.fluidos.eu/MustLeave').size() &&
    object.status.?conditions.orValue([]).all(c, c.type == 'broker.fluidos.eu/MustLeave' || oldObject.status.?conditions.orValue([]).exists(o, o.type == c.type && o.status == c.status &&
    o.?reason.orValue('') == c.?reason.orValue('') && o.?message.orValue('') == c.?message.orValue('') && o.?lastTransitionTime == c.?lastTransitionTime)) &&
    oldObject.status.?conditions.orValue([]).all(o, o.type == 'broker.fluidos.eu/MustLeave' || object.status.?conditions.orValue([]).exists(c, c.type == o.type)))
  message: the Spillway agent may only change condition broker.fluidos.eu/MustLeave in the status of a pod
  reason: Forbidden
{{- if not (include "spillway-agent.placeholders" .) }}
- expression: request.?subResource.orValue('') != 'status' || object.status.?nominatedNodeName == oldObject.status.?nominatedNodeName
  message: the Spillway agent may nominate no pod to a node without placeholders
  reason: Forbidden
{{- end }}
{{- end }}

{{/*
Deletions of pods by the agent, whose account is the argument, and virtual-node. The agent also
deletes pods of DaemonSets without a node that can only run on nodes with the name of a virtual
one: another pod replaces it if the node is real.
*/}}
{{- define "spillway-agent.podDeletionRules" -}}
- expression: >-
    {{ include "spillway-agent.onVirtualNode" "oldObject" | nindent 4 | trim }} ||
    (request.userInfo.username == '{{ . }}' && {{ include "spillway-agent.waitsForVirtualNode" "oldObject" | nindent 4 | trim }})
  messageExpression: "request.userInfo.username == '{{ . }}' ? 'the Spillway agent may only delete placeholders, pods on virtual nodes (spillway-*), and pods of DaemonSets that wait for these' : 'spillway-virtual-node may only change pods on virtual nodes (spillway-*)'"
  reason: Forbidden
{{- end }}

{{/* Evictions of pods by the agent, whose account is the argument, and the scheduler. */}}
{{- define "spillway-agent.podEvictionRules" -}}
- expression: >-
    request.name != params.metadata.name ||
    {{ include "spillway-agent.onVirtualNode" "params" | nindent 4 | trim }}
  messageExpression: "'the Spillway ' + (request.userInfo.username == '{{ . }}' ? 'agent' : 'scheduler') + ' may only evict pods on virtual nodes (spillway-*), and pod ' + params.metadata.name + ' is on none'"
  reason: Forbidden
{{- end }}

{{/* Virtual-node's reports of pods. */}}
{{- define "spillway-agent.reportRules" -}}
- expression: >-
    {{ include "spillway-agent.onVirtualNode" "oldObject" | nindent 4 | trim }}
  message: spillway-virtual-node may only change pods on virtual nodes (spillway-*)
  reason: Forbidden
# A write of the status may also change the metadata.
- expression: object.metadata.?labels == oldObject.metadata.?labels && object.metadata.?finalizers == oldObject.metadata.?finalizers
  message: spillway-virtual-node may not change labels and finalizers of pods
  reason: Forbidden
{{- end }}

{{/* The labels of pods on virtual nodes. */}}
{{- define "spillway-agent.holdsOfPodsRules" -}}
- expression: >-
    ['broker.fluidos.eu/hold', 'broker.fluidos.eu/shape'].all(key,
    object.metadata.?labels[?key] == oldObject.metadata.?labels[?key])
  messageExpression: "'pod ' + oldObject.metadata.name + ' is on virtual node ' + oldObject.spec.nodeName + ': labels broker.fluidos.eu/hold and broker.fluidos.eu/shape say what reserved capacity it uses; they may be neither added, changed nor removed'"
  reason: Forbidden
{{- end }}

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
