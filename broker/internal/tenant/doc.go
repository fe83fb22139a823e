// Package tenant gives each cluster that an operator has approved a namespace in the hub, with a
// ServiceAccount and what that may do there: read and write the objects of the transport
// kubernetes (package mailbox), and no status. It ends with the approval.
package tenant
