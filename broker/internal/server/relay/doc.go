// Package relay keeps the sealed messages of agents to each other until the receiver takes
// them, in memory and for a limited time. What a mailbox has is bounded by sender, by
// receiver, and in total.
package relay
