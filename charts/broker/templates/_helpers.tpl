{{/* The broker's name. It is fixed: agents, outside checks and people look for it, and one broker stands in a namespace. */}}
{{- define "spillway-broker.name" -}}spillway-broker{{- end }}

{{- define "spillway-broker.selectorLabels" -}}
app.kubernetes.io/name: spillway-broker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "spillway-broker.labels" -}}
{{ include "spillway-broker.selectorLabels" . }}
app.kubernetes.io/component: broker
app.kubernetes.io/part-of: spillway
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* An image's name, of a list of its values and the chart. A tag of digits only is a number in YAML. */}}
{{- define "spillway-broker.image" -}}
{{- $image := index . 0 }}
{{- $tag := $image.tag | default (index . 1).AppVersion }}
{{- printf "%s:%s" $image.repository (kindIs "string" $tag | ternary $tag (toString (int64 $tag))) | quote }}
{{- end }}
