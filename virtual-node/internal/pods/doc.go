// Package pods runs the pods of one virtual node as guests in a namespace of the
// provider. Handler reconciles each pod with its guest when the pod, the guest, or a
// ConfigMap or Secret that the pod refers to changes, and reports the guest's status.
// Errors on the way to the provider do not change the pod; they are retried. What it
// keeps of a pod is one encoded copy, and one of what it needs of the guest.
package pods
