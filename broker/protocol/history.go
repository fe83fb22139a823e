package protocol

import "time"

// HeaderContinue is the header of a page of CSV that has more after it: the value for parameter
// continue of the next one.
const HeaderContinue = "Spillway-Continue"

// HistoryList is the response to GET on PathHistory: a page of what has ended, the latest first.
type HistoryList struct {
	Items []HistoryItem `json:"items"`
	// Continue is the parameter of the next page; empty on the last one.
	Continue string `json:"continue,omitempty"`
}

// HistoryItem is a reservation that has ended. Times that have not happened are unset.
type HistoryItem struct {
	// ID and UID are the name and UID of the broker's Reservation.
	ID  string `json:"id"`
	UID string `json:"uid"`
	// Namespace of the Reservation in the consumer's cluster, and whose pods it was for: empty
	// if it was made by hand, or in the hub.
	Namespace string `json:"namespace,omitempty"`
	OwnerKind string `json:"ownerKind,omitempty"`
	Owner     string `json:"owner,omitempty"`
	// Requested is what it requested, such as "5 pods".
	Requested string    `json:"requested,omitempty"`
	Asked     time.Time `json:"asked,omitzero"`
	Ended     time.Time `json:"ended"`
	// Reason is why it ended.
	Reason    string            `json:"reason,omitempty"`
	Providers []HistoryProvider `json:"providers,omitempty"`
}

// HistoryProvider is what one provider gave a reservation. Hours are decimal numbers by resource:
// core-hours, GiB-hours of memory and ephemeral storage, and hours of one unit of all else.
type HistoryProvider struct {
	// Cluster ID of the provider.
	Cluster string `json:"cluster"`
	// Why it was chosen.
	Why string `json:"why,omitempty"`
	// Resources are the most that it promised at one time.
	Resources map[string]string `json:"resources,omitempty"`
	Granted   time.Time         `json:"granted,omitzero"`
	FirstUsed time.Time         `json:"firstUsed,omitzero"`
	Released  time.Time         `json:"released,omitzero"`
	// PromisedHours is what it promised over time, UsedHours what its guests used of that, as it
	// has measured it.
	PromisedHours map[string]string `json:"promisedHours,omitempty"`
	UsedHours     map[string]string `json:"usedHours,omitempty"`
	// PricePerHour of the resources at that time, and what all of it cost, as decimal numbers in
	// Currency. Unset if the provider stated no price.
	PricePerHour string `json:"pricePerHour,omitempty"`
	Cost         string `json:"cost,omitempty"`
	Currency     string `json:"currency,omitempty"`
}

// UsageList is the response to GET on PathUsage: a page of sums, by their fields.
type UsageList struct {
	Items []UsageItem `json:"items"`
	// Continue is the parameter of the next page; empty on the last one.
	Continue string `json:"continue,omitempty"`
}

// UsageItem is what one provider gave the pods of one owner on a day or in a month (UTC), at prices
// in one currency. Hours are as those of a HistoryProvider.
type UsageItem struct {
	// Period is a day as 2006-01-02, or a month as 2006-01.
	Period    string `json:"period"`
	Namespace string `json:"namespace,omitempty"`
	OwnerKind string `json:"ownerKind,omitempty"`
	Owner     string `json:"owner,omitempty"`
	// Provider is the cluster ID.
	Provider      string            `json:"provider"`
	PromisedHours map[string]string `json:"promisedHours,omitempty"`
	UsedHours     map[string]string `json:"usedHours,omitempty"`
	// Cost of the promised hours in Currency; unset if there was no price.
	Cost     string `json:"cost,omitempty"`
	Currency string `json:"currency,omitempty"`
	// ReferenceCost is what the same hours cost at the reference prices of the hub, and Saved the
	// difference; unset without such prices in the same currency.
	ReferenceCost string `json:"referenceCost,omitempty"`
	Saved         string `json:"saved,omitempty"`
}
