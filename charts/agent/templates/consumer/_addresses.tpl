{{- define "spillway-agent.podAddresses" -}}
# The Services of this cluster send traffic to the addresses that a provider reports for its
# guests. They count only in the networks of the provider's pods, as this cluster reaches them.
# What the API server refuses as an address of a Service would stop the updates of the whole
# Service. Only what reports what providers say is restricted; what writes an address of a
# provider to an EndpointSlice is this cluster's own controller.
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata:
  name: spillway-pod-addresses
  labels:
    {{- include "spillway-agent.labels" . | nindent 4 }}
  annotations:
    broker.fluidos.eu/binds: "what reports the status of overflowed pods"
    broker.fluidos.eu/stops: "addresses outside of the provider's pod networks, or that no pod can have"
spec:
  failurePolicy: Fail
  {{- if eq .Values.driver "liqo" }}
  paramKind:
    apiVersion: v1
    kind: ConfigMap
  {{- end }}
  matchConstraints:
    # The scheduler labels every pod that it binds to a virtual node.
    objectSelector:
      matchExpressions:
        - {key: broker.fluidos.eu/hold, operator: Exists}
    resourceRules:
      - apiGroups: [""]
        apiVersions: ["*"]
        operations: [UPDATE]
        resources: [pods/status]
  matchConditions:
    - name: by-a-virtual-kubelet
      expression: {{ include "spillway-agent.isVirtualKubelet" . | quote }}
    - name: has-new-addresses
      expression: "object.status.?podIPs != oldObject.status.?podIPs"
  variables:
    # The first of them is podIP, as the API server has it.
    - name: addresses
      expression: "object.status.?podIPs.orValue([]).map(p, p.ip)"
    - name: networks
      {{- $always := printf "'%s'.split(' ')" (join " " .Values.providerNetworks) }}
      {{- if eq .Values.driver "liqo" }}
      expression: "({{ $always }} + params.?data[?object.spec.nodeName].orValue('').split(' ')).filter(n, isCIDR(n)).map(n, cidr(n))"
      {{- else }}
      expression: "{{ $always }}.filter(n, isCIDR(n)).map(n, cidr(n))"
      {{- end }}
    # What means another host on each node, as in guest.PerHost: services of clouds, and NAT64.
    - name: perHost
      expression: >-
        ['168.63.129.16/32', '100.100.100.200/32', '192.0.0.0/24', 'fd00:ec2::/64', 'fd20:ce::254/128', '64:ff9b::/96',
        '64:ff9b:1::/48'].map(n, cidr(n))
  validations:
    - expression: "variables.addresses.all(a, isIP(a) && ip(a).isGlobalUnicast() && variables.perHost.all(n, !n.containsIP(ip(a))))"
      messageExpression: "'the provider reports an address that no pod can have, one of ' + variables.addresses.join(', ')"
      reason: Forbidden
    - expression: "variables.addresses.all(a, !isIP(a) || variables.networks.exists(n, n.containsIP(ip(a))))"
      messageExpression: "'the provider reports an address outside of its pod networks, one of ' + variables.addresses.join(', ') + ': if they are connected with this cluster, set providerNetworks{{ if eq .Values.driver "liqo" }}. Otherwise the agent takes it off, if the API server reaches its webhook, Service spillway-agent-guests{{ end }}'"
      reason: Forbidden
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: spillway-pod-addresses
  labels:
    {{- include "spillway-agent.labels" . | nindent 4 }}
spec:
  policyName: spillway-pod-addresses
  {{- if eq .Values.driver "liqo" }}
  paramRef:
    name: spillway-provider-networks
    namespace: {{ .Release.Namespace }}
    # Kubelets, too, write the status of pods: without the ConfigMap, which the agent creates
    # again within a minute, they are not to be denied that.
    parameterNotFoundAction: Allow
  {{- end }}
  validationActions: [Deny]
{{- end }}
