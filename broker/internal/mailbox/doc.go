// Package mailbox serves clusters through objects in their namespaces of the hub (package tenant),
// as the REST interface serves the others: a request is a call of that interface, with the
// namespace as the caller's identity, so that the same is validated, limited and logged. The
// objects are a copy of what the cluster sees: nothing is decided on them.
//
// What a stream would send is written to the objects of a session, which an agent renews.
package mailbox
