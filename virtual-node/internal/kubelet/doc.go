// Package kubelet serves the kubelet API of one virtual node: logs, exec, attach,
// port-forward, the list of its pods and their resource usage. New returns the
// handler. Requests are authenticated and authorized by this cluster's API server,
// as at any kubelet, and forwarded to the guests through the provider's API
// server.
package kubelet
