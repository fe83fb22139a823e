{{/* The names are fixed: policies, other programs and users rely on them, and a cluster has one agent. */}}
{{- define "spillway-agent.name" -}}spillway-agent{{- end }}
{{- define "spillway-agent.schedulerName" -}}spillway-scheduler{{- end }}
{{/* Name by which pods choose the scheduler. */}}
{{- define "spillway-agent.profileName" -}}{{ eq .Values.scheduler.mode "only" | ternary "default-scheduler" "spillway-scheduler" }}{{- end }}
{{- define "spillway-agent.virtualNodeName" -}}spillway-virtual-node{{- end }}
{{/* Namespace for the agent's Secrets that configure virtual-node, and nothing else: a role cannot select Secrets by label. */}}
{{- define "spillway-agent.virtualNodeNamespace" -}}spillway-virtual-nodes{{- end }}

{{/* PriorityClass of guests. */}}
{{- define "spillway-agent.guestPriorityClass" -}}spillway-guest{{- end }}

{{/*
Fails if the cluster has a PriorityClass with another value than lend.priority: the value is
immutable. Consumers know guests' class by name, so it cannot have another one. The argument is
the name and the root context.
*/}}
{{- define "spillway-agent.checkPriority" -}}
{{- $name := index . 0 }}{{ $want := int64 (index . 1).Values.lend.priority }}
{{- $old := lookup "scheduling.k8s.io/v1" "PriorityClass" "" $name }}
{{- if and $old (ne (int64 (default 0 $old.value)) $want) }}
{{- fail (printf "lend.priority is %d, and PriorityClass %s has value %d, which is immutable: run kubectl delete priorityclass spillway-guest spillway-hold, and repeat the upgrade; pods keep the priority that they have" $want $name (int64 (default 0 $old.value))) }}
{{- end }}
{{- end }}

{{/* Whether the agent serves webhooks: with driver liqo, for guests if this cluster lends, and for the addresses of overflowed pods if pods can overflow. */}}
{{- define "spillway-agent.guestsWebhook" -}}
{{- if and (eq .Values.driver "liqo") (or .Values.lend.enabled (ne .Values.scheduler.mode "none")) }}true{{ end }}
{{- end }}
{{- define "spillway-agent.guestsWebhookName" -}}spillway-agent-guests{{- end }}

{{- define "spillway-agent.holdsNamespace" -}}spillway-holds{{- end }}

{{/* Whether placeholders keep what this cluster lends. */}}
{{- define "spillway-agent.placeholders" -}}
{{- if .Values.lend.enabled }}true{{ end }}
{{- end }}

{{- define "spillway-agent.commonLabels" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/part-of: spillway
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "spillway-agent.selectorLabels" -}}
app.kubernetes.io/name: spillway-agent
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spillway-agent.labels" -}}
app.kubernetes.io/name: spillway-agent
app.kubernetes.io/component: agent
{{ include "spillway-agent.commonLabels" . }}
{{- end }}

{{- define "spillway-agent.schedulerSelectorLabels" -}}
app.kubernetes.io/name: spillway-scheduler
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spillway-agent.schedulerLabels" -}}
app.kubernetes.io/name: spillway-scheduler
app.kubernetes.io/component: scheduler
{{ include "spillway-agent.commonLabels" . }}
{{- end }}

{{- define "spillway-agent.virtualNodeSelectorLabels" -}}
app.kubernetes.io/name: spillway-virtual-node
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spillway-agent.virtualNodeLabels" -}}
app.kubernetes.io/name: spillway-virtual-node
app.kubernetes.io/component: virtual-node
{{ include "spillway-agent.commonLabels" . }}
{{- end }}

{{/* Whether virtual-node runs in this cluster: with driver direct, if pods can overflow. */}}
{{- define "spillway-agent.hasVirtualNode" -}}
{{- if and (eq .Values.driver "direct") (ne .Values.scheduler.mode "none") }}true{{ end }}
{{- end }}

{{/* Name of the Secret with a certificate of another authority; empty if the agent joins. */}}
{{- define "spillway-agent.certificateSecret" -}}
{{- if .Values.join.certManager.enabled }}spillway-agent-certificate{{ else }}{{ .Values.join.existingCertificate }}{{ end }}
{{- end }}

{{/* Name of the Secret with the join token. */}}
{{- define "spillway-agent.joinSecret" -}}
{{- .Values.join.existingSecret | default "spillway-agent-join" }}
{{- end }}

