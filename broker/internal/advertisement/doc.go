// Package advertisement reconciles ClusterAdvertisements: it stores what the clusters send,
// keeps the account and the activity of each in its status, releases holds without a
// Reservation, and forgets clusters whose registration is deleted. It knows which clusters are
// active, and what of their reports about holds counts; package reservation asks it.
package advertisement
