// Package page is the broker's page for people: clusters, who runs where, the queue, each Reservation,
// and what has ended, read-only, at a listener of its own. Each view is a document with its own URL,
// which works without scripts; with them, it follows the broker: an event of the stream says that
// there is something new, and the script gets the document again.
//
// Package view has what is shown, package session who may see it, assets how it looks. What clusters
// wrote is escaped by html/template, and the Content-Security-Policy runs no script but the one in
// assets. Charts are SVG of these templates: a library would draw them with a script or inline styles.
// Only the leader shows views: another replica has not heard the clusters.
package page
