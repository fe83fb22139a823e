{{- define "spillway-agent.podAddresses" -}}
# The Services of this cluster send traffic to the addresses that a provider reports for its
# guests. In networks of this cluster they would be those of its own nodes, pods and Services.
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
    broker.fluidos.eu/stops: "addresses that are this cluster's own, or that no pod can have"
spec:
  failurePolicy: Fail
  paramKind:
    apiVersion: v1
    kind: ConfigMap
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
      expression: "params.?data[?'networks'].orValue('').split(' ').filter(n, isCIDR(n)).map(n, cidr(n))"
    # What means another host on each node, as in guest.PerHost: services of clouds, and NAT64.
    - name: perHost
      expression: >-
        ['168.63.129.16/32', '100.100.100.200/32', '192.0.0.0/24', 'fd00:ec2::/64', 'fd20:ce::254/128', '64:ff9b::/96',
        '64:ff9b:1::/48'].map(n, cidr(n))
  validations:
    - expression: "variables.addresses.all(a, isIP(a) && ip(a).isGlobalUnicast() && variables.perHost.all(n, !n.containsIP(ip(a))))"
      messageExpression: "'the provider reports an address that no pod can have, one of ' + variables.addresses.join(', ')"
      reason: Forbidden
    - expression: "variables.addresses.all(a, !isIP(a) || variables.networks.all(n, !n.containsIP(ip(a))))"
      messageExpression: "'the provider reports an address of this cluster itself, one of ' + variables.addresses.join(', ') + ': the agent takes it off if the API server reaches its webhook, Service spillway-agent-guests; if the clusters have the same pod network, the pod has no address'"
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
  paramRef:
    name: spillway-own-networks
    namespace: {{ .Release.Namespace }}
    # Kubelets, too, write the status of pods: without the ConfigMap, which the agent creates
    # again within a minute, they are not to be denied that.
    parameterNotFoundAction: Allow
  validationActions: [Deny]
{{- end }}
