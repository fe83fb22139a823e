// Package kubelet serves the kubelet API of one virtual node: logs, exec, attach,
// port-forward, the list of its pods and what they use. The pods run in another
// cluster, so each request is checked against the home API server, as a kubelet
// checks it, and then carried on to the provider's API server, under the guest's
// name, as whom the link gives.
//
// Start with New, which lists the routes.
package kubelet
