// Package controller runs one virtual node for each nodeconfig Secret: the Node
// object (package node), its pods (package pods) and its kubelet API (package
// kubelet). It drains and deletes the virtual node when the Secret is ending.
package controller
