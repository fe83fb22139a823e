// Package identity says who is who: it keeps the hub's certificate authority,
// gives a certificate to each cluster that joins, and tells from the certificate
// of a connection which cluster speaks.
//
// A cluster's identity is bound to the first key that joins under its ID and is
// recorded in a ClusterRegistration; another key is turned away until somebody
// deletes that. The authority's key never leaves the hub.
package identity
