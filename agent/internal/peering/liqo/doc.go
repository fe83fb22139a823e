// Package liqo links clusters and makes virtual nodes with Liqo v1.2.0, whose
// controllers run in both clusters and do the work: Driver is the consumer's
// side, Provider the provider's. Neither needs a kubeconfig of the other cluster;
// what Liqo's handshake has to carry goes in sealed messages through the broker.
//
//	consumer (rome)                          provider (paris)
//	Namespace liqo-tenant-paris
//	          ── Hello ──────────────────►   Namespace liqo-tenant-rome, nonce
//	          ◄─────────────── Offer ─────
//	signs the nonce
//	          ── Request ────────────────►   Tenant rome → Liqo signs a certificate
//	          ◄─────────────── Grant ─────
//	Identity controlplane-paris → Liqo replicates objects from here on:
//	ResourceSlice spillway-paris ────────►   Provider answers it: status, Quota
//	VirtualNode spillway-paris → virtual kubelet → Node spillway-paris
//	NamespaceOffloading → NamespaceMap ──►   Namespace <name>-rome
//
// A peering has a session: a number that the consumer picks when it begins and
// that grows from one peering to the next. Every message names it, so that one
// which was delayed or repeated on its way touches no later peering.
//
// Both sides recompute everything from objects. What is kept in memory (answers
// that came, what was asked when, capacities that were asked for) is asked for
// again after a restart. Objects that somebody else made are never changed: a
// cluster that is already peered by hand, or a namespace that its owner offloads,
// is reported.
//
// Liqo's networking is neither used nor touched. Secrets of a mapped namespace
// are reflected by Liqo's rule (all but those marked otherwise): its other rule
// reflects only marked ones, and with it an ordinary pod that mounts a Secret
// would not start.
package liqo
