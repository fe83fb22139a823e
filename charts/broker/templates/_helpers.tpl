{{/* The name is fixed: agents and users rely on it, and a namespace has one broker. */}}
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

{{/* Secret with the certificates of another authority; empty with the broker's own. */}}
{{- define "spillway-broker.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}spillway-broker-tls{{ else }}{{ .Values.tls.existingSecret }}{{ end }}
{{- end }}

{{/* Reference of an image, from a list of its values and the chart. A tag that consists of digits is a number in YAML. */}}
{{- define "spillway-broker.image" -}}
{{- $image := index . 0 }}
{{- $tag := $image.tag | default (index . 1).AppVersion }}
{{- printf "%s:%s" $image.repository (kindIs "string" $tag | ternary $tag (toString (int64 $tag))) | quote }}
{{- end }}

{{/* Where the history is kept: sqlite, postgres, or nothing. */}}
{{- define "spillway-broker.history" -}}
{{- if and (kindIs "bool" .Values.history.enabled) (not .Values.history.enabled) }}
{{- else if .Values.history.postgres.existingSecret }}postgres
{{- else if or .Values.history.enabled (eq (int .Values.replicas) 1) }}sqlite
{{- end }}
{{- end }}

{{/* Whether SQLite's file is on a volume of its own. One that is there stays, whatever else is set. */}}
{{- define "spillway-broker.historyClaim" -}}
{{- $keep := .Values.history.persistence.enabled }}
{{- if kindIs "bool" $keep }}{{ if and $keep (eq (include "spillway-broker.history" .) "sqlite") }}true{{ end }}
{{- else if lookup "v1" "PersistentVolumeClaim" .Release.Namespace "spillway-broker-history" }}true
{{- else if eq (include "spillway-broker.history" .) "sqlite" }}
{{- $default := or (ne .Values.history.persistence.storageClassName "") (not (lookup "v1" "Namespace" "" "kube-system")) }}
{{- range (lookup "storage.k8s.io/v1" "StorageClass" "" "").items }}
{{- if eq (get (.metadata.annotations | default dict) "storageclass.kubernetes.io/is-default-class") "true" }}{{ $default = true }}{{ end }}
{{- end }}
{{- if $default }}true{{ end }}
{{- end }}
{{- end }}

{{/* Prices that usage is compared with, as a flag. */}}
{{- define "spillway-broker.referencePrices" -}}
{{- $parts := list }}
{{- $prices := .Values.history.referencePrices }}
{{- range $name := list "cpu" "memory" "gpu" "storage" "currency" }}
{{- $price := get $prices $name }}
{{- /* A number of a values file is a float, which is not to become 3e-05. */}}
{{- if kindIs "float64" $price }}{{ $price = regexReplaceAll "[.]?0+$" (printf "%.12f" $price) "" }}{{ end }}
{{- if not (kindIs "invalid" $price) }}{{ $parts = append $parts (printf "%s=%v" $name $price) }}{{ end }}
{{- end }}
{{- join "," $parts }}
{{- end }}