{{/* Security contexts of a pod and its container, as the Pod Security Standard restricted requires. */}}
{{- define "spillway-agent.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}
{{- define "spillway-agent.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* A number without an exponent. */}}
{{- define "spillway-agent.number" -}}
{{- if kindIs "float64" . }}{{ printf "%.6f" . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* Reference of an image, from a list of its values and the chart. A tag that consists of digits is a number in YAML. */}}
{{- define "spillway-agent.image" -}}
{{- $image := index . 0 }}
{{- $tag := $image.tag | default (index . 1).AppVersion }}
{{- printf "%s:%s" $image.repository (kindIs "string" $tag | ternary $tag (toString (int64 $tag))) | quote }}
{{- end }}

{{/*
CEL: whether a Node or its Lease is a virtual one's, by name and label, because a real node may have
the name. The argument is the object, which may be null.
*/}}
{{- define "spillway-agent.isVirtualNode" -}}
({{ . }} != null && 'spillway-' + {{ . }}.metadata.?labels[?'broker.fluidos.eu/provider'].orValue('/') == {{ . }}.metadata.name)
{{- end }}

{{/*
CEL: whether the argument is a pod on a virtual node: by the node's name, the label that the
scheduler gives every pod with its binding to one, and because it tolerates that node's taint. A
real node may have the name, and every pod that may overflow tolerates the taints of virtual nodes.
*/}}
{{- define "spillway-agent.onVirtualNode" -}}
({{ . }} != null && {{ . }}.spec.?nodeName.orValue('').startsWith('spillway-') && 'broker.fluidos.eu/hold' in {{ . }}.metadata.?labels.orValue({}) &&
{{ . }}.spec.?tolerations.orValue([]).exists(t, t.?key.orValue('') == '' || (t.key == 'broker.fluidos.eu/overflow' && (t.?value.orValue('') == '' || 'spillway-' + t.value == {{ . }}.spec.nodeName))))
{{- end }}

{{/*
CEL: whether a request is of a program that reports what providers say of overflowed pods: with
driver liqo the virtual kubelet of a peering, whose ServiceAccount has the name of the virtual
node, or else virtual-node.
*/}}
{{- define "spillway-agent.isVirtualKubelet" -}}
{{- if eq .Values.driver "liqo" -}}
request.userInfo.username.matches('^system:serviceaccount:liqo-tenant-[^:]+:spillway-')
{{- else -}}
request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:{{ include "spillway-agent.virtualNodeName" . }}'
{{- end }}
{{- end }}

{{/*
CEL: whether the argument is a pod of a DaemonSet that has no node, and that its controller
made for a node with the name of a virtual one.
*/}}
{{- define "spillway-agent.waitsForVirtualNode" -}}
({{ . }} != null && !has({{ . }}.spec.nodeName) && {{ . }}.metadata.?ownerReferences.orValue([]).exists(r, r.kind == 'DaemonSet' && r.?controller.orValue(false)) &&
[{{ . }}.spec.?affinity.?nodeAffinity.?requiredDuringSchedulingIgnoredDuringExecution.?nodeSelectorTerms.orValue([])].all(terms, size(terms) > 0 && terms.all(t,
t.?matchFields.orValue([]).exists(f, f.key == 'metadata.name' && f.operator == 'In' && f.?values.orValue([]).all(n, n.startsWith('spillway-'))))))
{{- end }}

{{/*
Parameters of a policy about virtual nodes: their Nodes. The policy is evaluated for each,
and there are few. The API server has all Nodes in its cache.
*/}}
{{- define "spillway-agent.virtualNodeParams" -}}
paramRef:
  selector:
    matchExpressions:
      - {key: broker.fluidos.eu/provider, operator: Exists}
  parameterNotFoundAction: Allow
{{- end }}

{{/*
Rules for the kinds whose objects are looked up to find root owners.
*/}}
{{- define "spillway-agent.ownerRules" }}
{{- range .Values.scheduler.ownerKinds }}
- apiGroups: [{{ .group }}]
  resources: [{{ .resource }}]
  verbs: [get]
{{- end }}
{{- end }}

{{/*
The namespaces of guests, in which the agent's role for guests can be bound: policy
spillway-agent-limits keeps the agent from binding it elsewhere, and from changing these
labels.
*/}}
{{- define "spillway-agent.guestNamespaces" -}}
namespaceSelector:
  {{- if eq .Values.driver "liqo" }}
  matchExpressions:
    - {key: liqo.io/remote-cluster-id, operator: Exists}
  {{- else }}
  matchLabels:
    app.kubernetes.io/managed-by: spillway
  matchExpressions:
    - {key: broker.fluidos.eu/guests-of, operator: Exists}
  {{- end }}
{{- end }}

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

{{/*
A policy's match conditions, variables and validations, where more requests pass than not: see
spillway-agent.violates, which has the same argument.
*/}}
{{- define "spillway-agent.rules" -}}
matchConditions:
  {{- include "spillway-agent.violates" . | nindent 2 }}
{{- with .variables }}
variables:
  {{- . | nindent 2 }}
{{- end }}
validations:
  {{- .validations | nindent 2 }}
{{- end }}

{{/* The binding of a policy, from a list of its name and the root context. */}}
{{- define "spillway-agent.binding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ index . 0 }}
  labels:
    {{- include "spillway-agent.labels" (index . 1) | nindent 4 }}
spec:
  policyName: {{ index . 0 }}
  validationActions: [Deny]
{{- end }}
