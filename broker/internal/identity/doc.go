// Package identity authenticates clusters: it keeps the hub's certificate authority,
// issues a certificate to each cluster that joins, and identifies the cluster by the
// certificate of its connection. Another authority, such as cert-manager's, may issue
// the certificates instead.
//
// A cluster ID is bound to the first key that joins with it, recorded in a
// ClusterRegistration. Other keys are refused until the ClusterRegistration is deleted. It
// also has what an operator decides: an invitation, an approval, a revocation.
// The authority's key never leaves the hub. A new CA is signed by the one before it, so that a
// rotation needs no agent.
package identity
